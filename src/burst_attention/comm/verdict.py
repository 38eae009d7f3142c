"""What all ranks of a group conclude from their records: an error that names fields, values and ranks, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ORDER = "earlier calls and the order of their backwards"
MODEL = "which model"
ONE_ORDER = "Make all calls and run their backwards in one order on every rank"
_KNOWN_REMEDIES = {
    ORDER: ONE_ORDER,
    MODEL: "Parallelize models, copy them and call them in one order on every rank",
}
MOST_NAMED = 3  # details of a field in an error


class DisagreementError(ValueError):
    """The ranks of one group made different calls, or the same call with different arguments."""


# The first class that fits an error: a disagreement along another axis of a mesh stays one.
REFUSALS: dict[str, type[Exception]] = {
    "TypeError": TypeError,
    "DisagreementError": DisagreementError,
    "ValueError": ValueError,
}


class PeerError(RuntimeError):
    """Another rank failed before a call, for example because it ran out of memory. Look at that rank's error.

    The ranks had not agreed on the call yet, so nothing was moved and the group can still be used.
    """


def raise_refusal(records: list[dict[str, Any]], rank: int, error: Exception | None = None) -> None:
    """Raise the error of the lowest rank that refused the call, or failed; ``error``: what this rank refuses."""
    refusals = {n: record["refused"] for n, record in enumerate(records) if "refused" in record}
    if not refusals:
        failed = next((n for n, record in enumerate(records) if "failed" in record), None)
        if failed is not None:
            raise PeerError(f"rank {failed} failed before the call: {records[failed]['failed']}")
        return
    first = min(refusals)
    kind = REFUSALS[refusals[first][0]]
    if error is not None and isinstance(error, kind):
        raise error
    if first == rank:
        raise kind(text_of(error)) from error
    own = "" if error is None else f"; this rank refused it too: {text_of(error)}"
    raise kind(f"rank {first} refused the call: {refusals[first][1]}{own}") from error


def differences(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields that differ, with the values by rank."""
    calls = [record["call"] for record in records]
    if len(set(calls)) > 1:
        raise DisagreementError(
            f"the ranks are in different calls: {_by_value(calls)}. Make the same calls on every rank"
        )
    return _odd([record["fields"] for record in records])


def _odd(values: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for own in values for name in own)
    fields = {name: [own.get(name) for own in values] for name in names}
    return {name: every for name, every in fields.items() if any(value != every[0] for value in every)}


def disagreement(
    call: str,
    odd: Mapping[str, list[Any]],
    inside: Mapping[str, list[dict[str, Any]]],
    remedy: str,
    remedies: Mapping[str, str],
) -> DisagreementError:
    """Return the error for fields that differ; ``inside``: the values of some of them, by rank."""
    texts = []
    for name, values in odd.items():
        apart = [f"{key}: {_by_value(every)}" for key, every in _odd(inside.get(name, [])).items()]
        more = f"; and {len(apart) - MOST_NAMED} more" if len(apart) > MOST_NAMED else ""
        texts.append(f"{name} ({'; '.join(apart[:MOST_NAMED])}{more})" if apart else f"{name}: {_by_value(values)}")
    table = {**_KNOWN_REMEDIES, **remedies}
    ways = dict.fromkeys(table.get(name, remedy) for name in odd)
    return DisagreementError(f"{call}: the ranks disagree on {'; '.join(texts)}. {'. '.join(ways)}")


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


def text_of(error: Exception | None) -> str:
    """Return an error's text."""
    try:
        return str(error)
    except Exception:  # if an error's __str__ fails, the other ranks must still be notified
        return "(it has no text)"
