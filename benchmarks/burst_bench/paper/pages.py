"""Measurement to Markdown: a page of docs/results for each JSON of benchmarks/paper.py, and an index with every target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from burst_bench.report.figures import bytes_text, link_text, number_text
from burst_bench.results import Results, Row
from paper_markdown import REFERENCE, Page, find, mebibytes, outcome, sizes_of, speeds, spread, table
from paper_targets import PEER, targets

GIB = 2**30


def draw(folder: Path) -> list[Path]:
    """Write a page for each section's figures, and the index; returns what was written."""
    written = []
    for name, pages in PAGES.items():
        if (folder / f"{name}.json").exists():
            for page, make in pages.items():
                (folder / f"{page}.md").write_text(make(Page.read(folder / f"{name}.json")), "utf-8")
                written.append(folder / f"{page}.md")
    (folder / "README.md").write_text(index(folder, written), "utf-8")
    return [*written, folder / "README.md"]


def index(folder: Path, written: Sequence[Path]) -> str:
    """Targets, pages and how long they took."""
    titles = [(path, path.read_text("utf-8").splitlines()[0].removeprefix("# ")) for path in written]
    minutes = {name: Page.read(folder / f"{name}.json").raw.get("minutes") for name in PAGES if _has(folder, name)}
    known = {name: took for name, took in minutes.items() if took is not None}
    text = (
        "# Results\n\nEvery figure here is measured by `python benchmarks/paper.py` on one machine; each page names it. "
        "The engines train, or compute, the same thing and take turns; one whose result is wrong gets no figures. One "
        "layer with H = 8, D = 32: what this machine can compute in the time. Beside each page lie its raw figures as "
        "JSON.\n\n## Targets\n\n"
    )
    text += targets(folder, PAGES) + "\n## Pages\n\n"
    text += "".join(f"- [{title}]({path.name})\n" for path, title in titles)
    took = ", ".join(f"{name} {minutes:.0f}" for name, minutes in known.items())
    text += f"\nMinutes that the sections took: {took}; {sum(known.values()):.0f} in all"
    return text + (", of 90 that they may take.\n" if set(known) == set(PAGES) else ".\n")


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def training(page: Page) -> str:
    """Table 1."""
    results, alone = page.results("results"), page.results("alone")
    about = (
        "One optimizer step of a small Llama; every engine trains the same model to the same loss. The nodes are "
        "network namespaces of one machine, so all ranks share its cores: with more nodes than cores nothing computes "
        "faster than a single rank, and what differs is what the engines exchange and how much of it hides behind "
        "computing. `its time / burst's` is the median over rounds, each ratio from one round (above 1: burst is faster); "
        "a round begins with another engine than the last. The optimizer's rate is 0, so that every call can be compared. "
        "`error` is the gradients' distance from fp64 at 512 tokens, which may be three times a single "
        "rank's; at the timed length the engines are compared with each other. An engine that fails either is not timed. "
        "`burst` is the default, zigzag with queries travelling in the backward; `burst:contiguous` lets either side "
        "travel: fewer bytes, but its busiest rank computes 1 / ranks more of the attention than the mean, which ranks "
        "that share cores don't feel. Tensor parallelism's collectives are gloo's own, whose reduce-scatter sends twice "
        "what it need; the parameters' gradients of the others go by all-to-all."
    )
    text = page.head("Training step, by engine, length and link", about, sizes_of(results))
    text += _links(results.rows) + "\n" + speeds(results)
    return text + "\nOne rank alone with all cores, PyTorch's own attention:\n\n" + speeds(alone)


def _links(rows: Sequence[Row]) -> str:
    """Each rate by what share of the reference's step it makes exchange."""
    lines = []
    burst = {row.link for row in rows if row.engine == "burst" and row.link is not None}
    for length in dict.fromkeys(row.seq_len for row in rows):
        free = find(rows, engine=REFERENCE, seq_len=length, link=None)
        for link in sorted(burst, reverse=True):
            limited = find(rows, engine=REFERENCE, seq_len=length, link=link)
            if free and limited:
                share = 1 - (free.median or 0) / (limited.median or 1)
                lines.append([f"{length:,}", link_text(round(link, -5)), f"{100 * share:.0f} %"])
    return table(("tokens", "link of each node", f"share of {REFERENCE}'s step that is exchange"), lines)


