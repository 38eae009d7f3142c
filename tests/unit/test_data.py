"""Documents become sequences: some are held out; the rest are packed, cut and shuffled."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from burst_train.checked import parse_json
from burst_train.config import DataConfig, RunConfig, TrainConfig
from burst_train.data import sequences as data
from burst_train.data.corpus import Document
from burst_train.data.sequences import (
    Cursor,
    Position,
    SequenceReader,
    TokenSequence,
    epochs_text,
    join_sequences,
    make_split,
    pack,
    shuffled,
    split_documents,
)
from burst_train.data.tokenizer import ByteTokenizer


class Texts:
    """A corpus with the given texts."""

    skipped = 0

    def __init__(self, *texts):
        self.texts = texts

    def documents(self, order=None):
        indices = range(len(self.texts)) if order is None else order.permutation(len(self.texts))
        return (Document(f"#{index}", self.texts[index]) for index in indices)


def reader_of(*texts, seq_len=32, packed=True, held_out=0.2, seed=0):
    corpus = texts[0] if len(texts) == 1 and not isinstance(texts[0], str) else Texts(*texts)
    return SequenceReader(corpus, ByteTokenizer(), seq_len=seq_len, packed=packed, held_out=held_out, seed=seed)


def many(count=60, length=20):
    """Return texts of different lengths; each repeats a different character."""
    return [chr(0x400 + index) * (length + 7 * index % 31) for index in range(count)]


def documents_of(sequence):
    """Return the token pieces between the borders of a sequence."""
    borders = sequence.cu_seqlens or (0, len(sequence.tokens))
    return [sequence.tokens[start:stop] for start, stop in itertools.pairwise(borders)]


def text_of(tokens):
    return bytes(int(token) for token in tokens if token < 256).decode("utf-8", "replace")


# Packing


def test_joined_sequences_keep_their_documents():
    parts = [TokenSequence(np.arange(5), (0, 2, 5)), TokenSequence(np.arange(5, 8), None)]
    joined = join_sequences([*parts, *parts])
    assert joined.tokens.tolist() == [*range(8), *range(8)]
    assert joined.cu_seqlens == (0, 2, 5, 8, 10, 13, 16)
    assert joined.valid_tokens == 2 * sum(part.valid_tokens for part in parts)


def test_pack_fills_cuts_and_marks_every_border():
    sequences = list(pack([np.arange(3), np.arange(10, 19), np.arange(0), np.arange(30, 34)], 5))
    assert [list(sequence.tokens) for sequence in sequences] == [
        [0, 1, 2, 10, 11],
        [12, 13, 14, 15, 16],
        [17, 18, 30, 31, 32],
        [33],
    ]
    assert [sequence.cu_seqlens for sequence in sequences] == [(0, 3, 5), (0, 5), (0, 2, 5), (0, 1)]
    assert [sequence.valid_tokens for sequence in sequences] == [3, 4, 3, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 17))
def test_packing_loses_repeats_and_mixes_nothing(lengths, seq_len):
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    sequences = list(pack(documents, seq_len))
    assert np.array_equal(np.concatenate([np.arange(0), *(s.tokens for s in sequences)]), np.arange(sum(lengths)))
    assert all(len(sequence.tokens) == seq_len for sequence in sequences[:-1])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for sequence in sequences:
        assert sequence.cu_seqlens[0] == 0
        assert sequence.cu_seqlens[-1] == len(sequence.tokens)
        pieces = documents_of(sequence)
        assert all(len(piece) and len(set(owner[piece])) == 1 for piece in pieces)
        neighbours = [owner[piece[0]] for piece in pieces]
        assert len(set(neighbours)) == len(neighbours), "a document is in one piece within a sequence"
        assert sequence.valid_tokens == len(sequence.tokens) - len(pieces)


def test_cut_takes_whole_sequences_of_one_document():
    documents = [np.arange(11), np.arange(100, 103), np.arange(200, 205)]
    assert [list(s.tokens) for s in split_documents(documents, 5)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [200, 201, 202, 203, 204],
    ]
    assert [list(s.tokens) for s in split_documents(documents[:1], 5, keep_rest=True)][-1] == [10]
    assert {s.cu_seqlens for s in split_documents(documents, 5)} == {None}
    assert next(split_documents(documents, 5)).valid_tokens == 4


def test_shuffled_yields_each_once_in_an_order_of_the_seed():
    def run(seed, buffer=7):
        sequences = (TokenSequence(np.array([index]), None) for index in range(50))
        return [int(s.tokens[0]) for s in shuffled(sequences, buffer, np.random.default_rng(seed))]

    assert sorted(run(0)) == list(range(50))
    assert run(0) == run(0) != run(1)
    assert run(0) != list(range(50))
    assert run(0, buffer=1) == list(range(50))


# The split


def test_held_out_documents_are_never_trained_on():
    reader = reader_of(*many())
    held_out = set().union(*(text_of(sequence.tokens) for sequence in reader.held_out())) - {"\ufffd"}
    trained = itertools.islice(reader.training(), 400)  # several times all there is
    trained_on = set().union(*(text_of(sequence.tokens) for sequence in trained)) - {"\ufffd"}
    assert 3 <= len(held_out) <= 30
    assert not held_out & trained_on
    # The last held-out sequence is dropped if it can't be filled, and with it at most two documents.
    assert 58 <= len(held_out | trained_on) <= 60


def test_the_split_does_not_depend_on_seed_order_or_neighbours():
    def held(texts, seed):
        split = reader_of(*texts, seed=seed).split
        return {text for text in texts if split.held_out(Document("", text))}

    texts = many()
    assert held(texts, 0) == held(texts, 1) == held(texts[::-1], 0)
    assert held(texts[:40], 0) == held(texts, 0) & set(texts[:40])


def test_a_copy_of_a_held_out_document_is_held_out_too():
    texts = many()
    split = make_split(Texts(*texts).documents(), 0.2)
    held = next(text for text in texts if split.held_out(Document("one", text)))
    assert split.training(Document("a copy under another name", held)) is None


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_small_corpus_still_holds_out_one_document_and_trains_on_the_rest(count):
    texts = many(count)
    split = make_split(Texts(*texts).documents(), 1e-9)
    assert sum(split.held_out(Document("", text)) is not None for text in texts) == 1
    assert sum(split.training(Document("", text)) is not None for text in texts) == count - 1


@pytest.mark.parametrize("packed", [True, False])
def test_one_document_gives_its_tail(packed):
    text = "".join(f"{index:04d}." for index in range(100))
    reader = reader_of(text, packed=packed, seq_len=40)
    held = "".join(text_of(sequence.tokens) for sequence in reader.held_out())
    assert text[400:].startswith(held)
    assert len(held) >= 40
    trained = {text_of(sequence.tokens) for sequence in itertools.islice(reader.training(), 50)}
    assert any("0000." in piece for piece in trained)
    assert any("0075." in piece for piece in trained)
    assert not any("0080." in piece for piece in trained)


@settings(max_examples=300, deadline=None)
@given(st.text(min_size=1, max_size=50), st.floats(1e-12, 1, exclude_max=True))
@example("\u00e9", 0.5)
@example("naïve 🦙", 1e-12)
@example("naïve 🦙", 1 - 1e-12)
def test_a_document_is_cut_in_two_without_a_character_in_both_or_in_none(text, fraction):
    document = Document("one", text)
    split = make_split([document], fraction)
    kept, held = split.training(document).text, split.held_out(document).text
    assert kept + held == text
    assert held
    assert abs(len(held) - len(text) * fraction) <= 1


@pytest.mark.parametrize("fraction", [1e-9, 0.001, 0.25, 0.75])
def test_what_one_document_trains_and_what_it_holds_out_are_all_of_it(fraction):
    text = "".join(chr(0x400 + index % 500) + "🦙é\n"[index % 3] for index in range(1000))
    reader = reader_of(text, seq_len=2**17, held_out=fraction)
    (held,) = reader.held_out()
    trained = documents_of(next(reader.training()))[1]  # the first may be the rest of one
    assert text_of(trained) + text_of(held.tokens) == text


@settings(max_examples=50, deadline=None)
@given(st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=20), st.floats(1e-12, 1, exclude_max=True))
def test_each_of_several_documents_is_whole_and_on_one_side(texts, fraction):
    documents = [Document("", text) for text in texts]
    split = make_split(documents, fraction)
    sides = [(split.training(document), split.held_out(document)) for document in documents]
    assert all({kept, held} == {document, None} for document, (kept, held) in zip(documents, sides, strict=True))
    assert any(kept for kept, _ in sides)
    assert any(held for _, held in sides)


def test_a_tail_shorter_than_a_sequence_is_one_short_sequence():
    (sequence,) = reader_of("abcdefghij" * 10, seq_len=64, held_out=0.1).held_out()
    assert text_of(sequence.tokens) == "abcdefghij"
    assert sequence.cu_seqlens == (0, 12)


def test_nothing_is_held_out_if_so_asked():
    reader = reader_of(*many(), held_out=0.0)
    assert list(reader.held_out()) == []
    assert all(reader.split.training(Document("", text)) for text in many())


# Order


def test_the_order_is_the_seeds_and_epochs_differ():
    def first(count, seed):
        sequences = itertools.islice(reader_of(*many(), seed=seed).training(), count)
        return [sequence.tokens.tobytes() for sequence in sequences]

    assert first(30, 0) == first(30, 0)
    assert first(30, 0) != first(30, 1)


class InSourceOrder(Texts):
    """A corpus that ignores the requested order, as a stream does, but records it."""

    def documents(self, order=None):
        self.asked = getattr(self, "asked", [])
        if order is not None:
            self.asked.append(tuple(order.permutation(len(self.texts))))
        return super().documents()


def test_documents_come_in_another_order_for_every_epoch_and_seed():
    def orders(seed):
        corpus = InSourceOrder(*many(length=2000))
        next(reader_of(corpus, seed=seed, seq_len=4096).training())
        return corpus.asked

    assert len(orders(0)) > 3
    assert len({*orders(0), *orders(1)}) == len(orders(0)) + len(orders(1))
    assert orders(0) == orders(0)


def test_what_a_stream_gives_is_shuffled_by_the_seed_and_held_out_alike():
    readers = [reader_of(InSourceOrder(*many(length=2000)), seed=seed, seq_len=4096) for seed in (0, 1)]
    trained = [[text_of(sequence.tokens) for sequence in itertools.islice(r.training(), 20)] for r in readers]
    assert trained[0] != trained[1]
    held = [[sequence.tokens.tobytes() for sequence in reader_of(*many(), seed=seed).held_out()] for seed in (0, 1)]
    assert held[0] == held[1]
    assert len(held[0]) > 1


@pytest.mark.parametrize("longer", ["uvwxyz", "stuvwxy", "pqrstu", "abcdefgh"])
def test_without_packing_short_documents_are_not_held_out_either(longer):
    reader = reader_of(*many(length=1), *(letter * 80 for letter in longer), packed=False, seq_len=70, held_out=0.5)
    held = list(reader.held_out())
    assert held
    assert {len(sequence.tokens) for sequence in held} == {70}
    assert all(set(text_of(sequence.tokens)) < set(longer) for sequence in held)


def test_without_packing_short_documents_are_passed_over_and_masks_are_plain():
    texts = ["short", "x" * 100, "y" * 80, "also short", "z" * 500]
    reader = reader_of(*texts, packed=False, seq_len=64)
    trained = list(itertools.islice(reader.training(), 40))
    held = list(reader.held_out())
    assert held
    for sequence in trained + held:
        assert sequence.cu_seqlens is None
        assert len(sequence.tokens) == 64
        assert len(set(text_of(sequence.tokens))) == 1, "one document each"
    assert not {text_of(s.tokens)[0] for s in trained} & {text_of(s.tokens)[0] for s in held}


def test_a_corpus_without_a_usable_document_is_refused():
    with pytest.raises(ValueError, match="any text"):
        next(reader_of(Texts()).training())
    with pytest.raises(ValueError, match="--pack none"):
        next(reader_of("short", "also short", packed=False).training())


@pytest.mark.parametrize("packed", [True, False])
def test_a_stream_knows_the_tokens_of_an_epoch_once_it_has_read_one(monkeypatch, packed):
    monkeypatch.setattr(data, "SHUFFLED_TOKENS", 16)
    stream = reader_of(*["x" * 94] * 7, seq_len=16, packed=packed, held_out=0.0).training()  # 96 tokens each
    counts = [(next(stream), stream.epoch_tokens)[1] for _ in range(50)]
    assert counts[:38] == [None] * 38 and counts[-1] == 7 * 96
    again = reader_of(*["x" * 94] * 7, seq_len=16, packed=packed, held_out=0.0).training(stream.cursor())
    assert next(again) is not None and again.epoch_tokens is None, "only a part of that epoch was read"
    config = TrainConfig(run=RunConfig(steps=42), data=DataConfig(seq_len=16))
    assert (
        epochs_text(config, 7 * 96) == "672 tokens in the training documents; 42 steps read 672, which is 1.00 epochs"
    )
    assert epochs_text(config, None) == "more than 16 tokens in the training documents; 42 steps read 672"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("buffer", [1, 3])
def test_a_stream_goes_on_anywhere(monkeypatch, packed, buffer):
    """The cursor passes through JSON, and crosses the ends of documents and epochs."""
    monkeypatch.setattr(data, "SHUFFLED_TOKENS", buffer * 16)
    reader = reader_of(*[f"{n} " * (7 + 5 * n) for n in range(7)], seq_len=16, packed=packed, held_out=0.0)
    whole = list(itertools.islice(reader.training(), 60))
    for taken in range(1, 40):
        stream = reader.training()
        list(itertools.islice(stream, taken))
        cursor = stream.cursor()
        reported = parse_json(cursor.model_dump_json().encode(), Position, "state.json")
        again = reader.training(Cursor(**dict(reported), waiting=cursor.waiting))
        for expected, got in zip(whole[taken:], again, strict=False):
            assert np.array_equal(expected.tokens, got.tokens) and expected.cu_seqlens == got.cu_seqlens
