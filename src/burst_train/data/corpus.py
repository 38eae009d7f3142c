"""Sources of documents: Python source files, text files, folders, JSON lines, or the Hugging Face hub."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import os
import reprlib
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..run.folder import first_line
from ..run.lock import MARKER
from .chat import check_messages

STANDARD_LIBRARY = "stdlib"
HUB = "hf:"
BROKEN_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True)
class Document:
    """A text and its name for messages; of a conversation (``chat``), its messages and tools as JSON."""

    name: str
    text: str
    chat: bool = False


def open_corpus(data: str) -> Files | Hub:
    """Open the corpus that ``--data`` names; ValueError if it is missing, empty or can't be listed."""
    if data == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _below(root, ".py", without=frozenset({"site-packages", "dist-packages", "__pycache__"}))
        return Files(root, files, strict=False)
    if data.startswith(HUB):
        return Hub(data[len(HUB) :])
    path, status = _stat(data)
    if stat.S_ISDIR(status.st_mode):
        return Files(path, _below(path), strict=False)
    if stat.S_ISREG(status.st_mode):
        return Files(path.parent, [path])
    raise ValueError(
        f"--data {data!r} is not a file or a directory; pipes and devices can't be read repeatedly. "
        "Write its content to a file"
    )


def _stat(data: str) -> tuple[Path, os.stat_result]:
    why = "no such file or directory"
    try:
        if data:
            return (path := Path(data).expanduser()), path.stat()
    except OSError as error:
        why = (error.strerror or why).lower()
    except (RuntimeError, ValueError):  # an unknown user's home directory, or a NUL in the name
        pass
    raise ValueError(f"--data {data!r}: {why} (give a file, a directory, {STANDARD_LIBRARY} or {HUB}NAME)")


