"""Generation after long prompts: ranks against one process.

Ranks share a sharded cache; the one process uses transformers' own. A Llama (fp32, random weights) reads a prompt and
then writes tokens greedily, by ``generate``. Ranks hold whole weights, or share them by ``shard_weights``. The first
figure is the time to the first token. The second is the time per later token, the median of those of a round. Each
rank has one thread. The one process has as many threads as there are ranks, but not more than cores. All take turns,
round by round; figures are the median and the range over rounds. A first run is not timed. It compares all tokens and
counts peak memory: the most resident bytes of a rank, minus those before. The bytes that a rank sends per token must
be those that are predicted, whatever the context's length. With --link each rank is a node of an emulated cluster
with links of this rate (it needs root and iproute2). Its rates and the host's work of a token are measured first; from
them the seconds of a later token are predicted, as by ``burst plan --generate``. ``tiny`` has two layers of width 256,
``190m`` has 12 of width 1,024.

    burst bench generate [--worlds 1 2 4] [--contexts 1024 4096 16384] [--rounds 3] [--new-tokens 17]
                         [--model 190m] [--link 100mbit]"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from burst_attention.attention.dealt import dealt_bytes
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.inference import ShardedCache, shard_weights
from burst_attention.inference.weights import step_bytes
from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading.known import CACHE
from burst_attention.launch.join import cores
from burst_train.forecast import request
from burst_train.forecast.models import Model
from burst_train.forecast.serving import Served, served

from ..arguments import WrittenArguments, asked
from ..cluster import Cluster, ClusterError, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, take_turns
from ..pool import WorkerPool
from ..tables import bytes_text, mebibytes, ranks_text, spread

WARM = 512  # tokens
TIMEOUT = 1800.0  # seconds
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 20,
    },
    "190m": {
        "vocab_size": 32_000,
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1 << 20,
    },
}
DIM = 64  # of a head
WEIGHTS = ("whole", "sharded")  # of the ranks; one process has them whole


@dataclass(frozen=True, kw_only=True)
class GenerationArguments(WrittenArguments):
    worlds: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    """Tokens of the prompt."""
    new_tokens: int = 17
    rounds: int = 3
    model: Literal["tiny", "190m"] = "tiny"
    link: str | None = None
    """Rate of each rank's link, such as 100mbit; each rank is then a node of an emulated cluster."""


