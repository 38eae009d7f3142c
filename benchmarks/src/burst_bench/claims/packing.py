"""Packed documents: grids of ranks against a balanced plan.

The documents have a long tail of lengths.

Every arrangement trains a tiny Llama (fp32, random weights) on the same batches. A grid DxC has D groups of C ranks.
Whole documents are assigned to groups greedily, longest first, to the group with the fewest tokens. The ranks of a
group share its documents with zigzag. The last arrangement is one group of all ranks with the layout balanced. Heads
stay whole. A grid is left out if a document is longer than a group's share of the tokens.

The figure is the CPU time of the busiest rank, in a forward and a backward: the least of several rounds. Local ranks
share this machine's cores, so wall time can't show imbalance. Tokens per second are the tokens of all batches divided
by the sum of these times: the rate of ranks that have a core each and never wait for a message. CPU time includes
copying and sending, which GPUs overlap with kernels. Making plans and the sum of gradients over ranks are not timed.
Before any timing, losses and gradient norms of all arrangements must agree to 1e-4.

Lengths come from the standard library's sources (bytes / 4), or from a log-normal distribution with a tail. They are
cut at 128K tokens and then scaled by --longest / 128K. The model has width 128. At the default of 8192 tokens attention
then has about the same share of the operations as in a Llama of 1B at 128K. A run takes about five minutes on two
cores.

    burst bench packing [--sources stdlib lognormal] [--ranks 8] [--tokens 32768] [--longest 8192] [--batches 3]"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from heapq import heapreplace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burst_attention import Strategy
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.integrations import hf
from burst_train.data.corpus import STANDARD_LIBRARY, Files, open_corpus

from ..arguments import WrittenArguments, asked
from ..harness.traffic_meter import TrafficMeter
from ..harness.turns import ratios, take_turns
from ..pool import WorkerPool
from ..tables import bytes_text, ranks_text

Lengths = tuple[int, ...]  # tokens of each document of a batch
Source = Literal["stdlib", "lognormal"]

REAL_LONGEST = 128 * 1024  # tokens; scaled to --longest
MEDIAN, SIGMA = 2048, 2.0  # tokens, and the standard deviation of the logarithm: 2 % of documents reach 128K
TOLERANCE = 1e-4  # relative
IGNORED = -100
VOCABULARY, LAYERS, WIDTH = 512, 2, 128
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class PackingArguments(WrittenArguments):
    sources: tuple[Source, ...] = ("stdlib", "lognormal")
    ranks: int = 8
    tokens: int = 32768
    """Tokens of a batch, over all ranks."""
    longest: int = 8192
    """Tokens to which a document of 128K tokens is scaled."""
    batches: int = 3
    """Batches, each with other documents."""
    rounds: int = 2
    """Timed steps of each batch and arrangement."""


@dataclass(frozen=True)
class Arrangement:
    """``groups`` groups of ``context`` ranks; the ranks of a group share its documents with ``layout``."""

    groups: int
    context: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.groups}x{self.context} {self.layout}"

    def fits(self, batches: Sequence[Lengths]) -> bool:
        """Whether in each batch every document fits a group's share of the tokens, and each group gets a document."""
        return all(max(each) * self.groups <= sum(each) and len(each) >= self.groups for each in batches)


