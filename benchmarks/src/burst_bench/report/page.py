"""The page of a report: one HTML file with table, plots and engine filter, which needs no network."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from ..harness.results import Results
from .figures import CHARTS, colours, timeline_rows, timelines
from .table import CHECK, PLACE, cells, measured, state


def page(results: Results) -> str:
    """Return the whole page, including plotly's JavaScript."""
    columns = measured(results)
    figures = {f"plot-{chart.key}": chart.figure(results) for chart in CHARTS}
    figures |= {f"timeline-{i}": figure for i, figure in enumerate(timelines(results))}
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
        timelines=timeline_rows(results),
        figures={name: figure.to_plotly_json() for name, figure in figures.items()},
        plotly=Markup(get_plotlyjs()),
        asset=lambda name: Markup(resources.files(__package__).joinpath(name).read_text("utf-8")),
    )
