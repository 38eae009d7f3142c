"""The text and figures that ``burst plan`` prints, and the same figures as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from burst_attention.planner.choice import WORTH

from ..figures import bytes_text, digits, flops_text, seconds_text, tokens_text
from ..forecast.forecast import Forecast, fastest, recommended
from ..forecast.machines import BANDWIDTH_EFFICIENCY, USABLE
from ..forecast.models import FORMULA
from ..forecast.request import ForecastRequest

SHORT = ("strategy", "step", "tokens/s", "memory", "--remat", "verdict")
# Columns of saving_rows: options; tokens; layer inputs outside the device; tokens/s at the given length.
SAVING = ("options, added one by one", "longest", "offloaded", "tokens/s per rank")


def headline(request: ForecastRequest) -> str:
    """Return one line that names the model, sequence, ranks, hardware and dtype."""
    cluster, model = request.cluster, request.model
    heads = (
        f"{request.q_heads} query and {request.kv_heads} key-value heads of dimension {request.head_dim}, "
        f"{request.layers} layers"
    )
    nodes, length = cluster.nodes, tokens_text(request.seq_len // request.joined)
    uneven = nodes > 1 and cluster.last < cluster.per_node
    fewer = f" (the last with {cluster.last} of {cluster.per_node})" if uneven else ""
    each = f"{request.joined} packed sequences of {length}" if request.joined > 1 else length
    return (
        f"{model.name if model else f'attention only, {heads}'}, {each} tokens over "
        f"{cluster.ranks:,} rank{'s' * (cluster.ranks > 1)} on {nodes:,} node{'s' * (nodes > 1)}{fewer}, "
        f"{cluster.rates.name}, {str(request.dtype).removeprefix('torch.')}"
    )


def short_rows(request: ForecastRequest, found: list[Forecast]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each strategy: its name and the columns of :data:`SHORT`."""
    for each in found:
        if each.refused:
            yield each.strategy, "-", "-", "-", "-", "refused"
            continue
        needs = "unknown" if each.bytes is None else bytes_text(each.bytes)
        speed = digits(each.tokens_per_second * request.cluster.ranks)
        fits = {None: "unknown", True: "fits", False: "too large"}[each.fits]
        yield each.strategy, seconds_text(each.seconds), speed, needs, each.remat if request.model else "-", fits


def verdict(request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    """Return the recommendation, and whether it fits in memory."""
    first, best = fastest(found), recommended(found, saving)
    if best is None:
        return _does_not_fit(request, found, saving)
    text = f"Recommended: {best.strategy} ({best.way}), {seconds_text(best.seconds)} per step"
    if first is not None and first is not best:
        text += (
            f" ({first.strategy} is {1 - first.seconds / best.seconds:.1%} faster, but a difference of up to "
            f"{WORTH - 1:.0%} is within the error of these predictions)"
        )
    if request.limit is None:
        return f"{text}. Give --device-memory to check whether it fits."
    if best.bytes is None:
        return f"{text}. No formula gives its memory: try one step."
    added = [] if first is not None else [flags for flags, each in saving[: _index(saving, best) + 1]]
    remat = [f"--remat {best.remat}"] if not added and request.model and best.remat != "none" else []
    needed = f" with {' '.join(added or remat)}" if added or remat else ""
    memory = bytes_text(request.cluster.device.memory or 0)
    return f"{text}. It fits{needed}: {bytes_text(best.bytes)} of {memory} per rank."


def _index(saving: list[tuple[str, Forecast]], best: Forecast) -> int:
    return next(n for n, (_, each) in enumerate(saving) if each is best)


def _does_not_fit(request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]]) -> str:
    able = [each for each in found if not each.refused] + [each for _, each in saving]
    best = max(able, key=lambda each: each.longest or 0)
    fits = f"the longest sequence that fits is {longest_text(best.longest)} tokens" if best.longest else ""
    options = " even with all options that save memory" if saving else ""
    return (
        f"It does not fit{options}: {best.strategy} needs {bytes_text(best.bytes or 0)} per rank; "
        f"{fits or 'no sequence length fits'}. Use more ranks or a shorter --seq-len."
    )


