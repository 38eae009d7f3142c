"""Plotly figures of a report: one for each chart and each timeline, for the page and for the image files.

Refused rows, and rows without a correct result, are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from plotly import graph_objects

from ..harness.results import KINDS, Results, Row
from ..texts import link_text, ranks_text

# Okabe and Ito's colours, which people with common kinds of colour blindness can distinguish. Grey replaces the yellow,
# which is too faint on white.
ENGINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
# Paul Tol's high-contrast set: three colours that stay distinct in greyscale.
KIND_COLOURS = {"compute": "#004488", "wait": "#DDAA33", "exchange": "#BB5566"}
DASHES = ("solid", "dash", "dot", "dashdot")  # by link
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")  # by world
LAYOUT = {
    "template": "plotly_white",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
    "hovermode": "closest",
    "showlegend": True,
}


class Chart(NamedTuple):
    """A chart of one figure against sequence length.

    Attributes:
        key: Name of its image file, without the suffix.
        title: Its title.
        axis: Label of the y axis.
        unit: Suffix of the ticks.
        value: Return a row's figure in ``unit``, or None.
    """

    key: str
    title: str
    axis: str
    unit: str
    value: Callable[[Row], float | None]

    def figure(self, results: Results) -> graph_objects.Figure:
        """Return the chart, with a line per engine × world × link in the order of the rows.

        Lines without points are left out.
        """
        shown = right(results)
        links, worlds = ([*dict.fromkeys(getattr(row, name) for row in shown)] for name in ("link", "world"))
        by_line: dict[tuple[str, int, float | None], list[Row]] = {}
        for row in sorted(shown, key=lambda row: row.seq_len):
            if self.has_point(row):
                by_line.setdefault((row.engine, row.world, row.link), []).append(row)
        figure = graph_objects.Figure(layout=LAYOUT)
        for engine, world, link in dict.fromkeys((row.engine, row.world, row.link) for row in shown):
            if rows := by_line.get((engine, world, link)):
                where = [*[ranks_text(world)] * (len(worlds) > 1), *[link_text(link)] * (len(links) > 1)]
                self._add(figure, rows, ", ".join([engine, *where]), colours(results)[engine])
                figure.data[-1].line.dash = DASHES[links.index(link) % len(DASHES)]
                figure.data[-1].marker.symbol = SYMBOLS[worlds.index(world) % len(SYMBOLS)]
        lengths = sorted({length for line in figure.data for length in line.x})
        ticks = {"tickvals": lengths, "ticktext": [f"{n:,}" for n in lengths]}
        figure.update_xaxes(type="log", title="tokens of the sequence", **ticks)
        figure.update_yaxes(type="log", tickformat="~s", ticksuffix=self.unit)
        height = max(440, 130 + 19 * len(figure.data))  # high enough for the whole legend
        return figure.update_layout(height=height, margin={"l": 70, "r": 20, "t": 40, "b": 50})

    def _add(self, figure: graph_objects.Figure, rows: Sequence[Row], name: str, colour: str) -> None:
        values = [self.value(row) or math.nan for row in rows]
        spread = {}
        if self.key == "seconds":  # error bars from the fastest to the slowest round
            ends = [(max(row.seconds) - y, y - min(row.seconds)) for row, y in zip(rows, values, strict=True)]
            spread = dict(zip(("array", "arrayminus"), zip(*ends, strict=True), strict=True))
        figure.add_scatter(
            mode="lines+markers",
            name=escape(name, quote=False),
            meta={"engine": rows[0].engine},
            x=[row.seq_len for row in rows],
            y=values,
            error_y={"visible": bool(spread), "type": "data", "symmetric": False, "thickness": 1.2, **spread},
            line={"color": colour, "width": 2},
            marker_size=8,
            hovertemplate=f"%{{x:,}} tokens: %{{y:.3s}}{self.unit}",
        )

    def has_point(self, row: Row) -> bool:
        """Return whether the row has a figure that a logarithmic axis can show."""
        values = [self.value(row), *(row.seconds if self.key == "seconds" else ())]
        return all(value is not None and math.isfinite(value) and value > 0 for value in values)

    def zeros(self, results: Results) -> list[str]:
        """Return the engines with a figure of zero, which the page must list because the chart can't show it."""
        return list(dict.fromkeys(row.engine for row in right(results) if self.value(row) == 0))


