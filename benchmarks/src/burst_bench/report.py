"""The report of ``burst bench``: one HTML page with a table, charts and timelines. It needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from plotly import graph_objects

from .harness.results import KINDS, Results, Row
from .tables import bytes_text, link_text, number_text, ranks_text, spread


class Column(NamedTuple):
    """A column: its header, its text for a row, and its meaning."""

    header: str
    text: Callable[[Row], str]
    meaning: str = ""


PLACE = (
    Column("strategy", lambda row: row.strategy),
    Column("tokens", lambda row: f"{row.seq_len:,}", "of the sequence, over all ranks"),
    Column("ranks", lambda row: str(row.world)),
    Column("link", lambda row: link_text(row.link), "rate of each node's link"),
)
NEAREST = "against fp64 at 512 tokens, for the tensor closest to its bound; for attention also in rows at this length"
CHECK = (
    Column("error", lambda row: "-" if row.error is None else f"{row.error:.2e}", NEAREST),
    Column("bound", lambda row: "-" if row.bound is None else f"{row.bound:.2e}", "largest allowed error"),
)
WIRE = "on the interfaces of the emulated cluster, per rank"
BEYOND = "on the wire but not counted: parameters, their gradients, protocol headers, gloo's overhead"
PEAK = "the highest rank's, minus the memory resident before the strategy was built"
RATIO = "time divided by the first strategy's; each ratio comes from one round: median and range"


def measured(results: Results) -> tuple[Column, ...]:
    """Return the columns with measured figures, between those of ``PLACE`` and ``CHECK``."""

    def ends(row: Row) -> str:
        return " to ".join(number_text(end(row.seconds)) for end in (min, max)) if row.seconds else "-"

    def gflops(row: Row) -> str:
        return number_text(None if row.flops_per_second is None else row.flops_per_second / 1e9)

    return (
        Column("median s", lambda row: number_text(row.median), "wall time of the median round, the slowest rank's"),
        Column("min to max s", ends, "least and greatest round"),
        Column("/ first's", lambda row: spread(results.ratios_to_first(row)), RATIO),
        Column("tokens/s", lambda row: number_text(row.tokens_per_second), "by the median round"),
        Column("GFLOP/s", gflops, "of the model, by the median round; recomputation does not count"),
        Column("bytes counted", lambda row: bytes_text(row.bytes_counted), "sent per rank and call: activations"),
        Column("bytes predicted", lambda row: bytes_text(row.bytes_predicted), "the same, predicted before the run"),
        Column("bytes on the wire", lambda row: bytes_text(row.bytes_wire), WIRE),
        Column("bytes uncounted", lambda row: bytes_text(row.bytes_uncounted), BEYOND),
        Column("peak memory", lambda row: bytes_text(row.peak_memory), PEAK),
    )


def cells(row: Row, columns: tuple[Column, ...]) -> list[tuple[str, int]]:
    """Return (text, column span) of each cell; rows without a proven result get no figures in ``columns``."""
    place, check = ([(column.text(row), 1) for column in some] for some in (PLACE, CHECK))
    if row.refused is not None:
        return [*place, (f"refused: {row.refused}", len(columns) + len(CHECK))]
    if row.passed:
        return [*place, *((column.text(row), 1) for column in columns), *check]
    unchecked = row.error is None or row.bound is None
    return [*place, ("not checked, so no figures" if unchecked else "WRONG", len(columns)), *check]


# Okabe and Ito's colours, which people with common kinds of colour blindness can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
KIND_COLOURS = dict(zip(KINDS, ("#004488", "#DDAA33", "#BB5566"), strict=True))
DASHES = ("solid", "dash", "dot", "dashdot")  # by link
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")  # by world
CHARTS: dict[str, Callable[[Row], float | None]] = {
    "seconds per call: median, with least and greatest round": lambda row: row.median,
    "peak memory in bytes": lambda row: row.peak_memory,
    "bytes sent per rank and call, as the transport counted": lambda row: row.bytes_counted,
}
STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}"
)


def charts(results: Results) -> Iterator[graph_objects.Figure]:
    """Yield each figure of ``CHARTS`` against the length, with a line per strategy, world and link.

    Only figures of correct rows that a logarithmic axis can show are drawn.
    """
    right = sorted((row for row in results.rows if row.passed), key=lambda row: row.seq_len)
    strategies, links, worlds = (
        [*dict.fromkeys(getattr(r, x) for r in results.rows)] for x in ("strategy", "link", "world")
    )
    for title, value in CHARTS.items():
        lines: dict[tuple[str, int, float | None], list[Row]] = {}
        for row in right:
            if (value(row) or 0) > 0:
                lines.setdefault((row.strategy, row.world, row.link), []).append(row)
        figure = graph_objects.Figure(layout={"template": "plotly_white", "title": title, "showlegend": True})
        for (strategy, world, link), rows in lines.items():
            values = [value(row) or math.nan for row in rows]
            ends = {"array": max, "arrayminus": min} if "round" in title else {}
            bars = {
                name: [abs(of(r.seconds) - y) for r, y in zip(rows, values, strict=True)] for name, of in ends.items()
            }
            figure.add_scatter(
                x=[row.seq_len for row in rows],
                y=values,
                error_y={"visible": bool(bars), "symmetric": False} | bars,
                name=escape(f"{strategy}, {ranks_text(world)}, {link_text(link)}", quote=False),
                mode="lines+markers",
                line={"color": COLOURS[strategies.index(strategy) % 8], "dash": DASHES[links.index(link) % 4]},
                marker={"size": 8, "symbol": SYMBOLS[worlds.index(world) % 6]},
            )
        figure.update_xaxes(type="log", title="tokens of the sequence")
        yield figure.update_yaxes(type="log", tickformat="~s")


def timelines(results: Results) -> Iterator[graph_objects.Figure]:
    """Yield a figure for each correct row with a timeline; it has a lane per rank and kind.

    Strategies at the same length, ranks and link share one scale.
    """
    shown = [row for row in results.rows if row.passed and any(row.timeline)]
    places = [(row.seq_len, row.world, row.link) for row in shown]
    ends = [max(span.end for rank in row.timeline for span in rank) for row in shown]
    for row, place in zip(shown, places, strict=True):
        name = f"{row.strategy}, {row.seq_len:,} tokens, {ranks_text(row.world)}, {link_text(row.link)}"
        options = {"template": "plotly_white", "title": escape(name, quote=False), "barmode": "overlay"}
        figure = graph_objects.Figure(layout={**options, "height": 200 + 60 * len(row.timeline)})
        for kind in KINDS:
            spans = [(n, span) for n, rank in enumerate(row.timeline) for span in rank if span.kind == kind]
            figure.add_bar(
                orientation="h",
                name=kind,
                base=[span.start for _, span in spans],
                x=[span.end - span.start for _, span in spans],
                y=[f"rank {n}: {kind}" for n, _ in spans],
                marker={"color": KIND_COLOURS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
                hovertext=[escape(span.label, quote=False) for _, span in spans],
            )
        end = max(each for each, other in zip(ends, places, strict=True) if other == place)
        figure.update_xaxes(title="seconds", range=[0, 1.01 * end])
        yield figure.update_yaxes(categoryorder="category descending")


def page(results: Results) -> str:
    """Return the whole page, including plotly's JavaScript."""
    columns = measured(results)
    title = f"burst bench {results.task}"
    facts = {"date": results.date, "machine": results.machine, "command": results.command, "revision": results.revision}
    facts |= {name: str(value) for name, value in {**results.versions, **results.setting}.items()}
    text = [f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>']
    text += [f"<h1>{title}</h1><p>{escape('; '.join(f'{name}: {value}' for name, value in facts.items()))}</p><table>"]
    heads = (f'<th title="{escape(each.meaning)}">{each.header}</th>' for each in (*PLACE, *columns, *CHECK))
    text += ["<tr>", *heads, "</tr>"]
    for row in results.rows:
        text += ["<tr>", *(f"<td colspan={width}>{escape(x)}</td>" for x, width in cells(row, columns)), "</tr>"]
    text += ["</table><p>Timelines: a rank's time is computing and waiting; its exchange overlaps both.</p>"]
    figures = [*charts(results), *timelines(results)]
    return "\n".join(
        [*text, *(each.to_html(full_html=False, include_plotlyjs=not n) for n, each in enumerate(figures))]
    )
