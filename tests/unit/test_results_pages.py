"""docs/results and the README: every figure is drawn from recorded figures, so none can be stale."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from burst_bench.paper.pages import draw
from burst_bench.texts import bytes_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
RECORDED = sorted(RESULTS.glob("*.json"))
NOT_DRAWN = {"gpu.md", "published.md"}  # gpu.md has no figures; test_published.py checks published.md


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Copy the recorded figures and the README, without the pages."""
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
    slower = re.sub(r'"seconds": \[[^\]]*', lambda found: re.sub(r"([\d.]+)", r"9\1", found[0]), row)  # every round
    (copies / "training.json").write_text(recorded.replace(row, slower), "utf-8")
    again = {path.name for path in draw(copies, copies / "front.md") if path.read_text("utf-8") != drawn[path]}
    assert again == {"training.md", "README.md", "front.md"}


def test_some_sections_draw_their_pages_and_an_index(copies: Path) -> None:
    for path in [*copies.glob("*.json")]:
        if path.stem not in ("peers", "perplexity"):
            path.unlink()
    assert {path.name for path in draw(copies)} == {"peers.md", "perplexity.md", "README.md"}
    assert "At a glance" not in (copies / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("burst bench paper", "- | not measured"),
        ("burst bench paper --quick", "- | not measured"),
        ("burst bench paper --rounds 2", " minutes with --rounds 2 | **not met**"),
        ("burst bench paper --rounds 2 --only peers", " minutes with --rounds 2, in 2 commands | **not met**"),
    ],
)
def test_minutes_count_if_the_sections_ran_alike(copies: Path, command: str, said: str) -> None:
    for path in copies.glob("*.json"):
        raw = json.loads(path.read_text("utf-8"))
        if "minutes" in raw and raw["command"].startswith("burst bench paper"):
            raw["command"] = command if path.stem == "peers" else "burst bench paper --rounds 2"
            path.write_text(json.dumps(raw), "utf-8")
    draw(copies)
    index = plain((copies / "README.md").read_text("utf-8"))
    assert re.search(rf"\| under 90 minutes \|[ 0-9]*{re.escape(said)}", index)


def with_rows(path: Path, like: str, **changes: object) -> None:
    """Add a copy of each of an engine's rows, with these values."""
    raw = json.loads(path.read_text("utf-8"))
    rows = raw["results"]["rows"]
    raw["results"]["rows"] = rows + [row | changes for row in rows if row["engine"] == like]
    path.write_text(json.dumps(raw), "utf-8")


def plain(text: str) -> str:
    """Remove the padding of columns, and replace special characters by ASCII."""
    for sign, letters in (("\N{MULTIPLICATION SIGN}", "x"), ("\N{MINUS SIGN}", "-"), ("· ¾", "* 3/4")):
        text = text.replace(sign, letters)
    return re.sub(r" +", " ", text)


def test_usp_the_published_and_what_was_planned_are_drawn_where_they_were_measured(copies: Path) -> None:
    for name in ("training", "memory"):  # remove these engines' rows, and the recorded plans
        raw = json.loads((copies / f"{name}.json").read_text("utf-8"))
        rows = [row for row in raw["results"]["rows"] if not row["engine"].startswith(("usp", "burst:"))]
        raw["results"]["rows"] = [{k: v for k, v in row.items() if k != "chosen"} for row in rows]
        (copies / f"{name}.json").write_text(json.dumps(raw), "utf-8")
    draw(copies, copies / "front.md")
    assert "against USP" not in (copies / "README.md").read_text("utf-8") and "burst's plan" not in (
        copies / "training.md"
    ).read_text("utf-8")
    for name in ("training", "memory"):
        with_rows(copies / f"{name}.json", "ulysses", engine="usp:ulysses_degree=4")
        with_rows(copies / f"{name}.json", "burst", engine="burst:published")
        text = (copies / f"{name}.json").read_text("utf-8")
        chosen = "zigzag, circulate='query', ulysses_degree=8"
        planned = text.replace('"engine": "burst",', f'"engine": "burst", "chosen": "{chosen}",')
        (copies / f"{name}.json").write_text(planned, "utf-8")
    draw(copies, copies / "front.md")
    index, bytes_page = (plain((copies / n).read_text("utf-8")) for n in ("README.md", "bytes.md"))
    (ulysses,) = re.findall(r"\| against Ulysses, [^|]*\| \| ([^|]*) \|", index)
    assert f"| against USP, `usp:ulysses_degree=4`: 8 nodes as a mesh | | {ulysses} |" in index
    assert "| against itself as published: whole heads, zigzag, whatever the links | | 1.00x and 1.00x |" in index
    assert "| burst | 32,768 | as planned: zigzag, circulate='query', ulysses_degree=8 | - |" in bytes_page
    n = 4096 * 256
    size = {"bfloat16": 2, "float32": 4}[raw["results"]["setting"]["dtype"]]
    assert f"| burst:published | 32,768 | 5 * 3/4 n (W - 1) b | {bytes_text(3.75 * n * 7 * size)} |" in bytes_page
    # 8 n 3 / 4 and, of a ring of two, 4 n, in that dtype; 2 n in fp32
    assert f"U = 4 | {bytes_text((6 * size + 4 * size + 2 * 4) * n)} |" in bytes_page
    training = plain((copies / "training.md").read_text("utf-8"))
    assert f"| burst | 32,768 | 8 | no limit | {chosen} |" in training


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_was_recorded_tells_its_code_and_has_a_line_for_each_row(path: Path) -> None:
    raw = json.loads(path.read_text("utf-8"))
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", raw["revision"])
    assert raw["versions"]["torch"] in raw["machine"]
    assert raw["command"].startswith("burst bench ") and raw["date"].startswith("20")
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
