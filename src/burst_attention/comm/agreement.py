"""All ranks or none: one small exchange by which the ranks of a group agree on a call before any of its bytes move.

Each rank sends one fixed-size record to every other: the call, fields that must be equal, values of its own, or a
refusal. Every rank so sees the same records and comes to the same verdict. Point to point, not a collective: a rank
that is gone is named by everyone who waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .transport import Receive, Send, Transport

RECORD_BYTES = 2048
_REFUSALS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class DisagreementError(ValueError):
    """The ranks of one group made different calls, or the same call with different arguments."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """Exchanges records over ``transport``, whose group must take CPU tensors."""

    transport: Transport

    def agree(self, call: str, fields: Mapping[str, Any], own: Any = None) -> list[Any]:
        """Check that every rank makes ``call`` with equal ``fields``; return every rank's ``own`` by rank.

        All values must be JSON's. Floats arrive exactly.

        Raises:
            DisagreementError: on every rank, naming the fields, their values and the odd rank.
            TypeError, ValueError: another rank refused the call (:meth:`refuse`); the same class on every rank.
        """
        records = self._exchange({"call": call, "fields": dict(fields), "own": own})
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
            raise DisagreementError(f"{call}: the ranks disagree on {told}. Pass the same on every rank of the group")
        return [record["own"] for record in records]

    def refuse(self, error: Exception) -> NoReturn:
        """Tell the others, who are in :meth:`agree`, that this rank can't make the call; then raise.

        The class raised is the lowest refusing rank's, on every rank: TypeError or ValueError (for any other error).
        """
        if self.transport.world == 1:
            raise error
        name = next((n for n, kind in _REFUSALS.items() if isinstance(error, kind)), "ValueError")
        # A character takes at most six bytes in JSON.
        records = self._exchange({"refused": [name, str(error)[: RECORD_BYTES // 8]]})
        _raise_refusal(records, self.transport.rank, error)
        raise error

    def _exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        transport = self.transport
        if transport.world == 1:
            return [record]
        encoded = json.dumps(record).encode()
        if len(encoded) > RECORD_BYTES:
            # Told like any refusal, for the others wait for a record.
            self.refuse(ValueError(f"{record['call']} has {len(encoded)} bytes to agree on, more than {RECORD_BYTES}"))
        mine = torch.frombuffer(bytearray(encoded.ljust(RECORD_BYTES)), dtype=torch.uint8)
        peers = [rank for rank in range(transport.world) if rank != transport.rank]
        theirs = {rank: torch.empty_like(mine) for rank in peers}
        label = f"the agreement on {record.get('call', 'a refused call')}"
        sends, receives = [Send(rank, mine) for rank in peers], [Receive(*item) for item in theirs.items()]
        pending = transport.post(sends, receives, label=label)
        transport.wait(pending)
        return [
            record if rank == transport.rank else json.loads(theirs[rank].numpy().tobytes())
            for rank in range(transport.world)
        ]


def _raise_refusal(records: list[dict[str, Any]], rank: int, error: Exception | None = None) -> None:
    refusals = {n: record["refused"] for n, record in enumerate(records) if "refused" in record}
    if not refusals:
        return
    first = min(refusals)
    kind = _REFUSALS[refusals[first][0]]
    if error is not None and isinstance(error, kind):
        raise error
    if first == rank:
        raise kind(str(error)) from error
    own = "" if error is None else f"; this rank refused it too: {error}"
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