def _below(root: Path, suffix: str = "", *, without: frozenset[str] = frozenset()) -> list[Path]:
    """List the files below ``root`` in a fixed order, without hidden ones; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"--data {str(error.filename)!r}: {error.strerror}") from None

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        # Skip folders written by our own runs: their files are not training text.
        marked = {name for name in folders if (Path(folder) / name / MARKER).exists()}
        folders[:] = [name for name in folders if not (name.startswith(".") or name in without or name in marked)]
        paths = [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
        try:
            files += [path for path in paths if path.is_file()]
        except OSError as error:
            refuse(error)
    return sorted(files, key=lambda path: path.relative_to(root).parts)


class Files:
    """Documents in files below ``root``: one per line of JSON lines, one per other file.

    ``strict``: whether a file that is not UTF-8 is an error; otherwise it is skipped, and counted in ``skipped``.
    """

    def __init__(self, root: Path, files: list[Path], strict: bool = True) -> None:
        if not files:
            raise ValueError(f"--data {str(root)!r}: the directory holds no file to read")
        self.root, self.files, self.strict, self.skipped = root, files, strict, 0

    def documents(self, order: np.random.Generator | None = None) -> Iterator[Document]:
        """Yield the documents, files in random ``order`` if given; ValueError names a wrong file and line."""
        self.skipped, empty = 0, True
        chosen = range(len(self.files)) if order is None else order.permutation(len(self.files))
        for index in chosen:
            for document in self._documents_of(self.files[index]):
                empty = False
                yield document
        if empty:
            where = str(self.files[0] if self.strict else self.root)
            passed = f"; {self.skipped} of its files are not UTF-8 text" if self.skipped else ""
            raise ValueError(f"--data {where!r} holds no text{passed}")

    def _documents_of(self, path: Path) -> Iterator[Document]:
        name = path.relative_to(self.root).as_posix()
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(path, name)
        elif text := self._read(path):
            yield Document(name, text)

    def _read(self, path: Path) -> str | None:
        try:
            # Not read_text, which would convert line endings.
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            if self.strict:
                raise ValueError(f"--data {str(path)!r}: not UTF-8 text at byte {error.start}") from None
            self.skipped += 1
            return None
        except BROKEN_GZIP as error:
            raise ValueError(f"--data {str(path)!r}: broken gzip data ({error})") from None
        except OSError as error:
            raise ValueError(f"--data {str(path)!r}: {error.strerror}") from None


def _json_lines(path: Path, name: str) -> Iterator[Document]:
    number = 0
    shown = repr(str(path))[1:-1]  # file names may have unprintable characters
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip() and (document := _document_of(json.loads(line.decode("utf-8")), f"{name}:{number}")):
                    yield document
    except BROKEN_GZIP as error:
        raise ValueError(f"--data {shown}:{number + 1}: broken gzip data ({error})") from None
    except RecursionError:
        raise ValueError(f"--data {shown}:{number}: not valid JSON (it is nested too deeply)") from None
    except ValueError as error:  # not UTF-8, not JSON, or an integer with more digits than Python reads
        raise ValueError(f"--data {shown}:{number}: not valid JSON ({error})") from None
    except TypeError as error:
        raise ValueError(f"--data {shown}:{number}: {error}") from None
    except OSError as error:
        raise ValueError(f"--data {str(path)!r}: {error.strerror}") from None


def _document_of(row: Any, name: str) -> Document | None:
    """Return the document of a row, its text or its conversation; None if it is empty, TypeError if it is wrong."""
    if not isinstance(row, dict):
        raise TypeError(f"expected an object with a 'text' or 'messages' field, found {type(row).__name__}")
    if "text" not in row and "messages" not in row:
        raise TypeError(f"no 'text' field among {reprlib.repr(sorted(row))}, and no 'messages'")
    if "text" in row and "messages" in row:
        raise TypeError("it has both a 'text' and a 'messages' field; keep one of them")
    if chat := "messages" in row:
        text = _conversation_of(row)
    elif not isinstance(text := row["text"], str):
        raise TypeError(f"the 'text' field holds {type(text).__name__}, not a string")
    # JSON can hold lone surrogates, which no tokenizer accepts.
    return Document(name, text.encode("utf-8", "replace").decode("utf-8"), chat) if text else None


def _conversation_of(row: dict[str, Any]) -> str:
    if "chat_template_kwargs" in row:
        raise TypeError("the field 'chat_template_kwargs' is not supported; remove it, or edit the template")
    check_messages(row["messages"])
    # A data set of columns holds None for what a message lacks.
    messages = [{key: value for key, value in each.items() if value is not None} for each in row["messages"]]
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise TypeError(f"the 'tools' field holds {type(tools).__name__}, not a list")
    return json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False)


class Hub:
    """A streamed split of a data set of ``datasets``: ``NAME[:CONFIG][@SPLIT]``, by default ``train``."""

    def __init__(self, name: str) -> None:
        self.skipped = 0
        self._stream: Any = None
        name, _, split = name.partition("@")
        self.split = split or "train"
        self.name, _, self.configuration = name.partition(":")
        if not self.name:
            raise ValueError(f"--data {HUB}{name}: give the data set's name, as in {HUB}allenai/c4:en")

    def documents(self, order: np.random.Generator | None = None) -> Iterator[Document]:
        """Yield the documents in source order; a stream ignores ``order``."""
        # Open the stream once for all epochs, to spare the hub another request.
        self._stream = self._load() if self._stream is None else self._stream
        rows = iter(self._reading())
        for index in itertools.count():
            try:
                document = _document_of(next(rows), f"{self.name}#{index}")
            except StopIteration:
                return
            except TypeError as error:
                raise ValueError(f"--data {HUB}{self.name}: row {index}: {error}") from None
            except Exception as error:  # datasets can raise anything, from broken files to a lost connection
                raise ValueError(f"--data {HUB}{self.name}: row {index} can't be read: {first_line(error)}") from error
            if document is not None:
                yield document

    def _reading(self) -> Any:
        """Return a new reader of the stream; a deep copy would fail in other threads (it changes fsspec's table)."""
        try:
            return self._stream.shard(num_shards=1, index=0)
        except Exception as error:
            raise ValueError(f"--data {HUB}{self.name}: can't be read: {first_line(error)}") from error

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise ValueError(f"--data {HUB}{self.name} needs the datasets library: pip install datasets") from None
        try:
            return datasets.load_dataset(self.name, self.configuration or None, split=self.split, streaming=True)
        except Exception as error:
            message = " ".join(str(error).split("\n")[:2]) or first_line(error)  # the second line lists configurations
            raise ValueError(f"--data {HUB}{self.name}: {message}") from error


Corpus = Files | Hub
