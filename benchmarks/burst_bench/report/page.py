"""The page of a report: its table, its plots and its engine filter in one HTML file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from importlib import resources
from typing import Any

from ..results import KINDS, Results, Row
from .figures import (
    CHARTS,
    KIND_COLOURS,
    Chart,
    bytes_text,
    colours,
    link_text,
    number_text,
    row_text,
    tick_text,
    timeline_ends,
    timeline_rows,
    y_scale,
)

COLUMNS = (  # header, what it means
    ("engine", ""),
    ("tokens", "of the sequence, over all ranks"),
    ("ranks", ""),
    ("link", "rate of each node's link"),
    ("median s", "wall time of the median round, the slowest rank's"),
    ("min to max s", "least and greatest round"),
    ("tokens/s", "by the median round"),
    ("GFLOP/s", "of the model, by the median round; work done twice counts once"),
    ("bytes counted", "sent per rank and call as the transport counted: activations"),
    ("bytes predicted", "the same, predicted before the run"),
    ("bytes on the wire", "on the interfaces of the emulated cluster, per rank"),
    (
        "bytes uncounted",
        "on the wire beyond the counted: parameters, their gradients, protocol headers, what gloo sends too much",
    ),
    (
        "peak memory",
        "highest rank's, above what was resident before the engine was built",
    ),
    (
        "error",
        "against fp64, of the tensor closest to its bound: at 512 tokens; of attention in rows at this length, too",
    ),
    ("bound", "what the error may be"),
)
PLACE, FIGURES = 4, len(COLUMNS) - 6  # columns that say which row it is; columns between those and error, bound
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")


def page(results: Results) -> str:
    """The whole page. Needs plotly, whose JavaScript it carries."""
    from plotly.offline import get_plotlyjs

    figures = {f"plot-{chart.key}": chart_figure(chart, results) for chart in CHARTS}
    rows = timeline_rows(results)
    ends = timeline_ends(rows)
    figures |= {
        f"timeline-{i}": timeline_figure(row, ends[row.seq_len, row.world, row.link]) for i, row in enumerate(rows)
    }
    title = escape(f"burst bench {results.task}, {results.date}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_asset("report.css")}</style>
</head>
<body>
{_heading(results)}
{_filter(results)}
<main>
{_table(results)}
{"".join(_chart_section(chart, results, bool(figures[f"plot-{chart.key}"]["data"])) for chart in CHARTS)}
{_timelines_section(rows)}
</main>
<script type="application/json" id="figures">{_json(figures)}</script>
<script>{get_plotlyjs()}</script>
<script>{_asset("report.js")}</script>
</body>
</html>
"""


def chart_figure(chart: Chart, results: Results) -> dict[str, Any]:
    """Plotly's figure of one chart; without data where no row has the figure."""
    colour = colours(results)
    lines = chart.lines(results)
    lengths = sorted({point.seq_len for line in lines for point in line.points})
    marks, low, high = y_scale(lines) if lines else ([], 1.0, 10.0)
    ticks = {"tickvals": marks, "ticktext": [tick_text(y, chart.unit) for y in marks]}
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(line.name, quote=False),
                "meta": {"engine": line.engine},
                "x": [point.seq_len for point in line.points],
                "y": [point.y for point in line.points],
                "error_y": {
                    "visible": chart.key == "seconds",
                    "type": "data",
                    "symmetric": False,
                    "array": [point.high - point.y for point in line.points],
                    "arrayminus": [point.y - point.low for point in line.points],
                    "thickness": 1.2,
                    "width": 4,
                },
                "line": {"color": colour[line.engine], "dash": DASHES[line.dash % len(DASHES)], "width": 2},
                "marker": {"symbol": SYMBOLS[line.symbol % len(SYMBOLS)], "size": 8},
                "hovertemplate": f"%{{x:,}} tokens: %{{y:.3s}}{chart.unit}",
            }
            for line in lines
        ],
        "layout": _layout(
            height=max(420, 110 + 19 * len(lines)),  # the legend needs no scrolling
            hovermode="closest",
            showlegend=True,
            xaxis=_axis("tokens of the sequence", type="log", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths]),
            yaxis=_axis("", type="log", range=[math.log10(low), math.log10(high)], **ticks),
        ),
    }


def timeline_figure(row: Row, end: float) -> dict[str, Any]:
    """Plotly's figure of what each rank did, on an axis from 0 to ``end`` seconds: a lane per rank and kind."""
    data = []
    for lane, kind in enumerate(KINDS):
        spans = [(rank, span) for rank, own in enumerate(row.timeline) for span in own if span.kind == kind]
        if spans:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "base": [span.start for _, span in spans],
                    "x": [span.end - span.start for _, span in spans],
                    "y": [(len(KINDS) + 1) * rank + lane for rank, _ in spans],
                    "width": 0.9,
                    "marker": {"color": KIND_COLOURS[kind], "line": {"width": 0.5, "color": "#ffffff"}},
                    "customdata": [[rank, s.start, s.end, escape(s.label, quote=False)] for rank, s in spans],
                    "hovertemplate": "rank %{customdata[0]}: %{customdata[1]:.4s}s to %{customdata[2]:.4s}s"
                    "<br>%{customdata[3]}",
                }
            )
    ranks = range(len(row.timeline))
    return {
        "data": data,
        "layout": _layout(
            height=110 + 34 * len(ranks),
            title={"text": escape(row_text(row), quote=False), "font": {"size": 14}, "x": 0.01},
            barmode="overlay",
            hovermode="closest",
            showlegend=True,
            legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
            xaxis=_axis("seconds", range=[0, 1.01 * end]),
            yaxis=_axis(
                "",
                range=[(len(KINDS) + 1) * len(ranks) - 1, -1],
                tickvals=[(len(KINDS) + 1) * rank + 1 for rank in ranks],
                ticktext=[f"rank {rank}" for rank in ranks],
                showgrid=False,
            ),
        ),
    }


