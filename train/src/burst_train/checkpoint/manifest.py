"""The manifest of a checkpoint: size and SHA-256 of every file, so that each damaged file can be named.

``step-00000012/manifest.json`` is
``{"format": 1, "step": 12, "files": {"state.json": {"bytes": 9, "sha256": "..."}}}``.
It is written last, before the folder is renamed. A folder without a whole manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checked import Checked, parse_json, read_json
from ..run.folder import FOLDER, name_of, step_of

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
UNFINISHED = ".unfinished"  # suffix of a folder that is being written
LARGEST_MANIFEST = 2**24
LARGEST_HEADER = 100_000_000  # the same limit as in safetensors
SHARDING = "DCP_SHARDING_INFO"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
PART = 2**22  # bytes per read: small enough for memory, large enough to take Python's lock rarely
Pieces = Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]  # by tensor name: dtype, shape, offsets


class DamagedError(ValueError):
    """A checkpoint differs from what was saved; the text names each wrong file and its error."""


def fingerprint(path: Path, rest: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return a file's manifest entry, read from disk; ``rest`` is called between parts."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART):
            digest.update(part)
            rest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def write_whole(path: Path, text: str) -> None:
    """Write a file and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest into the unfinished ``folder``, then give the folder its final name.

    Args:
        files: the entry of each file, by name.
    """
    write_whole(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    sync_folder(folder)
    whole = folder.with_name(name_of(step))
    if whole.exists():  # saved at this step before a resume, or found damaged
        discard(whole)
    folder.rename(whole)
    sync_folder(folder.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: a partly removed folder must not pass as a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def discard_unfinished(out: Path) -> None:
    """Remove unfinished checkpoints of a run that was killed while saving."""
    for folder in (out / FOLDER).glob(f"step-*{UNFINISHED}"):
        discard(folder)


def read_state(folder: Path) -> Checked:
    """Read a checkpoint's ``state.json`` and check it against the manifest.

    Raises:
        DamagedError: the manifest or the file differs from what was written.
    """
    try:
        entries = _entries(folder)

        def check(data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != entries[STATE]["sha256"]:
                raise ValueError(f"{STATE} is damaged: its SHA-256 is wrong")

        state = read_json(folder / STATE, check=check)
        if state.content.get("format") != FORMAT:
            raise state.wrong("format", f"must be {FORMAT}")
    except ValueError as error:
        raise DamagedError(f"{folder}: {error}") from None
    return state


def verify(folder: Path) -> list[str]:
    """Check every file of a checkpoint against its manifest; return the names of its safetensors files.

    Raises:
        DamagedError: a file is missing, foreign, truncated, changed or swapped; names each of them.
    """
    try:
        entries = _entries(folder)
        complaints = [text for name, entry in entries.items() if (text := _compare(folder, name, entry, entries))]
        foreign = sorted({path.name for path in folder.iterdir()} - {*entries, MANIFEST})
    except (ValueError, OSError) as error:
        raise DamagedError(f"{folder}: {error}") from None
    complaints += [f"{name} is foreign: it is not in the manifest" for name in foreign]
    if complaints:
        raise DamagedError(f"{folder}: {'; '.join(complaints)}")
    return [name for name in entries if name.endswith(".safetensors")]


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files that a folder's manifest lists.

    Raises:
        ValueError: the manifest is missing or invalid.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"there is no {MANIFEST}, so this is not a whole checkpoint")
    manifest = read_json(folder / MANIFEST, largest=LARGEST_MANIFEST)
    if manifest.content.get("format") != FORMAT:
        raise manifest.wrong("format", f"must be {FORMAT}")
    step, entries = manifest.non_negative_int("step"), manifest.part("files")
    if re.fullmatch(r"step-\d{8,}", folder.name) and step_of(folder) != step:
        raise manifest.wrong("step", f"is {step}, but the folder's name has another step")
    for name in entries.content:
        entry = entries.part(name)
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise entries.wrong(name, "is not the name of a file in the folder")
        if entry.value("bytes", int) < 0 or not re.fullmatch(r"[0-9a-f]{64}", entry.value("sha256", str)):
            raise entries.wrong(name, "must have a size and a SHA-256")
    if STATE not in entries.content:
        raise ValueError(f"{MANIFEST} lists no {STATE}")
    return entries.content


def _compare(folder: Path, name: str, entry: dict[str, Any], entries: dict[str, dict[str, Any]]) -> str:
    """Describe how a file is wrong; empty if it is right."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing" if not path.exists() else f"{name} is not a file"
    size = path.stat().st_size
    if size == entry["bytes"] and (found := fingerprint(path)["sha256"]) == entry["sha256"]:
        return ""
    if size != entry["bytes"]:
        how = "truncated" if size < entry["bytes"] else "too long"
        return f"{name} is {how}: {size:,} bytes, not {entry['bytes']:,}"
    other = next((each for each, its in entries.items() if its["sha256"] == found), None)
    return f"{name} has the content of {other}" if other else f"{name} is damaged: its SHA-256 is wrong"


def read_header(path: Path) -> Pieces:
    """Read the pieces of tensors from a safetensors header, by name: (dtype, shape, offsets in the tensor).

    They are in the order of the file. Memory use is limited to the header, which can't be longer than the file.

    Raises:
        ValueError: it is not a safetensors file, or header and content don't match; names the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else size
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"{path.name} is not a safetensors file: its header is longer than the file")
            header = parse_json(file.read(length), f"the header of {path.name}")
    except (OSError, struct.error) as error:
        raise ValueError(f"{path.name}: {error}") from None
    extra = header.part("__metadata__")
    places = parse_json(extra.value(SHARDING, str).encode("utf-8", "replace"), f"{SHARDING} of {path.name}")
    found = {name: _piece(header.part(name), places.part(name)) for name in header.content if name != "__metadata__"}
    in_order = sorted(found, key=lambda name: found[name][1])
    at = 0
    for start, stop in (found[name][1] for name in in_order):
        if start != at or stop < start:
            raise ValueError(f"{path.name}: its tensors are not contiguous")
        at = stop
    if at != size - 8 - length:
        raise ValueError(f"{path.name}: its tensors take {at:,} bytes, but the file has {size - 8 - length:,}")
    return {name: found[name][0] for name in in_order}


def _piece(entry: Checked, place: Checked) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
    """Return (the piece, its byte range) of a header's entry."""
    dtype, shape = entry.value("dtype", str), _naturals(entry, "shape")
    start, stop = _naturals(entry, "data_offsets", 2)
    if dtype not in BYTES or stop - start != BYTES[dtype] * math.prod(shape):
        raise entry.wrong("data_offsets", f"{start} to {stop} are not the bytes of {shape} in {dtype}")
    return (dtype, shape, _naturals(place, "saved_offsets", len(shape))), (start, stop)


def _naturals(content: Checked, name: str, count: int | None = None) -> tuple[int, ...]:
    """Return a list of ``count`` integers of at least 0."""
    found = content.value(name, list)
    if not all(type(each) is int and 0 <= each < 2**63 for each in found) or count not in (None, len(found)):
        raise content.wrong(name, f"must be {'a list of' if count is None else count} integers of at least 0")
    return tuple(found)
