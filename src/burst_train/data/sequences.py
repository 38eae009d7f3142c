"""Turn documents into token sequences: hold some out, order the rest, cut or pack them, and read them ahead."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from ..checked import Checked, Natural
from ..config import TrainConfig
from .corpus import Corpus, Document, open_corpus
from .tokenizer import Tokenizer, open_tokenizer

SHUFFLED_TOKENS = 2**20
NO_TARGET = -100


class Position(Checked):
    """The part of a cursor that JSON holds."""

    taken: Natural  # sequences yielded since the start of the run
    epoch: Natural  # complete passes over all documents
    document: Natural  # documents started in this epoch
    used: Natural  # tokens of the last of them that are in sequences
    digest: str  # of that document's text, in hex; empty before the first
    order: dict[str, Any]  # the shuffle's generator
    borders: list[list[int] | None]  # ``cu_seqlens`` of each buffered sequence


class Cursor(Position):
    """A position in a stream of sequences. ``waiting``: int32 [n, S], the shuffle's buffer, saved as a tensor."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    waiting: np.ndarray = Field(exclude=True)


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence."""

    tokens: np.ndarray  # int32 [S]: ids, and ``~id`` of a token that is no target
    cu_seqlens: tuple[int, ...] | None  # document borders ``[0, ..., S]`` of packed data; None: one document

    @property
    def ids(self) -> np.ndarray:
        """The tokens' ids, int32 [S]."""
        return np.where(self.tokens < 0, ~self.tokens, self.tokens)

    @property
    def labels(self) -> np.ndarray:
        """The ids of targets, -100 elsewhere, not shifted; int32 [S]."""
        return np.where(self.tokens < 0, NO_TARGET, self.tokens)

    @property
    def targets(self) -> np.ndarray:
        """The next token's id at each token, -100 where it is none; int32 [S]. Documents don't predict one another."""
        targets = np.append(self.labels[1:], np.int32(NO_TARGET))
        targets[np.asarray(self.cu_seqlens or (), np.int64)[1:] - 1] = NO_TARGET
        return targets

    @property
    def valid_tokens(self) -> int:
        """Number of tokens that are predicted: targets, but for the first token of each document."""
        borders = np.unique((0, len(self.tokens)) if self.cu_seqlens is None else self.cu_seqlens)
        targets = self.tokens >= 0
        return int(targets.sum() - targets[borders[:-1]].sum())


@dataclass(frozen=True)
class Split:
    """Rule that holds documents out. It depends only on the text, so copies of a document are held out together."""

    fraction: float  # share of documents whose hash holds them out
    only: bytes | None = None  # digest of the one held-out document, if the corpus is too small for ``fraction``
    tail: bool = False  # whether the corpus is one document, whose last ``fraction`` is held out

    def training(self, document: Document) -> Document | None:
        """Return the document's part for training, or None."""
        if self.tail:
            return Document(document.name, document.text[: self._kept_length(document)])
        return None if self._holds_out(document) else document

    def held_out(self, document: Document) -> Document | None:
        """Return the document's held-out part, or None."""
        if self.tail:
            return Document(f"{document.name} (tail)", document.text[self._kept_length(document) :])
        return document if self._holds_out(document) else None

    def _kept_length(self, document: Document) -> int:
        return len(document.text) - max(round(len(document.text) * self.fraction), 1)

    def _holds_out(self, document: Document) -> bool:
        digest = _digest(document)
        return digest == self.only if self.only else _hash_fraction(digest) < self.fraction


def _digest(document: Document) -> bytes:
    return hashlib.blake2b(document.text.encode(), digest_size=8).digest()


def _hash_fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2**64


def make_split(documents: Iterable[Document], fraction: float) -> Split:
    """Split by ``fraction`` if both sides get documents; else hold out one document, or the end of the only one."""
    seen: set[bytes] = set()
    sides: set[bool] = set()
    for document in documents:
        seen.add(digest := _digest(document))
        sides.add(_hash_fraction(digest) < fraction)
        if fraction in (0, 1) or len(sides) == 2:
            return Split(fraction)
    if len(seen) == 1 and document.chat:
        raise ValueError(
            "--data holds a single conversation, which can't be split; give more, or evaluate none by --held-out 0"
        )
    return Split(fraction, tail=True) if len(seen) == 1 else Split(fraction, only=min(seen, default=None))


