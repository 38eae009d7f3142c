"""The report and the documentation site in a real browser: no errors, every plot is drawn, the search works."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from burst_bench.report import page

from tests.support.bench_results import RESULTS

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


@pytest.mark.long
def test_browser_draws_every_plot_without_a_network(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(RESULTS), "utf-8")
    view, complaints = browser.new_page(), []
    view.on("console", lambda said: complaints.append(said.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("request", lambda asked: complaints.extend([asked.url] * (not asked.url.startswith("file:"))))
    view.goto(path.as_uri())
    view.wait_for_function("document.querySelectorAll('.main-svg .points path').length >= 35", timeout=20_000)
    drawn = "[...document.querySelectorAll('.plotly-graph-div')].map(p => p.querySelectorAll('.points path').length)"
    assert view.evaluate(drawn) == [6, 6, 5, 6, 6, 6]
    assert complaints == []
    view.close()


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
