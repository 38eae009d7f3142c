"""Draw the pages of docs/results from the JSON files of burst bench paper, and the index with all targets."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..claims.longest import longest_of
from ..harness.results import Results, Row
from ..peers.compare import cells
from ..tables import markdown
from ..texts import bytes_text, link_text, mebibytes, spread
from .markdown import PUBLISHED, REFERENCE, Page, find, gflops, outcome, sizes_of, speeds
from .readme import draw_readme, measured
from .targets import PEER, targets

GIB = 2**30
# Each page's introduction, by the name of the function below that draws the page.
PROSE = tomllib.loads(resources.files(__package__).joinpath("prose.toml").read_text("utf-8"))


def draw(folder: Path, readme: Path | None = None) -> list[Path]:
    """Write each section's page, the index, and the table of ``readme``; return the paths written."""
    written = []
    for name, pages in (PAGES | BESIDE).items():
        if (folder / f"{name}.json").exists():
            for page, make in pages.items():
                (folder / f"{page}.md").write_text(make(Page.read(folder / f"{name}.json")), "utf-8")
                written.append(folder / f"{page}.md")
    (folder / "README.md").write_text(index(folder, written), "utf-8")
    if readme is not None:
        draw_readme(readme, folder)
    return [*written, folder / "README.md", *([] if readme is None else [readme])]


def index(folder: Path, written: Sequence[Path]) -> str:
    """Return the index: targets, pages, and the minutes of each section."""
    titles = [(path, path.read_text("utf-8").splitlines()[0].removeprefix("# ")) for path in written]
    sections = [name for name in PAGES if (folder / f"{name}.json").exists()]
    minutes = {name: Page.read(folder / f"{name}.json").raw.get("minutes") for name in sections}
    known = {name: took for name, took in minutes.items() if took is not None}
    text = f"# Results\n\n{PROSE['index']}\n\n## Targets\n\n"
    text += targets(folder, PAGES)
    if all((folder / f"{name}.json").exists() for name in OF_GLANCE):
        text += "\n## At a glance\n\n" + measured(folder, "glance.md") + "\n"
    text += "\n## Pages\n\n"
    text += "".join(f"- [{title}]({path.name})\n" for path, title in titles)
    took = ", ".join(f"{name} {minutes:.0f}" for name, minutes in known.items())
    text += f"\nMinutes of each section: {took}; {sum(known.values()):.0f} in total"
    return text + ("; the limit is 90.\n" if set(known) == set(PAGES) else ".\n")


def training(page: Page) -> str:
    """Write the page of table 1."""
    results, alone = page.results("results"), page.results("alone")
    text = page.head("Training step, by engine, length and link", PROSE["training"], sizes_of(results))
    text += _links(results.rows) + "\n" + speeds(results)
    return text + "\nOne rank alone with all cores, PyTorch's own attention:\n\n" + speeds(alone)


def _links(rows: Sequence[Row]) -> str:
    """Describe each rate by the share of the reference's step that is exchange."""
    lines = []
    burst = {row.link for row in rows if row.engine == "burst" and row.link is not None}
    for length in dict.fromkeys(row.seq_len for row in rows):
        free = find(rows, engine=REFERENCE, seq_len=length, link=None)
        for link in sorted(burst, reverse=True):
            limited = find(rows, engine=REFERENCE, seq_len=length, link=link)
            if free and limited:
                share = 1 - (free.median or 0) / (limited.median or 1)
                cells = (f"{length:,}", link_text(round(link, -5)), f"{100 * share:.0f} %")
                columns = ("tokens", "link of each node", f"share of {REFERENCE}'s step that is exchange")
                lines.append(dict(zip(columns, cells, strict=True)))
    return markdown(lines)


def prefill(page: Page) -> str:
    """Write the page of table 2."""
    results = page.results("results")
    return page.head("First-token latency", PROSE["prefill"], sizes_of(results)) + speeds(results)


