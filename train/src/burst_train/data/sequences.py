"""Documents to token sequences: which are held out, in what order the rest come, and how they are cut and packed."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..config import TrainConfig
from .corpus import Corpus, Document, open_corpus
from .cursor import Cursor
from .tokenizer import Tokenizer, open_tokenizer

SHUFFLED_TOKENS = 2**20


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence.

    Attributes:
        tokens: int32 [S].
        cu_seqlens: global document borders ``[0, ..., S]`` of packed data; None where the sequence is one document.
    """

    tokens: np.ndarray
    cu_seqlens: tuple[int, ...] | None

    @property
    def valid_tokens(self) -> int:
        """How many tokens have a target: all but the last one of each document."""
        borders = (0, len(self.tokens)) if self.cu_seqlens is None else self.cu_seqlens
        return sum(max(stop - start - 1, 0) for start, stop in itertools.pairwise(borders))


@dataclass(frozen=True)
class Split:
    """Which documents are held out. It looks at the text alone, so that a copy of a held-out document is held out too.

    Attributes:
        fraction: the share of documents whose hash holds them out.
        only: the digest of the one held-out document, in a corpus too small for ``fraction`` to hold out any.
        tail: whether the corpus is one document, whose last ``fraction`` is held out.
    """

    fraction: float
    only: bytes | None = None
    tail: bool = False

    def training(self, document: Document) -> Document | None:
        """What of a document is trained on."""
        if self.tail:
            return Document(document.name, document.text[: self._cut(document)])
        return None if self._holds_out(document) else document

    def held_out(self, document: Document) -> Document | None:
        """What of a document is held out."""
        if self.tail:
            return Document(f"{document.name} (tail)", document.text[self._cut(document) :])
        return document if self._holds_out(document) else None

    def _cut(self, document: Document) -> int:
        return len(document.text) - max(round(len(document.text) * self.fraction), 1)

    def _holds_out(self, document: Document) -> bool:
        digest = _digest(document)
        return digest == self.only if self.only else _hash_fraction(digest) < self.fraction


def _digest(document: Document) -> bytes:
    return hashlib.blake2b(document.text.encode(), digest_size=8).digest()


def _hash_fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2**64


def make_split(documents: Iterable[Document], fraction: float) -> Split:
    """Read documents until it is known that ``fraction`` leaves some on either side; otherwise hold out one.

    Args:
        documents: the documents long enough to be used, in any order.
        fraction: the share to hold out, 0 <= fraction <= 1; 0 holds out nothing, 1 everything.
    """
    seen: set[bytes] = set()
    sides: set[bool] = set()
    for document in documents:
        seen.add(digest := _digest(document))
        sides.add(_hash_fraction(digest) < fraction)
        if fraction in (0, 1) or len(sides) == 2:
            return Split(fraction)
    return Split(fraction, tail=True) if len(seen) == 1 else Split(fraction, only=min(seen, default=None))


def pack(documents: Iterable[np.ndarray], seq_len: int) -> Iterator[TokenSequence]:
    """Fill sequences of exactly ``seq_len`` tokens with documents, one after the other.

    A document longer than the room left is cut, and its rest opens the next sequence as a document of its own: no token
    is dropped or repeated, and only the token before a cut loses its target. The last sequence may be short.
    """
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


def cut(documents: Iterable[np.ndarray], seq_len: int, *, keep_rest: bool = False) -> Iterator[TokenSequence]:
    """Sequences of ``seq_len`` tokens of one document each; the rest of a document is dropped, or is a short one."""
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
    """Each sequence drawn at random from the next ``buffer`` ones: those cut from one document lie side by side.

    ``waiting``: those that are among the next already. It is filled in place, and whenever a sequence is given out it
    holds those that are not yet: with the state of ``order`` it says how to go on.
    """
    waiting = [] if waiting is None else waiting
    waiting.extend(itertools.islice(sequences, buffer - len(waiting)))
    for sequence in sequences:
        index = int(order.integers(len(waiting)))
        drawn, waiting[index] = waiting[index], sequence
        yield drawn
    yield from (waiting[index] for index in order.permutation(len(waiting)))


