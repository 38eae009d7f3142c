"""The report and the documentation site in a real browser: no errors, every plot is drawn, filter and search work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from burst_bench.command import main as bench
from burst_bench.report.page import page

from tests.support.bench_results import ENGINES, RESULTS

pytest.importorskip("plotly")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    with playwright.sync_playwright() as driver:
        # The page is our own file, and Chromium's sandbox doesn't start for root.
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(RESULTS), "utf-8")
    return path


class Page:
    """The report in the browser, and every error it raised."""

    def __init__(self, browser: Any, path: Path, fragment: str = "") -> None:
        self.complaints: list[str] = []
        self.inner = browser.new_page(viewport={"width": 1366, "height": 768})
        self.inner.on("console", lambda said: self.complaints.append(said.text))
        self.inner.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.inner.on(
            "request", lambda asked: self.complaints.extend([asked.url] * (not asked.url.startswith("file:")))
        )
        self.inner.goto(path.as_uri() + fragment)

    def settle(self, engines: list[str]) -> None:
        """Wait until the page has drawn exactly ``engines``."""
        self.inner.wait_for_function(
            "want => document.body.dataset.engines === want", arg=_compact(engines), timeout=20_000
        )

    def plots(self) -> dict[str, dict[str, Any]]:
        """Return the size and the drawn marks of each visible plot element."""
        return self.inner.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".plot")].filter(p => p.offsetParent).map(p => [
              p.id, {
                size: [p.clientWidth, p.clientHeight],
                marks: [...p.querySelectorAll(".points path")].filter(mark => {
                    const box = mark.getBoundingClientRect();
                    return box.width > 0 && box.height > 0;
                }).length,
                engines: [...new Set(p._fullData.filter(t => t.visible === true && t.meta).map(t => t.meta.engine))],
                legend: p.querySelectorAll(".legend .traces").length,
            }]))"""
        )

    def shown(self) -> dict[str, set[str]]:
        """Return the visible engines of the table and of the timelines."""
        return {
            place: set(
                self.inner.evaluate(
                    "s => [...document.querySelectorAll(s)].filter(e => e.offsetHeight > 0).map(e => e.dataset.engine)",
                    selector,
                )
            )
            for place, selector in (("table", "#rows tr[data-engine]"), ("timelines", ".timeline"))
        }

    def click(self, engine: str) -> None:
        self.inner.locator("#filter label").nth(ENGINES.index(engine)).click()


def _compact(names: list[str]) -> str:
    return json.dumps(names, separators=(",", ":"))


def test_browser_draws_every_plot(browser: Any, report: Path) -> None:
    opened = Page(browser, report)
    opened.settle(ENGINES)
    drawn = opened.plots()
    assert {key: plot["marks"] for key, plot in drawn.items()} == {
        "plot-seconds": 6,
        "plot-memory": 6,
        "plot-bytes": 5,
        **{f"timeline-{i}": 6 for i in range(3)},
    }
    for plot in drawn.values():
        assert plot["size"][0] > 400
        assert plot["size"][1] > 100
        assert plot["legend"] >= 3
    assert opened.shown() == {"table": set(ENGINES), "timelines": set(ENGINES[:2])}
    assert opened.inner.evaluate("document.documentElement.scrollWidth <= innerWidth")
    titles = opened.inner.locator("#timeline-2 .gtitle").text_content()
    assert titles == "ring:zig<i>zag</i>, 4,096 tokens, 2 ranks, no limit"
    assert opened.complaints == []