def memory(page: Page) -> str:
    """Write the page of table 3.

    It shows the peak by length, and the length that fits in 2 GiB by a line through the points.
    """
    results, alone = page.results("results"), page.results("alone")
    peaks: dict[tuple[str, int], dict[int, int]] = {}
    for row in (*results.rows, *alone.rows):
        if row.peak_memory is not None:
            peaks.setdefault((row.engine, row.world), {})[row.seq_len] = row.peak_memory
    lengths = sorted({length for points in peaks.values() for length in points})
    lines = []
    for (engine, world), points in peaks.items():
        by_length = {f"{length:,} tokens": mebibytes(points.get(length)) for length in lengths}
        lines.append({"engine": engine, "ranks": str(world)} | by_length | _line(points))
    for row in (*results.rows, *alone.rows):
        if why := outcome(row):
            lines.append({"engine": row.engine, "ranks": str(row.world), f"{row.seq_len:,} tokens": why})
    return page.head("Memory", PROSE["memory"], sizes_of(results)) + markdown(lines)


def _line(points: dict[int, int]) -> dict[str, str]:
    slope, fits = "-", "-"
    if len(points) > 1:
        per_token, start = statistics.linear_regression(list(points), list(points.values()))
        slope = f"{per_token:,.0f}"
        fits = f"{(2 * GIB - start) / per_token:,.0f} tokens" if per_token > 0 else "-"
    return {"bytes per token and rank": slope, "fits in 2 GiB per rank": fits}


def _contiguous(world: int) -> int:
    """Count tensors of the blocks below the diagonal: 2 + 4 if K, V circulate (less than half a ring ahead), else 2 + 3."""
    return sum((6 if 2 * ahead < world else 5) * (world - ahead) for ahead in range(1, world))


FORMULAS: dict[str, tuple[str, Callable[[int, float, float], float]]] = {
    # W ranks, n elements of a hidden state per rank, b bytes each; causal multi-head attention
    PUBLISHED: ("5 · ¾ n (W − 1) b", lambda w, n, b: 3.75 * n * (w - 1) * b),
    "burst:contiguous": (
        "n b · (6 near + 5 far) / W blocks (nearer than W / 2, or not)",
        lambda w, n, b: n * b * _contiguous(w) / w,
    ),
    "ring": ("4 n (W − 1) b + 2 n (W − 1) · 4, untrimmed", lambda w, n, b: 4 * n * (w - 1) * b + 8 * n * (w - 1)),
    "ulysses": ("8 n (W − 1) / W b", lambda w, n, b: 8 * n * (w - 1) / w * b),
    "tensor": ("9 n (W − 1) b: four sums of 2, one gather", lambda w, n, b: 9 * n * (w - 1) * b),
    "tensor-sequence": ("8 n (W − 1) b: four gathers, four scatters", lambda w, n, b: 8 * n * (w - 1) * b),
}


def _formula(row: Row) -> tuple[str, Callable[[int, float, float], float] | None]:
    """Return the formula as text and as a function; the planner's own choice has no function."""
    if row.engine == "burst":
        return (f"as planned: {row.chosen}", None) if row.chosen else FORMULAS[PUBLISHED]
    # Version 0.2 called the setting `heads`.
    name, _, degree = row.engine.partition(":ulysses_degree=")
    if name != "usp":
        return FORMULAS[row.engine]
    u = int(degree)

    def mesh(w: int, n: float, b: float) -> float:
        rest = w // u - 1
        return 8 * n * (u - 1) / u * b + 4 * n * rest * b + 8 * n * rest

    return f"8 n (U − 1) / U b, and as ring of W / U, untrimmed; U = {u}", mesh


