"""Agreement: one small exchange by which all ranks of a group make a call, or none does, before its bytes move.

Each rank has a record: the call, the fields that must be equal and values that may differ by rank; or the refusal or
error of a rank that could not make the call. The ranks first exchange digests of their records. If all are equal, the
agreement is done. Otherwise, or if the call asks for values that differ, they gather all records, and every rank
reaches the same verdict.

Both take ceil(log2 W) small messages per rank, point to point, so that errors can name a rank that is gone. In round k,
rank r sends all that it knows to rank r + 2^k and receives from rank r - 2^k, modulo W: its own part and those of the
2^k - 1 ranks before it. With digests this is the dissemination barrier of Hensgen, Finkel and Manber; with records,
Bruck's all-gather. Some parts arrive twice, which changes no minimum or maximum.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NoReturn

import torch

from .transport import ExchangeError, Receive, Send, Transport
from .verdict import (
    MODEL,
    ONE_ORDER,
    ORDER,
    REFUSALS,
    DisagreementError,
    PeerError,
    differences,
    disagreement,
    raise_refusal,
    text_of,
)

__all__ = ["Agreement", "DisagreementError", "Meeting", "PeerError", "over_axis"]

NO_RANK = -1
FORM = struct.Struct("<16s16sIii")
DIGEST_BYTES = 16
NOTHING = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class CallSummary:
    """A summary of several ranks' records: the message of one round. A digest has DIGEST_BYTES."""

    least: bytes  # least digest of the records; NOTHING is the digest of a rank that could not make the call
    greatest: bytes  # equal to ``least`` if all records are equal
    size: int  # bytes of the longest record
    lost: int = NO_RANK  # a rank, any of them, that could not be reached
    finder: int = NO_RANK  # the rank that tried to reach it

    @property
    def agreed(self) -> bool:
        """Whether all ranks gave the same value."""
        return self.least == self.greatest

    def pack(self) -> torch.Tensor:
        """Return the summary as a uint8 tensor to send."""
        fields = self.least, self.greatest, self.size, self.lost, self.finder
        return torch.frombuffer(bytearray(FORM.pack(*fields)), dtype=torch.uint8)

    def joined(self, packed: torch.Tensor) -> CallSummary:
        """Return the summary of these ranks and of those in ``packed``."""
        least, greatest, size, lost, finder = FORM.unpack(packed.numpy().data)
        return CallSummary(
            min(self.least, least),
            max(self.greatest, greatest),
            max(self.size, size),
            *max((self.lost, self.finder), (lost, finder)),
        )


def rounds(rank: int, world: int) -> list[tuple[int, int]]:
    """Return (rank to send to, rank to receive from) for each round. No two rounds have the same pair."""
    hops = [1 << k for k in range((world - 1).bit_length())]
    return [((rank + hop) % world, (rank - hop) % world) for hop in hops]


def disseminate(transport: Transport, own: CallSummary, label: str) -> CallSummary:
    """Return the summary of all ranks. A rank that gives up sends a report in place of its message."""
    peers = rounds(transport.rank, transport.world)
    buffers = [torch.empty(FORM.size, dtype=torch.uint8, device="cpu") for _ in peers]
    done = 0  # rounds
    try:
        # Post all receives before any send. A rank that has sent something then takes messages without a wait.
        arriving = [
            transport.post([], [Receive(source, buffer)], label=_label(label, source, 1 << n, transport.world))
            for n, ((_, source), buffer) in enumerate(zip(peers, buffers, strict=True))
        ]
        leaving = []
        for (target, _), pending, buffer in zip(peers, arriving, buffers, strict=True):
            leaving.append(transport.post([Send(target, own.pack())], [], label=label))
            transport.wait(pending)
            own = own.joined(buffer)
            done += 1
            if own.lost != NO_RANK:
                why = f"rank {own.finder} can't reach rank {own.lost}"
                raise transport.failed(f"could not finish {label}: {why}", f"{label}: {why}", own.lost)
        for pending in leaving:
            transport.wait(pending)
    except ExchangeError as error:
        if own.lost == NO_RANK and error.peer is not None:
            own = replace(own, lost=error.peer, finder=transport.rank)
        if own.lost != NO_RANK:
            heirs = [target for target, _ in peers[done:] if target != own.lost]
            transport.send_last([Send(target, own.pack()) for target in heirs])
        raise
    return own


def gather(transport: Transport, own: bytes, size: int, label: str) -> list[bytes]:
    """Return every rank's record by rank, padded with spaces to ``size`` bytes. All must call it with one ``size``."""
    world, rank = transport.world, transport.rank
    blocks = torch.empty(world, size, dtype=torch.uint8, device="cpu")  # row n holds the record of rank - n
    blocks[0] = torch.frombuffer(bytearray(own.ljust(size)), dtype=torch.uint8)
    held = 1
    for target, source in rounds(rank, world):
        count = min(held, world - held)
        arriving = Receive(source, blocks[held : held + count])
        transport.wait(transport.post([Send(target, blocks[:count])], [arriving], label=label))
        held += count
    return [blocks[(rank - n) % world].numpy().tobytes() for n in range(world)]