def pack(documents: Iterable[np.ndarray], seq_len: int) -> Iterator[TokenSequence]:
    """Fill sequences of ``seq_len`` tokens with consecutive documents; the rest of a cut one starts the next."""
    parts: list[np.ndarray] = []
    borders = [0]
    for document in documents:
        while len(document):
            part, document = document[: seq_len - borders[-1]], document[seq_len - borders[-1] :]
            parts.append(part)
            borders.append(borders[-1] + len(part))
            if borders[-1] == seq_len:
                yield TokenSequence(np.concatenate(parts), tuple(borders))
                parts, borders = [], [0]
    if parts:
        yield TokenSequence(np.concatenate(parts), tuple(borders))


def join_sequences(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Join sequences into one; their documents stay separate, with the same targets."""
    borders = [0]
    for sequence in sequences:
        own = (0, len(sequence.tokens)) if sequence.cu_seqlens is None else sequence.cu_seqlens
        borders += [borders[-1] + border for border in own[1:]]
    return TokenSequence(np.concatenate([sequence.tokens for sequence in sequences]), tuple(borders))


def split_documents(
    documents: Iterable[np.ndarray], seq_len: int, *, keep_rest: bool = False
) -> Iterator[TokenSequence]:
    """Cut each document into sequences of ``seq_len`` tokens; drop a shorter rest unless ``keep_rest``."""
    for document in documents:
        stop = len(document) if keep_rest else len(document) - seq_len + 1
        for start in range(0, stop, seq_len):
            yield TokenSequence(document[start : start + seq_len], None)


def shuffled(
    sequences: Iterator[TokenSequence],
    buffer: int,
    order: np.random.Generator,
    waiting: list[TokenSequence] | None = None,
) -> Iterator[TokenSequence]:
    """Shuffle sequences through a buffer, ``waiting``; this and the state of ``order`` are enough to resume."""
    waiting = [] if waiting is None else waiting
    waiting.extend(itertools.islice(sequences, buffer - len(waiting)))
    for sequence in sequences:
        index = int(order.integers(len(waiting)))
        drawn, waiting[index] = waiting[index], sequence
        yield drawn
    yield from (waiting[index] for index in order.permutation(len(waiting)))


class SequenceReader:
    """All token sequences of a run, in an order that depends only on corpus and seed."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packed: bool,
        held_out: float,
        seed: int,
        assistant_only: bool = True,
    ) -> None:
        self.corpus, self.tokenizer, self.seq_len, self.packed, self.seed = corpus, tokenizer, seq_len, packed, seed
        self.assistant_only = assistant_only  # whether targets of conversations are the assistant's turns alone
        self._encoding = threading.Lock()  # a thread reads training data, and tokenizers are not thread-safe
        self.split = make_split(self._usable(corpus.documents()), held_out)

    def training(self, start: Cursor | None = None) -> TrainingStream:
        """Return an endless stream from a cursor or the beginning; each epoch has another order of documents."""
        return TrainingStream(self, start)

    def held_out(self) -> Iterator[TokenSequence]:
        """Yield each held-out sequence once, for every seed the same; only a sole sequence may be shorter."""
        if self.split.fraction == 0:
            return
        documents = (self.encode(part) for part in self.parts(self.split.held_out, np.random.default_rng(0)))
        for index, sequence in enumerate(self.sequences(documents, keep_rest=self.split.tail)):
            if index == 0 or len(sequence.tokens) == self.seq_len:
                yield sequence

    def sequences(self, documents: Iterable[np.ndarray], *, keep_rest: bool = False) -> Iterator[TokenSequence]:
        """Pack or cut documents, as the run is configured."""
        if self.packed:
            return pack(documents, self.seq_len)
        return split_documents(documents, self.seq_len, keep_rest=keep_rest)

    def encode(self, document: Document) -> np.ndarray:
        """Return a document's tokens, with ``~id`` for those that are no targets; threads take turns."""
        with self._encoding:
            if not document.chat:
                return self.tokenizer.encode(document.text)
            chat = json.loads(document.text)
            try:
                ids, targets = self.tokenizer.encode_chat(chat, assistant_only=self.assistant_only)
            except ValueError as error:
                raise ValueError(f"--data, {document.name}: {error}") from error
            return np.where(targets, ids, ~ids)

    def _usable(self, documents: Iterable[Document]) -> Iterator[Document]:
        return (doc for doc in documents if self.packed or len(self.encode(doc)) >= self.seq_len)

    def parts(self, select: Callable[[Document], Document | None], order: np.random.Generator) -> Iterator[Document]:
        """Yield the documents' parts on one side of the split."""
        documents = self.corpus.documents(order)
        for document in self._usable(documents) if self.split.tail else documents:
            if (part := select(document)) is not None and part.text:
                yield part


