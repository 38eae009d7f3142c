"""Predict bytes and times of ways to share a sequence, on up to thousands of GPUs: docs/predicted-scaling.md.

Nothing is run: all figures are those of ``burst plan``.

    burst bench scaling [--draw]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import torch
import tyro
from burst_train.figures import bytes_text, flops_text, seconds_text, tokens_text
from burst_train.forecast import collectives
from burst_train.forecast.calls import AttentionStrategy, Call, Workload, chosen, predict_call
from burst_train.forecast.machines import BANDWIDTH_EFFICIENCY, device_of
from burst_train.forecast.models import MODELS, Model
from burst_train.forecast.request import Cluster, ForecastRequest

from burst_attention.plan.groups import Groups
from burst_attention.plan.strategy import Strategy
from burst_attention.planner.presets import preset

PAGE = Path(__file__).resolve().parents[4] / "docs" / "predicted-scaling.md"
HARDWARE, PER_NODE = "h100-hgx", 8
MODEL_NAMES = ("llama-3-8b", "llama-2-7b")
RANKS = (8, 32, 128, 512, 1024, 4096)
KEPT_RANKS = (8, 16)
REMATS = ("none", "layer", "keep-attention")
LINE = 120
# Tokens per rank if the sequence grows with the ranks; tokens of the whole sequence otherwise.
PER_RANK, FIXED = 8 << 10, 8 << 20

Predict = Callable[[Workload], Call | None]  # None: it does not support this number of ranks


@dataclass(frozen=True)
class Scheme:
    """One column: a strategy."""

    name: str
    description: str
    predict_call: Predict


def _ulysses(setting: Workload) -> Call | None:
    shape, world = setting.shape, setting.world
    return None if shape.q_heads % world or shape.kv_heads % world else collectives.ulysses(setting)


def _usp(setting: Workload) -> Call | None:
    return collectives.usp(setting, PER_NODE)


def _by(way: AttentionStrategy) -> Predict:
    return lambda setting: predict_call(way, setting)


SUBJECTS = (
    Scheme(
        "ring",
        "RingAttention, zigzag: keys and values circulate around the ring, followed by their gradients in fp32",
        _by(collectives.RING),
    ),
    Scheme(
        "Ulysses",
        "all-to-alls give a rank all tokens of some heads, without overlap; at most as many ranks as key-value heads",
        _ulysses,
    ),
    Scheme(
        "USP",
        f"Ulysses' all-to-alls among the {PER_NODE} ranks of a node, a ring over the nodes, zigzag",
        _usp,
    ),
    Scheme(
        "Burst as published",
        "zigzag, the query side circulates in the backward, each shard crosses to each node once",
        _by(AttentionStrategy(layout="zigzag", route="nodes", circulate="query")),
    ),
    Scheme(
        "blocks",
        "each rank computes a square of (query shard, key shard) pairs, heads whole, zigzag",
        _by(AttentionStrategy(layout="zigzag", circulate="blocks")),
    ),
    Scheme(
        "the cube",
        "the planner's choice, as `burst` computes it",
        lambda setting: predict_call(chosen(setting, Strategy()), setting),
    ),
)


@dataclass(frozen=True)
class PredictedRow:
    """One model, sequence and number of ranks, with the call of each subject."""

    request: ForecastRequest
    calls: tuple[Call | None, ...]

    def sent(self, call: Call) -> float:
        """Return the bytes that a rank sends for one layer."""
        return sum(one.inside + one.across for one in (call.forward, call.backward))

    def across(self, call: Call) -> float:
        return call.forward.across + call.backward.across

    def seconds(self, call: Call) -> float:
        """Return the seconds of a step that recomputes only logits."""
        q = self.request
        return q.layers * call.seconds + q.rest_seconds("none")

    def exposed(self, call: Call) -> float:
        return self.request.layers * (call.forward.exposed + call.backward.exposed)


def asked(model: Model, seq_len: int, ranks: int) -> ForecastRequest:
    """Return the request of one row."""
    rates = preset(HARDWARE)
    cluster = Cluster(ranks=ranks, per_node=PER_NODE, rates=rates, device=device_of(rates))
    sizes = {name: getattr(model, name) for name in ("q_heads", "kv_heads", "head_dim", "layers")}
    return ForecastRequest(seq_len=seq_len, cluster=cluster, model=model, dtype=torch.bfloat16, **sizes)


def row(model: Model, seq_len: int, ranks: int) -> PredictedRow:
    """Return the row with every subject's figures."""
    request = asked(model, seq_len, ranks)
    setting = request.setting(next(iter(request.masks)))
    return PredictedRow(request, tuple(subject.predict_call(setting) for subject in SUBJECTS))