def sent(page: Page) -> str:
    """Write the page of table 4."""
    results = page.results("results")
    setting = results.setting
    wires = {(engine, length): size for engine, length, size in page.raw["wire"]}
    lines = []
    for row in results.rows:
        place = {"engine": row.engine, "tokens": f"{row.seq_len:,}"}
        if why := outcome(row):
            lines.append(place | {"formula": why})
            continue
        in_words, formula = _formula(row)
        n = row.seq_len / row.world * setting["width"]
        size = 2 if setting["dtype"] == "bfloat16" else 4
        closed = formula and setting["layers"] * formula(row.world, n, size)
        wire, reference = (wires.get((engine, row.seq_len)) for engine in (row.engine, REFERENCE))
        uncounted = None if wire is None or row.bytes_counted is None else wire - row.bytes_counted
        sizes = {
            "by the formula": closed,
            "counted": row.bytes_counted,
            "predicted": row.bytes_predicted,
            "on the wire": wire,
            "uncounted": uncounted,
        }
        share = {f"of {REFERENCE}'s wire": f"{wire / reference:.2f}" if wire and reference else "-"}
        lines.append(place | {"formula": in_words} | {name: bytes_text(size) for name, size in sizes.items()} | share)
    text = page.head("Bytes per rank and step", PROSE["sent"], sizes_of(results)) + markdown(lines)
    packages = _peer_bytes(page.raw["counted"], page.raw["size"])
    return f"{text}\n## The attention alone, and other packages\n\n{packages}"


def _peer_bytes(rows: list[dict[str, Any]], size: Sequence[int]) -> str:
    world, length, heads, dim = size
    text = (
        f"Forward and backward of one causal call: {world} ranks, {length:,} tokens, H = {heads}, D = {dim}, bf16.\n\n"
    )
    base = next((row for row in rows if row["name"] == PEER and row["correct"] and row["bytes"]), None)
    lines = []
    for row in rows:
        name = {"variant": row["name"], "passes": row["passes"]}
        if not row["correct"] or not row["bytes"]:
            why = row["refused"] or ("WRONG" if not row["correct"] else "not counted")
            lines.append(name | {"per rank, mean": why})
            continue
        mean, most = statistics.fmean(row["bytes"]), max(row["bytes"])
        shares = ["-", "-"]
        if base and row["passes"] == base["passes"]:
            shares = [f"{x / statistics.fmean(base['bytes']):.2f}" for x in (mean, most)]
        cells = {"per rank, mean": bytes_text(mean), f"of {PEER}'s": shares[0], "the busiest rank's": shares[1]}
        lines.append(name | cells)
    return text + markdown(lines)


def perplexity(page: Page) -> str:
    """Write the page of table 5."""
    text = page.head(
        "Perplexity", PROSE["perplexity"], "the preset `tiny`: 2 layers, width 256, 4 heads, 2 key-value heads; fp32"
    )
    text += "".join(f"- `{each}`\n" for each in page.raw["commands"]) + "\n"
    lines = []
    for row in page.raw["engines"]:
        if row["refused"]:
            lines.append({"engine": row["engine"], "loss": row["refused"]})
            continue
        apart = "reference" if row["engine"] == row["reference"] else f"{row['greatest_difference']:.1e}"
        figures = {"loss": f"{row['loss']:.7f}", "perplexity": f"{row['perplexity']:.6f}"}
        counts = {name: f"{row[name]:,}" for name in ("sequences", "tokens")}
        lines.append({"engine": row["engine"]} | figures | counts | {"greatest difference": apart})
    return text + markdown(lines)


def ablation(page: Page) -> str:
    """Write the page of table 6."""
    size = page.raw["sizes"]
    sizes = (
        f"{size['ranks']} emulated nodes, {size['seq_len']:,} tokens, H = {size['heads']}, D = {size['head_dim']}, bf16"
    )
    text = page.head("Ablation", PROSE["ablation"], f"{sizes}, link {link_text(round(size['link'], -5))}")
    lines = []
    for row in page.raw["rows"]:
        name = {"variant": row["name"], "what differs": row["differs"]}
        error = {"error": f"{max(row['errors'].values()):.1e}"}
        if not row["correct"]:
            lines.append(name | {"s": "WRONG"} | error)
            continue
        both, work = (
            [a + b for a, b in zip(row[f"{kind}_forward"], row[f"{kind}_backward"], strict=True)]
            for kind in ("bytes", "scores")
        )
        figures = {
            "s": spread(row["seconds"]),
            "ratio": spread(row["ratios"]),
            "sent per rank": bytes_text(statistics.fmean(both)),
            "forward's memory": mebibytes(max(row["peak_forward"]), 1),
            "memory": mebibytes(max(row["peak"]), 1),
            "work": f"{max(work) / statistics.fmean(work):.2f}",
        }
        lines.append(name | figures | error)
    return text + markdown(lines)