def _layout(**own: Any) -> dict[str, Any]:
    return {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
        "margin": {"l": 70, "r": 20, "t": 50 if "title" in own else 20, "b": 50},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        **own,
    }


def _axis(title: str, **own: Any) -> dict[str, Any]:
    grid = {"gridcolor": "#e3e7ee", "zeroline": False, "showline": True, "linecolor": "#8a94a6", "automargin": True}
    return grid | {"title": {"text": title, "standoff": 8}} | own


def _heading(results: Results) -> str:
    facts = {
        "date": escape(results.date),
        "machine": escape(results.machine),
        "command": f"<code>{escape(results.command)}</code>",
        "setting": escape(", ".join(f"{key} {value}" for key, value in results.setting.items())) or "-",
    }
    listed = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts.items())
    return f"<header><h1>burst bench {escape(results.task)}</h1><dl>{listed}</dl></header>"


def _filter(results: Results) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" checked data-engine="{escape(engine)}">'
        f'<span class="swatch" style="background:{colour}"></span>{escape(engine)}</label>'
        for engine, colour in colours(results).items()
    )
    return f'<nav id="filter"><fieldset><legend>Engines</legend>{boxes}</fieldset></nav>'


def _table(results: Results) -> str:
    head = "".join(f'<th scope="col" title="{escape(meaning)}">{escape(name)}</th>' for name, meaning in COLUMNS)
    body = "".join(
        f'<tr data-engine="{escape(row.engine)}" class="{_state(row)}">{_cells(row)}</tr>' for row in results.rows
    )
    if not results.rows:
        body = f'<tr><td class="said" colspan="{len(COLUMNS)}">Nothing was measured.</td></tr>'
    return (
        f'<section><h2>All rows</h2><div class="wide"><table id="rows"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _state(row: Row) -> str:
    if row.refused is not None:
        return "refused"
    if row.error is None or row.bound is None:
        return "unchecked"
    return "right" if row.passed else "wrong"


def _cells(row: Row) -> str:
    place = [row.engine, f"{row.seq_len:,}", str(row.world), link_text(row.link)]
    check = ["-" if value is None else f"{value:.2e}" for value in (row.error, row.bound)]
    state = _state(row)
    if state == "right":
        gflops = None if row.flops_per_second is None else row.flops_per_second / 1e9
        spread = " to ".join(number_text(end(row.seconds)) for end in (min, max)) if row.seconds else "-"
        speed = [number_text(value) for value in (row.tokens_per_second, gflops)]
        sent = (row.bytes_counted, row.bytes_predicted, row.bytes_wire, row.bytes_uncounted, row.peak_memory)
        return _tds([*place, number_text(row.median), spread, *speed, *map(bytes_text, sent), *check])
    if state == "refused":
        return _tds(place) + f'<td class="said" colspan="{FIGURES + 2}">refused: {escape(row.refused or "")}</td>'
    said = "WRONG" if state == "wrong" else "not checked, so no figure is told"
    return _tds(place) + f'<td class="said" colspan="{FIGURES}">{said}</td>' + _tds(check)


def _tds(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _chart_section(chart: Chart, results: Results, drawn: bool) -> str:
    zeros = chart.zeros(results)
    note = f"<p>Zero, which a logarithmic axis can't show: {escape(', '.join(zeros))}.</p>" if zeros else ""
    if drawn:
        plot = (
            f'<div class="plot" id="plot-{chart.key}"></div>'
            '<p class="none" hidden>None of the chosen engines has a figure here.</p>'
        )
    else:
        plot = '<p class="none">No row has a figure here.</p>'
    said = escape(chart.axis[0].upper() + chart.axis[1:])
    return f'<section class="chart"><h2>{chart.title}</h2><p>{said}.</p>{plot}{note}</section>'


def _timelines_section(rows: list[Row]) -> str:
    plots = "".join(
        f'<div class="timeline" data-engine="{escape(row.engine)}"><div class="plot" id="timeline-{i}"></div></div>'
        for i, row in enumerate(rows)
    )
    note = (
        "What each rank did in one call. Computing and waiting share a rank's time; the exchange runs beside them. "
        "Waiting for the parameters' collectives counts as computing. "
        "Engines at the same length, ranks and link share one scale."
    )
    inner = f'<p>{note}</p><div class="grid">{plots}</div>' if rows else '<p class="none">No row has a timeline.</p>'
    return f'<section id="timelines"><h2>Timelines</h2>{inner}</section>'


def _asset(name: str) -> str:
    return resources.files(__package__ or "burst_bench").joinpath(name).read_text("utf-8")


def _json(content: Any) -> str:
    # A "</script>" in a text would end the element that carries it.
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")