def page() -> str:
    """Return the whole page in Markdown."""
    models = (line for name in MODEL_NAMES for line in _of_model(MODELS[name]))
    return "\n".join([*_head(), *models, *_of_keeping(MODELS[MODEL_NAMES[0]])]) + "\n"


def _head() -> Iterator[str]:
    yield from ("# Predicted scaling", "")
    yield fill(
        "Predicted bytes and seconds of ways to share a sequence over up to 4,096 GPUs. This hardware has not been "
        "measured with this library: every figure on this page is a prediction. `burst bench scaling --draw` "
        "writes it, with the planner of `make_plan`. `burst plan --seq-len 8M --ranks 1024 --hardware h100-hgx` "
        "prints more about one row: memory, and what fits.",
        LINE,
    )
    yield from ("", "| | |", "|---|---|")
    yield from (f"| {each.name} | {each.description} |" for each in SUBJECTS)
    yield from ("", "Assumptions:", "")
    yield from (fill(f"- {text}", LINE, subsequent_indent="  ") for text in _assumptions())


def _assumptions() -> Iterator[str]:
    rates = preset(HARDWARE)
    request = asked(MODELS[MODEL_NAMES[0]], 8 * PER_RANK, 8)
    peak = flops_text(request.cluster.device.peak or 0.0)
    yield f"Rates of {rates.name}: {rates.source}. {PER_NODE} ranks a node."
    yield (
        "One causal sequence over all ranks, bf16, batch 1. The parameters' exchange is left out, because it overlaps "
        "computation."
    )
    yield (
        f"The rest of the model: matrix products at {request.cluster.efficiency:.0%} of {peak}/s, and element-wise "
        f"operations at {BANDWIDTH_EFFICIENCY:.0%} of the memory's bandwidth. Only the head's logits are recomputed, "
        "so that times compare. Whether a row fits in memory is not considered."
    )
    yield (
        "Up to 256 ranks are simulated one by one (32 on routes by nodes and around a ring). More ranks are "
        "extrapolated by a line through two smaller worlds with the same tokens per rank and nodes of the same size. "
        "`tests/unit/test_forecast.py` bounds the error of such lines: 2 %, and 15 % for blocks."
    )
    yield (
        "The exchange of one step overlaps the computation of the step before. The all-to-alls of Ulysses and USP "
        "overlap nothing. Exposed exchange is all time in which the last rank to finish does not compute. It may also "
        "wait for a rank with more work, as in blocks."
    )


def _of_model(model: Model) -> Iterator[str]:
    heads = f"{model.q_heads} query heads, {model.kv_heads} key-value heads"
    yield from ("", f"## {model.name}: {heads}")
    yield from _section(f"{tokens_text(PER_RANK)} tokens a rank", [row(model, PER_RANK * n, n) for n in RANKS])
    yield from _section(f"{tokens_text(FIXED)} tokens in all", [row(model, FIXED, n) for n in RANKS])


def _section(title: str, rows: Sequence[PredictedRow]) -> Iterator[str]:
    yield from ("", f"### {title}", "")
    yield from ("Bytes that a rank sends for one layer, forward and backward; those across nodes in brackets:", "")
    yield from table(rows, sent)
    yield from ("", "Time of a step; exposed exchange in brackets:", "")
    yield from table(rows, taken)