def _label(label: str, source: int, hop: int, world: int) -> str:
    """Return the label of the wait for ``source``; it names the other ranks whose parts ``source`` forwards."""
    news = min(hop, world - hop)
    if news == 1:
        return label
    first, last = (source - news + 1) % world, (source - 1) % world
    others = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return f"{label} (rank {source} also forwards messages of {others})"


RECORD_BYTES = 2048
REMEMBERED = 1 << 12  # calls that need no second agreement, by name; a scale that changes makes a new one
BACKWARD = "a backward"  # the call of one
TEXT_BYTES = RECORD_BYTES - 64  # limit for the text of a refusal or failure; the rest of the record needs the other 64


@dataclass(frozen=True, eq=False)
class Agreement:
    """Exchange records over ``transport``, whose group must carry CPU tensors; remember which calls ranks made alike.

    Each plan has its own, so that the first call of every plan is compared, and a refusal of it reaches all ranks.
    """

    transport: Transport
    model: str = ""  # the number of the model whose calls these are; ranks compare it in each of them
    agreed: dict[str, set[bytes]] = field(default_factory=dict, init=False)  # digests of calls, by name

    def fresh(self) -> Agreement:
        """Return an agreement over the same transport that remembers no call."""
        return replace(self)

    @property
    def count(self) -> int:
        """How many exchanges of records the group has made. After one, it numbers what the ranks agreed on."""
        return self.transport.health.agreements

    def of_model(self, number: str = "") -> Agreement:
        """Return the agreement of a model's calls; without a number, the ranks have just agreed on a new model."""
        return replace(self, model=number or str(self.count))

    @contextmanager
    def entering(self, call: str, *, once: bool = False) -> Iterator[None]:
        """Guard what a rank does alone before it agrees on ``call``: if the block raises, the other ranks raise too.

        Call :meth:`agree` after the block, never inside it. A TypeError or ValueError is raised on every rank; after
        any other error, the others raise PeerError. ``once``: from the second such call on, this rank raises alone.
        """
        try:
            yield
        except (TypeError, ValueError) as error:
            if once and self.agreed.get(call):
                raise
            self.refuse(error)
        except Exception as error:
            if self.transport.world > 1 and not (once and self.agreed.get(call)):
                self._tell({"failed": _shortened(f"{call}: {type(error).__name__}: {text_of(error)}")}, error)
            raise

    def agree(
        self,
        call: str,
        fields: Mapping[str, Any],
        own: Any = None,
        *,
        remedy: str = "Pass the same on every rank of the group",
        remedies: Mapping[str, str] | None = None,
        details: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
        once: bool = False,
    ) -> list[Any]:
        """Check that every rank makes ``call`` with equal ``fields`` (JSON types); return every rank's ``own`` by rank.

        ``once``: send nothing if the ranks agreed on the same call and fields before; a rank that alone makes another
        call then waits until the deadline. Every rank raises DisagreementError if fields differ, the class of another
        rank's refusal (:meth:`refuse`), or PeerError if one failed. ``remedy``, ``remedies`` by field: last sentences
        of a disagreement. ``details`` by field: returns the values of which the field is a digest, by name.
        """
        if self.transport.world == 1:
            return [own]
        with self.entering(call):
            shared, gathers = dict(fields) | ({MODEL: self.model} if self.model else {}), own is not None
            # Equal values give equal texts. If texts differ, the records decide whether the values do.
            digest = blake2b(json.dumps([call, shared, gathers]).encode(), digest_size=DIGEST_BYTES).digest()
            health = self.transport.health
            agreed = self.agreed.setdefault(call, set())
            if once and digest in agreed:
                health.note(int.from_bytes(digest[:6], "big"))
                return [None] * self.transport.world
            # The history marks messages on gloo: ranks in different calls wait until the deadline, and never add up
            # what does not belong together. NCCL has no tags: there only the next agreement compares histories.
            shared[ORDER] = health.history
            encoded = _encoded({"call": call, "fields": shared, "own": own})
            whole = blake2b(digest + health.history.to_bytes(8, "big"), digest_size=DIGEST_BYTES).digest()
        try:
            records = self._exchange(encoded, f"the agreement on {call}", whole, gathers=gathers)
        except ExchangeError as error:
            if once and agreed:
                error.add_note(f"Ranks that repeat a call of {call} don't compare it: is this rank's another? {shared}")
            raise
        if records is None:
            if len(agreed) >= REMEMBERED:
                agreed.clear()
            if once:
                agreed.add(digest)
                health.note(int.from_bytes(digest[:6], "big"))
            return [None] * self.transport.world
        raise_refusal(records, self.transport.rank)
        if odd := differences(records):
            digests = {name: get for name, get in (details or {}).items() if name in odd}
            inside = {name: self.collect(f"{call}: {name}", dict(get())) for name, get in digests.items()}
            raise disagreement(call, odd, inside, remedy, remedies or {})
        return [record["own"] for record in records]

    def begin(self, number: int, call: str = BACKWARD) -> None:
        """Check that all ranks begin the backward of one call, by its number. Sends nothing if it runs already.

        For exchanges without tags, which would add up gradients of different calls.
        """
        health = self.transport.health
        if self.transport.world > 1 and health.begun != (number, health.agreements):
            self.agree(call, {"the call whose backward begins": number}, remedy=ONE_ORDER)
            health.begun = number, health.agreements

    def collect(self, call: str, own: Any) -> list[Any]:
        """Return every rank's ``own``, JSON types of any size, by rank. Every rank must make ``call``."""
        with self.entering(call):
            encoded = json.dumps(own).encode()
        sizes = self.agree(call, {}, len(encoded))
        return [json.loads(record) for record in gather(self.transport, encoded, max(sizes), call)]

    def refuse(self, error: Exception) -> NoReturn:
        """Notify the other ranks, in :meth:`agree`, of a refusal; every rank raises the lowest one's class."""
        if self.transport.world == 1:
            raise error
        name = next((n for n, kind in REFUSALS.items() if isinstance(error, kind)), "ValueError")
        records = self._tell({"refused": [name, _shortened(text_of(error))]}, error)
        raise_refusal(records, self.transport.rank, error)
        raise error

    def _tell(self, record: dict[str, Any], error: Exception) -> list[dict[str, Any]]:
        """Exchange a record of this rank's failure. Raise ``error`` if that fails too."""
        try:
            return self._exchange(_encoded(record), "the agreement on a refused call") or []
        except ExchangeError as unreachable:
            error.add_note(f"The other ranks could not be notified: {unreachable}")
            raise error from unreachable

    def _exchange(
        self, encoded: bytes, label: str, digest: bytes = NOTHING, *, gathers: bool = True
    ) -> list[dict[str, Any]] | None:
        """Return all ranks' records; None if all digests are equal and the call does not gather records."""
        everyone = disseminate(self.transport, CallSummary(digest, digest, len(encoded)), label)
        self.transport.health.agreements += 1
        if everyone.agreed and not gathers:
            return None
        return [json.loads(record) for record in gather(self.transport, encoded, everyone.size, label)]


