"""The page of a report: its table, its plots and its engine filter in one HTML file that needs no network."""

from __future__ import annotations

import math
from html import escape
from importlib import resources

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly import graph_objects
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from ..harness.results import KINDS, Results, Row
from .figures import CHARTS, KIND_COLOURS, Chart, colours, row_text, tick_text, timeline_ends, timeline_rows, y_scale
from .table import CHECK, PLACE, cells, measured, state

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
SIZE = {"template": "plotly_white", "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"}}


def page(results: Results) -> str:
    """The whole page, which carries plotly's JavaScript."""
    columns = measured(results)
    rows = timeline_rows(results)
    ends = timeline_ends(rows)
    figures = {f"plot-{chart.key}": chart_figure(chart, results) for chart in CHARTS}
    for i, row in enumerate(rows):
        figures[f"timeline-{i}"] = timeline_figure(row, ends[row.seq_len, row.world, row.link])
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "cls": PlotlyJSONEncoder}
    return environment.get_template("page.html").render(
        results=results,
        facts={
            "date": results.date,
            "machine": results.machine,
            "code": ", ".join(filter(None, [results.revision, *map(" ".join, results.versions.items())])),
            "setting": ", ".join(f"{key} {value}" for key, value in results.setting.items()),
        },
        columns=(*PLACE, *columns, *CHECK),
        cells=lambda row: cells(row, columns),
        state=state,
        charts=CHARTS,
        colours=colours(results),
        timelines=rows,
        figures={name: figure.to_plotly_json() for name, figure in figures.items()},
        plotly=Markup(get_plotlyjs()),
        asset=lambda name: Markup(resources.files(__package__).joinpath(name).read_text("utf-8")),
    )


def chart_figure(chart: Chart, results: Results) -> graph_objects.Figure:
    """One chart; without data where no row has the figure."""
    colour, lines = colours(results), chart.lines(results)
    lengths = sorted({point.seq_len for line in lines for point in line.points})
    marks, low, high = y_scale(lines) if lines else ([], 1.0, 10.0)
    figure = graph_objects.Figure(
        layout=SIZE,
        layout_height=max(440, 130 + 19 * len(lines)),  # the legend needs no scrolling
        layout_margin={"l": 70, "r": 20, "t": 40, "b": 50},
        layout_hovermode="closest",
        layout_showlegend=True,
    )
    figure.update_xaxes(
        type="log", title="tokens of the sequence", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths]
    )
    figure.update_yaxes(type="log", range=[math.log10(low), math.log10(high)], tickvals=marks)
    figure.update_yaxes(ticktext=[tick_text(y, chart.unit) for y in marks])
    for line in lines:
        spans = {
            "array": [point.high - point.y for point in line.points],
            "arrayminus": [point.y - point.low for point in line.points],
        }
        figure.add_scatter(
            mode="lines+markers",
            name=escape(line.name, quote=False),
            meta={"engine": line.engine},
            x=[point.seq_len for point in line.points],
            y=[point.y for point in line.points],
            error_y={"visible": chart.key == "seconds", "type": "data", "symmetric": False, "thickness": 1.2, **spans},
            line={"color": colour[line.engine], "dash": DASHES[line.dash % len(DASHES)], "width": 2},
            marker={"symbol": SYMBOLS[line.symbol % len(SYMBOLS)], "size": 8},
            hovertemplate=f"%{{x:,}} tokens: %{{y:.3s}}{chart.unit}",
        )
    return figure


def timeline_figure(row: Row, end: float) -> graph_objects.Figure:
    """What each rank did, on an axis from 0 to ``end`` seconds: a lane per rank and kind."""
    height, ranks = len(KINDS) + 1, range(len(row.timeline))
    figure = graph_objects.Figure(
        layout=SIZE,
        layout_height=150 + 34 * len(ranks),
        # Three storeys above the plot: the title beside the toolbar, then the legend.
        layout_margin={"l": 70, "r": 20, "t": 84, "b": 50},
        layout_title={"text": escape(row_text(row), quote=False), "font_size": 14, "x": 0.01, "y": 1, "yanchor": "top"},
        layout_title_pad_t=30,
        layout_legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        layout_barmode="overlay",
        layout_hovermode="closest",
        layout_showlegend=True,
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
