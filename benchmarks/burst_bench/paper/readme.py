"""The README's table of what was measured, drawn from the figures of docs/results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from ..harness.results import Row, ratios
from .markdown import REFERENCE, Page, find, table
from .targets import PEER, limits, relieved

BEGIN, END = "<!-- measured: drawn by python benchmarks/paper.py --draw -->\n", "<!-- measured: end -->"
PAPER = "`python benchmarks/paper.py`"


def draw_readme(readme: Path, folder: Path) -> None:
    """Replace what stands between the two marks of ``readme``.

    Raises:
        ValueError: the marks aren't there, once each.
    """
    text = readme.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme} must have {BEGIN.strip()!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    pages = {path.stem: Page.read(path) for path in folder.glob("*.json")}
    rows = [*_alone(pages), *_training(pages["training"]), *_packages(pages)]
    lines = ({"what": what, "command": command, "result": result} for what, command, result in rows)
    readme.write_text(before + BEGIN + table(lines) + END + rest.split(END)[1], "utf-8")


def _alone(pages: dict[str, Page]) -> Iterator[tuple[str, str, str]]:
    """What is measured by commands of their own."""
    attention, memory = pages["attention"].raw, pages["memory-by-world"].raw
    size, ratio = attention["size"], attention["ratio"]
    yield (
        f"causal attention, forward and backward, bf16, S = {size['seq_len']}, H = {size['heads']}, D = {size['head_dim']}: "
        f"{size['world']} ranks × 1 thread against PyTorch's own kernel in one process × {size['world']} threads",
        f"`{attention['command']}`",
        f"{ratio['median']:.2f} × ({ratio['least']:.2f} to {ratio['greatest']:.2f} over {attention['rounds']} rounds)",
    )
    worlds, peaks = zip(*((str(row["world"]), f"{row['peak'] / 2**20:.0f}") for row in memory["rows"]), strict=True)
    what = f"peak memory per rank, S = {memory['size']['seq_len']}, at {', '.join(worlds)} ranks"
    yield what, f"`{memory['command']}`", f"{', '.join(peaks)} MiB"
    yield "bytes sent by the attention in a training step, counted and predicted", "`make demo`", "equal"


def _training(page: Page) -> Iterator[tuple[str, str, str]]:
    """Of the steps at the greatest length: at the middle and at the slow rate."""
    rows = page.results("results").rows
    length = max(row.seq_len for row in rows)
    rows = [row for row in rows if row.seq_len == length]
    nodes = rows[0].nodes
    yield (
        f"a training step of {length:,} tokens over {nodes} emulated nodes, against tensor parallelism with sequence "
        "parallelism, links at which that exchanges for half of its step; and at a quarter of that rate",
        PAPER,
        f"{_both(rows, 'burst', REFERENCE)} as fast; contiguous layout {_both(rows, 'burst:contiguous', REFERENCE)}",
    )
    yield (
        "the same, gloo's wasteful reduce-scatter made up for by links 1.5 times as fast for tensor parallelism alone",
        "",
        " and ".join(f"{ratio:.2f}×" for *_, ratio in relieved(rows, "burst")),
    )
    own, contiguous = (_both(rows, engine, "ring") for engine in ("burst", "burst:contiguous"))
    yield "against RingAttention (zigzag, same sweep and kernels)", "", f"{own}; contiguous layout {contiguous}"
    most = "against Ulysses, which exchanges least where there are as many key-value heads as ranks"
    yield most, "", _both(rows, "burst", "ulysses")
    free = [_ratio(rows, "burst", row.engine, None) for row in rows if row.link is None and ":" not in row.engine]
    others = [ratio for ratio in free if ratio != 1.0]
    yield "without a limit, against any of those on shared cores", "", f"{min(others):.2f}× to {max(others):.2f}×"
    burst, contiguous, theirs = (_wire(rows, e, limits(rows)[0]) for e in ("burst", "burst:contiguous", REFERENCE))
    ideal = _wire(rows, "burst", None) / (_one(rows, REFERENCE, None).bytes_predicted or 1)
    yield (
        "its bytes on the wire, parameters included, as a share of tensor parallelism's",
        "",
        f"{burst / theirs:.2f}, without gloo's waste {ideal:.2f}; contiguous layout {contiguous / theirs:.2f}",
    )


def _packages(pages: dict[str, Page]) -> Iterator[tuple[str, str, str]]:
    counted, peers = pages["memory"].raw, pages["peers"].raw
    mine, theirs = (
        statistics.fmean(row["bytes"]) for name in ("burst", PEER) for row in counted["counted"] if row["name"] == name
    )
    what = f"the attention's bytes as a share of {PEER}'s, {counted['size'][0]} ranks"
    yield what, "", f"{mine / theirs:.2f}"
    by_round = next(row["ratios"] for row in peers["rows"] if row["name"] == PEER)
    world, length, *_ = peers["size"]
    yield (
        f"attention against {PEER}, {world} ranks, no limit, S = {length}, bf16",
        "",
        f"{statistics.median(by_round):.2f}× ({min(by_round):.2f} to {max(by_round):.2f} over {len(by_round)} rounds)",
    )


def _both(rows: list[Row], engine: str, other: str) -> str:
    return " and ".join(f"{_ratio(rows, engine, other, link):.2f}×" for link in limits(rows))


def _ratio(rows: list[Row], engine: str, other: str, link: float | None) -> float:
    return statistics.median(ratios(_one(rows, engine, link), _one(rows, other, link)))


def _wire(rows: list[Row], engine: str, link: float | None) -> float:
    return _one(rows, engine, link).bytes_wire or 0.0


def _one(rows: list[Row], engine: str, link: float | None) -> Row:
    row = find(rows, engine=engine, link=link)
    if row is None:
        raise ValueError(f"no right row of {engine} at link={link}: measure the section again before drawing")
    return row