def scaling(page: Page) -> str:
    """Write the page of table 7."""
    strong, weak = page.results("strong"), page.results("weak")
    text = page.head("Scaling", PROSE["scaling"], sizes_of(strong))
    for title, results in (("Fixed length", strong), ("Fixed length per rank", weak)):
        text += f"## {title}\n\n" + _scaling(results) + "\n"
    return text


def _scaling(results: Results) -> str:
    def cells(row: Row) -> dict[str, str]:
        place = {"engine": row.engine, "ranks": str(row.world), "tokens": f"{row.seq_len:,}"}
        if why := outcome(row):
            return place | {"s": why}
        figures = {"GFLOP/s": gflops(row), "peak memory per rank": mebibytes(row.peak_memory)}
        return place | {"s": spread(row.seconds)} | figures

    return markdown(map(cells, sorted(results.rows, key=lambda row: (row.engine, row.world))))


def long(page: Page) -> str:
    """Write the page of the run with 128K tokens."""
    results = page.results("results")
    (row,) = results.rows
    text = page.head(f"{row.seq_len:,} tokens through one layer", PROSE["long"], sizes_of(results))
    most = mebibytes(row.peak_resident and row.peak_resident * row.world)
    figures = {
        "ranks": str(row.world),
        "seconds of the only call, while its memory was measured": outcome(row) or spread(row.seconds, ".1f"),
        "GFLOP/s": gflops(row),
        "sent per rank, counted and predicted": f"{bytes_text(row.bytes_counted)}, {bytes_text(row.bytes_predicted)}",
        "peak memory of the highest rank, minus the memory resident before": mebibytes(row.peak_memory),
        "upper bound of all ranks' resident memory": most,
        "error": "-" if row.error is None else f"{row.error:.1e}",
    }
    return text + markdown({"what": what, "measured": figure} for what, figure in figures.items())


def peers(page: Page) -> str:
    """Write the page that compares ours with other packages."""
    world, length, heads, dim = page.raw["size"]
    sizes = f"{world} ranks x 1 thread, {length:,} tokens, H = {heads}, D = {dim}, bf16, no limit"
    rows = map(cells, page.raw["rows"])
    return page.head("Compared with other packages", PROSE["peers"], sizes) + markdown(rows)


def longest(page: Page) -> str:
    """Write the page of the longest sequence by recompute policy."""
    size = page.raw["size"]
    packed = f"documents of {size['document']:,} tokens" if size["document"] else "one document"
    width = size["heads"] * size["head_dim"]
    sizes = (
        f"{size['ranks']} ranks, {size['gib']:g} GiB each; {size['layers']} layers, width {width}, feed-forward "
        f"{size['intermediate']:,}, fp32; {packed}; lengths from {size['first']:,} tokens on, doubled up to {size['most']:,}"
    )
    return page.head("The longest sequence", PROSE["longest"], sizes) + markdown(longest_of(page.raw["rows"]))


# section -> its pages
PAGES: dict[str, dict[str, Callable[[Page], str]]] = {
    "training": {"training": training},
    "memory": {"memory": memory, "bytes": sent},
    "prefill": {"prefill": prefill},
    "perplexity": {"perplexity": perplexity},
    "ablation": {"ablation": ablation},
    "scaling": {"scaling": scaling},
    "long": {"long": long},
    "peers": {"peers": peers},
}
# Pages of separate commands.
BESIDE: dict[str, dict[str, Callable[[Page], str]]] = {"longest": {"longest": longest}}
OF_GLANCE = ("training", "memory", "peers", "attention", "memory-by-world")  # figures of the table "At a glance"
