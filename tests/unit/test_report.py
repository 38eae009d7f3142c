"""The report of ``burst bench``: the figures of each row, the image files and the page's text."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

from burst_bench.harness.results import Span
from burst_bench.report import figures as report_figures
from burst_bench.report.page import page
from burst_bench.report.write import chart_picture, timeline_names, write_report, write_traces
from burst_bench.texts import bytes_text, link_text

from tests.support.bench_results import ENGINES, REFUSED, RESULTS, TIMELINE, WRONG, right


class Table(HTMLParser):
    """A parser that collects the visible cells of the page's table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text[text.index("<table") : text.index("</table>")])

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def figures(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def points(text: str, plot: str) -> dict[str, list[tuple[float, float]]]:
    """Return each line's points by engine and name."""
    lines = figures(text)[plot]["data"]
    return {f"{line['meta']['engine']}|{line['name']}": list(zip(line["x"], line["y"], strict=True)) for line in lines}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(RESULTS, tmp_path_factory.mktemp("report") / "new")


@pytest.fixture(scope="module")
def text(written: list[Path]) -> str:
    return written[0].read_text("utf-8")


def test_every_figure_stands_under_its_header(text: str) -> None:
    header, *rows = Table(text).rows
    assert len(rows) == len(RESULTS.rows)
    assert dict(zip(header, rows[1], strict=True)) == {
        "engine": "burst",
        "tokens": "8,192",
        "ranks": "2",
        "link": "200 Mbit/s",
        "median s": "0.819",
        "min to max s": "0.737 to 1.06",
        "/ first's": "-",
        "tokens/s": "10,000",
        "GFLOP/s": "1.25",
        "bytes counted": "8 MB",
        "bytes predicted": "8.19 MB",
        "bytes on the wire": "9 MB",
        "bytes uncounted": "1 MB",
        "peak memory": "41 MB",
        "error": "1.00e-06",
        "bound": "1.00e-05",
    }
    assert rows[0][3] == "no limit"
    assert rows[0][11:13] == ["-", "-"], "no emulated cluster, so nothing is known of the wire"


def test_times_are_compared_with_the_first_engines_round_by_round() -> None:
    """The machine slows by half from round to round. The ratio of medians is 1.5; the ratio of rounds is 2."""
    rows = [right("burst", 64, seconds=(1.0, 2.0, 3.0)), right("ring", 64, seconds=(2.0, 3.0, 9.0))]
    header, *cells = Table(page(replace(RESULTS, rows=rows))).rows
    assert [row[header.index("/ first's")] for row in cells] == ["-", "2.00 (1.50 to 3.00)"]
    wrong = replace(rows[0], error=1.0)
    header, *cells = Table(page(replace(RESULTS, rows=[wrong, rows[1]]))).rows
    assert cells[1][header.index("/ first's")] == "-", "nothing is compared with what was wrong"


def test_a_wrong_row_tells_its_error_and_nothing_else(text: str) -> None:
    rows = Table(text).rows
    assert rows[7] == ["tensor", "4,096", "2", "no limit", "WRONG", "2.50e-01", "1.00e-05"]
    assert rows[8] == ["ulysses", "4,096", "2", "no limit", "refused: needs Hkv >= world: 1 < 2 </script>"]
    assert rows[9] == ["bare", "4,096", "2", "no limit", *["-"] * 10, "0.00e+00", "1.00e-05"]


@pytest.mark.parametrize("error", [None, float("nan")])
def test_a_row_without_a_proven_result_tells_no_figure(error: float | None) -> None:
    made = page(replace(RESULTS, rows=[replace(WRONG, error=error)]))
    said = "not checked, so no figures" if error is None else "WRONG"
    assert Table(made).rows[1] == [
        "tensor",
        "4,096",
        "2",
        "no limit",
        said,
        "-" if error is None else "nan",
        "1.00e-05",
    ]
    assert not any(figure["data"] for figure in figures(made).values())


def test_only_rows_with_a_figure_have_points(text: str) -> None:
    zigzag = "ring:zig<i>zag</i>|ring:zig&lt;i&gt;zag&lt;/i&gt;, 2 ranks, no limit"
    assert points(text, "plot-bytes") == {
        "burst|burst, 2 ranks, no limit": [(4096, 4096e3), (8192, 8192e3)],
        "burst|burst, 2 ranks, 200 Mbit/s": [(8192, 8e6)],
        zigzag: [(4096, 4096e3), (8192, 8192e3)],
    }
    assert points(text, "plot-seconds")["single|single, 1 rank, no limit"] == [(4096, 0.4096)]
    assert set(points(text, "plot-memory")) == set(points(text, "plot-seconds"))
    assert "which a logarithmic axis can't show: single." in text


def test_spread_is_from_the_least_to_the_greatest_round(text: str) -> None:
    line = figures(text)["plot-seconds"]["data"][0]
    assert line["error_y"]["visible"]
    assert line["error_y"]["arrayminus"] == pytest.approx([0.04096, 0.08192])
    assert line["error_y"]["array"] == pytest.approx([0.12288, 0.24576])
    assert not figures(text)["plot-bytes"]["data"][0]["error_y"]["visible"]


def test_an_engine_keeps_its_colour_and_links_differ_in_dash(text: str) -> None:
    drawn = figures(text)
    lines = [line for chart in report_figures.CHARTS for line in drawn[f"plot-{chart.key}"]["data"]]
    by_engine = {line["meta"]["engine"]: set() for line in lines}
    for line in lines:
        by_engine[line["meta"]["engine"]].add(line["line"]["color"])
    assert {engine: len(found) for engine, found in by_engine.items()} == dict.fromkeys(ENGINES[:3], 1)
    assert len(set.union(*by_engine.values())) == 3
    burst = [line["line"]["dash"] for line in drawn["plot-seconds"]["data"] if line["meta"]["engine"] == "burst"]
    assert len(burst) == len(set(burst)) == 2


def test_a_timeline_has_a_lane_per_rank_and_kind(text: str) -> None:
    drawn = {key: figure for key, figure in figures(text).items() if key.startswith("timeline")}
    assert [figure["layout"]["title"]["text"] for figure in drawn.values()] == [
        "burst, 4,096 tokens, 2 ranks, no limit",
        "burst, 8,192 tokens, 2 ranks, 200 Mbit/s",
        "ring:zig&lt;i&gt;zag&lt;/i&gt;, 4,096 tokens, 2 ranks, no limit",
    ]
    lanes = {}
    for bars in drawn["timeline-0"]["data"]:
        kind, shown = bars["name"], zip(bars["y"], bars["base"], bars["x"], strict=True)
        lanes |= {y: (kind, base, pytest.approx(base + x)) for y, base, x in shown}
    assert [lanes[y] for y in sorted(lanes)] == [
        ("compute", 0.0, 0.4),
        ("wait", 0.4, 0.5),
        ("exchange", 0.05, 0.3),
        ("compute", 0.0, 0.4),
        ("wait", 0.4, 0.6),
        ("exchange", 0.05, 0.4),
    ]
    assert len({bars["marker"]["color"] for bars in drawn["timeline-0"]["data"]}) == 3


def test_engines_side_by_side_share_a_time_scale() -> None:
    slow = tuple((Span("compute", 0.0, 3.0),) for _ in range(2))
    other = right("ring", 8192, timeline=TIMELINE)
    rows = [right("burst", 4096, timeline=TIMELINE), right("ring", 4096, timeline=slow), other]
    drawn = figures(page(replace(RESULTS, rows=rows)))
    ends = [drawn[f"timeline-{i}"]["layout"]["xaxis"]["range"][1] for i in range(3)]
    assert ends[0] == ends[1] >= 3.0
    assert ends[2] < 1.0


def test_plotly_accepts_every_figure(text: str) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures(text).values():
        graph_objects.Figure(figure)


def test_text_is_escaped(text: str) -> None:
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    for raw in ("<done>", "<fast>", "<i>", "<b>of", "2 </script>"):
        assert raw not in own
    assert "2 cores, &lt;fast&gt;" in own
    assert "burst bench train --engine burst &amp;&amp; echo &lt;done&gt;" in own


def test_pictures_of_every_chart_and_timeline(written: list[Path]) -> None:
    assert [path.name for path in written] == [
        "report.html",
        "seconds.png",
        "memory.png",
        "bytes.png",
        "timeline-burst-4096-nolimit.png",
        "timeline-burst-8192-200Mbit.png",
        "timeline-ring-zig-i-zag-i-4096-nolimit.png",
    ]
    assert sorted(written) == sorted(written[0].parent.iterdir())
    for path in written[1:]:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 1000
        assert height >= 250


def test_timelines_are_trace_events_with_a_process_for_each_rank(tmp_path: Path) -> None:
    """Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    written = write_traces(RESULTS, tmp_path)
    assert [path.name for path in written] == [
        "timeline-burst-4096-nolimit.trace.json",
        "timeline-burst-8192-200Mbit.trace.json",
        "timeline-ring-zig-i-zag-i-4096-nolimit.trace.json",
    ]
    events = json.loads(written[0].read_text("utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    for rank, spans in enumerate(TIMELINE):
        own = [event for event in events if event["pid"] == rank]
        complete = [(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in own if e["ph"] == "X"]
        begun = {e["id"]: e for e in own if e["ph"] == "b"}
        ended = {e["id"]: e for e in own if e["ph"] == "e"}
        assert begun.keys() == ended.keys()
        complete += [(e["cat"], e["name"], e["ts"], ended[n]["ts"]) for n, e in begun.items()]
        expected = [
            (s.kind, s.label or s.kind, pytest.approx(1e6 * s.start), pytest.approx(1e6 * s.end)) for s in spans
        ]
        assert sorted(complete) == sorted(expected, key=lambda span: span[:2])
        assert {event["ph"] for event in own} == {"M", "X", "b", "e"}
    assert len({event["id"] for event in events if event["ph"] == "b"}) == 2, "ranks' exchanges have different ids"


def test_rows_that_share_a_name_get_a_picture_each() -> None:
    made = [right("a/b", 64, world=world) for world in (2, 4, 4)]
    assert timeline_names([*made, right("../c", 64, link=1.5e9)]) == [
        "timeline-a-b-64-nolimit-2ranks",
        "timeline-a-b-64-nolimit-4ranks",
        "timeline-a-b-64-nolimit-4ranks-2",
        "timeline-..-c-64-1.5Gbit",
    ]


def test_empty_plots_say_so(tmp_path: Path) -> None:
    written = write_report(replace(RESULTS, rows=[WRONG, REFUSED]), tmp_path)
    text = written[0].read_text("utf-8")
    assert text.count("No row has a figure here.") == 3
    assert "No row has a timeline." in text
    assert 'id="plot-' not in text
    assert [path.name for path in written] == ["report.html", "seconds.png", "memory.png", "bytes.png"]
    assert "Nothing was measured." in page(replace(RESULTS, rows=[]))


@pytest.mark.parametrize("values", [(3.2,), (3.1, 3.3), (0.02, 0.9), (4e3, 9e8), (1.0,), (10.0, 100.0)])
def test_a_pictures_axis_holds_its_points_and_two_ticks(values: tuple[float, ...]) -> None:
    chart = report_figures.CHARTS[0]
    rows = [right("burst", 2**n, seconds=(value,)) for n, value in enumerate(values)]
    picture = chart_picture(chart.figure(replace(RESULTS, rows=rows)), chart.title, chart.axis, chart.unit)
    (axes,) = picture.axes
    low, high = axes.get_ylim()
    assert low < min(values) and max(values) < high
    texts = [axes.yaxis.get_major_formatter()(mark) for mark in axes.get_yticks() if low <= mark <= high]
    assert 2 <= len(set(texts)) == len(texts) <= 20
    assert all(text.endswith("s") for text in texts)


def test_numbers_as_text() -> None:
    assert [bytes_text(count) for count in (None, 0, 999, 1500, 2.5e9, 3e13)] == [
        *("-", "0 B", "999 B", "1.5 kB", "2.5 GB", "30 TB")
    ]
    assert [link_text(link) for link in (None, 4.5e8, 1e9, 300)] == [
        *("no limit", "450 Mbit/s", "1 Gbit/s", "300 bit/s")
    ]
