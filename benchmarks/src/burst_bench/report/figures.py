"""What a report draws, before any plotting library: the lines, the timelines, their names and their colours.

The page and the pictures are both made from these, so they can't differ. A row that was refused, or whose result wasn't
shown to be right, gives nothing here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..harness.results import Results, Row
from ..texts import link_text, ranks_text

# Okabe and Ito's colours, which people with any common colour blindness can tell apart; without the yellow, which is
# too faint on white, and with a grey.
ENGINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
# Paul Tol's high-contrast set: three colours that stay apart in grey too.
KIND_COLOURS = {"compute": "#004488", "wait": "#DDAA33", "exchange": "#BB5566"}


@dataclass(frozen=True)
class Point:
    """One row's place in a chart; ``low`` and ``high`` are the least and the greatest round, or y without rounds."""

    seq_len: int
    y: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points of one engine × world × link, by sequence length."""

    engine: str
    name: str
    points: Sequence[Point]
    dash: int  # the link's place among all links of the run
    symbol: int  # the world's place among all worlds of the run


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of every row against sequence length.

    Attributes:
        key: name of its picture, without the suffix.
        axis: what the y axis says.
        unit: suffix of its ticks.
        value: a row's figure in ``unit``, or None where the row has none.
    """

    key: str
    title: str
    axis: str
    unit: str
    value: Callable[[Row], float | None]

    def lines(self, results: Results) -> list[Line]:
        """One per engine × world × link that has a point; in the order of the rows."""
        shown = [row for row in results.rows if row.passed and row.refused is None]
        links = list(dict.fromkeys(row.link for row in shown))
        worlds = list(dict.fromkeys(row.world for row in shown))
        by_line: dict[tuple[str, int, float | None], list[Point]] = {}
        for row in shown:
            if (point := self.point(row)) is not None:
                by_line.setdefault((row.engine, row.world, row.link), []).append(point)
        return [
            Line(
                engine=engine,
                name=", ".join(
                    [engine, *[ranks_text(world)] * (len(worlds) > 1), *[link_text(link)] * (len(links) > 1)]
                ),
                points=sorted(points, key=lambda point: point.seq_len),
                dash=links.index(link),
                symbol=worlds.index(world),
            )
            for (engine, world, link), points in by_line.items()
        ]

    def point(self, row: Row) -> Point | None:
        """Where ``row`` stands; None where it has no figure or one that a logarithmic axis can't show."""
        y = self.value(row)
        if y is None:
            return None
        rounds = row.seconds if self.key == "seconds" else (y,)
        if not all(math.isfinite(value) and value > 0 for value in (y, *rounds)):
            return None
        return Point(row.seq_len, y, min(rounds), max(rounds))

    def zeros(self, results: Results) -> list[str]:
        """The engines with a figure of zero, which the chart can't show and must say."""
        shown = (row for row in results.rows if row.passed and row.refused is None)
        return list(dict.fromkeys(row.engine for row in shown if self.value(row) == 0))


SECONDS = "seconds per call: median, with least and greatest round"
PEAK = "peak resident memory, highest rank, above that before the engine was built"
SENT = "bytes sent per rank and call, as the transport counted"
CHARTS = (
    Chart(key="seconds", title="Time", axis=SECONDS, unit="s", value=lambda row: row.median),
    Chart(key="memory", title="Memory", axis=PEAK, unit="B", value=lambda row: row.peak_memory),
    Chart(key="bytes", title="Bytes", axis=SENT, unit="B", value=lambda row: row.bytes_counted),
)


def colours(results: Results) -> dict[str, str]:
    """Each engine's colour, by its first row; engines beyond the eighth begin again."""
    engines = dict.fromkeys(row.engine for row in results.rows)
    return {engine: ENGINE_COLOURS[i % len(ENGINE_COLOURS)] for i, engine in enumerate(engines)}


def y_scale(lines: Sequence[Line]) -> tuple[list[float], float, float]:
    """The logarithmic y axis over ``lines``: its ticks, at least two of them, and the values at its two ends."""
    low = min(point.low for line in lines for point in line.points) / 1.15
    high = max(point.high for line in lines for point in line.points) * 1.15
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 5 else (1, 2, 5) if high / low < 1e3 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [step * 10.0**power for power in powers for step in steps]
    if sum(low <= mark <= high for mark in marks) < 2:
        low = 0.99 * max(mark for mark in marks if mark <= low)
        high = 1.01 * min(mark for mark in marks if mark >= high)
    return [mark for mark in marks if low <= mark <= high], low, high


def tick_text(value: float, unit: str) -> str:
    """Such as ``500 ms`` or ``2 GB``."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= size * (1 - 1e-9):
            return f"{value / size:g} {prefix}{unit}"
    return f"{value * 1e6:g} µ{unit}"


def timeline_rows(results: Results) -> list[Row]:
    """The rows that have a timeline and were right."""
    return [row for row in results.rows if row.passed and row.refused is None and any(row.timeline)]


def timeline_ends(rows: Iterable[Row]) -> dict[tuple[int, int, float | None], float]:
    """The latest end, in seconds, for each (seq_len, world, link): engines side by side share one scale."""
    ends: dict[tuple[int, int, float | None], float] = {}
    for row in rows:
        key = (row.seq_len, row.world, row.link)
        ends[key] = max(ends.get(key, 0.0), *(span.end for rank in row.timeline for span in rank))
    return ends


def timeline_names(rows: Sequence[Row]) -> list[str]:
    """``timeline-<engine>-<seq_len>-<link or nolimit>.png`` for each row, in characters that any file system takes.

    Rows that would share a name get their ranks in it, and then a number.
    """
    plain = [f"timeline-{row.engine}-{row.seq_len}-{_file_link(row)}" for row in rows]
    plain = [re.sub(r"[^A-Za-z0-9.]+", "-", name) for name in plain]
    names: list[str] = []
    for row, name in zip(rows, plain, strict=True):
        own = name if plain.count(name) == 1 else f"{name}-{row.world}ranks"
        tries = [own, *(f"{own}-{i}" for i in range(2, len(rows) + 1))]
        names.append(next(text for text in tries if text not in names))
    return [f"{name}.png" for name in names]


def _file_link(row: Row) -> str:
    return "nolimit" if row.link is None else link_text(row.link).removesuffix("/s").replace(" ", "")


def row_text(row: Row) -> str:
    """What a timeline's title says."""
    return f"{row.engine}, {row.seq_len:,} tokens, {ranks_text(row.world)}, {link_text(row.link)}"
