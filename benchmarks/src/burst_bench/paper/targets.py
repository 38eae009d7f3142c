"""The targets, computed from the figures.

All are always shown; a missed target comes with an explanation.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.results import Row
from ..harness.turns import ratios
from ..tables import markdown
from ..texts import bytes_text, link_text, spread
from .markdown import GLOO_WASTE, REFERENCE, Page, find

PEER = "ring-flash-attn zigzag"
LOCAL = "on unlimited links no exchange needs overlap, and both run the same kernels on the same cores"


class Line(NamedTuple):
    """One target.

    Attributes:
        what: What is measured.
        target: The target, as text.
        measured: The measured value, as text.
        met: Whether the target was met; None if it was not measured.
        why: The explanation if it was missed.
    """

    what: str
    target: str
    measured: str = "-"
    met: bool | None = None
    why: str = ""

    def cells(self) -> dict[str, str]:
        verdict = {True: "met", None: "not measured"}.get(self.met, f"**not met**: {self.why}")
        return {"what": self.what, "target": self.target, "measured": self.measured, "verdict": verdict}


def targets(folder: Path, sections: Collection[str]) -> str:
    """Return a table with one row for each target.

    Args:
        folder: Folder with the figures.
        sections: Names of all sections.
    """
    pages = {path.stem: Page.read(path) for path in folder.glob("*.json")}
    rows = pages["training"].results("results").rows if "training" in pages else []
    lines = [*_training(rows), _attention_bytes(pages.get("memory")), _peers(pages.get("peers"))]
    lines += [_long(pages.get("long")), _minutes([pages.get(name) for name in sections])]
    return markdown(line.cells() for line in lines) + "\n" + _information(rows)


def _training(rows: list[Row]) -> list[Line]:
    length = longest(rows) or 32768
    middle, slow = limits(rows)
    asked = (
        (middle, "middle", ((REFERENCE, 1.85), ("ring", 1.3), ("ulysses", 1.0))),
        (slow, "slow", ((REFERENCE, 3.5), ("ring", 2.2), ("ulysses", 1.25))),
    )
    lines = [_speed(rows, length, link, name, *each) for link, name, pairs in asked for each in pairs]
    what = f"burst's bytes on the wire, parameters included, as a share of {REFERENCE}'s; {length:,} tokens"
    mine, theirs = (find(rows, engine=e, seq_len=length, link=middle) for e in ("burst", REFERENCE))
    if not (mine and theirs and mine.bytes_wire and theirs.bytes_wire):
        return [*lines, Line(what, "≤ 0.60")]
    share, why = mine.bytes_wire / theirs.bytes_wire, "parameters take a larger share of shorter sequences"
    return [*lines, Line(what, "≤ 0.60", f"{share:.2f}", share <= 0.60, why)]


def longest(rows: list[Row]) -> int:
    """Return the greatest length; 0 without rows."""
    return max((row.seq_len for row in rows), default=0)


def limits(rows: list[Row]) -> tuple[float | None, float | None]:
    """Return the middle and the slow link rate."""
    links = sorted({row.link for row in rows if row.engine == "burst" and row.link is not None}, reverse=True)
    return (links[0], links[1]) if len(links) == 2 else (None, None)


def _speed(rows: list[Row], length: int, link: float | None, name: str, engine: str, target: float) -> Line:
    what = f"burst's training step against {engine}'s at {length:,} tokens, {name} rate"
    mine, theirs = (find(rows, engine=e, seq_len=length, link=link) for e in ("burst", engine))
    if link is None or not mine or not theirs:
        return Line(what, f"≥ {target}×")
    free = [find(rows, engine=row.engine, seq_len=length, link=None) for row in (mine, theirs)]
    slower, alike = ["?", "?"], "?"
    if all(free):
        slower = [f"{row.median / first.median:.2f}" for row, first in zip((mine, theirs), free, strict=True)]
        alike = spread(ratios(*(row.seconds for row in free)))
    why = (
        f"without a limit the ratio is {alike}. At this rate burst's step takes {slower[0]} times as long, and {engine}'s "
        f"{slower[1]} times. Exchange that overlaps computing costs no time"
    )
    values = ratios(mine.seconds, theirs.seconds)
    return Line(what, f"≥ {target}×", f"{spread(values)}×", statistics.median(values) >= target, why)


def _attention_bytes(page: Page | None) -> Line:
    what = f"burst's attention: bytes as a share of {PEER}'s, 8 ranks"
    target = "≤ 0.135, the busiest rank ≤ 0.14"
    if (shares := attention_shares(page.raw["counted"] if page else [])) is None:
        return Line(what, target)
    mean, most = shares
    why = "with few tokens, agreements' records take a larger share"
    return Line(what, target, f"{mean:.3f}, the busiest rank {most:.3f}", mean <= 0.135 and most <= 0.14, why)


def attention_shares(counted: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return the bytes of our (mean rank, busiest rank) divided by :data:`PEER`'s mean.

    The result is None if one of the two was not counted.
    """
    rows = {row["name"]: row["bytes"] for row in counted if row["correct"] and row["bytes"]}
    if not {"burst", PEER} <= rows.keys():
        return None
    theirs = statistics.fmean(rows[PEER])
    return statistics.fmean(rows["burst"]) / theirs, max(rows["burst"]) / theirs