def prefill(page: Page) -> str:
    """Table 2."""
    results = page.results("results")
    about = "The forward alone, up to the logits of the token that follows the sequence, at the training table's middle rate."
    return page.head("First-token latency", about, sizes_of(results)) + speeds(results)


def memory(page: Page) -> str:
    """Table 3: the peak against length, and the length that two GiB hold, by the line through the points."""
    results, alone = page.results("results"), page.results("alone")
    about = (
        "Peak resident memory of a training step, of the highest rank, above what is resident before the engine's model "
        "is built; each engine by itself. `fits in 2 GiB` is read off the least-squares line through the points, not "
        "run: with the time of attention in the square of the length, the whole column would take this machine hours."
    )
    rows = [row for row in (*results.rows, *alone.rows) if row.peak_memory is not None]
    lengths = sorted({row.seq_len for row in rows})
    lines = []
    for engine, world in dict.fromkeys((row.engine, row.world) for row in rows):
        points = {row.seq_len: row.peak_memory or 0 for row in rows if (row.engine, row.world) == (engine, world)}
        lines.append([engine, str(world), *(mebibytes(points.get(n)) for n in lengths), *_line(points)])
    lines += [[row.engine, str(row.world), why] for row in (*results.rows, *alone.rows) if (why := outcome(row))]
    columns = (
        "engine",
        "ranks",
        *(f"{n:,} tokens" for n in lengths),
        "bytes per token and rank",
        "fits in 2 GiB per rank",
    )
    return page.head("Memory", about, sizes_of(results)) + table(columns, lines)


def _line(points: dict[int, int]) -> list[str]:
    if len(points) < 2:
        return ["-", "-"]
    slope, start = statistics.linear_regression(list(points), list(points.values()))
    return [f"{slope:,.0f}", f"{(2 * GIB - start) / slope:,.0f} tokens" if slope > 0 else "-"]


def _contiguous(world: int) -> int:
    """Of the blocks below the diagonal: 2 + 4 where K, V travel (less than half a ring ahead), 2 + 3 where Q does."""
    return sum((6 if 2 * ahead < world else 5) * (world - ahead) for ahead in range(1, world))


FORMULAS: dict[str, tuple[str, Callable[[int, float, float], float]]] = {
    # of W ranks, n elements of a hidden state per rank, b bytes each; multi-head attention, causal
    "burst": ("5 · ¾ n (W − 1) b", lambda w, n, b: 3.75 * n * (w - 1) * b),
    "burst:contiguous": (
        "n b · (6 near + 5 far) / W blocks (nearer than W / 2, or not)",
        lambda w, n, b: n * b * _contiguous(w) / w,
    ),
    "ring": ("4 n (W − 1) b + 2 n (W − 1) · 4, untrimmed", lambda w, n, b: 4 * n * (w - 1) * b + 8 * n * (w - 1)),
    "ulysses": ("8 n (W − 1) / W b", lambda w, n, b: 8 * n * (w - 1) / w * b),
    "tensor": ("9 n (W − 1) b: four sums of 2, one gather", lambda w, n, b: 9 * n * (w - 1) * b),
    "tensor-sequence": ("8 n (W − 1) b: four gathers, four scatters", lambda w, n, b: 8 * n * (w - 1) * b),
}


def sent(page: Page) -> str:
    """Table 4."""
    results = page.results("results")
    about = (
        "Bytes that a rank sends in one training step, mean over ranks. `counted` is what the transport was given (of "
        "tensor parallelism: what its collectives send by the ring algorithm), `predicted` what the engine foretold; "
        "`on the wire` is the interface's counter in the training table, which has everything in it; `uncounted` is the difference: "
        "parameters, their gradients, protocol headers, and, most of it where tensor parallelism scatters, what gloo "
        "sends beyond the ring algorithm: its reduce-scatter is a whole all-reduce. The formulas are of activations, per "
        "layer: W ranks, n = (tokens / W) · width elements, b bytes each; burst's leave out (lse, D), some hundredths; "
        "ring's is RingAttention's as published, here rows that nobody needs are not sent."
    )
    setting = results.setting
    wires = {(engine, length): size for engine, length, size in page.raw["wire"]}
    lines = []
    for row in results.rows:
        if why := outcome(row):
            lines.append([row.engine, f"{row.seq_len:,}", why])
            continue
        told, formula = FORMULAS[row.engine]
        n = row.seq_len / row.world * setting["width"]
        closed = setting["layers"] * formula(row.world, n, 2 if setting["dtype"] == "bfloat16" else 4)
        wire, reference = (wires.get((engine, row.seq_len)) for engine in (row.engine, REFERENCE))
        share = f"{wire / reference:.2f}" if wire and reference else "-"
        uncounted = None if wire is None or row.bytes_counted is None else wire - row.bytes_counted
        figures = (closed, row.bytes_counted, row.bytes_predicted, wire, uncounted)
        lines.append([row.engine, f"{row.seq_len:,}", told, *map(bytes_text, figures), share])
    columns = ("engine", "tokens", "formula", "by the formula", "counted", "predicted", "on the wire", "uncounted")
    text = page.head("Bytes per rank and step", about, sizes_of(results))
    text += table((*columns, f"of {REFERENCE}'s wire"), lines)
    return (
        text + "\n## The attention alone, beside the packages\n\n" + _peer_bytes(page.raw["counted"], page.raw["size"])
    )


