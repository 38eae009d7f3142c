"""A covering array: rows in which every two values of every two factors meet."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any


def covering_array(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedily, so that each row meets many pairs not met before. Deterministic."""
    random, names = Random(seed), list(factors)
    missing = {
        (a, i, b, j) for a, b in combinations(names, 2) for i in range(len(factors[a])) for j in range(len(factors[b]))
    }
    chosen = []
    while missing:
        a, i, b, j = min(missing, key=str)
        best: dict[str, int] = {}
        gain = -1
        for _ in range(40):
            row = {name: random.randrange(len(values)) for name, values in factors.items()} | {a: i, b: j}
            met = len(missing & _pairs(row, names))
            if met > gain:
                best, gain = row, met
        missing -= _pairs(best, names)
        chosen.append({name: factors[name][index] for name, index in best.items()})
    return chosen


def _pairs(row: Mapping[str, int], names: Sequence[str]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}
