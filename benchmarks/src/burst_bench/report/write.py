"""The report of a run of ``burst bench``: one HTML page and its plots as pictures, made from the results alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..harness.results import KINDS, Results, Row
from .figures import (
    CHARTS,
    KIND_COLOURS,
    Chart,
    colours,
    row_text,
    tick_text,
    timeline_ends,
    timeline_names,
    timeline_rows,
    y_scale,
)
from .page import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDED = ("matplotlib", "plotly")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "D", "^", "X", "*")


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write ``report.html``, a picture per chart and a picture per timeline into ``folder``, which is made if need be.

    Args:
        results: what was measured. Rows that were refused or whose result wasn't right stand in the table only.
        folder: where to; files of the same names are replaced, others stay.

    Returns:
        The files written, the page first.

    Raises:
        ImportError: plotly or matplotlib isn't installed.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"the report needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    written[0].write_text(page(results), "utf-8")
    for chart in CHARTS:
        written.append(folder / f"{chart.key}.png")
        _save(_draw_chart(chart, results), written[-1])
    rows = timeline_rows(results)
    ends = timeline_ends(rows)
    for row, name in zip(rows, timeline_names(rows), strict=True):
        written.append(folder / name)
        _save(_draw_timeline(row, ends[row.seq_len, row.world, row.link]), written[-1])
    return written


def _draw_chart(chart: Chart, results: Results) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    lines = chart.lines(results)
    if not lines:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{chart.title}: no row has a figure here.", ha="center", va="center", fontsize=14)
        return figure
    colour = colours(results)
    for line in lines:
        spread = [[point.y - point.low for point in line.points], [point.high - point.y for point in line.points]]
        axes.errorbar(
            [point.seq_len for point in line.points],
            [point.y for point in line.points],
            yerr=spread if chart.key == "seconds" else None,
            label=_plain(line.name),
            color=colour[line.engine],
            linestyle=DASHES[line.dash % len(DASHES)],
            marker=MARKERS[line.symbol % len(MARKERS)],
            capsize=3,
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", title=chart.axis)
    axes.title.set_fontsize(11)
    lengths = sorted({point.seq_len for line in lines for point in line.points})
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    marks, low, high = y_scale(lines)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(marks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: tick_text(value, chart.unit))
    axes.grid(color="#e3e7ee")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _draw_timeline(row: Row, end: float) -> Figure:
    from matplotlib.figure import Figure

    height = len(KINDS) + 1
    ranks = range(len(row.timeline))
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for lane, kind in enumerate(KINDS):
        label = kind
        for rank in ranks:
            spans = [(span.start, span.end - span.start) for span in row.timeline[rank] if span.kind == kind]
            if spans:
                place = (height * rank + lane - 0.45, 0.9)
                axes.broken_barh(spans, place, color=KIND_COLOURS[kind], edgecolor="white", linewidth=0.5, label=label)
                label = "_"  # one entry per kind in the legend
    axes.set_title(_plain(row_text(row)), loc="left", fontsize=11)
    axes.set(xlabel="seconds", xlim=(0, 1.01 * end or None), ylim=(height * len(ranks) - 1, -1))
    axes.set_yticks([height * rank + 1 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.grid(axis="x", color="#e3e7ee")
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _plain(text: str) -> str:
    # A pair of dollar signs would begin a formula.
    return text.replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
