"""Where documents come from: source files, text files, folders, JSON lines, or the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from .tokenizer import first_line

STANDARD_LIBRARY = "stdlib"
HUB = "hf:"


@dataclass(frozen=True)
class Document:
    """One text, and a name to show in messages."""

    name: str
    text: str


class Corpus(Protocol):
    """Documents that can be read again and again, in the same order each time."""

    skipped: int
    """Files passed over because they are not UTF-8 text, counted while reading."""

    def documents(self, order: np.random.Generator | None = None) -> Iterator[Document]:
        """Yield every document that is not empty: in source order, or roughly as ``order`` draws it.

        Raises:
            ValueError: what was read is not what its name promises; names the file and the line.
        """
        ...


def open_corpus(data: str) -> Corpus:
    """The corpus that ``--data`` names.

    Args:
        data: ``stdlib`` (the Python standard library's own source files), ``hf:NAME[:CONFIG][@SPLIT]`` (streamed
            through ``datasets``), a ``*.jsonl`` or ``*.jsonl.gz`` file whose lines have a ``text`` field, a directory
            (every such file and every text file below it), or any other file: one document.

    Raises:
        ValueError: there is no such file, or the directory holds no file.
    """
    if data == STANDARD_LIBRARY:
        return Files(*_standard_library())
    if data.startswith(HUB):
        return Hub(data[len(HUB) :])
    path = Path(data).expanduser()
    if path.is_dir():
        return Files(path, _below(path, "*"), strict=False)
    if path.is_file():
        return Files(path.parent, [path])
    raise ValueError(
        f"--data {data!r}: no such file or directory (give a file, a directory, {STANDARD_LIBRARY} or {HUB}NAME)"
    )


def _below(root: Path, pattern: str, *, without: frozenset[str] = frozenset()) -> list[Path]:
    """Files below ``root``, in one order on every machine; not the hidden ones, nor those in folders of ``without``."""
    found = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") or part in without for part in parts):
            found.append((parts, path))
    return [path for _, path in sorted(found)]


def _standard_library() -> tuple[Path, list[Path], bool]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, _below(root, "*.py", without=frozenset({"site-packages", "dist-packages", "__pycache__"})), False


class Files:
    """Documents in files below ``root``: JSON lines where the name says so, else one document a file.

    Args:
        root: what document names are relative to.
        files: the files, in source order.
        strict: whether a file that is not UTF-8 text is an error; otherwise it is passed over and counted.
    """

    def __init__(self, root: Path, files: list[Path], strict: bool = True) -> None:
        if not files:
            raise ValueError(f"--data {str(root)!r}: the directory holds no file to read")
        self.root, self.files, self.strict, self.skipped = root, files, strict, 0

    def documents(self, order: np.random.Generator | None = None) -> Iterator[Document]:
        self.skipped = 0
        chosen = range(len(self.files)) if order is None else order.permutation(len(self.files))
        for index in chosen:
            path = self.files[index]
            name = path.relative_to(self.root).as_posix()
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _json_lines(path, name)
            elif (text := self._read(path)) is not None and text:
                yield Document(name, text)

    def _read(self, path: Path) -> str | None:
        try:
            # Not read_text: it would turn every line ending into one kind.
            return path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            if self.strict:
                raise ValueError(f"--data {str(path)!r}: not UTF-8 text at byte {error.start}") from None
            self.skipped += 1
            return None
        except OSError as error:
            raise ValueError(f"--data {str(path)!r}: {error.strerror}") from None


def _json_lines(path: Path, name: str) -> Iterator[Document]:
    number = 0
    try:
        with _open_bytes(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                text = _text_field(json.loads(line))
                if text:
                    yield Document(f"{name}:{number}", text)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"--data {path}:{number + 1}: broken gzip data ({error})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--data {path}:{number}: not JSON ({error})") from None
    except TypeError as error:
        raise ValueError(f"--data {path}:{number}: {error}") from None
    except OSError as error:
        raise ValueError(f"--data {str(path)!r}: {error.strerror}") from None


def _open_bytes(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _text_field(row: Any) -> str:
    if not isinstance(row, dict):
        raise TypeError(f"expected an object with a 'text' field, found {type(row).__name__}")
    if "text" not in row:
        raise TypeError(f"no 'text' field among {sorted(map(str, row))}")
    if not isinstance(row["text"], str):
        raise TypeError(f"the 'text' field holds {type(row['text']).__name__}, not a string")
    # JSON can spell lone surrogates, which no tokenizer takes.
    return row["text"].encode("utf-8", "replace").decode("utf-8")


class Hub:
    """A split of a data set that the ``datasets`` library can load, streamed, never downloaded whole.

    Args:
        name: what ``datasets.load_dataset`` takes, a local folder included; ``NAME:CONFIG`` picks a configuration,
            ``NAME@SPLIT`` or ``NAME:CONFIG@SPLIT`` a split other than ``train``.
    """

    def __init__(self, name: str) -> None:
        self.skipped = 0
        name, _, split = name.partition("@")
        self.split = split or "train"
        self.name, _, self.configuration = name.partition(":")
        if not self.name:
            raise ValueError(f"--data {HUB}{name}: give the data set's name, as in {HUB}allenai/c4:en")

    def documents(self, order: np.random.Generator | None = None) -> Iterator[Document]:
        """In source order whatever ``order`` says: a stream has no other."""
        for index, row in enumerate(self._load()):
            try:
                text = _text_field(row)
            except TypeError as error:
                raise ValueError(f"--data {HUB}{self.name}: row {index}: {error}") from None
            if text:
                yield Document(f"{self.name}#{index}", text)

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise ValueError(f"--data {HUB}{self.name} needs the datasets library: pip install datasets") from None
        try:
            return datasets.load_dataset(self.name, self.configuration or None, split=self.split, streaming=True)
        except Exception as error:
            told = " ".join(str(error).split("\n")[:2]) or first_line(error)  # the second lists configurations
            raise ValueError(f"--data {HUB}{self.name}: {told}") from error
