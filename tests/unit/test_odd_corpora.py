"""Any content of ``--data`` gives documents, or one sentence with file (and line); it never hangs or crashes."""

import gzip
import json
import os
from pathlib import Path

import pytest

from burst_train.data.corpus import open_corpus
from burst_train.data.tokenizer import ByteTokenizer

GOOD = b'{"text": "fine"}\n'
DEEP = b'{"text": "x", "more": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
LONG = b'{"text": "x", "id": ' + b"9" * 5000 + b"}\n"
ZIPPED = gzip.compress(GOOD * 1000)
BOM = b"\xef\xbb\xbf"

# name: (what is in rows.jsonl or rows.jsonl.gz, its texts or what the refusal says after the file's name)
ROWS = {
    "deep": (GOOD + DEEP, r":2: .*nested too deeply"),
    "long integer": (GOOD * 2 + LONG, r":3: .*integer"),
    "long integer as text": (b'{"text": ' + b"1" * 5000 + b"}", r":1: .*integer"),
    "long fraction": (b'{"text": "x", "id": 0.' + b"9" * 5000 + b"}", ["x"]),
    "not a number": (b'{"text": "x", "id": NaN}', ["x"]),
    "NUL as such": (b'{"text": "a\x00b"}', r":1: not valid JSON"),
    "NUL escaped": (rb'{"text": "a\u0000b"}', ["a\x00b"]),
    "byte order mark": (BOM + GOOD, ["fine"]),
    "byte order mark later": (GOOD + BOM + GOOD, r":2: not valid JSON"),
    "UTF-16": ('{"text": "x"}\n'.encode("utf-16"), r":1: not valid JSON"),
    "text null": (GOOD + b'{"text": null}\n', r":2: the 'text' field holds NoneType"),
    "text missing": (b"{}", r":1: no 'text' field among \[\]"),
    "ten thousand fields": (json.dumps({f"{n}" * 40: n for n in range(10_000)}).encode(), r":1: no 'text'.{,250}$"),
    "field twice": (b'{"text": 1, "text": "last"}', ["last"]),
    "lone surrogate": (rb'{"text": "a\ud800b"}', ["a?b"]),
    "surrogates in a pair": (rb'{"text": "\ud83e\udd99"}', ["🦙"]),
    "surrogate in a field": (rb'{"te\ud800xt": "a"}', r":1: no 'text' field"),
    "carriage returns": (b'{"text": "a"}\r{"text": "b"}\r', r":1: not valid JSON"),
    "both line ends": (b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["a", "b"]),
    "one array": (b'[{"text": "a"}]', r":1: expected an object"),
    "bad UTF-8": (b'{"text": "caf\xe9"}', r":1: not valid JSON"),
    "surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', r":1: not valid JSON"),
    "line of 20 MB": (b'{"text": "' + b"x" * 20_000_000 + b'"}', ["x" * 20_000_000]),
    "no line": (b"", r"' holds no text"),
    "empty texts": (b'{"text": ""}\n' * 3, r"' holds no text"),
    "zipped": (ZIPPED, ["fine"] * 1000),
    "zipped twice over": (ZIPPED + ZIPPED, ["fine"] * 2000),
    "zipped, truncated": (ZIPPED[:-20], r":\d+: broken gzip"),
    "zipped, checksum cut": (ZIPPED[:-4], r":\d+: broken gzip"),
    "zipped, bits flipped": (ZIPPED[:30] + b"\xff" * 8 + ZIPPED[38:], r":\d+: broken gzip"),
    "zipped, rubbish after": (ZIPPED + b"rubbish", r":\d+: broken gzip"),
    "zipped in name only": (b"text", r":1: broken gzip"),
    "zipped, zero bytes": (b"", r"' holds no text"),
    "zipped, deep": (gzip.compress(GOOD + DEEP), r":2: .*nested too deeply"),
}


def texts_of(data):
    """Return the texts, after checking that each can be encoded."""
    documents = list(open_corpus(str(data)).documents())
    assert all(len(ByteTokenizer().encode(document.text)) > 2 for document in documents)
    return [document.text for document in documents]


def check(data, named, expected):
    """Check a file and its folder; ``expected`` is the texts, or the message after ``named``."""
    if isinstance(expected, list):
        assert texts_of(data) == expected
        return
    with pytest.raises(ValueError, match=rf"^--data .*{named}.*?{expected}") as refused:
        texts_of(data)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ROWS)