@pytest.mark.parametrize("width", [1366, 620])
@pytest.mark.long
def test_browser_keeps_title_legend_and_toolbar_apart(browser: Any, report: Path, width: int) -> None:
    opened = Page(browser, report)
    opened.inner.set_viewport_size({"width": width, "height": 768})
    opened.inner.reload()
    opened.settle(ENGINES)
    parts = opened.inner.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot")].map(plot => [plot.id, Object.fromEntries(
          [".gtitle", ".legend", ".modebar", ".bglayer"].filter(part => plot.querySelector(part)).map(part => {
            const {left, top, right, bottom} = plot.querySelector(part).getBoundingClientRect();
            return [part, [left, top, right, bottom]];
          }))]))"""
    )
    assert len(parts) == 6
    for plot, boxes in parts.items():
        assert set(boxes) == {".legend", ".modebar", ".bglayer"} | ({".gtitle"} if "timeline" in plot else set())
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (plot, one, a, other, b)
    buttons = opened.inner.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert set(buttons) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}, "none that needs a network"


@pytest.mark.long
def test_browser_draws_what_a_real_run_wrote(browser: Any, tmp_path: Path) -> None:
    sizes = ["--seq-lens", "64", "128", "--heads", "2", "--head-dim", "8", "--rounds", "2"]
    assert bench(["attention", "--engines", "burst", "ring", *sizes, "--out", str(tmp_path / "run")]) == 0
    opened = Page(browser, tmp_path / "run" / "report.html")
    opened.settle(["burst", "ring"])
    drawn = opened.plots()
    assert set(drawn) == {"plot-seconds", "plot-memory", "plot-bytes", *(f"timeline-{i}" for i in range(4))}
    assert all(plot["marks"] > 0 for plot in drawn.values())
    opened.inner.locator("#filter label").first.click()
    opened.settle(["ring"])
    assert opened.shown() == {"table": {"ring"}, "timelines": {"ring"}}
    assert opened.complaints == []


def test_browser_filters_engines_everywhere(browser: Any, report: Path) -> None:
    opened = Page(browser, report)
    opened.settle(ENGINES)
    before = opened.plots()
    opened.click("burst")
    opened.settle(ENGINES[1:])
    assert opened.shown() == {"table": set(ENGINES[1:]), "timelines": {ENGINES[1]}}
    assert {key: (plot["engines"], plot["marks"]) for key, plot in opened.plots().items()} == {
        "plot-seconds": (ENGINES[1:3], 3),
        "plot-memory": (ENGINES[1:3], 3),
        "plot-bytes": (ENGINES[1:2], 2),
        "timeline-2": ([], 6),
    }
    opened.click(ENGINES[1])
    opened.settle(ENGINES[2:])
    assert set(opened.plots()) == {"plot-seconds", "plot-memory"}
    assert opened.inner.get_by_text("None of the chosen engines has a figure here.").count() == 3
    assert opened.inner.locator("p.none:visible").count() == 1, "only the bytes have nothing left to show"
    opened.click(ENGINES[1])
    opened.click("burst")
    opened.settle(ENGINES)
    assert opened.plots() == before
    assert opened.inner.evaluate("location.hash") == ""
    assert opened.complaints == []


@pytest.mark.long
def test_browser_reads_and_writes_the_fragment(browser: Any, report: Path) -> None:
    opened = Page(browser, report, "#engines=ring,single")
    opened.settle(ENGINES[1:3])
    assert opened.shown() == {"table": set(ENGINES[1:3]), "timelines": {ENGINES[1]}}
    assert opened.plots()["plot-seconds"]["engines"] == ENGINES[1:3]
    opened.inner.evaluate("location.hash = '#engines=burst'")
    opened.settle(["burst"])
    assert set(opened.plots()) == {"plot-seconds", "plot-memory", "plot-bytes", "timeline-0", "timeline-1"}
    opened.click(ENGINES[1])
    opened.settle(ENGINES[:2])
    again = Page(browser, report, opened.inner.evaluate("location.hash"))
    again.settle(ENGINES[:2])
    assert again.shown()["table"] == set(ENGINES[:2])
    assert all(plot["marks"] > 0 for plot in again.plots().values())
    assert opened.complaints == again.complaints == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site of two pages, one in a folder, built with the project's theme, plugins and hooks."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("mkdocs_hooks.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (folder / name).write_text((ROOT / name).read_text("utf-8") if name.endswith(".py") else f"# {name}\n", "utf-8")
    (folder / "docs/deep").mkdir(parents=True)
    for name in ("search-from-file.js", "site.css"):
        shutil.copy(ROOT / "docs" / name, folder / "docs" / name)
    (folder / "docs/deep/page.md").write_text("# Oddities\n\nThe xylophone is explained here.\n", "utf-8")
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    (folder / "mkdocs.yml").write_text(text[: text.index("\nnav:")] + "\nnav: [index.md, deep/page.md]\n", "utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder / "site")]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder / "site"


@pytest.mark.parametrize("start", ["index.html", "deep/page.html"])
def test_the_site_is_searched_from_a_file(browser: Any, site: Path, start: str) -> None:
    view = browser.new_page(viewport={"width": 1440, "height": 900})
    failures: list[str] = []
    view.on("pageerror", lambda error: failures.append(str(error)))
    view.goto((site / start).as_uri())
    view.locator(".md-search__input").press_sequentially("xylophone", delay=20)
    found = view.locator(".md-search-result__item a").first
    found.wait_for(timeout=20_000)
    assert found.get_attribute("href").startswith((site / "deep/page.html").as_uri()) and not failures
    view.close()