def _peer_bytes(rows: list[dict[str, Any]], size: Sequence[int]) -> str:
    world, length, heads, dim = size
    text = (
        f"Forward and backward of one causal call: {world} ranks, {length:,} tokens, H = {heads}, D = {dim}, bf16.\n\n"
    )
    base = next((row for row in rows if row["name"] == PEER and row["correct"] and row["bytes"]), None)
    lines = []
    for row in rows:
        if not row["correct"] or not row["bytes"]:
            why = row["refused"] or ("WRONG" if not row["correct"] else "not counted")
            lines.append([row["name"], row["passes"], why, "", ""])
            continue
        mean, most = statistics.fmean(row["bytes"]), max(row["bytes"])
        shares = ["-", "-"]
        if base and row["passes"] == base["passes"]:
            shares = [f"{x / statistics.fmean(base['bytes']):.2f}" for x in (mean, most)]
        lines.append([row["name"], row["passes"], bytes_text(mean), *shares])
    return text + table(("variant", "passes", "per rank, mean", f"of {PEER}'s", "the busiest rank's"), lines)


def perplexity(page: Page) -> str:
    """Table 5."""
    about = (
        "One model, trained by `burst`, evaluated by every engine on the same held-out sequences. The last column is the "
        "greatest difference of any token's log-likelihood from the reference engine's."
    )
    text = page.head("Perplexity", about, "the preset `tiny`: 2 layers, width 256, 4 heads, 2 key-value heads; fp32")
    text += "".join(f"- `{each}`\n" for each in page.raw["commands"]) + "\n"
    lines = []
    for row in page.raw["engines"]:
        if row["refused"]:
            lines.append([row["engine"], row["refused"], *[""] * 4])
            continue
        apart = "reference" if row["engine"] == row["reference"] else f"{row['greatest_difference']:.1e}"
        figures = (f"{row['loss']:.7f}", f"{row['perplexity']:.6f}", f"{row['sequences']:,}", f"{row['tokens']:,}")
        lines.append([row["engine"], *figures, apart])
    return text + table(("engine", "loss", "perplexity", "sequences", "tokens", "greatest difference"), lines)


def ablation(page: Page) -> str:
    """Table 6."""
    about = (
        "One causal attention, forward and backward, changed in one thing at a time. `ratio` is its time by ours, round "
        "by round; `error` the worst relative L2 error of out, dq, dk, dv against fp64 at 2,048 tokens or fewer; bytes "
        "are the mean rank's, memory (of the forward; of all) the highest's; `work` is the busiest rank's share of what all compute, by the mean: "
        "ranks that share cores don't feel it, ranks with a core each wait for it."
    )
    size = page.raw["sizes"]
    told = f"{size['ranks']} emulated nodes, {size['seq_len']:,} tokens, H = {size['heads']}, D = {size['head_dim']}, bf16, "
    text = page.head("Ablation", about, told + f"link {link_text(round(size['link'], -5))}")
    lines = []
    for row in page.raw["rows"]:
        error = f"{max(row['errors'].values()):.1e}"
        if not row["correct"]:
            lines.append([row["name"], row["differs"], "WRONG", *[""] * 5, error])
            continue
        both, work = (
            [a + b for a, b in zip(row[f"{name}_forward"], row[f"{name}_backward"], strict=True)]
            for name in ("bytes", "scores")
        )
        peaks = (mebibytes(max(row[name]), 1) for name in ("peak_forward", "peak"))
        sizes = (bytes_text(statistics.fmean(both)), *peaks)
        busiest = f"{max(work) / statistics.fmean(work):.2f}"
        lines.append(
            [row["name"], row["differs"], spread(row["seconds"]), spread(row["ratios"]), *sizes, busiest, error]
        )
    columns = ("variant", "what differs", "s", "ratio", "sent per rank", "forward's memory", "memory", "work", "error")
    return text + table(columns, lines)


