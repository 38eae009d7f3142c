"""The marker in a run's folder: which files the run wrote, and which process holds the folder.

It is JSON. ``wrote`` lists files relative to the folder; a slash at the end marks a folder that the run owns entirely.
Other files are never removed or overwritten. The writer holds a lock on the marker, which ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Annotated

from pydantic import AfterValidator

from ..checked import FORMAT, Checked, Format, parse_json

HELD = "already holds a run; choose another folder or add --overwrite"
MARKER = ".burst-run.json"  # hidden, so that a corpus skips it


def _listed(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or path.parts[0] == MARKER:
        raise ValueError("must be a file inside the folder")
    return name


class Marker(Checked):
    """Content of the marker. An empty file, left by a killed writer, stands for a marker without files."""

    format: Format
    wrote: list[Annotated[str, AfterValidator(_listed)]]
    by: str = ""
    process: int | None = None
    parent: int | None = None
    host: str = ""


class RunFolderLock:
    """The list of written files in the marker of ``folder``; for the process that holds the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, *names: str) -> None:
        """List files before they are written."""
        self._write(list(dict.fromkeys([*read_marker(self.folder).wrote, *names])))

    def move(self, source: str, target: str) -> None:
        """Move the files of the listed folder ``source`` to ``target``, and list them."""
        files = [path for path in sorted((self.folder / source).rglob("*")) if path.is_file()]
        names = {path: f"{target}/{path.relative_to(self.folder / source).as_posix()}" for path in files}
        self.add(*names.values())
        for path, name in names.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(self.folder / name)
        shutil.rmtree(self.folder / source)
        self._write([name for name in read_marker(self.folder).wrote if name != f"{source}/"])

    def remove_old(self) -> None:
        """Remove all listed files and folders, and parent folders that are then empty."""
        for name in read_marker(self.folder).wrote:
            path = self.folder / name
            if not _is_own(self.folder, name):
                continue
            if name.endswith("/"):
                shutil.rmtree(path)
            else:
                path.unlink()
            _remove_empty([parent for parent in path.parents if self.folder in parent.parents])
        self._write([])

    def _write(self, wrote: list[str]) -> None:
        marker = read_marker(self.folder).model_copy(update={"wrote": wrote})
        # In place, because the lock is on this file.
        with (self.folder / MARKER).open("r+b") as file:
            _fill(file, marker)


def was_claimed_by_sibling(folder: Path) -> bool:
    """Whether the folder's last writer has the same parent process as this one."""
    try:
        marker = read_marker(folder)
    except (OSError, ValueError):
        return False
    return (marker.parent, marker.host) == (os.getppid(), socket.gethostname())


def read_marker(folder: Path) -> Marker:
    """Read the marker; ValueError if it is not a valid one."""
    data = (folder / MARKER).read_bytes()
    try:
        return parse_json(data, Marker, "its content") if data else Marker(format=FORMAT, wrote=[])
    except ValueError as error:
        raise ValueError(
            f"has a {MARKER} that is not of format {FORMAT} ({error}), so the files of earlier runs are unknown; "
            "choose another folder"
        ) from None


@contextmanager
def claimed(out: str, *, by: str, overwrite: bool, writes: Sequence[str], held: str = HELD) -> Iterator[RunFolderLock]:
    """Hold ``out`` for this process and its command, ``by``; ValueError if that is not possible.

    A missing folder is created, and removed again if nothing is written. Files that match ``writes`` must be a run's.
    An earlier run raises ``held``, or with ``overwrite`` stays until :meth:`RunFolderLock.remove_old`.
    """
    folder = Path(out)
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        with _locked(folder) as file:
            _enter(file, folder, by=by, overwrite=overwrite, writes=writes, held=held)
            copy = os.dup(file.fileno())  # the lock lasts while any copy is open
    except OSError as error:
        raise ValueError(
            f"--out {out!r} can't be written to: {error.strerror or error}; choose another folder"
        ) from None
    except ValueError as error:
        raise ValueError(f"--out {out!r} {error}") from None
    try:
        yield RunFolderLock(folder)
    finally:
        if folder.is_dir() and set(os.listdir(folder)) == {MARKER}:  # nothing was written, so leave no trace
            (folder / MARKER).unlink()
            _remove_empty(made)
        os.close(copy)