def rows(request: ForecastRequest, found: list[Forecast]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: a figure's name, then its value for each strategy."""
    able = [each for each in found if not each.refused]

    def row(name: str, tell: Any) -> tuple[str, ...]:
        return (name, *(tell(each) for each in able))

    model = request.model is not None
    yield row("step time" if model else "time of all layers", lambda x: seconds_text(x.seconds))
    yield row("tokens/s per rank", lambda x: digits(x.tokens_per_second))
    if model:
        yield row(" attention", lambda x: seconds_text(x.attention))
        yield row(" rest of the model", lambda x: seconds_text(x.rest))
        yield row(" parameters, not hidden", lambda x: seconds_text(x.parameters))
        for remat in dict.fromkeys(remat for each in able for remat in each.steps):
            yield row(
                f"step time, --remat {remat}", lambda x, r=remat: seconds_text(x.steps[r]) if r in x.steps else "-"
            )
    yield row("attention exchange, not hidden", lambda x: seconds_text(x.exposed))
    for what in ("attention", "parameters")[: 2 if model else 1]:
        for n, where in enumerate(("within a node", "between nodes")):
            yield row(f"{what} sent {where}", lambda x, n=n, what=what: bytes_text(x.sent[what][n]))
    for remat in dict.fromkeys(remat for each in able for remat in each.memory):
        name = f"memory, --remat {remat}" if model else "memory"
        yield row(name, lambda x, r=remat: bytes_text(sum(x.memory[r].values())) if r in x.memory else "-")
    if model:
        yield row("chosen --remat", lambda x: x.remat)
    for part in able[0].memory.get(able[0].remat, ()) if able else ():
        yield row(f" at the peak: {part}", lambda x, p=part: bytes_text(x.memory[x.remat][p]))
    yield row("fits", lambda x: {None: "unknown", True: "yes", False: "no"}[x.fits])
    yield row("longest sequence that fits", lambda x: "unknown" if x.longest is None else longest_text(x.longest))
    yield row("MFU", lambda x: "-" if x.mfu is None else f"{x.mfu:.1%}")


def saving_rows(request: ForecastRequest, saving: list[tuple[str, Forecast]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each option that saves memory, with the options above it in force; see :data:`SAVING`."""
    offloads, inputs = False, replace(request, offload="host").copied / request.seq_len
    for n, (flags, each) in enumerate(saving):
        offloads = offloads or "--offload" in flags
        longest = each.longest or 0
        yield (
            ("+ " if n else "") + flags,
            longest_text(longest),
            bytes_text(longest * request.joined * inputs) if offloads else "-",
            digits(each.tokens_per_second) if each.fits else "-",
        )


def longest_text(tokens: int) -> str:
    """Return a token count in K, or in M from 64M on, rounded down."""
    if tokens == 0:
        return "none"
    return f"{tokens >> 20}M" if tokens >= 64 << 20 else f"{tokens >> 10:,}K"


def as_dict(
    request: ForecastRequest, found: list[Forecast], saving: list[tuple[str, Forecast]], notes: list[str]
) -> Mapping[str, Any]:
    """Return all figures as plain values in seconds, bytes and FLOP."""
    best = recommended(found, saving)
    return {
        "asked": headline(request),
        "seq_len": request.seq_len // request.joined,
        "joined": request.joined,
        "ranks": request.cluster.ranks,
        "ranks_of_a_node": request.cluster.per_node,
        "rates": request.cluster.rates.as_dict(),
        "model": None if request.model is None else {"name": request.model.name, "parameters": request.model.size},
        "flops_of_a_step": request.flops,
        "recommended": None if best is None else best.strategy,
        "strategies": [asdict(each) | {"seconds": each.seconds} for each in found],
        "savings": [{"flags": flags, "longest": each.longest, "step": each.seconds} for flags, each in saving],
        "assumptions": notes,
    }


def assumptions(request: ForecastRequest, found: list[Forecast]) -> Iterator[str]:
    """Yield the assumptions behind the figures, one note each."""
    cluster, rates = request.cluster, request.cluster.rates
    unmeasured = rates.source.count("estimated") + rates.source.count("foretold")  # as 0.2 wrote it
    notes = {
        0: "",
        1: " Some of these rates were not measured with this library. The figures that depend on them are predictions.",
        2: " This hardware was not measured with this library: every figure here is a prediction.",
    }
    yield f"Rates of {rates.name}: {rates.source}.{notes[min(unmeasured, 2)]}"
    for few, many in sorted({each.standing for each in found if each.standing}):
        names = ", ".join(each.strategy for each in found if each.standing == (few, many))
        yield (
            f"The attention of {names} is not simulated over all {cluster.ranks:,} ranks: it is extrapolated from "
            f"simulations of {few} and {many} ranks, with the same tokens per rank and ranks per node."
        )
    if request.model is not None:
        yield from _of_a_model(request)
    else:
        yield "Attention only: time and bytes cover the calls of all layers; memory covers one call."
    if request.limit is not None:
        yield (
            f"A step fits if it needs at most {USABLE:.0%} of a device's "
            f"{bytes_text(request.cluster.device.memory or 0)}; the rest is left to the process, its libraries and "
            "the allocator. The longest sequence is found by bisection, with --remat layer unless you give --remat."
        )
    else:
        yield "The memory of these devices is unknown. Give --device-memory to see whether a step fits."
    peak = cluster.device.peak
    if peak is not None:
        yield (
            "MFU is 3 x (forward FLOP of the matrix products and of the unmasked attention) / (seconds x ranks x "
            f"{flops_text(peak)}/s): here {flops_text(request.flops)} per step. Recomputed work does not count."
        )
    else:
        yield "MFU is unknown, because the peak of these devices is unknown. Give --peak-tflops to see it."


def command(request: ForecastRequest, flags: str) -> str:
    """Return the shell command that runs ``burst train`` with these flags. A comment says if a last node has fewer."""
    cluster = request.cluster
    nodes, ranks = cluster.nodes, min(cluster.ranks, cluster.per_node)
    meet = " --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else ""
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks}{meet} -m burst_attention.cli train"
    fewer = f"  # on the last node: --nproc-per-node {cluster.last}" if cluster.last != ranks else ""
    return f"{start} {flags} --data DATA --out runs/mine{fewer}"


def _of_a_model(request: ForecastRequest) -> Iterator[str]:
    cluster, model, io = request.cluster, request.model, request.dtype.itemsize
    assert model is not None
    yield f"{model.name}: {digits(model.size / 1e9)} billion parameters, read from transformers' model without weights."
    if io == 2 and cluster.device.peak is not None:
        how = (
            f"{cluster.efficiency:.0%} of the {flops_text(cluster.device.peak)}/s of the matrix units "
            "(--matmul-efficiency)"
        )
    else:
        how = f"the rate of attention kernels, {flops_text(request.matrix_rate)}/s (assumed)"
    moved = "the element-wise operations and AdamW are not counted, because the memory bandwidth is unknown"
    if cluster.device.bandwidth is not None:
        rate = bytes_text(cluster.device.bandwidth)
        moved = f"element-wise operations and AdamW move bytes at {BANDWIDTH_EFFICIENCY:.0%} of {rate}/s"
    yield f"The time of the rest of the model: its matrix products run at {how}; {moved}."
    yield (
        "Weights, fp32 gradients and AdamW's moments are sharded over all ranks by FSDP2 (tensor-sequence cuts them by "
        f"heads and columns). A step gathers weights twice, at {io} bytes per element, and scatters gradients in fp32, "
        "both by rings. Matrix products hide these transfers while they last."
    )
    device, inputs = cluster.device, bytes_text(replace(request, offload="host").copied)
    yield (
        f"--offload keeps {inputs} of layer inputs per rank at this length. Copies overlap with computation. They run "
        f"at {bytes_text(device.link)}/s to host memory (--link-rate), or {bytes_text(device.disk)}/s to a disk "
        "(--disk-rate); both are assumed."
    )
    yield "--optimizer-offload: its copies and AdamW on the host take no time in these figures."
    yield (
        "tensor-sequence can't keep attention results (--remat keep-attention). To compare strategies by their "
        "exchanges, compare steps with the same --remat."
    )
    if not model.predicted:
        yield (
            f"The memory of a {model.family} is not predicted, only that of {', '.join(FORMULA)}. Element-wise "
            "operations count as in a Llama of these sizes. Recurrent layers count by formula, without their exchanges."
        )
        return
    yield "Memory comes from the formula for what burst train predicts before it starts."
