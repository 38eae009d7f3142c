"""The manifest of a checkpoint: size and SHA-256 of every file, so that each damaged file can be named.

``step-00000012/manifest.json`` is
``{"format": 1, "step": 12, "files": {"state.json": {"bytes": 9, "sha256": "..."}}}``.
It is written last, before the folder is renamed. A folder without a whole manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from ..checked import FORMAT, Checked, Format, Natural, parse_json, read_bytes
from ..run.folder import FOLDER, name_of, step_of
from .state import State

MANIFEST, STATE = "manifest.json", "state.json"
UNFINISHED = ".unfinished"  # suffix of a folder that is being written
LARGEST_MANIFEST = 2**24
PART = 2**22  # bytes per read: small enough for memory, large enough to take Python's lock rarely


def _plain_name(name: str) -> str:
    if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
        raise ValueError("is not the name of a file in the folder")
    return name


class FileEntry(Checked):
    """Size and hash of a file."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(Checked):
    """Every file of a checkpoint, by name."""

    format: Format
    step: Natural
    files: dict[Annotated[str, AfterValidator(_plain_name)], FileEntry]


class DamagedError(ValueError):
    """A checkpoint differs from what was saved; the text names each wrong file and its error."""


def fingerprint(path: Path, rest: Callable[[], None] = lambda: None) -> FileEntry:
    """Return a file's manifest entry, read from disk; ``rest`` is called between parts."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART):
            digest.update(part)
            rest()
        return FileEntry(bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


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


def seal(folder: Path, step: int, files: dict[str, FileEntry]) -> None:
    """Write the manifest of ``files`` into the unfinished ``folder``, then give the folder its final name."""
    write_whole(folder / MANIFEST, Manifest(format=FORMAT, step=step, files=files).model_dump_json(indent=1))
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


def read_state(folder: Path) -> State:
    """Read a checkpoint's ``state.json``; DamagedError if it or the manifest differs from what was written."""
    try:
        entry, data = _entries(folder)[STATE], read_bytes(folder / STATE)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ValueError(f"{STATE} is damaged: its SHA-256 is wrong")
        return parse_json(data, State, STATE)
    except ValueError as error:
        raise DamagedError(f"{folder}: {error}") from None


def verify(folder: Path) -> None:
    """Check every file of a checkpoint against its manifest; DamagedError names each wrong, missing or foreign one."""
    try:
        entries = _entries(folder)
        complaints = [text for name, entry in entries.items() if (text := _compare(folder, name, entry, entries))]
        foreign = sorted({path.name for path in folder.iterdir()} - {*entries, MANIFEST})
    except (ValueError, OSError) as error:
        raise DamagedError(f"{folder}: {error}") from None
    complaints += [f"{name} is foreign: it is not in the manifest" for name in foreign]
    if complaints:
        raise DamagedError(f"{folder}: {'; '.join(complaints)}")


def _entries(folder: Path) -> dict[str, FileEntry]:
    """Return the files that a folder's manifest lists; ValueError if the manifest is missing or invalid."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"there is no {MANIFEST}, so this is not a whole checkpoint")
    manifest = parse_json(read_bytes(folder / MANIFEST, LARGEST_MANIFEST), Manifest, MANIFEST)
    if re.fullmatch(r"step-\d{8,}", folder.name) and step_of(folder) != manifest.step:
        raise ValueError(f"{MANIFEST}: 'step' is {manifest.step}, but the folder's name has another step")
    if STATE not in manifest.files:
        raise ValueError(f"{MANIFEST} lists no {STATE}")
    return manifest.files


def _compare(folder: Path, name: str, entry: FileEntry, entries: Mapping[str, FileEntry]) -> str:
    """Describe how a file is wrong; empty if it is right."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing" if not path.exists() else f"{name} is not a file"
    size = path.stat().st_size
    if size == entry.bytes and (digest := fingerprint(path).sha256) == entry.sha256:
        return ""
    if size != entry.bytes:
        how = "truncated" if size < entry.bytes else "too long"
        return f"{name} is {how}: {size:,} bytes, not {entry.bytes:,}"
    other = next((each for each, its in entries.items() if its.sha256 == digest), None)
    return f"{name} has the content of {other}" if other else f"{name} is damaged: its SHA-256 is wrong"
