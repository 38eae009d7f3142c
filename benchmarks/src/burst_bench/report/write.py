"""Write the report of a ``burst bench`` run: a page, image files and traces, from the results alone."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from ..harness.results import Results
from .figures import CHARTS, row_text, timeline_names, timeline_rows, timelines
from .page import page
from .trace_events import trace_events

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X", "star": "*"}


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write ``report.html``, and an image file for each chart and timeline.

    Args:
        results: The results. Refused and wrong rows appear in the table only.
        folder: Output folder, created if missing. Files of the same names are replaced; others stay.

    Returns:
        Paths of the files written, the page first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    written[0].write_text(page(results), "utf-8")
    pictures = {
        chart.key: chart_picture(chart.figure(results), chart.title, chart.axis, chart.unit) for chart in CHARTS
    }
    rows = timeline_rows(results)
    for name, row, figure in zip(timeline_names(rows), rows, timelines(results), strict=True):
        pictures[name] = timeline_picture(figure, row_text(row))
    for name, picture in pictures.items():
        written.append(folder / f"{name}.png")
        picture.savefig(written[-1], dpi=120)
    return written


def write_traces(results: Results, folder: Path) -> list[Path]:
    """Write ``timeline-….trace.json`` for each correct row with a timeline; return the paths."""
    rows = timeline_rows(results)
    written = [folder / f"{name}.trace.json" for name in timeline_names(rows)]
    for row, path in zip(rows, written, strict=True):
        content = {"traceEvents": list(trace_events(row)), "otherData": {"title": row_text(row)}}
        path.write_text(json.dumps(content) + "\n", "utf-8")
    return written


def chart_picture(figure: Any, title: str, says: str, unit: str) -> Figure:
    """Draw one of Plotly's charts with matplotlib."""
    picture = Figure(figsize=(10, 5), layout="constrained")
    axes = picture.add_subplot()
    if not figure.data:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{title}: no row has a figure here.", ha="center", va="center", fontsize=14)
        return picture
    for line in figure.data:
        spread = [line.error_y.arrayminus, line.error_y.array] if line.error_y.visible else None
        style = {"color": line.line.color, "linestyle": DASHES[line.line.dash], "marker": MARKERS[line.marker.symbol]}
        axes.errorbar(line.x, line.y, yerr=spread, label=_plain(unescape(line.name)), capsize=3, **style)
    axes.set(xscale="log", yscale="log", xlabel=figure.layout.xaxis.title.text)
    axes.set_title(says, fontsize=11)
    axes.set_xticks(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e3e7ee")
    picture.legend(loc="outside right upper", fontsize=9)
    return picture


def timeline_picture(figure: Any, title: str) -> Figure:
    """Draw one of Plotly's timelines with matplotlib."""
    across, down = figure.layout.xaxis, figure.layout.yaxis
    picture = Figure(figsize=(11, 1.6 + 0.5 * len(down.tickvals)), layout="constrained")
    axes = picture.add_subplot()
    for bars in figure.data:
        style = {"color": bars.marker.color, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(bars.y, bars.x, bars.width, bars.base, label=bars.name, **style)
    axes.set_title(_plain(title), loc="left", fontsize=11)
    axes.set(xlabel=across.title.text, xlim=(0, across.range[1] or None), ylim=down.range)
    axes.set_yticks(down.tickvals, down.ticktext)
    axes.grid(axis="x", color="#e3e7ee")
    axes.set_axisbelow(True)
    picture.legend(loc="outside right upper", fontsize=9)
    return picture


def _plain(text: str) -> str:
    # matplotlib would read text between two dollar signs as a formula.
    return text.replace("$", r"\$")
