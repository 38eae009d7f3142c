"""The text and figures that ``burst plan`` prints, and the same figures as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from burst_attention.planner.choice import TIE

from ..figures import bytes_text, digits, seconds_text, tokens_text
from ..forecast.forecast import Forecast, fastest, recommended
from ..forecast.request import ForecastRequest


def headline(request: ForecastRequest) -> str:
    """Return one line that names the model, sequence, ranks, hardware and dtype."""
    cluster = request.cluster
    nodes, length = cluster.nodes, tokens_text(request.seq_len // request.joined)
    uneven = nodes > 1 and cluster.last < cluster.per_node
    fewer = f" (the last with {cluster.last} of {cluster.per_node})" if uneven else ""
    each = f"{request.joined} packed sequences of {length}" if request.joined > 1 else length
    return (
        f"{request.model.name}, {each} tokens over "
        f"{cluster.ranks:,} rank{'s' * (cluster.ranks > 1)} on {nodes:,} node{'s' * (nodes > 1)}{fewer}, "
        f"{cluster.rates.name}, {str(request.dtype).removeprefix('torch.')}"
    )


def short_rows(request: ForecastRequest, found: list[Forecast]) -> Iterator[dict[str, str]]:
    """Yield a row of figures for each strategy."""
    for each in found:
        row = {"strategy": each.strategy, "step": "-", "tokens/s": "-", "memory": "-", "--remat": "-"}
        if not each.refused:
            row["step"] = seconds_text(each.seconds)
            row["tokens/s"] = digits(each.tokens_per_second * request.cluster.ranks)
            row["memory"] = "unknown" if each.bytes is None else bytes_text(each.bytes)
            row["--remat"] = each.remat
        fits = {None: "unknown", True: "fits", False: "too large"}[each.fits]
        yield row | {"verdict": "refused" if each.refused else fits}


def verdict(request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    """Return the recommendation, and whether it fits in memory."""
    first, best = fastest(found), recommended(found, saving)
    if best is None:
        return _does_not_fit(request, found, saving)
    text = f"Recommended: {best.strategy} ({best.way}), {seconds_text(best.seconds)} per step"
    if first is not None and first is not best:
        text += (
            f" ({first.strategy} is {1 - first.seconds / best.seconds:.1%} faster, but a difference of up to "
            f"{TIE - 1:.0%} is within the error of these predictions)"
        )
    if request.limit is None:
        return f"{text}. Give --device-memory to check whether it fits."
    if best.bytes is None:
        return f"{text}. No formula gives its memory: try one step."
    added = [] if first is not None else [flags for flags, _ in saving[: [each for _, each in saving].index(best) + 1]]
    remat = [f"--remat {best.remat}"] if not added and best.remat != "none" else []
    needed = f" with {' '.join(added or remat)}" if added or remat else ""
    memory = bytes_text(request.cluster.device.memory or 0)
    return f"{text}. It fits{needed}: {bytes_text(best.bytes)} of {memory} per rank."


def _does_not_fit(request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    able = [each for each in found if not each.refused] + [each for _, each in saving]
    best = max(able, key=lambda each: each.longest or 0)
    fits = ""
    if longest := best.longest:
        in_k_or_m = f"{longest >> 20}M" if longest >= 64 << 20 else f"{longest >> 10:,}K"  # rounded down
        fits = f"the longest sequence that fits is {in_k_or_m} tokens"
    options = " even with all options that save memory" if saving else ""
    return (
        f"It does not fit{options}: {best.strategy} needs {bytes_text(best.bytes or 0)} per rank; "
        f"{fits or 'no sequence length fits'}. Use more ranks or a shorter --seq-len."
    )


def as_dict(request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]]) -> Mapping[str, Any]:
    """Return all figures as plain values in seconds, bytes and FLOP."""
    best = recommended(found, saving)
    return {
        "asked": headline(request),
        "seq_len": request.seq_len // request.joined,
        "joined": request.joined,
        "ranks": request.cluster.ranks,
        "ranks_of_a_node": request.cluster.per_node,
        "rates": request.cluster.rates.as_dict(),
        "model": {"name": request.model.name, "parameters": request.model.size},
        "flops_of_a_step": request.flops,
        "recommended": None if best is None else best.strategy,
        "strategies": [asdict(each) | {"seconds": each.seconds} for each in found],
        "savings": [{"flags": flags, "longest": each.longest, "step": each.seconds} for flags, each in saving],
        "notes": [*notes(request, found)],
    }


def notes(request: ForecastRequest, found: list[Forecast]) -> Iterator[str]:
    """Yield why strategies are refused, and what the figures rest on that was not measured or simulated."""
    for each in found:
        if each.refused:
            yield f"{each.strategy}: not possible: {each.refused}"
    rates = request.cluster.rates
    if unmeasured := rates.source.count("estimated"):
        what = "some of these rates were not measured with this library: what depends on them"
        if unmeasured > 1:
            what = "this hardware was not measured with this library: every figure here"
        yield f"Rates of {rates.name}: {rates.source}; {what} is a prediction."
    for few, many in sorted({each.standing for each in found if each.standing}):
        names = ", ".join(each.strategy for each in found if each.standing == (few, many))
        yield (
            f"The attention of {names} is not simulated over all {request.cluster.ranks:,} ranks: it is extrapolated "
            f"from simulations of {few} and {many} ranks."
        )


def command(request: ForecastRequest, flags: str) -> str:
    """Return the shell command that runs ``burst train`` with these flags. A comment says if a last node has fewer."""
    cluster = request.cluster
    nodes, ranks = cluster.nodes, min(cluster.ranks, cluster.per_node)
    meet = " --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else ""
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks}{meet} -m burst_attention.cli train"
    fewer = f"  # on the last node: --nproc-per-node {cluster.last}" if cluster.last != ranks else ""
    return f"{start} {flags} --data DATA --out runs/mine{fewer}"
