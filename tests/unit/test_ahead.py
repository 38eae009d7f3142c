"""Reading ahead in a thread gives the same sequences, and the cursor counts only sequences taken."""

import threading

import numpy as np
import pytest

from burst_train.data.ahead import ReadAhead
from burst_train.data.corpus import open_corpus
from burst_train.data.sequences import SequenceReader
from burst_train.data.tokenizer import ByteTokenizer
from tests.support.training import write_corpus

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