def arrangements(world: int) -> list[Arrangement]:
    """Return the static grids of ``world`` ranks, largest context first, and one balanced plan over all ranks."""
    grids = [Arrangement(world // size, size, "zigzag") for size in range(world, 0, -1) if world % size == 0]
    return [*grids, Arrangement(1, world, "balanced")]


def draw(source: Source, *, tokens: int, longest: int, seed: int) -> Lengths:
    """Draw scaled lengths until they sum to ``tokens``; the last document is cut to fit."""
    dice = np.random.default_rng(seed)
    if source == "stdlib":
        drawn = dice.choice(_lengths_of_sources(), tokens)
    else:
        drawn = dice.lognormal(math.log(MEDIAN), SIGMA, tokens)
    lengths = np.rint(np.minimum(drawn, REAL_LONGEST) * longest / REAL_LONGEST)
    ends = np.minimum(np.cumsum(np.maximum(lengths, 2).astype(np.int64)), tokens)
    return tuple(np.diff(ends[: np.searchsorted(ends, tokens) + 1], prepend=0).tolist())


@cache
def _lengths_of_sources() -> np.ndarray:
    """Return the standard library's files' bytes / 4, float [files]."""
    corpus = open_corpus(STANDARD_LIBRARY)
    assert isinstance(corpus, Files)
    return np.array([path.stat().st_size / 4 for path in corpus.files])


def assigned(lengths: Lengths, groups: int) -> list[list[int]]:
    """Assign documents, longest first, to the group with the fewest tokens; return each group's indices, ascending."""
    loads = [(0, group) for group in range(groups)]
    found: list[list[int]] = [[] for _ in range(groups)]
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        tokens, group = loads[0]
        found[group].append(n)
        heapreplace(loads, (tokens + lengths[n], group))
    return [sorted(each) for each in found]


@cache
def _model(arrangement: Arrangement, longest: int) -> Any:
    """Build a rank's model; the weights are the same on all ranks and in all arrangements."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**SIZES, max_position_embeddings=longest, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    shape = (arrangement.groups, arrangement.context)
    group = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))["context"]
    strategy = Strategy(layout=arrangement.layout, route="direct", ulysses_degree=1)
    return hf.parallelize(model, group, strategy=strategy, gradients="sum")


def _pack(arrangement: Arrangement, lengths: Lengths) -> dict[str, Any]:
    """Return the model's arguments: the documents of this rank's group in one row, [1, tokens]."""
    documents = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1)).split(lengths)
    mine = assigned(lengths, arrangement.groups)[dist.get_rank() // arrangement.context]
    positions = torch.cat([torch.arange(lengths[n]) for n in mine])[None]
    ids = torch.cat([documents[n] for n in mine])[None]
    labels = ids.where(positions > 0, IGNORED)  # nothing predicts a document's first token
    targets = sum(lengths) - len(lengths)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "num_items_in_batch": targets}


def _result(arrangement: Arrangement, lengths: Lengths, longest: int) -> tuple[float, float]:
    """Run a step on a rank; return the mean loss of the whole batch and the norm of its gradient."""
    model = _model(arrangement, longest)
    model.zero_grad()
    loss = model(**_pack(arrangement, lengths)).loss  # this group's share of the mean, on each of its ranks
    loss.backward()
    mean = loss.detach().double() / arrangement.context
    for tensor in (mean, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)
    return mean.item(), torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()


def _measured(arrangement: Arrangement, lengths: Lengths, longest: int) -> tuple[float, int]:
    """Run a step on a rank; return its CPU seconds and the bytes that it sent."""
    model, pack = _model(arrangement, longest), _pack(arrangement, lengths)
    model.zero_grad()
    dist.barrier()
    with TrafficMeter() as meter:
        started = time.process_time()
        model(**pack).loss.backward()
        seconds = time.process_time() - started
    assert meter.sent is not None
    return seconds, meter.sent


def check_same(found: Mapping[str, tuple[float, float]]) -> None:
    """Raise SystemExit if the (loss, gradient norm) of two arrangements differ."""
    expected = next(iter(found.values()))
    for each in found.values():
        if not all(math.isclose(x, y, rel_tol=TOLERANCE) for x, y in zip(each, expected, strict=True)):
            raise SystemExit(f"losses and gradient norms differ: {dict(found)}; nothing is reported")


def measured(pool: WorkerPool, source: Source, a: PackingArguments) -> list[dict[str, Any]]:
    """Return a row for each arrangement that fits: ``seconds`` and ``sent``, both [batches, ranks]."""
    batches = [draw(source, tokens=a.tokens, longest=a.longest, seed=seed) for seed in range(a.batches)]
    fitting = [each for each in arrangements(a.ranks) if each.fits(batches)]
    rows: list[dict[str, Any]] = [
        {"source": source, "arrangement": each.name, "seconds": [], "sent": []} for each in fitting
    ]
    for lengths in batches:
        check_same({each.name: pool.run(_result, each, lengths, a.longest)[0] for each in fitting})
        calls = [partial(pool.run, _measured, each, lengths, a.longest) for each in fitting]
        for row, rounds in zip(rows, take_turns(calls, a.rounds), strict=True):
            by_rank = zip(*rounds, strict=True)
            row["seconds"].append([min(seconds for seconds, _ in turns) for turns in by_rank])
            row["sent"].append([sent for _, sent in rounds[0]])
    return rows


def main(arguments: list[str]) -> None:
    a = asked(PackingArguments(), __doc__, "burst bench packing", arguments)
    console, rows = console_of_tables(), []
    with WorkerPool(a.ranks, timeout=900) as pool:
        for source in a.sources:
            rows += (found := measured(pool, source, a))
            size = f"{a.batches} batches of {a.tokens:,} tokens, documents up to {a.longest:,}"
            title = f"{source}: {ranks_text(a.ranks)}, {size}; by CPU time of the busiest rank"
            print_table(console, lines(found, a.tokens), title=title, legend=LEGEND)
    a.write(rows=rows)


def busiest(row: Mapping[str, Any]) -> list[float]:
    """Return the seconds of the busiest rank in each batch."""
    return [max(by_rank) for by_rank in row["seconds"]]


LEGEND = {
    "groups x ranks": "data-parallel groups, and the ranks of each that share its documents",
    "tokens/s": "all tokens, divided by the CPU time of the busiest rank",
    "ours / its": "the last row's tokens/s divided by this row's, and the range over batches",
    "busiest / mean": "CPU time of the busiest rank, divided by the mean over ranks",
    "sent per rank": "bytes in a step, mean over ranks",
}


def lines(rows: Sequence[Mapping[str, Any]], tokens: int) -> list[dict[str, str]]:
    """Return the table of one source's rows, the last of which is ours: figures of all batches together."""
    return [
        {
            "groups x ranks": row["arrangement"],
            "tokens/s": f"{tokens * len(row['seconds']) / sum(busiest(row)):,.0f}",
            "ours / its": _faster(rows[-1], row),
            "busiest / mean": f"{sum(busiest(row)) / sum(map(statistics.mean, row['seconds'])):.2f}",
            "sent per rank": bytes_text(statistics.mean(sent for each in row["sent"] for sent in each)),
        }
        for row in rows
    ]


def _faster(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the ratio of a row's tokens per second to another's, and its range over batches."""
    by_batch = ratios(busiest(row), busiest(other))
    return f"{sum(busiest(other)) / sum(busiest(row)):.2f} ({min(by_batch):.2f} to {max(by_batch):.2f})"