def _of_keeping(model: Model) -> Iterator[str]:
    yield from ("", "## Caching q, k and v of the forward", "")
    yield fill(
        f"{model.name}, {tokens_text(PER_RANK)} tokens a rank, heads split over all ranks (of {KEPT_RANKS[1]} "
        "ranks, two share a key-value head). For one layer the table shows the bytes that a rank sends in a step, and "
        "the bytes that the attention retains from its forward to its backward, with and without `cache_qkv`. A layer "
        "that is recomputed whole runs its forward twice and retains nothing in between. Under `keep-attention` the "
        "attention's results stay, and cached q, k and v stay with them.",
        LINE,
    )
    yield from (
        "",
        "| ranks | recomputed | sent | sent, cached | retained | retained, cached |",
        "|---|---|---|---|---|---|",
    )
    for ranks in KEPT_RANKS:
        for remat in REMATS:
            sizes = [kept_row(model, ranks, remat, keep=keep) for keep in (False, True)]
            texts = [bytes_text(size) for pair in zip(*sizes, strict=True) for size in pair]
            yield f"| {ranks} | {remat} | {' | '.join(texts)} |"


def kept_row(model: Model, ranks: int, remat: str, *, keep: bool) -> tuple[float, float]:
    """Return the bytes that a rank sends for one layer, and those that its attention retains.

    Args:
        model: The model.
        ranks: Number of ranks.
        remat: What is recomputed, one of :data:`REMATS`.
        keep: Whether the forward's q, k and v are cached for the backward.
    """
    request = asked(model, PER_RANK * ranks, ranks)
    setting, shape = request.setting(next(iter(request.masks))), request.shape
    groups = Groups.of(ranks, q_heads=shape.q_heads, kv_heads=shape.kv_heads, keep=keep, chunks=1)
    call = predict_call(AttentionStrategy(layout="zigzag", circulate="query", groups=groups), setting)
    forward, backward = (one.inside + one.across for one in (call.forward, call.backward))
    queries = shape.q_heads * shape.head_dim * shape.io
    keys = 2 * shape.kv_heads * shape.head_dim * shape.io * (ranks // groups.key if keep else 1)
    results = shape.q_heads * (shape.head_dim * shape.io + shape.accumulate)
    retained = {"none": queries + keys + results, "layer": 0, "keep-attention": results + keep * (queries + keys)}
    return forward * (2 if remat == "layer" else 1) + backward, request.tokens * retained[remat]


def sent(row: PredictedRow, call: Call) -> str:
    """Return the bytes of a layer as text, with those across nodes in brackets."""
    return f"{bytes_text(row.sent(call))} ({bytes_text(row.across(call))})"


def taken(row: PredictedRow, call: Call) -> str:
    """Return the seconds of a step as text, with exposed exchange in brackets."""
    return f"{seconds_text(row.seconds(call))} ({seconds_text(row.exposed(call))})"


def table(rows: Sequence[PredictedRow], tell: Callable[[PredictedRow, Call], str]) -> Iterator[str]:
    """Yield a Markdown table; a dash marks a scheme that does not support this number of ranks."""
    yield f"| ranks | tokens | {' | '.join(each.name for each in SUBJECTS)} |"
    yield "|---" * (2 + len(SUBJECTS)) + "|"
    for each in rows:
        texts = ["-" if call is None else tell(each, call) for call in each.calls]
        request = each.request
        yield f"| {request.cluster.ranks:,} | {tokens_text(request.seq_len)} | {' | '.join(texts)} |"


def draw(*, draw: bool = False) -> None:
    """Print the page.

    Args:
        draw: Write the page to docs/predicted-scaling.md instead.
    """
    text = page()
    if draw:
        PAGE.write_text(text, "utf-8")
    else:
        print(text)


def main(arguments: list[str]) -> None:
    tyro.cli(draw, prog="burst bench scaling", description=__doc__, args=arguments)
