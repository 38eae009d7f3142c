"""All ranks or none: one small exchange by which the ranks of a group agree on a call before any of its bytes move.

Each rank has a record: the call, fields that must be equal, values of its own, or what kept it from the call: a
refusal, or another error. Digests go round, ceil(log2 W) messages from each rank, and where they are equal that is all.
Where they differ, or some rank has something to tell, or values of their own are asked for, every rank knows it and
gathers all records, in as many messages again: every rank sees the same ones and comes to the same verdict.
Point to point, not a collective: a rank that is gone is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NoReturn

from .dissemination import DIGEST_BYTES, NOTHING, Summary, disseminate, gather
from .transport import ExchangeError, Transport

RECORD_BYTES = 2048
TEXT_BYTES = RECORD_BYTES - 64  # of a refusal's or a failure's text
_REFUSALS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class DisagreementError(ValueError):
    """The ranks of one group made different calls, or the same call with different arguments."""


class PeerError(RuntimeError):
    """Another rank failed on its way into a call: it ran out of memory, say, and has an error of its own.

    The ranks had not agreed on the call yet: nothing was moved, and the group is as good as before.
    """


@dataclass(frozen=True, eq=False)
class Agreement:
    """Exchanges records over ``transport``, whose group must take CPU tensors."""

    transport: Transport

    @contextmanager
    def entering(self, call: str) -> Iterator[None]:
        """What a rank does by itself before it agrees on ``call``. What is raised within, the others hear of at once.

        Call :meth:`agree` after it, never within: what that raises is known to all ranks.

        Raises:
            TypeError, ValueError: raised within, or refused by another rank: the same class on every rank.
            Exception: any other that was raised within, here; on the other ranks it is a PeerError.
        """
        try:
            yield
        except (TypeError, ValueError) as error:
            self.refuse(error)
        except Exception as error:
            if self.transport.world > 1:
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
    ) -> list[Any]:
        """Check that every rank makes ``call`` with equal ``fields``; return every rank's ``own`` by rank.

        All values must be JSON's. Floats arrive exactly. ``remedy`` ends the text of a disagreement; ``remedies`` has
        others, by field.

        Raises:
            DisagreementError: on every rank, naming the fields, their values and the odd rank.
            TypeError, ValueError: another rank refused the call (:meth:`refuse`); the same class on every rank.
            PeerError: another rank failed before it came here (:meth:`entering`).
        """
        if self.transport.world == 1:
            return [own]
        with self.entering(call):
            shared, asked = dict(fields), own is not None
            # What must be equal, in a text that equal values share. The verdict is the records', should texts differ.
            digest = blake2b(json.dumps([call, shared, asked]).encode(), digest_size=DIGEST_BYTES).digest()
            encoded = _encoded({"call": call, "fields": shared, "own": own})
        records = self._exchange(encoded, f"the agreement on {call}", digest, gathers=asked)
        if records is None:
            return [None] * self.transport.world
        _raise_refusal(records, self.transport.rank)
        calls = [record["call"] for record in records]
        if len(set(calls)) > 1:
            raise DisagreementError(f"the ranks are in different calls: {_by_value(calls)}")
        odd = {
            name: [record["fields"].get(name) for record in records]
            for name in records[0]["fields"]
            if any(record["fields"].get(name) != records[0]["fields"][name] for record in records)
        }
        if odd:
            told = "; ".join(f"{name}: {_by_value(values)}" for name, values in odd.items())
            ways = dict.fromkeys((remedies or {}).get(name, remedy) for name in odd)
            raise DisagreementError(f"{call}: the ranks disagree on {told}. {'. '.join(ways)}")
        return [record["own"] for record in records]

    def refuse(self, error: Exception) -> NoReturn:
        """Tell the others, who are in :meth:`agree`, that this rank can't make the call; then raise.

        The class raised is the lowest refusing rank's, on every rank: TypeError or ValueError (for any other error).
        """
        if self.transport.world == 1:
            raise error
        name = next((n for n, kind in _REFUSALS.items() if isinstance(error, kind)), "ValueError")
        records = self._tell({"refused": [name, _shortened(_text(error))]}, error)
        _raise_refusal(records, self.transport.rank, error)
        raise error

    def _tell(self, record: dict[str, Any], error: Exception) -> list[dict[str, Any]]:
        """Exchange what became of the call here; ``error`` is raised if that can't be done, too."""
        try:
            return self._exchange(_encoded(record), "the agreement on a refused call") or []
        except ExchangeError as unreachable:
            error.add_note(f"The other ranks could not be told: {unreachable}")
            raise error from unreachable

    def _exchange(
        self, encoded: bytes, label: str, digest: bytes = NOTHING, *, gathers: bool = True
    ) -> list[dict[str, Any]] | None:
        """All ranks' records; None if what must be equal, of which ``digest`` is, is equal, and nobody ``gathers``."""
        everyone = disseminate(self.transport, Summary(digest, digest, len(encoded)), label)
        if everyone.agreed and not gathers:
            return None
        return [json.loads(record) for record in gather(self.transport, encoded, everyone.size, label)]


def _encoded(record: dict[str, Any]) -> bytes:
    """The record in JSON, at most RECORD_BYTES of it.

    Raises:
        TypeError, ValueError: it is not JSON's, or longer.
    """
    encoded = json.dumps(record).encode()
    if len(encoded) > RECORD_BYTES:
        raise ValueError(f"{record['call']} has {len(encoded)} bytes to agree on, more than {RECORD_BYTES}")
    return encoded


def _text(error: Exception | None) -> str:
    try:
        return str(error)
    except Exception:  # an error that can't tell itself must not keep the others waiting
        return "(it has no text)"


def _shortened(text: str) -> str:
    """As much of it as leaves a record room for the rest: a character takes one to twelve bytes in JSON."""
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
    """'rank 2 has 65, ranks 0, 1, 3 have 64': the odd ones first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    parts = sorted(ranks.items(), key=lambda entry: (len(entry[1]), entry[1]))
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} {'have' if len(who) > 1 else 'has'} {value}"
        for value, who in parts
    )
