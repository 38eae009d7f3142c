"""What ``burst plan`` tells, in words and figures for people; and all of it as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from burst_attention.planner.choice import WORTH

from ..figures import bytes_text, digits, flops_text, seconds_text, tokens_text
from ..forecast.forecast import Forecast, fastest, recommended
from ..forecast.machines import USABLE
from ..forecast.request import Question


def headline(question: Question) -> str:
    """What was asked, in a line."""
    cluster, model = question.cluster, question.model
    heads = f"{question.q_heads}/{question.kv_heads} heads of {question.head_dim}, {question.layers} layers"
    nodes = cluster.nodes
    return (
        f"{model.name if model else f'attention alone, {heads}'}, {tokens_text(question.seq_len)} tokens over "
        f"{cluster.ranks:,} rank{'s' * (cluster.ranks > 1)} on {nodes:,} node{'s' * (nodes > 1)}, "
        f"{cluster.rates.name}, {str(question.dtype).removeprefix('torch.')}"
    )


def verdict(question: Question, found: list[Forecast]) -> str:
    """What is recommended, and whether it fits."""
    best = recommended(found)
    if best is None:
        best = max((each for each in found if not each.refused), key=lambda each: each.longest or 0)
        needs = bytes_text(sum(best.memory[best.remat].values()))
        remat = f" with --remat {best.remat}" if question.model and best.remat != "none" else ""
        longest = (
            f"the longest sequence that fits is {longest_text(best.longest)} tokens" if best.longest else "none does"
        )
        remedies = ["more ranks", "a shorter --seq-len"]
        if question.model and question.mlp_chunks == 1:
            remedies.insert(1, "--mlp-chunks 8")
        why = f"It does not fit: {best.engine} needs {needs} a rank{remat}; {longest}."
        return f"{why} Take {', '.join(remedies[:-1])} or {remedies[-1]}."
    told = f"Recommended: {best.engine} ({best.way}), {seconds_text(best.seconds)} a step"
    first = fastest(found)
    if first is not None and first is not best:
        told += (
            f" ({first.engine} is {1 - first.seconds / best.seconds:.1%} faster, which is within the "
            f"{WORTH - 1:.0%} that predictions can't tell apart)"
        )
    if best.fits is None:
        return f"{told}; whether it fits is not known."
    needs = bytes_text(sum(best.memory[best.remat].values()))
    remat = f" with --remat {best.remat}" if question.model and best.remat != "none" else ""
    return f"{told}. It fits{remat}: {needs} of {bytes_text(question.cluster.device.memory or 0)} a rank."


def rows(question: Question, found: list[Forecast]) -> Iterator[tuple[str, ...]]:
    """The table: a figure's name, and of each engine the figure."""
    able = [each for each in found if not each.refused]

    def row(name: str, tell: Any) -> tuple[str, ...]:
        return (name, *(tell(each) for each in able))

    model = question.model is not None
    yield row("a step" if model else "all layers", lambda x: seconds_text(x.seconds))
    yield row("tokens/s per rank", lambda x: digits(x.tokens_per_second))
    if model:
        yield row(" attention", lambda x: seconds_text(x.attention))
        yield row(" rest of the model", lambda x: seconds_text(x.rest))
        yield row(" parameters, exposed", lambda x: seconds_text(x.parameters))
        for remat in dict.fromkeys(remat for each in able for remat in each.steps):
            name = "as it is" if remat == "none" else f"--remat {remat}"
            yield row(f"a step, {name}", lambda x, r=remat: seconds_text(x.steps[r]) if r in x.steps else "-")
    yield row("exchange, exposed", lambda x: seconds_text(x.exposed))
    for what in ("attention", "parameters")[: 2 if model else 1]:
        for n, where in enumerate(("in a node", "across")):
            yield row(f"{what}: sent {where}", lambda x, n=n, what=what: bytes_text(x.sent[what][n]))
    for remat in dict.fromkeys(remat for each in able for remat in each.memory):
        name = f"memory, {'as it is' if remat == 'none' else remat}" if model else "memory"
        yield row(name, lambda x, r=remat: bytes_text(sum(x.memory[r].values())) if r in x.memory else "-")
    if model:
        yield row("--remat", lambda x: x.remat)
    for part in able[0].memory[able[0].remat] if able else ():
        yield row(f" peak: {part}", lambda x, p=part: bytes_text(x.memory[x.remat][p]))
    yield row("fits", lambda x: {None: "not known", True: "yes", False: "no"}[x.fits])
    yield row("longest that fits", lambda x: "not known" if x.longest is None else longest_text(x.longest))
    yield row("MFU", lambda x: "-" if x.mfu is None else f"{x.mfu:.1%}")


