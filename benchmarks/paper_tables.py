"""Figures to Markdown: one function for each page of docs/results. Verdicts are computed, never written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from burst_attention.bench.report_figures import bytes_text, link_text, number_text
from burst_attention.bench.results import Results, Row

REFERENCE = "tensor-sequence"
# What gloo sends for four gathers and four scatters, by what a ring sends: its reduce-scatter is a whole all-reduce.
MADE_UP = 1.5
GIB = 2**30


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def head(title: str, about: str, results: Results) -> str:
    """What every page begins with."""
    told = ", ".join(f"{name} {value}" for name, value in results.setting.items())
    return f"# {title}\n\n{about}\n\n{_origin(results.machine, results.date, results.command)}- Sizes: {told}.\n\n"


def _origin(machine: str, date: str, command: str) -> str:
    return f"- Machine: {machine}.\n- Date: {date}.\n- Command: `{command}`.\n"


def ratios(mine: Row, theirs: Row) -> list[float]:
    """By round: how many times as long theirs took."""
    return [b / a for a, b in zip(mine.seconds, theirs.seconds, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median (least to greatest)."""
    if not values:
        return "-"
    low, middle, high = (format(x, form) for x in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The right row with these attributes, if there is one."""
    return next((r for r in rows if r.passed and all(getattr(r, k) == v for k, v in wanted.items())), None)


def speeds(results: Results, *, compare: bool = True) -> str:
    """Times of every row; ``compare``: also burst's ratio to it, by round."""
    lines = []
    for row in results.rows:
        place = [row.engine, f"{row.seq_len:,}", str(row.world), link_text(row.link)]
        if row.refused or not row.passed:
            why = row.refused or f"WRONG: error {row.error:.1e}, bound {row.bound:.1e}"
            lines.append([*place, why, *[""] * 5])
            continue
        ours = find(results.rows, engine="burst", seq_len=row.seq_len, world=row.world, link=row.link)
        times = spread(ratios(ours, row)) if compare and ours is not None and row.engine != "burst" else "-"
        speed = [number_text(row.tokens_per_second), number_text((row.flops_per_second or 0) / 1e9)]
        lines.append([*place, spread(row.seconds), times, *speed, bytes_text(row.bytes_wire), f"{row.error:.1e}"])
    columns = ("engine", "tokens", "ranks", "link", "s, median (rounds)", "burst is faster by")
    return table((*columns, "tokens/s", "GFLOP/s", "on the wire, per rank", "error"), lines)


def training(results: Results, alone: Results) -> str:
    """Table 1."""
    rows = results.rows
    about = (
        "One optimizer step of a small Llama; every engine trains the same model to the same loss. The nodes are "
        "network namespaces of one machine, so all ranks share its cores: with more nodes than cores nothing computes "
        "faster than a single rank, and what differs is what they exchange and how much of it hides behind computing. "
        "`burst is faster by` is the median over rounds of (its seconds / burst's seconds) in the same round. "
        "`error` is the gradients' distance from fp64 at 512 tokens; one that exceeds three times a single rank's, or "
        "differs from the other engines at the timed length, is not timed."
    )
    text = head("Training step, by engine, length and link", about, results) + _links(rows) + "\n"
    text += speeds(results) + "\nOne rank alone with all cores, PyTorch's own attention:\n\n"
    text += speeds(alone, compare=False)
    return text + "\n## Targets\n\n" + _training_targets(rows)


def _links(rows: Sequence[Row]) -> str:
    """Each rate by what share of the reference's step it makes communication."""
    lines = []
    for length in dict.fromkeys(row.seq_len for row in rows):
        free = find(rows, engine=REFERENCE, seq_len=length, link=None)
        for link in dict.fromkeys(row.link for row in rows if row.link is not None):
            limited = find(rows, engine=REFERENCE, seq_len=length, link=link)
            if free and limited:
                share = 1 - (free.median or 0) / (limited.median or 1)
                lines.append([f"{length:,}", link_text(link), f"{100 * share:.0f} %"])
    return table(("tokens", "link of each node", f"share of {REFERENCE}'s step that is exchange"), lines)


def _training_targets(rows: Sequence[Row]) -> str:
    longest = max(row.seq_len for row in rows)
    links = sorted({row.link for row in rows if row.engine == "burst" and row.link is not None}, reverse=True)
    lines = []
    for link, rate, against in zip(links, ("middle", "slow"), ((1.7, 1.3), (2.2, 1.5)), strict=False):
        for engine, target in zip((REFERENCE, "ring"), against, strict=True):
            lines.append(_speed_target(rows, longest, link, f"{rate} rate", engine, target))
    for link in links:
        lines += _against_a_better_gloo(rows, longest, link)
    middle = links[0] if links else None
    mine, theirs = (find(rows, engine=e, seq_len=longest, link=middle) for e in ("burst", REFERENCE))
    if mine and theirs and mine.bytes_wire and theirs.bytes_wire:
        share = mine.bytes_wire / theirs.bytes_wire
        what = f"bytes on the wire at {longest:,} tokens, parameters included, as a share of {REFERENCE}'s"
        lines.append([what, "≤ 0.60", f"{share:.2f}", _verdict(share <= 0.60)])
        formula = mine.bytes_wire / theirs.bytes_predicted
        what = f"the same against {REFERENCE}'s activations as the ring algorithm would send them, and nothing else"
        lines.append([what, "-", f"{formula:.2f}", "for information: gloo's own reduce-scatter sends twice that"])
    return table(("what", "target", "measured", ""), lines)


def _against_a_better_gloo(rows: Sequence[Row], length: int, link: float) -> list[list[str]]:
    mine = find(rows, engine="burst", seq_len=length, link=link)
    theirs = find(rows, engine=REFERENCE, seq_len=length, link=MADE_UP * link)
    if not mine or not theirs:
        return []
    what = f"burst at {length:,} tokens, {link_text(link)}, against {REFERENCE} on links {MADE_UP} times as fast"
    value = (theirs.median or 0) / (mine.median or 1)
    return [[what, "-", f"{value:.2f}×", "for information: makes up for gloo's reduce-scatter; not interleaved"]]


def _speed_target(rows: Sequence[Row], length: int, link: float, rate: str, engine: str, target: float) -> list[str]:
    mine, theirs = (find(rows, engine=e, seq_len=length, link=link) for e in ("burst", engine))
    what = f"burst against {engine} at {length:,} tokens, {rate} ({link_text(link)})"
    if not mine or not theirs:
        return [what, f"≥ {target}×", "not measured", _verdict(False)]
    values = ratios(mine, theirs)
    return [what, f"≥ {target}×", f"{spread(values)}×", _verdict(statistics.median(values) >= target)]


def _verdict(met: bool) -> str:
    return "met" if met else "**not met**"


def prefill(results: Results) -> str:
    """Table 2."""
    about = (
        "The forward alone, up to the logits of the token that follows the sequence, with the middle link rate of the "
        "training table."
    )
    return head("First-token latency", about, results) + speeds(results)


def memory(results: Results, alone: Results) -> str:
    """Table 3: the peak against length, and the length that two GiB hold, by the line through the points."""
    about = (
        "Peak resident memory of a training step, of the highest rank, above what is resident after the imports. "
        "`fits in 2 GiB` is read off the least-squares line through the points: lengths of that size would take this "
        "machine days to compute, so it is an extrapolation."
    )
    rows = [row for row in (*results.rows, *alone.rows) if row.passed and row.link is None]
    lengths = sorted({row.seq_len for row in rows})
    lines = []
    for engine, world in dict.fromkeys((row.engine, row.world) for row in rows):
        points = {row.seq_len: row.peak_memory or 0 for row in rows if (row.engine, row.world) == (engine, world)}
        cells = [f"{points[n] / 2**20:,.0f} MiB" if n in points else "-" for n in lengths]
        lines.append([engine, str(world), *cells, *_line(points)])
    columns = (
        "engine",
        "ranks",
        *(f"{n:,} tokens" for n in lengths),
        "bytes per token and rank",
        "fits in 2 GiB per rank",
    )
    return head("Memory", about, results) + table(columns, lines)


def _line(points: dict[int, int]) -> list[str]:
    if len(points) < 2:
        return ["-", "-"]
    slope, start = statistics.linear_regression(list(points), list(points.values()))
    return [f"{slope:,.0f}", f"{(2 * GIB - start) / slope:,.0f} tokens" if slope > 0 else "-"]


FORMULAS: dict[str, tuple[str, Callable[[int, float, float], float]]] = {
    # of W ranks, n elements of a hidden state per rank, b bytes each; multi-head attention, causal
    "burst": ("5 · ¾ n (W − 1) b, and (lse, D)", lambda w, n, b: 3.75 * n * (w - 1) * b),
    "ring": ("4 n (W − 1) b + 2 n W · 4 − 2 n · 4, untrimmed", lambda w, n, b: 4 * n * (w - 1) * b + 8 * n * (w - 1)),
    "ulysses": ("8 n (W − 1) / W b", lambda w, n, b: 8 * n * (w - 1) / w * b),
    "tensor": ("9 n (W − 1) b: four sums of 2, one gather", lambda w, n, b: 9 * n * (w - 1) * b),
    "tensor-sequence": ("8 n (W − 1) b: four gathers, four scatters", lambda w, n, b: 8 * n * (w - 1) * b),
}


def sent(results: Results, counted: list[dict[str, Any]], size: tuple[int, int, int, int]) -> str:
    """Table 4."""
    about = (
        "Bytes that a rank sends in one training step, mean over ranks. `counted` is what the transport was given (of "
        "tensor parallelism: what its collectives send by the ring algorithm), `predicted` what the engine foretold; "
        "`on the wire` is the interface's counter, which has everything in it; `parameters` is the difference: "
        "parameters, their gradients, protocol headers, and what gloo sends beyond the ring algorithm: its "
        "reduce-scatter is a whole all-reduce. The formulas are of activations, per layer: W ranks, "
        "n = (tokens / W) · width elements, b bytes each."
    )
    setting = results.setting
    lines = []
    for row in results.rows:
        if row.passed and row.link is None:
            told, formula = FORMULAS[row.engine]
            n = row.seq_len / row.world * setting["width"]
            closed = setting["layers"] * formula(row.world, n, 2 if setting["dtype"] == "bfloat16" else 4)
            reference = find(results.rows, engine=REFERENCE, seq_len=row.seq_len, link=None)
            share = f"{(row.bytes_wire or 0) / (reference.bytes_wire or 1):.2f}" if reference else "-"
            figures = (closed, row.bytes_counted, row.bytes_predicted, row.bytes_wire, row.bytes_parameters)
            lines.append([row.engine, f"{row.seq_len:,}", told, *map(bytes_text, figures), share])
    columns = ("engine", "tokens", "formula", "by the formula", "counted", "predicted", "on the wire", "parameters")
    text = head("Bytes per rank and step", about, results) + table((*columns, f"of {REFERENCE}'s wire"), lines)
    return text + "\n## The attention alone, beside the packages\n\n" + _peer_bytes(counted, size)


def _peer_bytes(rows: list[dict[str, Any]], size: tuple[int, int, int, int]) -> str:
    world, length, heads, dim = size
    text = (
        f"Forward and backward of one causal call: {world} ranks, {length:,} tokens, H = {heads}, D = {dim}, bf16.\n\n"
    )
    named = {row["name"]: row for row in rows if row["bytes"]}
    base = named.get("ring-flash-attn zigzag")
    lines = []
    for row in rows:
        if not row["bytes"]:
            lines.append([row["name"], row["passes"], row["refused"] or "WRONG", "", ""])
            continue
        mean, most = statistics.fmean(row["bytes"]), max(row["bytes"])
        shares = ["-", "-"]
        if base and row["passes"] == base["passes"]:
            shares = [f"{x / statistics.fmean(base['bytes']):.2f}" for x in (mean, most)]
        lines.append([row["name"], row["passes"], bytes_text(mean), *shares])
    share = "of ring-flash-attn zigzag's"
    return text + table(("variant", "passes", "per rank, mean", share, "the busiest rank's"), lines)


def perplexity(raw: dict[str, Any], commands: Sequence[str], command: str) -> str:
    """Table 5."""
    from datetime import UTC, datetime

    from burst_attention.bench.run import machine

    rows = raw["results"]
    text = "# Perplexity\n\nOne model, trained by `burst`, evaluated by every engine on the same held-out sequences. "
    text += "The last column is the greatest difference of any token's log-likelihood from the reference engine's.\n\n"
    text += _origin(machine(), datetime.now(UTC).isoformat(timespec="seconds"), command)
    text += "".join(f"- `{each}`\n" for each in commands) + "\n"
    lines = []
    for row in rows:
        if row["refused"]:
            lines.append([row["engine"], row["refused"], *[""] * 4])
            continue
        apart = "reference" if row["engine"] == row["reference"] else f"{row['greatest_difference']:.1e}"
        figures = (f"{row['loss']:.7f}", f"{row['perplexity']:.6f}", f"{row['sequences']:,}", f"{row['tokens']:,}")
        lines.append([row["engine"], *figures, apart])
    return text + table(("engine", "loss", "perplexity", "sequences", "tokens", "greatest difference"), lines)


def ablation(rows: list[dict[str, Any]], scale: Any, link: float | None, command: str) -> str:
    """Table 6."""
    from datetime import UTC, datetime

    from burst_attention.bench.run import machine

    job = scale.job
    text = (
        "# Ablation\n\nOne causal attention, forward and backward, changed in one thing at a time. `ratio` is its time "
    )
    text += "by ours, round by round; `error` the worst relative L2 error of out, dq, dk, dv against fp64 at a shorter "
    text += "length; memory and bytes are of the highest rank and the mean rank.\n\n"
    text += _origin(machine(), datetime.now(UTC).isoformat(timespec="seconds"), command)
    text += (
        f"- Sizes: {scale.nodes} emulated nodes, {scale.ablation_len:,} tokens, H = {job.heads}, D = {job.head_dim}, "
    )
    text += f"bf16, link {link_text(link)}.\n\n"
    lines = []
    for row in rows:
        error = f"{max(row['errors'].values()):.1e}"
        if not row["correct"]:
            lines.append([row["name"], row["differs"], "WRONG", "", "", "", error])
            continue
        both = [a + b for a, b in zip(row["bytes_forward"], row["bytes_backward"], strict=True)]
        sizes = (bytes_text(statistics.fmean(both)), bytes_text(max(row["peak"])))
        lines.append([row["name"], row["differs"], spread(row["seconds"]), spread(row["ratios"]), *sizes, error])
    return text + table(("variant", "what differs", "s", "ratio", "sent per rank", "peak memory", "error"), lines)


def scaling(strong: Results, weak: Results) -> str:
    """Table 7."""
    about = (
        "Training step on local ranks, links without a limit. The ranks share this machine's cores (a rank alone has "
        "them all), so time can't fall with ranks here: at a fixed length, constant time means that spreading costs "
        "nothing; at a fixed length per rank, attention's work grows with the square of the ranks. GFLOP/s tells both: "
        "it should not fall. Memory per rank does fall."
    )
    text = head("Scaling", about, strong)
    for title, results in (("Fixed length", strong), ("Fixed length per rank", weak)):
        text += f"## {title}\n\n" + _scaling(results) + "\n"
    return text


def _scaling(results: Results) -> str:
    lines = []
    for row in results.rows:
        if not row.passed:
            lines.append([row.engine, str(row.world), f"{row.seq_len:,}", row.refused or "WRONG", "", ""])
            continue
        speed = number_text((row.flops_per_second or 0) / 1e9)
        lines.append(
            [row.engine, str(row.world), f"{row.seq_len:,}", spread(row.seconds), speed, bytes_text(row.peak_memory)]
        )
    return table(
        ("engine", "ranks", "tokens", "s", "GFLOP/s", "peak memory per rank"), sorted(lines, key=lambda x: x[0])
    )


def long(results: Results, imports: int) -> str:
    """128K tokens."""
    about = (
        "One attention layer, forward and backward, over one long sequence. `error` is of out and dq, in rows drawn at "
    )
    about += "random at this length, and of all results at 512 tokens, against fp64."
    (row,) = results.rows
    text = head(f"{row.seq_len:,} tokens through one layer", about, results)
    if not row.passed:
        return text + f"Not done: {row.refused or f'WRONG, error {row.error}'}\n"
    peak = row.peak_memory or 0
    lines = [
        ["ranks", str(row.world)],
        ["seconds", spread(row.seconds, ".1f")],
        ["GFLOP/s", number_text((row.flops_per_second or 0) / 1e9)],
        ["sent per rank, counted and predicted", f"{bytes_text(row.bytes_counted)}, {bytes_text(row.bytes_predicted)}"],
        ["peak memory of the highest rank, above its imports", bytes_text(peak)],
        ["all ranks, imports included, at most", bytes_text(peak * row.world + imports)],
        ["error", f"{row.error:.1e}"],
    ]
    return text + table(("", ""), lines)


def peers(rows: list[dict[str, Any]], size: tuple[int, int, int, int], command: str) -> str:
    """Ours beside the packages."""
    from datetime import UTC, datetime

    from burst_attention.bench.run import machine

    world, length, heads, dim = size
    text = (
        "# Beside the packages\n\nOne causal attention, forward and backward, all taking turns on the same ranks, over "
    )
    text += "torch's CPU flash kernels. `ratio` is the package's time by ours, round by round.\n\n"
    text += _origin(machine(), datetime.now(UTC).isoformat(timespec="seconds"), command)
    text += f"- Sizes: {world} ranks x 1 thread, {length:,} tokens, H = {heads}, D = {dim}, bf16, no limit.\n\n"
    lines = []
    for row in rows:
        name = f"{row['name']} {row['version'] or ''}".strip()
        if not row["seconds"]:
            lines.append([name, row["passes"], row["refused"] or "WRONG", "", ""])
            continue
        sent_bytes = bytes_text(statistics.fmean(row["bytes"])) if row["bytes"] else "-"
        lines.append([name, row["passes"], spread(row["seconds"]), spread(row["ratios"], ".3f"), sent_bytes])
    text += table(("variant", "passes", "s", "ratio", "sent per rank"), lines) + "\n"
    zigzag = next((r for r in rows if r["name"] == "ring-flash-attn zigzag" and r["ratios"]), None)
    if zigzag:
        ratio = statistics.median(zigzag["ratios"])
        target = [["burst against ring-flash-attn zigzag", "≥ 1.05×", f"{ratio:.3f}×", _verdict(ratio >= 1.05)]]
        text += table(("what", "target", "measured", ""), target)
    return text