class SequenceReader:
    """Every token sequence of a run, in an order that depends on the corpus and the seed alone.

    Args:
        corpus, tokenizer: what is read and how it is encoded.
        seq_len: tokens of a sequence.
        packed: pack documents (their borders in ``cu_seqlens``) or cut each sequence from one document.
        held_out: the share of documents never trained on.
        seed: of the order.

    Raises:
        ValueError: the corpus has nothing to train on, or nothing to hold out.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, *, seq_len: int, packed: bool, held_out: float, seed: int
    ) -> None:
        self.corpus, self.tokenizer, self.seq_len, self.packed, self.seed = corpus, tokenizer, seq_len, packed, seed
        self._encoding = threading.Lock()  # what is trained on is read in a thread, and tokenizers take one at a time
        self.split = make_split(self._usable(corpus.documents()), held_out)

    def training(self, start: Cursor | None = None) -> TrainingStream:
        """Sequences without end, for documents are read again and again, each time in another order.

        Args:
            start: where to go on; None: at the beginning.
        """
        return TrainingStream(self, start)

    def held_out(self) -> Iterator[TokenSequence]:
        """Held-out sequences, the same for every seed, once.

        All are of ``seq_len`` tokens; a corpus that can't fill one gives one short sequence.
        """
        if self.split.fraction == 0:
            return
        documents = self._encoded(self._parts(self.split.held_out, np.random.default_rng(0)))
        for index, sequence in enumerate(self.sequences(documents, keep_rest=self.split.tail)):
            if index == 0 or len(sequence.tokens) == self.seq_len:
                yield sequence

    def sequences(self, documents: Iterable[np.ndarray], *, keep_rest: bool = False) -> Iterator[TokenSequence]:
        """Documents packed or cut, as the run asks for."""
        return pack(documents, self.seq_len) if self.packed else cut(documents, self.seq_len, keep_rest=keep_rest)

    def _encoded(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        return (self.encode(document) for document in documents)

    def encode(self, document: Document) -> np.ndarray:
        """A document's tokens, for one thread after the other."""
        with self._encoding:
            return self.tokenizer.encode(document.text)

    def _usable(self, documents: Iterable[Document]) -> Iterator[Document]:
        return (doc for doc in documents if self.packed or len(self.encode(doc)) >= self.seq_len)

    def _parts(self, select: Callable[[Document], Document | None], order: np.random.Generator) -> Iterator[Document]:
        documents = self.corpus.documents(order)
        for document in self._usable(documents) if self.split.tail else documents:
            if (part := select(document)) is not None and part.text:
                yield part

    def training_parts(self, epoch: int) -> Iterator[Document]:
        """What is trained on, in the order of one epoch."""
        return self._parts(self.split.training, np.random.default_rng([self.seed, epoch, 0]))


class TrainingStream:
    """A run's training sequences one by one, and the cursor from which another stream goes on in the same way.

    Args:
        reader: whose sequences they are.
        start: where to go on; None: at the beginning.
    """

    def __init__(self, reader: SequenceReader, start: Cursor | None) -> None:
        self._reader, self._start = reader, start
        self._taken = start.taken if start else 0
        self._order = np.random.default_rng([reader.seed, 0, 1])
        self._waiting: list[TokenSequence] = []
        # The document at hand: its epoch, its number there from 1, its tokens, those not yet in a sequence, its text's.
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
        """Where the stream is: what comes next is what a stream that starts there gives first."""
        return self.place()()

    def place(self) -> Callable[[], Cursor]:
        """What makes the cursor of where the stream is now, also when it is somewhere else: making one takes longer."""
        if not self._taken:
            raise ValueError("a stream has no place before its first sequence was taken")
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
            return Cursor(**plain, waiting=tokens, borders=borders)  # type: ignore[arg-type]  # by its own names

        return make

    def _counted(self) -> Iterator[TokenSequence]:
        """Sequences in the order of the documents. When one is given out, what is open is of the document at hand."""
        for sequence in self._reader.sequences(self._documents()):
            self._open -= len(sequence.tokens)
            yield sequence

    def _documents(self) -> Iterator[np.ndarray]:
        reader, start = self._reader, self._start
        for epoch in itertools.count(start.epoch if start else 0):
            parts, empty = enumerate(reader.training_parts(epoch), start=1), True
            if start and epoch == start.epoch:
                yield self._find(start, itertools.islice(parts, start.document - 1, None))
                empty = False
            for number, part in parts:
                tokens = reader.encode(part)
                if reader.packed or len(tokens) >= reader.seq_len:
                    empty = False
                    yield self._begin(epoch, number, part, tokens)
            if empty:
                least = (
                    "any text" if reader.packed else f"the {reader.seq_len} tokens that --pack none --seq-len asks for"
                )
                raise ValueError(f"--data has no document to train on with {least}")

    def _begin(self, epoch: int, number: int, part: Document, tokens: np.ndarray, used: int = 0) -> np.ndarray:
        self._epoch, self._document, self._length = epoch, number, len(tokens)
        self._digest = _digest(part).hex()
        # Packed, what was open is in the sequence that this document goes on with; else the rest was dropped.
        self._open = len(tokens) - used + (self._open if self._reader.packed else 0)
        return tokens[used:]

    def _find(self, start: Cursor, parts: Iterator[tuple[int, Document]]) -> np.ndarray:
        """What ``start`` left of its document, which must be the one that it read."""
        number, part = next(parts, (0, None))
        if part is None or _digest(part).hex() != start.digest:
            found = "is no longer there" if part is None else f"is now {part.name!r}, or its text was changed"
            raise ValueError(
                f"--data is not what the checkpoint was made with: document {start.document} of epoch {start.epoch} "
                f"{found}; give the same data, or start anew with --overwrite"
            )
        return self._begin(start.epoch, number, part, self._reader.encode(part), start.used)


def open_sequences(config: TrainConfig) -> tuple[SequenceReader, Tokenizer]:
    """A run's sequences and their tokenizer.

    Raises:
        ValueError: naming the flag whose value can't be used.
    """
    data = config.data
    tokenizer = open_tokenizer(data.tokenizer, config.model.model)
    reader = SequenceReader(
        open_corpus(data.data),
        tokenizer,
        seq_len=data.seq_len,
        packed=config.packed,
        held_out=data.held_out,
        seed=config.run.seed,
    )
    return reader, tokenizer


def digest_of(sequences: Iterable[TokenSequence]) -> str:
    """What ranks compare that must have read the same tokens and borders."""
    digest = hashlib.blake2b(digest_size=8)
    for sequence in sequences:
        digest.update(sequence.tokens.tobytes())
        digest.update(repr(sequence.cu_seqlens).encode())
    return digest.hexdigest()
