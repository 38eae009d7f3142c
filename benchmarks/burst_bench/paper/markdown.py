"""What the pages of docs/results share: their raw figures, tables, ratios by round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_bench.report.figures import bytes_text, link_text, number_text
from burst_bench.results import Results, Row

REFERENCE = "tensor-sequence"
# What gloo sends for four gathers and four scatters, by what a ring sends: its reduce-scatter is a whole all-reduce.
MADE_UP = 1.5


@dataclass(frozen=True)
class Page:
    """The figures of one section: machine, date, command, minutes, and what it measured."""

    raw: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(json.loads(path.read_text("utf-8")))

    def results(self, key: str) -> Results:
        return Results.of(self.raw[key])

    def head(self, title: str, about: str, sizes: str) -> str:
        """What every page begins with."""
        origin = {"Machine": self.raw["machine"], "Date": self.raw["date"], "Sizes": sizes}
        lines = "".join(f"- {name}: {told}.\n" for name, told in origin.items())
        return f"# {title}\n\n{about}\n\n{lines}- Command: `{self.raw['command']}`\n\n"


def sizes_of(results: Results) -> str:
    """The sizes that all rows share."""
    return ", ".join(f"{name} {value}" for name, value in results.setting.items())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def ratios(mine: Row, theirs: Row) -> list[float]:
    """By round: how many times as long theirs took."""
    return [b / a for a, b in zip(mine.seconds, theirs.seconds, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median (least to greatest)."""
    if not values:
        return "-"
    low, middle, high = (format(x, form) for x in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The right row with these attributes, if there is one."""
    return next((r for r in rows if r.passed and all(getattr(r, k) == v for k, v in wanted.items())), None)


def mebibytes(size: float | None, digits: int = 0) -> str:
    return "-" if size is None else f"{size / 2**20:,.{digits}f} MiB"


def outcome(row: Row) -> str | None:
    """Why a row has no figures; None if it has."""
    if row.refused:
        return row.refused
    return None if row.passed else f"WRONG: error {row.error:.1e}, bound {row.bound:.1e}"


def speeds(results: Results) -> str:
    """Times of every row, and burst's ratio to it by round."""
    lines = []
    for row in results.rows:
        place = [row.engine, f"{row.seq_len:,}", str(row.world), link_text(row.link)]
        if why := outcome(row):
            lines.append([*place, why, *[""] * 5])
            continue
        ours = find(results.rows, engine="burst", seq_len=row.seq_len, world=row.world, link=row.link)
        times = spread(ratios(ours, row)) if ours is not None and row.engine != "burst" else "-"
        speed = [number_text(row.tokens_per_second), number_text((row.flops_per_second or 0) / 1e9)]
        lines.append([*place, spread(row.seconds), times, *speed, bytes_text(row.bytes_wire), f"{row.error:.1e}"])
    columns = ("engine", "tokens", "ranks", "link", "s, median (rounds)", "its time / burst's")
    return table((*columns, "tokens/s", "GFLOP/s", "on the wire, per rank", "error"), lines)