def test_odd_rows_give_documents_or_name_the_line(tmp_path, name):
    content, expected = ROWS[name]
    path = tmp_path / ("rows.jsonl.gz" if name.startswith("zipped") else "rows.jsonl")
    path.write_bytes(content)
    check(path, path.name, expected)
    check(tmp_path, "" if expected == r"' holds no text" else path.name, expected)


# name: (what makes something at a path, the texts or what the refusal says)
PLACES = {
    "nothing": (lambda path: None, "no such file or directory"),
    "pipe": (os.mkfifo, "not a file or a directory.*Write its content to a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a file or a directory"),
    "link to itself": (lambda path: path.symlink_to(path), "too many levels of symbolic links"),
    "link to nothing": (lambda path: path.symlink_to(path.with_name("gone")), "no such file or directory"),
    "link to a text": (lambda path: path.symlink_to(text_at(path.with_name("text"))), ["text"]),
    "what breaks when read": (lambda path: path.symlink_to("/proc/self/mem"), "error"),
    "empty file": (Path.touch, "holds no text"),
    "byte order mark": (lambda path: path.write_bytes(BOM + b"x"), ["\ufeffx"]),
    "NUL": (lambda path: path.write_bytes(b"a\x00b"), ["a\x00b"]),
    "surrogate in UTF-8": (lambda path: path.write_bytes(b"ab\xed\xa0\x80"), "not UTF-8 text at byte 2"),
    "UTF-16": (lambda path: path.write_bytes("x".encode("utf-16")), "not UTF-8 text at byte 0"),
    "carriage returns": (lambda path: path.write_bytes(b"a\rb\r\n"), ["a\rb\r\n"]),
    "empty folder": (Path.mkdir, "holds no file"),
}
# Further contents of a folder with a text: the extra texts read, or the message of the refusal.
BESIDE = {
    "pipe": [],
    "device": [],
    "link to itself": [],
    "link to nothing": [],
    "what breaks when read": "error",
    "empty file": [],
    "NUL": ["a\x00b"],
    "surrogate in UTF-8": [],
    "empty folder": [],
}


def text_at(path):
    path.write_text("text")
    return path


@pytest.mark.parametrize("kind", PLACES)
def test_odd_places_give_documents_or_are_named(tmp_path, kind):
    make, expected = PLACES[kind]
    make(tmp_path / "odd")
    check(tmp_path / "odd", "odd", expected)


@pytest.mark.parametrize("kind", BESIDE)
def test_odd_places_in_a_folder_do_not_stop_the_rest(tmp_path, kind):
    text_at(tmp_path / "a.txt")
    PLACES[kind][0](tmp_path / "odd")
    check(tmp_path, "odd", BESIDE[kind] if isinstance(BESIDE[kind], str) else ["text", *BESIDE[kind]])


def test_folders_that_link_in_a_circle_are_read_once(tmp_path):
    (tmp_path / "below").mkdir()
    text_at(tmp_path / "below" / "a.txt")
    (tmp_path / "below" / "up").symlink_to(tmp_path)
    assert texts_of(tmp_path) == ["text"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    text_at(tmp_path / "a.txt")
    (tmp_path / "locked").mkdir()
    listed = os.scandir

    def scandir(path):  # root may list anything, so that no permission would do
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"--data .*locked.*Permission denied"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize("data", ["", "a\x00b", "~no such user/x", "x" * 5000, "hf:", "hf:@train"])
def test_names_that_name_nothing_are_refused(data):
    with pytest.raises(ValueError, match=r"^--data ") as refused:
        open_corpus(data)
    assert "\n" not in str(refused.value)
    assert "\x00" not in str(refused.value)


def test_a_file_name_that_cannot_be_printed_is_escaped(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.jsonl"))
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"\\udcff\\n.jsonl:1: no 'text' field") as refused:
        texts_of(path)
    str(refused.value).encode()


@pytest.mark.parametrize("row", [b'{"text": null}', b"{}", b"rubbish", b'{"text": ["a"]}'])
def test_odd_rows_of_a_data_set_name_it(tmp_path, row):
    (tmp_path / "train.jsonl").write_bytes(GOOD * 2 + row)
    with pytest.raises(ValueError, match=rf"^--data hf:{tmp_path}"):
        list(open_corpus(f"hf:{tmp_path}").documents())