class TrainingStream:
    """A run's training sequences, with a cursor from which another stream can resume."""

    def __init__(self, reader: SequenceReader, start: Cursor | None) -> None:
        self._reader, self._start = reader, start
        self.epoch_tokens: int | None = None
        self._taken = start.taken if start else 0
        self._order = np.random.default_rng([reader.seed, 0, 1])
        self._waiting: list[TokenSequence] = []
        # The current document: its epoch, its number there from 1, its tokens, tokens in no sequence yet, its digest.
        self._epoch, self._document, self._length, self._open, self._digest = 0, 0, 0, 0, ""
        if start:
            self._order.bit_generator.state = start.order
            borders = (None if each is None else tuple(each) for each in start.borders)
            self._waiting = [TokenSequence(*each) for each in zip(start.waiting, borders, strict=True)]
        buffer = max(SHUFFLED_TOKENS // reader.seq_len, 1)
        self._sequences = shuffled(self._counted(), buffer, self._order, self._waiting)

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> TokenSequence:
        sequence = next(self._sequences)
        self._taken += 1
        return sequence

    def cursor(self) -> Cursor:
        """Return the current position: a stream started there yields the next sequence first."""
        return self.place()()

    def place(self) -> Callable[[], Cursor]:
        """Return a function that builds the current cursor later, because that is slow."""
        if not self._taken:
            raise ValueError("the stream has no cursor yet; take a sequence first")
        waiting = tuple(self._waiting)
        plain = {
            "taken": self._taken,
            "epoch": self._epoch,
            "document": self._document,
            "used": self._length - self._open,
            "digest": self._digest,
            "order": self._order.bit_generator.state,
        }

        def make() -> Cursor:
            tokens = np.stack([sequence.tokens for sequence in waiting]).astype(np.int32)
            borders = [None if each.cu_seqlens is None else list(each.cu_seqlens) for each in waiting]
            return Cursor(**plain, waiting=tokens, borders=borders)  # type: ignore[arg-type]  # keys are its fields

        return make

    def _counted(self) -> Iterator[TokenSequence]:
        """Yield sequences in document order; at each one, the open tokens belong to the current document."""
        for sequence in self._reader.sequences(self._documents()):
            self._open -= len(sequence.tokens)
            yield sequence

    def _documents(self) -> Iterator[np.ndarray]:
        reader, start = self._reader, self._start
        for epoch in itertools.count(start.epoch if start else 0):
            order = np.random.default_rng([reader.seed, epoch, 0])
            parts, count = enumerate(reader.parts(reader.split.training, order), start=1), 0
            resumed = start is not None and epoch == start.epoch
            if start and resumed:
                yield self._find(start, itertools.islice(parts, start.document - 1, None))
            for number, part in parts:
                tokens = reader.encode(part)
                count += len(tokens) if reader.packed else len(tokens) // reader.seq_len * reader.seq_len
                if reader.packed or len(tokens) >= reader.seq_len:
                    yield self._begin(epoch, number, part, tokens)
            self.epoch_tokens = self.epoch_tokens if resumed else count
            if self.epoch_tokens == 0:
                need = f"the {reader.seq_len} tokens that --pack none --seq-len asks for"
                least = "any text" if reader.packed else need
                raise ValueError(f"--data has no document to train on with {least}")

    def _begin(self, epoch: int, number: int, part: Document, tokens: np.ndarray, used: int = 0) -> np.ndarray:
        self._epoch, self._document, self._length = epoch, number, len(tokens)
        self._digest = _digest(part).hex()
        # Packed: the previous document's open tokens share a sequence with this one. Otherwise its rest was dropped.
        self._open = len(tokens) - used + (self._open if self._reader.packed else 0)
        return tokens[used:]

    def _find(self, start: Cursor, parts: Iterator[tuple[int, Document]]) -> np.ndarray:
        """Return the tokens of the cursor's document that remain; the document must be unchanged."""
        number, part = next(parts, (0, None))
        if part is None or _digest(part).hex() != start.digest:
            fault = "is missing" if part is None else f"is now {part.name!r}, or its text has changed"
            raise ValueError(
                f"--data is not the data of the checkpoint: document {start.document} of epoch {start.epoch} "
                f"{fault}; give the same data, or start over with --overwrite"
            )
        return self._begin(start.epoch, number, part, self._reader.encode(part), start.used)


class ReadAhead:
    """A stream's sequences, at most ``most`` read ahead. The cursor is that of the last sequence taken, not read."""

    def __init__(self, stream: TrainingStream, most: int) -> None:
        self._stream, self._most = stream, most
        self._place: Callable[[], Cursor] | None = None
        self._ready: deque[tuple[TokenSequence, Callable[[], Cursor]]] = deque()
        self._failure: BaseException | None = None
        self._closed, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> TokenSequence:
        """Return the next sequence; raise the thread's error here if reading failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            if not self._ready:
                raise self._failure or ValueError("the sequences can't be read: ReadAhead was closed")
            sequence, self._place = self._ready.popleft()
            self._changed.notify()
        return sequence

    def coming(self, count: int) -> list[TokenSequence]:
        """Return up to ``count`` sequences that are read and not taken yet."""
        with self._changed:
            return [sequence for sequence, _ in itertools.islice(self._ready, count)]

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens of an epoch; None until a whole one was read."""
        return self._stream.epoch_tokens

    def cursor(self) -> Cursor:
        """Return the cursor after the last sequence taken: a stream started there continues with the next one."""
        if self._place is None:
            raise ValueError("the stream has no cursor yet; take a sequence first")
        return self._place()

    def close(self) -> None:
        """Stop reading; the cursor stays valid."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._most or self._closed)
                    if self._closed:
                        return
                read = next(self._stream), self._stream.place()
                with self._changed:
                    self._ready.append(read)
                    self._changed.notify()
        except BaseException as error:  # any error: it is raised again in the training thread
            with self._changed:
                self._failure = error
                self._changed.notify()


def open_sequences(config: TrainConfig) -> tuple[SequenceReader, Tokenizer]:
    """Return a run's sequences and their tokenizer; ValueError names a flag whose value can't be used."""
    data = config.data
    tokenizer = open_tokenizer(data.tokenizer, config.model.model)
    reader = SequenceReader(
        open_corpus(data.data),
        tokenizer,
        seq_len=data.seq_len,
        packed=config.packed,
        held_out=data.held_out,
        seed=config.run.seed,
        assistant_only=data.chat_loss == "assistant",
    )
    return reader, tokenizer


def epochs_text(config: TrainConfig, tokens: int | None) -> str:
    """Say how often a run reads its data, of ``tokens`` per epoch; None: more than the shuffle's buffer holds."""
    read = config.run.steps * config.sequences_per_step * config.data.seq_len
    if tokens is None:
        return f"more than {SHUFFLED_TOKENS:,} tokens in the training documents; {config.run.steps} steps read {read:,}"
    epochs = f"{read / tokens:,.2f} epochs"
    return f"{tokens:,} tokens in the training documents; {config.run.steps} steps read {read:,}, which is {epochs}"


def digest_of(sequences: Iterable[TokenSequence]) -> str:
    """Return a digest of tokens and borders, for comparison between ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for sequence in sequences:
        digest.update(sequence.tokens.tobytes())
        digest.update(repr(sequence.cu_seqlens).encode())
    return digest.hexdigest()