class _Times:
    """A streamer that notes when tokens come. The prompt comes first."""

    def __init__(self, held: Any, clock: Callable[[], float]) -> None:
        self.held, self.clock, self.times, self.sent = held, clock, list[float](), list[int]()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, or a token."""
        self.times.append(self.clock())
        self.sent.append(self.held.sent if isinstance(self.held, ShardedCache) else 0)

    def end(self) -> None:
        """Do nothing."""


@cache
def _model(size: str, weights: str | None) -> Any:
    """Build a rank's model, the same on all ranks; ``weights``: how ranks hold them, None in one process."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    if weights is not None:
        hf.parallelize(model)
    if weights == "sharded":
        shard_weights(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _generated(
    size: str,
    weights: str | None,
    threads: int,
    context: int,
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run on a rank: generate; return the tokens, the seconds of each, and bytes: cache, weights, sent per token."""
    torch.set_num_threads(threads)
    model = _model(size, weights)
    held = DynamicCache() if weights is None else ShardedCache(model.config)
    vocabulary = SIZES[size]["vocab_size"]
    ids = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(context))
    options = {
        "max_new_tokens": count,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(ids),
    }
    streamer = _Times(held, clock)
    if dist.is_initialized():
        dist.barrier()
    out = model.generate(ids, streamer=streamer, **{CACHE: held}, **options)
    seconds = [after - before for before, after in pairwise(streamer.times)]
    sent, predicted = (streamer.sent[-1] - streamer.sent[1]) / max(1, count - 1), 0
    if weights is not None:
        heads = {"q_heads": SIZES[size]["num_attention_heads"], "v_head_dim": DIM}
        of_layer = dealt_bytes(world=held.transport.world, batch=1, queries=1, **heads, dtype=torch.float32)
        predicted = SIZES[size]["num_hidden_layers"] * of_layer + step_bytes(model)
    return {
        "tokens": out[0, context:].tolist(),
        "seconds": seconds,
        "cache": held.nbytes() if isinstance(held, ShardedCache) else _nbytes(held),
        "weights": sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in model.parameters()),
        "sent": sent,
        "predicted": predicted,
    }


def _peaked(size: str, weights: str | None, threads: int, context: int, count: int) -> tuple[dict[str, Any], int]:
    """Run on a rank: generate; return what :func:`_generated` does, and the peak resident bytes minus those before."""
    warm = min(context, WARM)
    _generated(size, weights, threads, warm, 2)  # in the first call libraries also allocate what they keep
    give_back()
    before = resident()
    found, peak = peak_during(lambda: _generated(size, weights, threads, context, count))
    return found, peak - before


def _host(size: str, count: int) -> float:
    """Run on one rank: return the CPU seconds of a later token without its products and without attention."""
    found = _generated(size, "whole", 1, WARM, count, time.process_time)
    weights = [each.weight for each in _model(size, "whole").modules() if isinstance(each, nn.Linear)]
    rows = {x.shape[1]: torch.ones(1, x.shape[1]) for x in weights}

    def products() -> float:
        started = time.process_time()
        for x in weights:
            F.linear(rows[x.shape[1]], x)
        return time.process_time() - started

    with torch.no_grad():
        took = statistics.median(products() for _ in range(count))
    read = sum(x.nbytes for x in weights)
    return max(0.0, statistics.median(found["seconds"][1:]) - took * (read + found["cache"]) / read)


def _predicted(one: WorkerPool, many: WorkerPool, network: Cluster, a: GenerationArguments) -> dict[int, list[Served]]:
    """Measure the cluster; return predictions by context, for whole and for sharded weights."""
    rate, sizes = network.rate, SIZES[a.model]
    network.set_rate(None)
    rates = limited(calibrated(many), rate)
    network.set_rate(rate)
    (host,) = one.run(_host, a.model, a.new_tokens, timeout=TIMEOUT)
    cluster = request.Cluster(ranks=many.world, per_node=1, rates=rates, device=request.Device())
    model = Model.read(LlamaConfig(**sizes), a.model)
    asked_of = partial(request.ForecastRequest, cluster=cluster, model=model, dtype=torch.float32)
    return {context: served(asked_of(seq_len=context), host) for context in a.contexts}


def _nbytes(held: DynamicCache) -> int:
    return sum(x.nbytes for layer in held.layers for x in (layer.keys, layer.values))


def measured(
    one: WorkerPool, many: WorkerPool, context: int, a: GenerationArguments, predictions: Sequence[Served] = ()
) -> list[dict[str, Any]]:
    """Return the figures of one context, a row for each way to hold weights; SystemExit if tokens or bytes are off.

    ``predictions``: of those ways; empty if they are not predicted.
    """
    world, ways = many.world, WEIGHTS if many.world > 1 else WEIGHTS[:1]
    calls = [partial(one.run, _generated, a.model, None, min(world, cores()), context, a.new_tokens, timeout=TIMEOUT)]
    ((expected, peak),) = one.run(_peaked, *calls[0].args[1:], timeout=TIMEOUT)
    peaks = [peak]
    for way in ways:
        arguments = (a.model, way, 1, context, a.new_tokens)
        found, of_ranks = zip(*many.run(_peaked, *arguments, timeout=TIMEOUT), strict=True)
        where = f"{context} tokens, {world} ranks, {way} weights"
        if any(each["tokens"] != expected["tokens"] for each in found):
            raise SystemExit(f"{where}: other tokens than one process; nothing is reported")
        for each in found:
            if each["sent"] != each["predicted"]:
                raise SystemExit(f"{where}: sent {each['sent']} bytes a token, not {each['predicted']}")
        calls.append(partial(many.run, _generated, *arguments, timeout=TIMEOUT))
        peaks.append(max(of_ranks))
    alone, *turns = take_turns(calls, a.rounds)
    rows: list[dict[str, Any]] = [
        {"ranks": world, "context": context, "weights": way, "peak": [peak, most], **_figures(alone, ours)}
        for way, ours, most in zip(ways, turns, peaks[1:], strict=True)
    ]
    for row, each in zip(rows, predictions, strict=False):
        row["predicted"] = {"token": each.token, "step": dict(each.step), "gain": predictions[0].token / each.token}
        row["gain"] = ratios(row["later"][1], rows[0]["later"][1])
    return rows


def _figures(*sides: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return seconds by side and round, and bytes by side, of the slowest and fullest ranks."""
    first, later = (
        [[max(of(each["seconds"]) for each in by_rank) for by_rank in side] for side in sides]
        for of in (lambda seconds: seconds[0], lambda seconds: statistics.median(seconds[1:]))
    )
    most = {name: [max(each[name] for each in side[0]) for side in sides] for name in ("cache", "weights", "sent")}
    return {"first": first, "later": later, "cache": most["cache"], "held": most["weights"], "sent": most["sent"][-1]}


def main(arguments: list[str]) -> None:
    a = asked(GenerationArguments(), __doc__, "burst bench generate", arguments)
    console, rows = console_of_tables(), list[dict[str, Any]]()
    for world in a.worlds:
        found = over_contexts(world, a)
        rows += found
        threads = min(world, cores())
        sizes = SIZES[a.model]
        title = f"{ranks_text(world)} x 1 thread against one process x {threads}; fp32, "
        title += f"{sizes['num_hidden_layers']} layers, H={sizes['num_attention_heads']}, D={DIM}; rounds: {a.rounds}"
        title += f", links of {a.link}" if a.link else ""
        print_table(console, [line(row) for row in found], title=title, legend=LEGEND)
    a.write(model=SIZES[a.model], rows=rows)


def over_contexts(world: int, a: GenerationArguments) -> list[dict[str, Any]]:
    """Return the rows of all contexts for one number of ranks."""
    with ExitStack() as stack:
        network = None
        if a.link is not None:
            try:
                network = stack.enter_context(Cluster(world, 1, rate=parse_rate(a.link)))
            except (ClusterError, ValueError) as error:
                raise SystemExit(f"burst bench generate: {error}") from None
        one = stack.enter_context(WorkerPool(1, timeout=TIMEOUT))
        entries = None if network is None else network.entries()
        many = stack.enter_context(WorkerPool(world, timeout=TIMEOUT, entries=entries))
        predictions = {} if network is None or world == 1 else _predicted(one, many, network, a)
        return [row for context in a.contexts for row in measured(one, many, context, a, predictions.get(context, ()))]


LEGEND = {
    "context": "tokens of the prompt",
    "weights": "how ranks hold them",
    "first token, ms": "from the prompt to the first new token, median and range of the rounds",
    "first token, ratio": "one process's time divided by ours, round by round",
    "later token, ms": "each further token, the same way",
    "later token, ratio": "the same of further tokens",
    "predicted, ms": "the same, from rates measured before",
    "over whole": "seconds of a later token with whole weights over those with sharded ones, round by round",
    "over whole, predicted": "the same of the predicted seconds",
    "weights per rank": "bytes of weights",
    "whole": "the same in one process",
    "cache per rank": "bytes of keys and values",
    "one process's": "the same in one process",
    "peak per rank": "the highest rank's memory, without that before the prompt",
    "one process's peak": "the same in one process",
    "sent per token": "bytes that a rank sends for each further token",
}


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one context. Ratios are one process's seconds over ours."""
    cells = {"context": f"{row['context']:,}", "weights": row["weights"]}
    for name, (alone, ours) in (("first token", row["first"]), ("later token", row["later"])):
        cells |= {f"{name}, ms": spread([1e3 * x for x in ours], ".3g"), f"{name}, ratio": spread(ratios(ours, alone))}
    if "predicted" in row:
        cells["predicted, ms"] = f"{1e3 * row['predicted']['token']:.3g}"
        cells["over whole"] = spread(row["gain"]) if row["weights"] == "sharded" else ""
        cells["over whole, predicted"] = f"{row['predicted']['gain']:.2f}" if row["weights"] == "sharded" else ""
    alone, ours = row["held"]
    cells |= {"weights per rank": mebibytes(ours, 1), "whole": mebibytes(alone, 1)}
    alone, ours = row["cache"]
    cells |= {"cache per rank": mebibytes(ours, 1), "one process's": mebibytes(alone, 1)}
    alone, ours = row["peak"]
    cells |= {"peak per rank": mebibytes(ours, 1), "one process's peak": mebibytes(alone, 1)}
    return cells | {"sent per token": bytes_text(row["sent"])}
