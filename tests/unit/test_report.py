"""The report of ``burst bench``: only correct rows have figures, and each figure stands where it belongs."""

import re
from dataclasses import replace
from html import unescape

import pytest

pytest.importorskip("plotly")

from burst_bench.harness.results import Results, Span
from burst_bench.report import CHARTS, charts, page, timelines
from burst_bench.tables import bytes_text, link_text

from tests.support.bench_results import RESULTS, TIMELINE, WRONG, right

ZIGZAG = "ring:zig&lt;i&gt;zag&lt;/i&gt;, 2 ranks, no limit"


def cells(results: Results) -> list[list[str]]:
    """Return the cells of the page's table, row by row."""
    table = re.search("<table>(.*?)</table>", page(results), re.DOTALL)[1]
    rows = re.findall("<tr>(.*?)</tr>", table, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_every_figure_stands_under_its_header() -> None:
    header, *rows = cells(RESULTS)
    assert len(rows) == len(RESULTS.rows)
    assert dict(zip(header, rows[1], strict=True)) == {
        "strategy": "burst",
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


def test_times_are_compared_with_the_first_strategies_round_by_round() -> None:
    """The machine slows by half from round to round. The ratio of medians is 1.5; the ratio of rounds is 2."""
    rows = [right("burst", 64, seconds=(1.0, 2.0, 3.0)), right("ring", 64, seconds=(2.0, 3.0, 9.0))]
    header, *found = cells(replace(RESULTS, rows=rows))
    assert [row[header.index("/ first's")] for row in found] == ["-", "2.00 (1.50 to 3.00)"]
    wrong = replace(rows[0], error=1.0)
    header, *found = cells(replace(RESULTS, rows=[wrong, rows[1]]))
    assert found[1][header.index("/ first's")] == "-", "nothing is compared with what was wrong"


def test_a_wrong_row_tells_its_error_and_nothing_else() -> None:
    rows = cells(RESULTS)
    assert rows[7] == ["tensor", "4,096", "2", "no limit", "WRONG", "2.50e-01", "1.00e-05"]
    assert rows[8] == ["ulysses", "4,096", "2", "no limit", "refused: needs Hkv >= world: 1 < 2 </script>"]
    for error, said in ((None, "not checked, so no figures"), (float("nan"), "WRONG")):
        made = replace(RESULTS, rows=[replace(WRONG, error=error)])
        assert cells(made)[1][4] == said
        assert not [*timelines(made)] and not any(figure.data for figure in charts(made))


def test_charts_show_what_a_logarithmic_axis_can() -> None:
    seconds, memory, sent = charts(RESULTS)
    assert len(CHARTS) == 3
    assert {line.name: [*zip(line.x, line.y, strict=True)] for line in sent.data} == {
        "burst, 2 ranks, no limit": [(4096, 4096e3), (8192, 8192e3)],
        "burst, 2 ranks, 200 Mbit/s": [(8192, 8e6)],
        ZIGZAG: [(4096, 4096e3), (8192, 8192e3)],
    }
    assert {line.name for line in seconds.data} == {line.name for line in memory.data}
    first = seconds.data[0]
    assert first.error_y.arrayminus == pytest.approx([0.04096, 0.08192])
    assert first.error_y.array == pytest.approx([0.12288, 0.24576])
    assert not sent.data[0].error_y.visible
    burst = [line.line for line in seconds.data if line.name.startswith("burst")]
    assert len({line.color for line in burst}) == 1 and len({line.dash for line in burst}) == 2


def test_a_timeline_has_a_lane_per_rank_and_kind() -> None:
    drawn = [*timelines(RESULTS)]
    assert [figure.layout.title.text for figure in drawn] == [
        "burst, 4,096 tokens, 2 ranks, no limit",
        "burst, 8,192 tokens, 2 ranks, 200 Mbit/s",
        "ring:zig&lt;i&gt;zag&lt;/i&gt;, 4,096 tokens, 2 ranks, no limit",
    ]
    lanes = {y: (b, b + x) for bars in drawn[0].data for y, b, x in zip(bars.y, bars.base, bars.x, strict=True)}
    assert lanes["rank 0: compute"] == (0.0, 0.4)
    assert lanes["rank 1: wait"] == pytest.approx((0.4, 0.6))
    assert lanes["rank 1: exchange"] == pytest.approx((0.05, 0.4))


def test_strategies_side_by_side_share_a_time_scale() -> None:
    slow = tuple((Span("compute", 0.0, 3.0),) for _ in range(2))
    rows = [right("burst", 4096, timeline=TIMELINE), right("ring", 4096, timeline=slow)]
    rows.append(right("ring", 8192, timeline=TIMELINE))
    ends = [figure.layout.xaxis.range[1] for figure in timelines(replace(RESULTS, rows=rows))]
    assert ends[0] == ends[1] >= 3.0
    assert ends[2] < 1.0


def test_text_is_escaped_and_nothing_comes_from_a_network() -> None:
    text = page(RESULTS)
    own = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for raw in ("<done>", "<fast>", "<i>", "<b>of", "2 </script>"):
        assert raw not in own
    assert "2 cores, &lt;fast&gt;" in own
    assert "burst bench train --strategy burst &amp;&amp; echo &lt;done&gt;" in own
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


def test_numbers_as_text() -> None:
    assert [bytes_text(count) for count in (None, 0, 999, 1500, 2.5e9)] == ["-", "0 B", "999 B", "1.5 kB", "2.5 GB"]
    assert [link_text(link) for link in (None, 84.3e6, 1e9)] == ["no limit", "84.3 Mbit/s", "1 Gbit/s"]
