"""Checkpoints as files: whole ones have a manifest with the SHA-256 of every file, and anything else is told by name.

``step-00000012/manifest.json`` is
``{"format": 1, "step": 12, "files": {"state.json": {"bytes": 9, "sha256": "..."}}}``.
It is written last, before the folder gets its name: a folder without a whole manifest is no checkpoint.
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
UNFINISHED = ".unfinished"  # at the end of the name of a folder that is being written
LARGEST_MANIFEST = 2**24
LARGEST_HEADER = 100_000_000  # as safetensors itself has it
SHARDING = "DCP_SHARDING_INFO"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
PART = 2**22  # bytes of a file that are read at once: few enough, and Python's lock is not asked for all the time
Pieces = Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]  # by tensor: dtype, shape, place


class DamagedError(ValueError):
    """A checkpoint is not what was saved; the text names each file that is wrong and how."""


def fingerprint(path: Path, rest: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A file's entry in a manifest, read from the disk; ``rest`` is called between its parts."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART):
            digest.update(part)
            rest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest.hexdigest()}


def write_whole(path: Path, text: str) -> None:
    """Write a file, and return once the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return once the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest into the unfinished ``folder`` and give it its name.

    Args:
        files: the entry of each file, by its name.
    """
    write_whole(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    sync_folder(folder)
    whole = folder.with_name(name_of(step))
    if whole.exists():  # what a resumed run saved at this step before, or was found damaged
        discard(whole)
    folder.rename(whole)
    sync_folder(folder.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint; the manifest first, so that no half of it can be taken for a whole one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def discard_unfinished(out: Path) -> None:
    """Remove what a run that was killed while it saved left half written."""
    for folder in (out / FOLDER).glob(f"step-*{UNFINISHED}"):
        discard(folder)


def read_state(folder: Path) -> Checked:
    """What a checkpoint's ``state.json`` holds, held against the manifest.

    Raises:
        DamagedError: the manifest or the file is not what was written.
    """
    try:
        entries = _entries(folder)

        def check(data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != entries[STATE]["sha256"]:
                raise ValueError(f"{STATE} is not what was saved: its SHA-256 is another")

        state = read_json(folder / STATE, check=check)
        if state.content.get("format") != FORMAT:
            raise state.wrong("format", f"must be {FORMAT}")
    except ValueError as error:
        raise DamagedError(f"{folder}: {error}") from None
    return state


def verify(folder: Path) -> list[str]:
    """Hold every file of a checkpoint against its manifest; returns the names of the safetensors files.

    Raises:
        DamagedError: names each file that is missing, foreign, truncated, changed or another one's.
    """
    try:
        entries = _entries(folder)
        complaints = [text for name, entry in entries.items() if (text := _compare(folder, name, entry, entries))]
        foreign = sorted({path.name for path in folder.iterdir()} - {*entries, MANIFEST})
    except (ValueError, OSError) as error:
        raise DamagedError(f"{folder}: {error}") from None
    complaints += [f"{name} is in no manifest: it is foreign" for name in foreign]
    if complaints:
        raise DamagedError(f"{folder}: {'; '.join(complaints)}")
    return [name for name in entries if name.endswith(".safetensors")]


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that the manifest of a folder lists.

    Raises:
        ValueError: there is no manifest, or it is not one of ours.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"there is no {MANIFEST}, so this is no whole checkpoint")
    manifest = read_json(folder / MANIFEST, largest=LARGEST_MANIFEST)
    if manifest.content.get("format") != FORMAT:
        raise manifest.wrong("format", f"must be {FORMAT}")
    step, entries = manifest.natural("step"), manifest.part("files")
    if re.fullmatch(r"step-\d{8,}", folder.name) and step_of(folder) != step:
        raise manifest.wrong("step", f"is {step}, which is not that of the folder: it is another checkpoint's")
    for name in entries.content:
        entry = entries.part(name)
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise entries.wrong(name, "is no name of a file in the folder")
        if entry.value("bytes", int) < 0 or not re.fullmatch(r"[0-9a-f]{64}", entry.value("sha256", str)):
            raise entries.wrong(name, "must have its size and SHA-256")
    if STATE not in entries.content:
        raise ValueError(f"{MANIFEST} lists no {STATE}")
    return entries.content


def _compare(folder: Path, name: str, entry: dict[str, Any], entries: dict[str, dict[str, Any]]) -> str:
    """What is wrong with a file; empty if nothing is."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing" if not path.exists() else f"{name} is no file"
    size = path.stat().st_size
    if size == entry["bytes"] and (found := fingerprint(path)["sha256"]) == entry["sha256"]:
        return ""
    if size != entry["bytes"]:
        how = "truncated" if size < entry["bytes"] else "too long"
        return f"{name} is {how}: {size:,} bytes, not {entry['bytes']:,}"
    other = next((each for each, its in entries.items() if its["sha256"] == found), None)
    return f"{name} holds what {other} should" if other else f"{name} is not what was saved: its SHA-256 is another"


def read_header(path: Path) -> Pieces:
    """The pieces of tensors in a safetensors file: by name (dtype, shape, place of its first element in the tensor).

    They come in the order in which they lie there. Nothing is allocated but for the header, which is no longer than the
    file.

    Raises:
        ValueError: it is no such file, or its header does not fit what follows; names the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else size
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"{path.name} is no safetensors file: its header is longer than the file")
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
            raise ValueError(f"{path.name}: its tensors do not lie one after the other")
        at = stop
    if at != size - 8 - length:
        raise ValueError(f"{path.name}: its tensors take {at:,} bytes, the file has {size - 8 - length:,}")
    return {name: found[name][0] for name in in_order}


def _piece(entry: Checked, place: Checked) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
    """(what the piece is, the bytes it takes) by its entry of a header."""
    dtype, shape = entry.value("dtype", str), _naturals(entry, "shape")
    start, stop = _naturals(entry, "data_offsets", 2)
    if dtype not in BYTES or stop - start != BYTES[dtype] * math.prod(shape):
        raise entry.wrong("data_offsets", f"{start} to {stop} are not the bytes of {shape} in {dtype}")
    return (dtype, shape, _naturals(place, "saved_offsets", len(shape))), (start, stop)


def _naturals(content: Checked, name: str, count: int | None = None) -> tuple[int, ...]:
    """A list of ``count`` whole numbers that are not below 0."""
    found = content.value(name, list)
    if not all(type(each) is int and 0 <= each < 2**63 for each in found) or count not in (None, len(found)):
        raise content.wrong(name, f"must be {'some' if count is None else count} whole numbers")
    return tuple(found)