def scaling(page: Page) -> str:
    """Table 7."""
    strong, weak = page.results("strong"), page.results("weak")
    about = (
        "Training step on local ranks, links without a limit. The ranks share this machine's cores (a rank alone has "
        "them all), so time can't fall with ranks here: at a fixed length, constant time means that spreading costs "
        "nothing; at a fixed length per rank, attention's work grows with the square of the ranks. GFLOP/s tells both: "
        "it should not fall. Memory per rank does."
    )
    text = page.head("Scaling", about, sizes_of(strong))
    for title, results in (("Fixed length", strong), ("Fixed length per rank", weak)):
        text += f"## {title}\n\n" + _scaling(results) + "\n"
    return text


def _scaling(results: Results) -> str:
    lines = []
    for row in sorted(results.rows, key=lambda row: (row.engine, row.world)):
        place = [row.engine, str(row.world), f"{row.seq_len:,}"]
        if why := outcome(row):
            lines.append([*place, why, "", ""])
            continue
        speed = number_text((row.flops_per_second or 0) / 1e9)
        lines.append([*place, spread(row.seconds), speed, mebibytes(row.peak_memory)])
    return table(("engine", "ranks", "tokens", "s", "GFLOP/s", "peak memory per rank"), lines)


def long(page: Page) -> str:
    """128K tokens."""
    results = page.results("results")
    (row,) = results.rows
    about = (
        "One attention layer, forward and backward, over one long sequence. `error` is against fp64: of out and dq in "
        "rows drawn at random at this length, of dk and dv by what their sums must be, and of all results at 512 tokens."
    )
    text = page.head(f"{row.seq_len:,} tokens through one layer", about, sizes_of(results))
    lines = [
        ["ranks", str(row.world)],
        ["seconds, of the one call, with its memory watched", outcome(row) or spread(row.seconds, ".1f")],
        ["GFLOP/s", number_text((row.flops_per_second or 0) / 1e9)],
        ["sent per rank, counted and predicted", f"{bytes_text(row.bytes_counted)}, {bytes_text(row.bytes_predicted)}"],
        ["peak memory of the highest rank, above what was resident before", mebibytes(row.peak_memory)],
        [
            "all ranks, with all that is resident, at most",
            mebibytes(row.peak_resident and row.peak_resident * row.world),
        ],
        ["error", "-" if row.error is None else f"{row.error:.1e}"],
    ]
    return text + table(("", ""), lines)


def peers(page: Page) -> str:
    """Ours beside the packages."""
    about = (
        "One causal attention, forward and backward, all taking turns on the same ranks, over torch's CPU flash kernels. "
        "`ratio` is the package's time by ours, round by round. The packages call flash_attn, whose [B, S, H, D] layout "
        "costs them a few copies on these kernels; on a GPU it would not: `without copies` is the ratio with the time of "
        "those copies taken off."
    )
    world, length, heads, dim = page.raw["size"]
    sizes = f"{world} ranks x 1 thread, {length:,} tokens, H = {heads}, D = {dim}, bf16, no limit"
    lines = []
    for row in page.raw["rows"]:
        name = f"{row['name']} {row['version'] or ''}".strip()
        if not row["seconds"]:
            why = row["refused"] or ("not timed" if row["correct"] else "WRONG")
            lines.append([name, row["passes"], why, "", "", ""])
            continue
        sent_bytes = bytes_text(statistics.fmean(row["bytes"])) if row["bytes"] else "-"
        by_round = (spread(row.get(key, ()), ".3f") for key in ("ratios", "ratios_without_copies"))
        lines.append([name, row["passes"], spread(row["seconds"]), *by_round, sent_bytes])
    text = page.head("Beside the packages", about, sizes)
    return text + table(("variant", "passes", "s", "ratio", "without copies", "sent per rank"), lines)


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
