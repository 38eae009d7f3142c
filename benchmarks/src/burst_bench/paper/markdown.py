"""Shared parts of the pages of docs/results: raw figures, heads and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness.results import Results, Row
from ..harness.turns import ratios
from ..tables import markdown
from ..texts import bytes_text, link_text, number_text, spread

REFERENCE = "tensor-sequence"
PUBLISHED = "burst:published"  # the paper's strategy on any network: whole heads, zigzag
# Bytes of gloo for four gathers and four scatters, divided by a ring's: its reduce-scatter is a whole all-reduce.
GLOO_WASTE = 1.5
ORIGIN = ("command", "date", "machine", "revision", "versions")


@dataclass(frozen=True)
class Page:
    """The figures of one section, with its minutes and its origin (:func:`..harness.origin`)."""

    raw: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(json.loads(path.read_text("utf-8")))

    def results(self, key: str) -> Results:
        return Results.of(self.raw[key] | {name: self.raw[name] for name in ORIGIN})

    def head(self, title: str, about: str, sizes: str) -> str:
        """Return the head of a page."""
        versions = ", ".join(f"{name} {version}" for name, version in self.raw["versions"].items())
        code = f"revision `{self.raw['revision']}`, {versions}"
        origin = {"Machine": self.raw["machine"], "Date": self.raw["date"], "Code": code, "Sizes": sizes}
        lines = "".join(f"- {name}: {text}.\n" for name, text in origin.items())
        return f"# {title}\n\n{about}\n\n{lines}- Command: `{self.raw['command']}`\n\n"


def sizes_of(results: Results) -> str:
    """Return the sizes that all rows share, as text."""
    return "; ".join(f"{name} {value}" for name, value in results.setting.items())


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """Return the first correct row with these attributes, or None."""
    return next((r for r in rows if r.passed and all(getattr(r, k) == v for k, v in wanted.items())), None)


def outcome(row: Row) -> str | None:
    """Return why a row has no figures; None if it has figures."""
    if row.refused:
        return row.refused
    return None if row.passed else f"WRONG: error {row.error:.1e}, bound {row.bound:.1e}"


def gflops(row: Row) -> str:
    """Return a row's GFLOP/s as text."""
    return number_text((row.flops_per_second or 0) / 1e9)


def speeds(results: Results) -> str:
    """Return a table with every row's times, and their ratios to burst's in each round."""

    plans = any(row.chosen for row in results.rows)

    def cells(row: Row) -> dict[str, str]:
        place = {
            "engine": row.engine,
            "tokens": f"{row.seq_len:,}",
            "ranks": str(row.world),
            "link": link_text(row.link),
        }
        place |= {"burst's plan": row.chosen or "-"} if plans else {}
        if why := outcome(row):
            return place | {"s, median (rounds)": why}
        ours = find(results.rows, engine="burst", seq_len=row.seq_len, world=row.world, link=row.link)
        return place | {
            "s, median (rounds)": spread(row.seconds),
            "its time / burst's": spread(ratios(ours.seconds, row.seconds))
            if ours is not None and row.engine != "burst"
            else "-",
            "tokens/s": number_text(row.tokens_per_second),
            "GFLOP/s": gflops(row),
            "on the wire, per rank": bytes_text(row.bytes_wire),
            "error": f"{row.error:.1e}",
        }

    return markdown(map(cells, results.rows))