def _peers(page: Page | None) -> Line:
    length = page.raw["size"][1] if page else 8192
    what = f"burst's attention against {PEER}'s, no limit, bf16, 2 ranks, {length:,} tokens"
    row = next((row for row in (page.raw["rows"] if page else []) if row["name"] == PEER and row["ratios"]), None)
    if row is None:
        return Line(what, "≥ 1.05×")
    bare = spread(row["ratios_without_copies"], ".3f")
    measured = f"{spread(row['ratios'], '.3f')}×; {bare}× without the stand-in's copies"
    return Line(what, "≥ 1.05×", measured, statistics.median(row["ratios"]) >= 1.05, LOCAL)


def _long(page: Page | None) -> Line:
    what = "burst: one layer forward and backward, H = 4, D = 64: memory of all 4 ranks"
    row = page.results("results").rows[0] if page else None
    if row is None or not row.passed or row.peak_resident is None:
        return Line(what, "128K tokens in 24 GiB")
    total = row.peak_resident * row.world
    measured, met = f"{row.seq_len:,} tokens in {total / 2**30:.2f} GiB", total <= 24 * 2**30
    return Line(
        what, "128K tokens in 24 GiB", measured, row.seq_len >= 131072 and met, "only a shorter sequence was run"
    )


def _minutes(pages: list[Page | None]) -> Line:
    what, target = "time to measure all tables with one command on 2 cores", "under 90 minutes"
    commands = {page.raw["command"] for page in pages if page}
    minutes = [page.raw.get("minutes") if page else None for page in pages]
    alike = {command.partition(" --only ")[0] for command in commands}
    if None in minutes or len(alike) > 1 or any("--quick" in command for command in commands):
        return Line(what, target)
    (command,), total = alike, sum(minutes)
    options = command.removeprefix("burst bench paper").strip()  # --rounds, which makes a run shorter
    measured = f"{total:.0f} minutes" + f" with {options}" * bool(options)
    measured += f", in {len(commands)} commands" * (len(commands) > 1)
    met = None if (options or len(commands) > 1) and total < 90 else total < 90
    return Line(what, target, measured, met, "the sizes were chosen on a faster machine")


def _information(rows: list[Row]) -> str:
    """Return the reference's estimated times with a better reduce-scatter than gloo's."""
    length = longest(rows)
    text = (
        f"Gloo's reduce-scatter sends a whole all-reduce, so {REFERENCE} here sends {GLOO_WASTE} times the bytes of a "
        "better library. (burst and ring exchange the gradients of sharded parameters by all-to-all.) To estimate the "
        f"effect, {REFERENCE} also ran alone on links {GLOO_WASTE} times as fast:\n\n"
    )
    lines = []
    for link, theirs, ratio in relieved(rows, "burst"):
        rates = {"burst's link": link_text(link), f"{REFERENCE}'s link": link_text(theirs)}
        lines.append({"tokens": f"{length:,}"} | rates | {"its time / burst's": f"{ratio:.2f}×"})
    if not lines:
        return ""
    mine, theirs = (find(rows, engine=e, seq_len=length, link=None) for e in ("burst", REFERENCE))
    ideal = ""
    if mine and theirs and mine.bytes_wire and theirs.bytes_predicted:
        ideal = (
            f"\nEach rank sends {bytes_text(mine.bytes_wire)} in total with burst. With {REFERENCE} and the ring algorithm it "
            f"would send {bytes_text(theirs.bytes_predicted)} of activations alone. burst's share is "
            f"{mine.bytes_wire / theirs.bytes_predicted:.2f}.\n"
        )
    return text + markdown(lines) + ideal


def relieved(rows: list[Row], engine: str) -> list[tuple[float, float, float]]:
    """Return the reference's ratios on faster links at the greatest length.

    Each item is (link, the reference's faster link, the reference's time divided by ``engine``'s).
    """
    length = longest(rows)
    ratios_by_link = []
    for link in (x for x in limits(rows) if x is not None):
        mine = find(rows, engine=engine, seq_len=length, link=link)
        theirs = find(rows, engine=REFERENCE, seq_len=length, link=GLOO_WASTE * link)
        if mine and theirs:
            ratios_by_link.append((link, GLOO_WASTE * link, (theirs.median or 0) / (mine.median or 1)))
    return ratios_by_link