def check_inputs(out: str, inputs: Mapping[str, str | None]) -> None:
    """Raise ValueError if an input, by flag, is a path inside the output folder, with links resolved."""
    folder = Path(out).resolve()
    for flag, value in inputs.items():
        path = Path(value).expanduser() if value else None
        if path is None or not path.exists():
            continue
        # A model folder's files may be links.
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
        if any(folder in (file.resolve(), *file.resolve().parents) for file in (path, *files)):
            raise ValueError(
                f"{flag} {value!r} lies in --out {out!r}, where the run would overwrite it; choose another folder"
            )


@contextmanager
def _locked(folder: Path) -> Iterator[IO[bytes]]:
    """Create the marker if it is missing, and lock it for this process."""
    blocked = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if blocked is not None:
        raise ValueError(f"can't be a folder: {str(blocked)!r} is a file")
    if ".." in folder.parts and not folder.exists():  # creating "new" would make "theirs/new/.." mean "theirs"
        raise ValueError("contains '..' after a missing folder; name the folder without '..'")
    for _ in range(3):  # the previous holder may be removing its empty folder now
        if not (folder / MARKER).exists() and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                "holds files, but no marker of an earlier run, so nothing is written there; "
                "choose a new or empty folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"is in use by {_holder(folder)}; choose another folder") from None
            if (folder / MARKER).exists() and os.path.samestat(os.fstat(file.fileno()), (folder / MARKER).stat()):
                yield file
                return
    raise ValueError("is in use by other runs; choose another folder")


def _holder(folder: Path) -> str:
    try:
        marker = read_marker(folder)
    except (OSError, ValueError):  # the holder has just ended
        return "another run"
    return f"{marker.by}, process {marker.process} on {marker.host}" if marker.by else "another run"


def _enter(file: IO[bytes], folder: Path, *, by: str, overwrite: bool, writes: Sequence[str], held: str) -> None:
    """Write this process into the marker, unless the folder holds files that must stay."""
    wrote = read_marker(folder).wrote
    if not overwrite and any((folder / name).exists() for name in wrote):
        raise ValueError(held)
    theirs = [path for pattern in writes for path in sorted(folder.glob(pattern))]
    folders = [folder / part for name in writes for part in _folders(name)]
    theirs += [path for path in folders if path.is_symlink() or (path.exists() and not path.is_dir())]
    for path in theirs:
        name = path.relative_to(folder).as_posix()
        listed = next((entry for entry in wrote if entry.rstrip("/") == name), None)
        if listed is None or not _is_own(folder, listed):
            raise ValueError(f"holds {name!r}, which no run wrote and this run would replace; move it away")
    # The parent distinguishes a restart by the same launcher from another launcher's run.
    process, parent, host = os.getpid(), os.getppid(), socket.gethostname()
    _fill(file, Marker(format=FORMAT, by=by, wrote=wrote, process=process, parent=parent, host=host))


def _fill(file: IO[bytes], marker: Marker) -> None:
    """Write the marker in one call, so that it can't be left half written."""
    text = marker.model_dump_json().encode()
    os.pwrite(file.fileno(), text, 0)
    os.ftruncate(file.fileno(), len(text))


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove empty folders, innermost first, up to the first that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            break


def _folders(name: str) -> list[str]:
    """Return the parent folders of ``name``, outermost first."""
    return [parent.as_posix() for parent in reversed(PurePosixPath(name).parents) if parent != PurePosixPath(".")]


def _is_own(folder: Path, name: str) -> bool:
    """Whether a listed name is still the run's file or folder: of the right type and not behind a link."""
    path = folder / name
    if len(os.fsencode(name)) > 1024:  # our files have shorter names
        return False
    if any((folder / part).is_symlink() for part in (*_folders(name), name.rstrip("/"))):
        return False
    return path.is_dir() if name.endswith("/") else path.is_file()
