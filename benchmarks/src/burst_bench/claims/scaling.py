"""Predict bytes and times of ways to share a sequence, on up to thousands of GPUs: docs/predicted-scaling.md.

Nothing is run: all figures are those of ``burst plan``.

    python benchmarks/scaling.py [--draw]
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
from burst_train.forecast.calls import Call, Setting, Way, chosen, foretell
from burst_train.forecast.machines import device_of
from burst_train.forecast.models import MODELS, Model
from burst_train.forecast.request import Cluster, Question

from burst_attention.plan.groups import Groups
from burst_attention.planner.presets import preset

PAGE = Path(__file__).resolve().parents[4] / "docs" / "predicted-scaling.md"
HARDWARE, PER_NODE = "h100-hgx", 8
MODEL_NAMES = ("llama-3-8b", "llama-2-7b")
RANKS = (8, 32, 128, 512, 1024, 4096)
KEPT_RANKS = (8, 16)
REMATS = ("none", "layer", "keep-attention")
LINE = 120
PER_RANK, FIXED = 8 << 10, 8 << 20  # tokens: of a rank where the sequence grows with the ranks, of the sequence else

Foretold = Callable[[Setting], Call | None]  # None: it does not come with so many ranks


@dataclass(frozen=True)
class Subject:
    """One column: a way to share a sequence."""

    name: str
    told: str
    foretell: Foretold


def _ulysses(setting: Setting) -> Call | None:
    shape, world = setting.shape, setting.world
    return None if shape.q_heads % world or shape.kv_heads % world else collectives.ulysses(setting)


def _usp(setting: Setting) -> Call | None:
    return collectives.usp(setting, PER_NODE)


def _by(way: Way) -> Foretold:
    return lambda setting: foretell(way, setting)


SUBJECTS = (
    Subject(
        "ring",
        "RingAttention, zigzag: keys and values go round the ring, their gradients in fp32 after them",
        _by(collectives.RING),
    ),
    Subject(
        "Ulysses", "all tokens of some heads, by all-to-alls that nothing hides; up to the key-value heads", _ulysses
    ),
    Subject(
        "USP",
        f"Ulysses' all-to-alls among the {PER_NODE} ranks of a node, ring over nodes, zigzag",
        _usp,
    ),
    Subject(
        "Burst as published",
        "zigzag, the query side travels in the backward, each shard crosses to a node once",
        _by(Way(layout="zigzag", route="nodes", travels="query")),
    ),
    Subject("blocks", "squares of pairs, heads whole, zigzag", _by(Way(layout="zigzag", travels="blocks"))),
    Subject("the cube", "the planner's choice: `burst` as it is", lambda setting: foretell(chosen(setting), setting)),
)


@dataclass(frozen=True)
class Row:
    """One model, sequence and number of ranks; calls by subject."""

    question: Question
    calls: tuple[Call | None, ...]

    def sent(self, call: Call) -> float:
        """Bytes of a layer."""
        return sum(one.inside + one.across for one in (call.forward, call.backward))

    def across(self, call: Call) -> float:
        return call.forward.across + call.backward.across

    def seconds(self, call: Call) -> float:
        """Of a step in which nothing is recomputed but logits."""
        q = self.question
        rest = q.rest_flops("none") / (q.cluster.ranks * q.matrix_rate)
        return q.layers * call.seconds + rest

    def exposed(self, call: Call) -> float:
        return self.question.layers * (call.forward.exposed + call.backward.exposed)


def asked(model: Model, seq_len: int, ranks: int) -> Question:
    """Of one row."""
    rates = preset(HARDWARE)
    cluster = Cluster(ranks=ranks, per_node=PER_NODE, rates=rates, device=device_of(rates))
    sizes = {name: getattr(model, name) for name in ("q_heads", "kv_heads", "head_dim", "layers")}
    return Question(seq_len=seq_len, cluster=cluster, model=model, dtype=torch.bfloat16, **sizes)


def row(model: Model, seq_len: int, ranks: int) -> Row:
    """Every subject's figures."""
    question = asked(model, seq_len, ranks)
    setting = question.setting(next(iter(question.masks)))
    return Row(question, tuple(subject.foretell(setting) for subject in SUBJECTS))


def page() -> str:
    """All of it, in Markdown."""
    models = (line for name in MODEL_NAMES for line in _of_model(MODELS[name]))
    return "\n".join([*_head(), *models, *_of_keeping(MODELS[MODEL_NAMES[0]])]) + "\n"


def _head() -> Iterator[str]:
    yield from ("# Scaling, foretold", "")
    yield fill(
        "What ways to share a sequence are predicted to send and to take on up to 4,096 GPUs. Nobody has measured this "
        "hardware with this library: every figure on this page is foretold. `python benchmarks/scaling.py --draw` "
        "draws it, by the planner that `make_plan` chooses by. `burst plan --seq-len 8M --ranks 1024 --hardware "
        "h100-hgx` tells more of one row: memory, and what fits.",
        LINE,
    )
    yield from ("", "| | |", "|---|---|")
    yield from (f"| {each.name} | {each.told} |" for each in SUBJECTS)
    yield from ("", "Assumptions:", "")
    yield from (fill(f"- {told}", LINE, subsequent_indent="  ") for told in _assumptions())


