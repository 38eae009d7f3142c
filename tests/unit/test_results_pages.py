"""docs/results and the README: every figure is drawn from what was recorded, so none can go stale."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from burst_bench.paper.pages import draw

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
RECORDED = sorted(RESULTS.glob("*.json"))
NOT_DRAWN = {"gpu.md"}  # says what never ran


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The recorded figures and the README's text, without the pages."""
    for path in [*RECORDED, ROOT / "README.md"]:
        shutil.copy(path, tmp_path / path.name.replace("README", "front"))
    return tmp_path


def test_pages_and_readme_are_what_the_figures_draw(copies: Path) -> None:
    written = draw(copies, copies / "front.md")
    pages = {path.name for path in RESULTS.glob("*.md")} - NOT_DRAWN
    assert {path.name for path in written} == pages | {"front.md"}
    for name in pages:
        assert (copies / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8"), f"{name}: paper.py --draw"
    assert (copies / "front.md").read_text("utf-8") == (ROOT / "README.md").read_text("utf-8"), "paper.py --draw"


def test_another_figure_draws_another_page(copies: Path) -> None:
    drawn = {path: path.read_text("utf-8") for path in draw(copies, copies / "front.md")}
    recorded = (copies / "training.json").read_text("utf-8")
    row = next(
        x for x in recorded.splitlines() if '"ring"' in x and '"seq_len": 32768' in x and '"link": null' not in x
    )
    slower = re.sub(r'"seconds": \[([\d.]+)', r'"seconds": [9\1', row)
    (copies / "training.json").write_text(recorded.replace(row, slower), "utf-8")
    again = {path.name for path in draw(copies, copies / "front.md") if path.read_text("utf-8") != drawn[path]}
    assert again == {"training.md", "README.md", "front.md"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_was_recorded_tells_its_code_and_has_a_line_for_each_row(path: Path) -> None:
    raw = json.loads(path.read_text("utf-8"))
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", raw["revision"])
    assert raw["versions"]["torch"] in raw["machine"]
    assert raw["command"].startswith("python benchmarks/") and raw["date"].startswith("20")
    lines = [line.strip().rstrip(",") for line in path.read_text("utf-8").splitlines()]
    tables = [each for each in raw.values() if isinstance(each, list)]
    tables += [each["rows"] for each in raw.values() if isinstance(each, dict) and "rows" in each]
    for table in tables:
        if isinstance(table[0], dict | list):
            assert all(json.dumps(row) in lines for row in table)


def test_a_readme_without_its_marks_is_refused(copies: Path) -> None:
    (copies / "front.md").write_text("# nothing\n", "utf-8")
    with pytest.raises(ValueError, match="measured: end"):
        draw(copies, copies / "front.md")