@dataclass(frozen=True, eq=False)
class Meeting:
    """How all ranks of a mesh's two axes agree: along the inner axis first, then along the outer one.

    What a rank refuses, all ranks of both axes raise.

    Args:
        outer: the agreement of the ranks that share a sequence.
        inner: the agreement of the ranks of a tensor-parallel axis, which compute the same tokens; None without one.
    """

    outer: Agreement
    inner: Agreement | None = None

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part."""
        return self.outer.transport.world == 1 and self.inner is None

    def of_model(self, number: str = "") -> Meeting:
        """As :meth:`Agreement.of_model`."""
        return Meeting(self.outer.of_model(number), None if self.inner is None else self.inner.of_model(number))

    def turn(self) -> Callable[[Any], None] | None:
        """Return a hook for the results of the call just agreed on, which checks that it is its turn in a backward.

        None without other ranks on the inner axis: elsewhere messages carry the number of their call.
        """
        outer, inner = self.outer, self.inner
        if inner is None or inner.transport.world == 1:
            return None
        numbers = outer.count, inner.count

        def begin(_: Any) -> None:
            with outer.entering(BACKWARD):
                inner.begin(numbers[1], over_axis(BACKWARD))
            outer.begin(numbers[0])

        return begin

    @contextmanager
    def entering(self, call: str) -> Iterator[None]:
        """As :meth:`Agreement.entering`."""
        with self.outer.entering(call):
            if self.inner is None:
                yield
                return
            with self.inner.entering(over_axis(call)):
                yield

    def agree(
        self,
        call: str,
        fields: Mapping[str, Any],
        *,
        outer: Mapping[str, Any] | None = None,
        inner: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """As :meth:`Agreement.agree`. ``outer``, ``inner``: fields that only the ranks of one axis compare."""
        if self.inner is None:
            self.outer.agree(call, {**fields, **(outer or {})}, **options)
            return
        if outer:  # the ranks of the inner axis don't see a difference here, so the next exchange notifies them
            with self.inner.entering(over_axis(call)):
                self.outer.agree(call, outer, **options)
        with self.outer.entering(call):
            self.inner.agree(over_axis(call), {**fields, **(inner or {})}, **options)
        self.outer.agree(call, fields, **options)


def over_axis(call: str) -> str:
    """Return how errors name a call that the ranks of a tensor-parallel axis compare."""
    return f"{call} (over the ranks of the axis tp)"


def _encoded(record: dict[str, Any]) -> bytes:
    """Return the record in JSON."""
    encoded = json.dumps(record).encode()
    if len(encoded) > RECORD_BYTES:
        raise ValueError(
            f"{record['call']} has {len(encoded)} bytes to agree on, more than {RECORD_BYTES}; pass shorter values"
        )
    return encoded


def _shortened(text: str) -> str:
    """Return the longest prefix that fits in a record; a character takes 1 to 12 bytes in JSON."""
    sizes = accumulate(len(json.dumps(character)) - 2 for character in text[:TEXT_BYTES])
    return text[: sum(size <= TEXT_BYTES for size in sizes)]