def _assumptions() -> Iterator[str]:
    rates = preset(HARDWARE)
    question = asked(MODELS[MODEL_NAMES[0]], 8 * PER_RANK, 8)
    peak = flops_text(question.cluster.device.peak or 0.0)
    yield f"Rates of {rates.name}: {rates.source}. {PER_NODE} ranks a node."
    yield "One causal sequence over all ranks, bf16, batch 1; parameters' exchange is hidden and left out."
    yield (
        f"The rest of the model is its matrix products at {question.cluster.efficiency:.0%} of {peak}/s. Nothing is "
        "recomputed but the head's logits, so that times of ways compare; whether it fits is another question."
    )
    yield (
        "Up to 256 ranks are run on paper one by one (32 on routes by nodes and round a ring); of more, two smaller "
        "worlds with as many tokens a rank and nodes as large, and a line through both. `tests/unit/test_forecast.py` "
        "holds such lines against what they stand for: within 2 %, of blocks within 15 %."
    )
    yield (
        "What is exchanged for one step of an attention travels while the step before is computed; the "
        "all-to-alls of Ulysses and USP hide behind nothing. Exchange that nothing hides is all time in which the "
        "last rank to end does not compute: it may also wait for a rank that has more to do, as in blocks."
    )


def _of_model(model: Model) -> Iterator[str]:
    heads = f"{model.q_heads} query heads, {model.kv_heads} key-value heads"
    yield from ("", f"## {model.name}: {heads}")
    yield from _section(f"{tokens_text(PER_RANK)} tokens a rank", [row(model, PER_RANK * n, n) for n in RANKS])
    yield from _section(f"{tokens_text(FIXED)} tokens in all", [row(model, FIXED, n) for n in RANKS])


def _section(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from ("", f"### {title}", "")
    yield from ("Sent by a rank for one layer, forward and backward; across nodes in brackets:", "")
    yield from table(rows, sent)
    yield from ("", "Time of a step; exchange that nothing hides in brackets:", "")
    yield from table(rows, taken)


def _of_keeping(model: Model) -> Iterator[str]:
    yield from ("", "## Keeping what a forward fetched", "")
    yield fill(
        f"{model.name}, {tokens_text(PER_RANK)} tokens a rank, heads cut over all ranks (of {KEPT_RANKS[1]} two share "
        "a key-value head). For one layer: what a rank sends in a step, and what attention retains from its forward to "
        "its backward, with and without `keep`. A layer that is recomputed whole runs its forward twice and retains "
        "nothing in between; under `keep-attention` the operator's results stay, and with them what was kept.",
        LINE,
    )
    yield from (
        "",
        "| ranks | recomputed | sent | sent, kept | retained | retained, kept |",
        "|---|---|---|---|---|---|",
    )
    for ranks in KEPT_RANKS:
        for remat in REMATS:
            sizes = [kept_row(model, ranks, remat, keep=keep) for keep in (False, True)]
            told = [bytes_text(size) for pair in zip(*sizes, strict=True) for size in pair]
            yield f"| {ranks} | {remat} | {' | '.join(told)} |"


def kept_row(model: Model, ranks: int, remat: str, *, keep: bool) -> tuple[float, float]:
    """Bytes that a rank sends for a layer, and that its attention retains, under a way to recompute."""
    question = asked(model, PER_RANK * ranks, ranks)
    setting, shape = question.setting(next(iter(question.masks))), question.shape
    groups = Groups.of(ranks, q_heads=shape.q_heads, kv_heads=shape.kv_heads, keep=keep, waves=1)
    call = foretell(Way(layout="zigzag", travels="query", groups=groups), setting)
    forward, backward = (one.inside + one.across for one in (call.forward, call.backward))
    queries = shape.q_heads * shape.head_dim * shape.io
    keys = 2 * shape.kv_heads * shape.head_dim * shape.io * (ranks // groups.key if keep else 1)
    results = shape.q_heads * (shape.head_dim * shape.io + shape.accumulate)
    retained = {"none": queries + keys + results, "layer": 0, "keep-attention": results + keep * (queries + keys)}
    return forward * (2 if remat == "layer" else 1) + backward, question.tokens * retained[remat]


def sent(row: Row, call: Call) -> str:
    """Bytes of a layer."""
    return f"{bytes_text(row.sent(call))} ({bytes_text(row.across(call))})"


def taken(row: Row, call: Call) -> str:
    """Seconds of a step."""
    return f"{seconds_text(row.seconds(call))} ({seconds_text(row.exposed(call))})"


def table(rows: Sequence[Row], tell: Callable[[Row, Call], str]) -> Iterator[str]:
    """In Markdown; a dash for what does not come with so many ranks."""
    yield f"| ranks | tokens | {' | '.join(each.name for each in SUBJECTS)} |"
    yield "|---" * (2 + len(SUBJECTS)) + "|"
    for each in rows:
        told = ["-" if call is None else tell(each, call) for call in each.calls]
        question = each.question
        yield f"| {question.cluster.ranks:,} | {tokens_text(question.seq_len)} | {' | '.join(told)} |"


def draw(*, draw: bool = False) -> None:
    """Tell the page.

    Args:
        draw: write it to docs/predicted-scaling.md.
    """
    text = page()
    if draw:
        PAGE.write_text(text, "utf-8")
    else:
        print(text)


def main() -> None:
    tyro.cli(draw, description=__doc__)
