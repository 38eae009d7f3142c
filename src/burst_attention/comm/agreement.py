"""Agreement: one small exchange by which all ranks of a group make a call, or none does, before its bytes move.

Each rank has a record. It holds the call, the fields that must be equal and values that may differ by rank. If the rank
could not make the call, it holds the refusal or error instead.

The ranks first exchange digests of their records, with ceil(log2 W) messages per rank. If all digests are equal, the
agreement is done. Otherwise the ranks gather all records, with the same number of messages again. They also do so if a
rank reports an error, or if the call asks for values that differ by rank. Every rank sees the same records and reaches
the same verdict.

Messages are point to point, not a collective, so that errors can name a rank that is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NoReturn

from .dissemination import DIGEST_BYTES, NOTHING, Summary, disseminate, gather
from .transport import ExchangeError, Transport

RECORD_BYTES = 2048
REMEMBERED = 1 << 12  # calls that need no second agreement, by name; a scale that changes makes a new one
TEXT_BYTES = RECORD_BYTES - 64  # limit for the text of a refusal or failure; the rest of the record needs the other 64
_ORDER = "earlier calls and the order of their backwards"
_REFUSALS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class DisagreementError(ValueError):
    """The ranks of one group made different calls, or the same call with different arguments."""


class PeerError(RuntimeError):
    """Another rank failed before a call, for example because it ran out of memory. Look at that rank's error.

    The ranks had not agreed on the call yet, so nothing was moved and the group can still be used.
    """


@dataclass(frozen=True, eq=False)
class Agreement:
    """Exchange records over ``transport``, whose group must carry CPU tensors; remember which calls ranks made alike.

    Each plan has its own, so that the first call of every plan is compared, and a refusal of it reaches all ranks.
    """

    transport: Transport
    agreed: dict[str, set[bytes]] = field(default_factory=dict, init=False)  # digests of calls, by name

    def anew(self) -> Agreement:
        """Return an agreement over the same transport that remembers no call."""
        return replace(self)

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
                self._tell({"failed": _shortened(f"{call}: {type(error).__name__}: {_text(error)}")}, error)
            raise

    def agree(
        self,
        call: str,
        fields: Mapping[str, Any],
        own: Any = None,
        *,
        remedy: str = "Pass the same on every rank of the group",
        remedies: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> list[Any]:
        """Check that every rank makes ``call`` with equal ``fields`` (JSON types); return every rank's ``own`` by rank.
         ``once``: send nothing if the ranks agreed on the same call and fields before; a rank that alone makes another
        call then waits until the deadline. Every rank raises DisagreementError if fields differ, the class of another
        rank's refusal (:meth:`refuse`), or PeerError if one failed. ``remedy``, ``remedies`` by field: last sentences
        of a disagreement.
        """
        if self.transport.world == 1:
            return [own]
        with self.entering(call):
            shared, asked = dict(fields), own is not None
            # Equal values give equal texts. If texts differ, the records decide whether the values do.
            digest = blake2b(json.dumps([call, shared, asked]).encode(), digest_size=DIGEST_BYTES).digest()
            health = self.transport.health
            agreed = self.agreed.setdefault(call, set())
            if once and digest in agreed:
                health.note(int.from_bytes(digest[:6], "big"))
                return [None] * self.transport.world
            # The history marks messages on gloo: ranks in different calls wait until the deadline, and never add up
            # what does not belong together. NCCL has no tags: there only the next agreement compares histories.
            shared[_ORDER] = health.history
            encoded = _encoded({"call": call, "fields": shared, "own": own})
            whole = blake2b(digest + health.history.to_bytes(8, "big"), digest_size=DIGEST_BYTES).digest()
        try:
            records = self._exchange(encoded, f"the agreement on {call}", whole, gathers=asked)
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
        _raise_refusal(records, self.transport.rank)
        calls = [record["call"] for record in records]
        if len(set(calls)) > 1:
            raise DisagreementError(
                f"the ranks are in different calls: {_by_value(calls)}. Make the same calls on every rank"
            )
        odd = {
            name: [record["fields"].get(name) for record in records]
            for name in records[0]["fields"]
            if any(record["fields"].get(name) != records[0]["fields"][name] for record in records)
        }
        if odd:
            differences = "; ".join(f"{name}: {_by_value(values)}" for name, values in odd.items())
            known = {_ORDER: "Make all calls and run their backwards in one order on every rank", **(remedies or {})}
            ways = dict.fromkeys(known.get(name, remedy) for name in odd)
            raise DisagreementError(f"{call}: the ranks disagree on {differences}. {'. '.join(ways)}")
        return [record["own"] for record in records]

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
        name = next((n for n, kind in _REFUSALS.items() if isinstance(error, kind)), "ValueError")
        records = self._tell({"refused": [name, _shortened(_text(error))]}, error)
        _raise_refusal(records, self.transport.rank, error)
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
        everyone = disseminate(self.transport, Summary(digest, digest, len(encoded)), label)
        if everyone.agreed and not gathers:
            return None
        return [json.loads(record) for record in gather(self.transport, encoded, everyone.size, label)]


def _encoded(record: dict[str, Any]) -> bytes:
    """Return the record in JSON."""
    encoded = json.dumps(record).encode()
    if len(encoded) > RECORD_BYTES:
        raise ValueError(
            f"{record['call']} has {len(encoded)} bytes to agree on, more than {RECORD_BYTES}; pass shorter values"
        )
    return encoded


def _text(error: Exception | None) -> str:
    try:
        return str(error)
    except Exception:  # if an error's __str__ fails, the other ranks must still be notified
        return "(it has no text)"


def _shortened(text: str) -> str:
    """Return the longest prefix that fits in a record; a character takes 1 to 12 bytes in JSON."""
    sizes = accumulate(len(json.dumps(character)) - 2 for character in text[:TEXT_BYTES])
    return text[: sum(size <= TEXT_BYTES for size in sizes)]


def _raise_refusal(records: list[dict[str, Any]], rank: int, error: Exception | None = None) -> None:
    refusals = {n: record["refused"] for n, record in enumerate(records) if "refused" in record}
    if not refusals:
        failed = next((n for n, record in enumerate(records) if "failed" in record), None)
        if failed is not None:
            raise PeerError(f"rank {failed} failed before the call: {records[failed]['failed']}")
        return
    first = min(refusals)
    kind = _REFUSALS[refusals[first][0]]
    if error is not None and isinstance(error, kind):
        raise error
    if first == rank:
        raise kind(_text(error)) from error
    own = "" if error is None else f"; this rank refused it too: {_text(error)}"
    raise kind(f"rank {first} refused the call: {refusals[first][1]}{own}") from error


def _by_value(values: list[Any]) -> str:
    """Return text such as 'rank 2 has 65, ranks 0, 1, 3 have 64', with the rarest values first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    parts = sorted(ranks.items(), key=lambda entry: (len(entry[1]), entry[1]))
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} {'have' if len(who) > 1 else 'has'} {value}"
        for value, who in parts
    )