SECONDS = "seconds per call: median, with least and greatest round"
PEAK = "peak resident memory, highest rank, above that before the engine was built"
SENT = "bytes sent per rank and call, as the transport counted"
CHARTS = (
    Chart("seconds", "Time", SECONDS, "s", lambda row: row.median),
    Chart("memory", "Memory", PEAK, "B", lambda row: row.peak_memory),
    Chart("bytes", "Bytes", SENT, "B", lambda row: row.bytes_counted),
)


def right(results: Results) -> list[Row]:
    """Return the rows whose results are right."""
    return [row for row in results.rows if row.passed and row.refused is None]


def colours(results: Results) -> dict[str, str]:
    """Return each engine's colour, in the order of first rows; the colours repeat after the eighth engine."""
    engines = dict.fromkeys(row.engine for row in results.rows)
    return {engine: ENGINE_COLOURS[i % len(ENGINE_COLOURS)] for i, engine in enumerate(engines)}


def timeline_rows(results: Results) -> list[Row]:
    """Return the correct rows that have a timeline."""
    return [row for row in right(results) if any(row.timeline)]


def timelines(results: Results) -> list[graph_objects.Figure]:
    """Return a timeline figure per row; engines at the same length, ranks and link share one scale."""
    rows, ends = timeline_rows(results), {}
    for row in rows:
        place = row.seq_len, row.world, row.link
        ends[place] = max(ends.get(place, 0.0), *(span.end for rank in row.timeline for span in rank))
    return [_timeline(row, ends[row.seq_len, row.world, row.link]) for row in rows]


def _timeline(row: Row, end: float) -> graph_objects.Figure:
    """Return a figure with a lane per rank and kind, on an axis from 0 to ``end`` seconds."""
    height, ranks = len(KINDS) + 1, range(len(row.timeline))
    figure = graph_objects.Figure(
        layout=LAYOUT,
        layout_height=150 + 34 * len(ranks),
        # Two rows above the plot: the title and the toolbar, then the legend.
        layout_margin={"l": 70, "r": 20, "t": 84, "b": 50},
        layout_title={"text": escape(row_text(row), quote=False), "font_size": 14, "x": 0.01, "y": 1, "yanchor": "top"},
        layout_title_pad_t=30,
        layout_legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        layout_barmode="overlay",
    )
    figure.update_xaxes(title="seconds", range=[0, 1.01 * end])
    figure.update_yaxes(range=[height * len(ranks) - 1, -1], showgrid=False)
    figure.update_yaxes(tickvals=[height * rank + 1 for rank in ranks], ticktext=[f"rank {rank}" for rank in ranks])
    for lane, kind in enumerate(KINDS):
        spans = [(rank, span) for rank, own in enumerate(row.timeline) for span in own if span.kind == kind]
        if spans:
            figure.add_bar(
                orientation="h",
                name=kind,
                base=[span.start for _, span in spans],
                x=[span.end - span.start for _, span in spans],
                y=[height * rank + lane for rank, _ in spans],
                width=0.9,
                marker={"color": KIND_COLOURS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
                customdata=[[rank, s.start, s.end, escape(s.label, quote=False)] for rank, s in spans],
                hovertemplate="rank %{customdata[0]}: %{customdata[1]:.4s}s to %{customdata[2]:.4s}s"
                "<br>%{customdata[3]}",
            )
    return figure


def timeline_names(rows: Iterable[Row]) -> list[str]:
    """Return ``timeline-<engine>-<seq_len>-<link or nolimit>`` for each row, as a portable file name.

    If rows would share a name, their number of ranks is appended, and then a counter.
    """
    plain = []
    for row in rows:
        link = "nolimit" if row.link is None else link_text(row.link).removesuffix("/s").replace(" ", "")
        plain.append((re.sub(r"[^A-Za-z0-9.]+", "-", f"timeline-{row.engine}-{row.seq_len}-{link}"), row.world))
    taken = [name for name, _ in plain]
    names: list[str] = []
    for name, world in plain:
        own = name if taken.count(name) == 1 else f"{name}-{world}ranks"
        tries = [own, *(f"{own}-{i}" for i in range(2, len(plain) + 1))]
        names.append(next(text for text in tries if text not in names))
    return names


def row_text(row: Row) -> str:
    """Return the title of a row's timeline."""
    return f"{row.engine}, {row.seq_len:,} tokens, {ranks_text(row.world)}, {link_text(row.link)}"
