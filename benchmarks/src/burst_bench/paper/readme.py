"""Draw tables from the figures of docs/results: a few rows for the README, all rows for the index."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..harness.results import Row
from ..harness.turns import ratios
from .markdown import GLOO_WASTE, PUBLISHED, REFERENCE, Page, find
from .targets import PEER, attention_shares, limits, longest, relieved

BEGIN, END = "<!-- measured: drawn by burst bench paper --draw -->\n", "<!-- measured: end -->"


def draw_readme(readme: Path, folder: Path) -> None:
    """Replace the text between the two marks of ``readme``.

    Raises:
        ValueError: A mark does not stand exactly once, or a row for the table was not measured.
    """
    text = readme.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme} must contain {BEGIN.strip()!r} and {END!r} exactly once each; restore the marks")
    before, rest = text.split(BEGIN)
    readme.write_text(before + BEGIN + measured(folder, "readme.md") + "\n" + END + rest.split(END)[1], "utf-8")


def measured(folder: Path, template: str) -> str:
    """Render a table: ``readme.md``, the README's rows, or ``glance.md``, all rows."""
    pages = {path.stem.replace("-", "_"): Page.read(path) for path in folder.glob("*.json")}
    rows = pages["training"].results("results").rows
    length = longest(rows)
    rows = [row for row in rows if row.seq_len == length]
    free = [row.engine for row in rows if row.link is None and row.engine != "burst" and ":" not in row.engine]
    unlimited = [_ratio(rows, "burst", engine, None) for engine in free]
    reference, middle = _one(rows, REFERENCE, limits(rows)[0]), limits(rows)[0]
    ideal = (_one(rows, "burst", None).bytes_wire or 0) / (_one(rows, REFERENCE, None).bytes_predicted or 1)
    by_round = next(row["ratios"] for row in pages["peers"].raw["rows"] if row["name"] == PEER)
    ends = f"{min(by_round):.2f} to {max(by_round):.2f} over {len(by_round)} rounds"
    environment = Environment(loader=PackageLoader(__package__, "."), undefined=StrictUndefined)
    return environment.get_template(template).render(
        {name: page.raw for name, page in pages.items()},
        tokens=f"{length:,}",
        nodes=rows[0].nodes,
        reference=REFERENCE,
        waste=GLOO_WASTE,
        peer=PEER,
        published=PUBLISHED,
        meshes=[name for name in dict.fromkeys(row.engine for row in rows) if name.startswith("usp")],
        ran=lambda engine: any(row.engine == engine for row in rows),
        both=lambda *engines: " and ".join(f"{_ratio(rows, *engines, link):.2f}×" for link in limits(rows)),
        without_waste=" and ".join(f"{ratio:.2f}×" for *_, ratio in relieved(rows, "burst")),
        unlimited=f"{min(unlimited):.2f}× to {max(unlimited):.2f}×",
        share=lambda engine: f"{(_one(rows, engine, middle).bytes_wire or 0) / (reference.bytes_wire or 1):.2f}",
        ideal_share=f"{ideal:.2f}",
        peer_share=f"{(attention_shares(pages['memory'].raw['counted']) or [math.nan])[0]:.2f}",
        peer_ratio=f"{statistics.median(by_round):.2f}× ({ends})",
    )


def _ratio(rows: list[Row], engine: str, other: str, link: float | None) -> float:
    return statistics.median(ratios(*(_one(rows, name, link).seconds for name in (engine, other))))


def _one(rows: list[Row], engine: str, link: float | None) -> Row:
    row = find(rows, engine=engine, link=link)
    if row is None:
        raise ValueError(f"no correct row of {engine} at link={link}; measure the section again before drawing")
    return row
