"""Sources of documents, the errors of unreadable corpora, and reading ahead."""

import gzip
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from burst_train.data.corpus import Files, open_corpus
from burst_train.data.sequences import ReadAhead, SequenceReader
from burst_train.data.tokenizer import ByteTokenizer
from tests.support.training import write_corpus


def names_and_texts(data):
    return [(document.name, document.text) for document in open_corpus(str(data)).documents()]


def test_the_standard_library_is_there_and_long():
    corpus = open_corpus("stdlib")
    documents = list(corpus.documents())
    names = [document.name for document in documents]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert "argparse.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert any(len(document.text) > 128 * 1024 for document in documents)


def test_a_text_file_is_one_document_with_its_line_endings(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\n\u00e9".encode())
    assert names_and_texts(tmp_path / "a.txt") == [("a.txt", "one\r\ntwo\n\u00e9")]


def test_json_lines_plain_and_zipped(tmp_path):
    rows = [{"text": "one", "url": "x"}, {"text": ""}, {"text": "twø"}, {"text": "lone \ud800 surrogate"}]
    lines = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    plain = names_and_texts(tmp_path / "a.jsonl")
    assert plain == [("a.jsonl:1", "one"), ("a.jsonl:5", "twø"), ("a.jsonl:7", "lone ? surrogate")]
    assert [text for _, text in names_and_texts(tmp_path / "b.jsonl.gz")] == [text for _, text in plain]


def test_a_directory_is_read_below_in_one_order_and_what_is_not_text_is_counted(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.txt", ".hidden/x.txt", "c/.secret"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c/rows.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("")
    corpus = open_corpus(str(tmp_path))
    read = [(document.name, document.text) for document in corpus.documents()]
    assert read == [("a.txt", "a.txt"), ("b/a.txt", "b/a.txt"), ("b/z.txt", "b/z.txt"), ("c/rows.jsonl:1", "row")]
    assert corpus.skipped == 1
    shuffled_names = [document.name for document in corpus.documents(np.random.default_rng(3))]
    assert sorted(shuffled_names) == sorted(name for name, _ in read)
    assert corpus.skipped == 1, "counted again at each reading"


def test_a_local_data_set_is_streamed_through_the_datasets_library(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(5)))
    documents = list(open_corpus(f"hf:{tmp_path}").documents())
    assert [document.text for document in documents] == [f"row {index}" for index in range(5)]
    assert len({document.name for document in documents}) == 5


def test_a_streamed_data_set_is_read_by_several_threads_each_from_its_start(tmp_path):
    """A run reads training data and held-out data in two threads; neither opened the data set."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(5)))
    corpus = open_corpus(f"hf:{tmp_path}")
    here = corpus.documents()
    read = [next(here).text]
    with ThreadPoolExecutor(3) as threads:
        together = Barrier(3)  # three threads, each its own
        elsewhere = [threads.submit(lambda: (together.wait(), [*corpus.documents()])[1]) for _ in range(3)]
    read += [document.text for document in here]
    assert [[document.text for document in each.result()] for each in elsewhere] == [read] * 3
    assert read == [f"row {index}" for index in range(5)]


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--data hf:.*nothing"):
        list(open_corpus(f"hf:{tmp_path / 'nothing'}").documents())
    with pytest.raises(ValueError, match="holds no file"):
        Files(tmp_path, [])


def test_what_a_run_wrote_is_no_text_to_train_on(tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / ".burst-run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    (tmp_path / "runs" / "notes.txt").write_text("text")
    assert [document.name for document in open_corpus(str(tmp_path)).documents()] == ["runs/notes.txt"]


def test_a_text_that_is_compressed_is_one_document(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("über\r\nall".encode()))
    (tmp_path / "b.txt").write_text("plain")
    assert names_and_texts(tmp_path) == [("a.txt.gz", "über\r\nall"), ("b.txt", "plain")]
    assert names_and_texts(tmp_path / "a.txt.gz") == [("a.txt.gz", "über\r\nall")]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 10_000)[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.gz': broken gzip data"):
        names_and_texts(tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_many_documents_take_the_memory_of_one(tmp_path, suffix):
    path = tmp_path / f"many{suffix}"
    lines = (json.dumps({"text": f"{n} " + "0123456789" * 500}) + "\n" for n in range(4_000))
    with gzip.open(path, "wt", compresslevel=1) if suffix.endswith(".gz") else path.open("w") as file:
        file.writelines(lines)
    corpus = open_corpus(str(path))
    tracemalloc.start()
    try:
        read = sum(len(document.text) for document in corpus.documents())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read > 20e6 > 20 * peak


LONG = 60


def reader_of(folder, packed=True):
    corpus = open_corpus(write_corpus(folder))
    return SequenceReader(corpus, ByteTokenizer(), seq_len=61, packed=packed, held_out=0.1, seed=3)


def same(x, y):
    return np.array_equal(x.tokens, y.tokens) and x.cu_seqlens == y.cu_seqlens


@pytest.mark.parametrize(("packed", "taken"), [(True, 1), (False, 7), (True, 200)])
def test_sequences_and_places_are_those_of_the_stream(tmp_path, packed, taken):
    reader = reader_of(tmp_path, packed)
    plain, ahead = reader.training(), ReadAhead(reader.training(), 5)
    for _ in range(taken):
        assert same(next(plain), next(ahead))
    ours, theirs = ahead.cursor(), plain.cursor()
    assert ours.model_dump() == theirs.model_dump() and np.array_equal(ours.waiting, theirs.waiting)
    again = reader.training(ours)
    for _ in range(50):
        expected = next(plain)
        assert same(next(again), expected) and same(next(ahead), expected)
    ahead.close()


class Counting:
    """An endless stream that counts how much of it was read."""

    def __init__(self, fails_at=None):
        self.read, self.fails_at, self.changed = 0, fails_at, threading.Condition()

    def __next__(self):
        with self.changed:
            self.read += 1
            self.changed.notify()
        if self.read == self.fails_at:
            raise ValueError("--data: line 7 is broken")
        return self.read

    def place(self):
        return lambda read=self.read: read

    def wait_for(self, read):
        with self.changed:
            assert self.changed.wait_for(lambda: self.read >= read, LONG)


def test_it_reads_as_far_ahead_as_it_may_and_no_further():
    stream = Counting()
    ahead = ReadAhead(stream, 4)
    stream.wait_for(4)
    assert [next(ahead) for _ in range(3)] == [1, 2, 3] and ahead.cursor() == 3
    stream.wait_for(7)
    ahead.close()
    ahead._thread.join(LONG)
    assert not ahead._thread.is_alive() and stream.read == 7 and ahead.cursor() == 3
    with pytest.raises(ValueError, match="closed"):
        next(ahead)


def test_an_unreadable_checkpoint_is_reported_where_it_would_be_loaded():
    ahead = ReadAhead(Counting(fails_at=3), 9)
    assert [next(ahead), next(ahead)] == [1, 2] and ahead.cursor() == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="line 7 is broken"):
            next(ahead)


def test_nothing_was_taken_yet():
    with pytest.raises(ValueError, match="no cursor yet"):
        ReadAhead(Counting(), 1).cursor()