def longest_text(tokens: int) -> str:
    """In K, or from 64M on in M; rounded down."""
    if tokens == 0:
        return "none"
    return f"{tokens >> 20}M" if tokens >= 64 << 20 else f"{tokens >> 10:,}K"


def as_dict(question: Question, found: list[Forecast], notes: list[str]) -> Mapping[str, Any]:
    """All figures, of plain values: seconds, bytes, FLOP."""
    best = recommended(found)
    return {
        "asked": headline(question),
        "seq_len": question.seq_len,
        "ranks": question.cluster.ranks,
        "ranks_of_a_node": question.cluster.per_node,
        "rates": question.cluster.rates.as_dict(),
        "model": None if question.model is None else asdict(question.model) | {"parameters": question.model.size},
        "flops_of_a_step": question.flops,
        "recommended": None if best is None else best.engine,
        "engines": [asdict(each) | {"seconds": each.seconds} for each in found],
        "assumptions": notes,
    }


def assumptions(question: Question, found: list[Forecast]) -> Iterator[str]:
    """What the figures rest on, a sentence each."""
    cluster, rates = question.cluster, question.cluster.rates
    unmeasured = rates.source.count("foretold")
    told = {
        0: "",
        1: " What is called foretold there nobody has measured with this library, nor what rests on it here.",
        2: " Nobody has measured this hardware with this library: every figure here is foretold.",
    }
    yield f"Rates of {rates.name}: {rates.source}.{told[min(unmeasured, 2)]}"
    for few, many in sorted({each.standing for each in found if each.standing}):
        names = ", ".join(each.engine for each in found if each.standing == (few, many))
        yield (
            f"Attention of {names} is not run on paper over all {cluster.ranks:,} ranks: it is extrapolated from "
            f"worlds of {few} and {many}, with as many tokens a rank and nodes as large."
        )
    if question.model is not None:
        yield from _of_a_model(question)
    else:
        yield "Attention alone: bytes and seconds are of its calls, memory of one of them."
    if question.limit is not None:
        yield (
            f"What takes at most {USABLE:.0%} of a device's {bytes_text(question.cluster.device.memory or 0)} fits; "
            "the rest is left to the process, its libraries and the allocator. The longest sequence is found by "
            "halving; with --remat layer, if none is asked for."
        )
    else:
        yield "What a device holds is not known of these rates: --device-memory tells what fits."
    peak = cluster.device.peak
    if peak is not None:
        yield (
            "MFU is 3 x (forward FLOP of the matrix products and of the attention that is seen) / (seconds x ranks x "
            f"{flops_text(peak)}/s): here {flops_text(question.flops)} a step; what is recomputed does not count."
        )
    else:
        yield "No MFU: the peak of these devices is not known; --peak-tflops tells it."


def command(question: Question, flags: str) -> str:
    """Return the command that runs a step with these flags of ``burst train``."""
    cluster = question.cluster
    nodes, ranks = cluster.nodes, min(cluster.ranks, cluster.per_node)
    meet = " --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else ""
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks}{meet} -m burst_attention.cli train"
    return f"{start} {flags} --data DATA --out runs/mine"


def _of_a_model(question: Question) -> Iterator[str]:
    cluster, model, io = question.cluster, question.model, question.dtype.itemsize
    assert model is not None
    yield f"{model.name}: {digits(model.size / 1e9)} billion parameters, figures of the config.json of {model.source}."
    if io == 2 and cluster.device.peak is not None:
        how = (
            f"{cluster.efficiency:.0%} of the {flops_text(cluster.device.peak)}/s of the matrix units "
            "(--matmul-efficiency); norms and activations are in it"
        )
    else:
        how = f"the rate of attention kernels, {flops_text(question.matrix_rate)}/s, an assumption"
    yield f"The rest of the model is its matrix products at {how}."
    yield (
        "Parameters, gradients in fp32 and AdamW's moments are sharded over all ranks (FSDP2; tensor-sequence cuts "
        f"them by heads and columns). A step gathers weights twice in {io} bytes an element and scatters gradients in "
        "fp32, by rings, hidden behind the matrix products as far as these last. The optimizer's own time is left out."
    )
    yield "Offloading and mixtures of experts are not modelled; a model with experts is refused by name."
    yield (
        "Engines other than burst and ring can't keep their attention here (--remat keep-attention). Compare steps "
        "with equal --remat to see the exchanges alone."
    )
    yield (
        "Memory is what burst train foretells before it starts, by formula; of ulysses, usp and tensor-sequence, which "
        "it does not foretell, by a simpler one."
    )
