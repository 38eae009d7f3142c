"""Generation after long prompts: ranks against one process.

Ranks share a sharded cache; the one process uses transformers' own. A tiny Llama (fp32, random weights) reads a prompt
and then writes tokens greedily. The first figure is the time to the first token. The second is the time per later
token, the median of those of a round. Each rank has one thread. The one process has as many threads as there are ranks,
but not more than cores. The two take turns, round by round; figures are the median and the range over rounds. A first
run is not timed. It compares all tokens and counts peak memory: the most resident bytes of a rank, minus those before.
The bytes that a rank sends per token must be those that are predicted, whatever the context's length. With --link each
rank is a node of an emulated cluster with links of this rate (it needs root and iproute2).

    burst bench generate [--worlds 1 2 4] [--contexts 1024 4096 16384] [--rounds 3] [--new-tokens 17]
                         [--link 100mbit]"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from burst_attention.attention.dealt import dealt_bytes
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.launch.join import cores

from ..arguments import WrittenArguments, asked
from ..cluster import Cluster, ClusterError, parse_rate
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, take_turns
from ..pool import WorkerPool
from ..tables import bytes_text, mebibytes, ranks_text, spread

VOCABULARY, LAYERS, HEADS, DIM = 512, 2, 4, 64
WARM = 512  # tokens
TIMEOUT = 1800.0  # seconds
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": HEADS * DIM,
    "intermediate_size": 512,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True, kw_only=True)
class GenerationArguments(WrittenArguments):
    worlds: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    """Tokens of the prompt."""
    new_tokens: int = 17
    rounds: int = 3
    link: str | None = None
    """Rate of each rank's link, such as 100mbit; each rank is then a node of an emulated cluster."""


@cache
def _model(parallel: bool) -> Any:
    """Build a rank's model; the weights are the same on all ranks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32, attn_implementation="sdpa")
    return hf.parallelize(model.eval()) if parallel else model.eval()


def _generated(parallel: bool, threads: int, context: int, count: int) -> dict[str, Any]:
    """Run on a rank: generate; return the tokens, the seconds of each, the cache's bytes, and those sent per token."""
    torch.set_num_threads(threads)
    model = _model(parallel)
    held = ShardedCache(model.config) if parallel else DynamicCache()
    ids = torch.randint(VOCABULARY, (1, context), generator=torch.Generator().manual_seed(context))
    tokens, seconds, sent = list[int](), list[float](), list[int]()
    with torch.no_grad():
        for _ in range(count):
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            ids = model(ids, past_key_values=held, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - started)
            tokens.append(ids.item())
            sent.append(held.transport.sent if isinstance(held, ShardedCache) else 0)
    size = held.nbytes() if isinstance(held, ShardedCache) else _nbytes(held)
    return {"tokens": tokens, "seconds": seconds, "cache": size, "sent": (sent[-1] - sent[0]) / max(1, count - 1)}


def _peaked(parallel: bool, threads: int, context: int, count: int) -> tuple[dict[str, Any], int]:
    """Run on a rank: generate; return what :func:`_generated` does, and the peak resident bytes minus those before."""
    _generated(parallel, threads, min(context, WARM), 2)  # in the first call libraries also allocate what they keep
    give_back()
    before = resident()
    found, peak = peak_during(lambda: _generated(parallel, threads, context, count))
    return found, peak - before


def _nbytes(held: DynamicCache) -> int:
    return sum(x.nbytes for layer in held.layers for x in (layer.keys, layer.values))


def measured(one: WorkerPool, many: WorkerPool, context: int, a: GenerationArguments) -> dict[str, Any]:
    """Return the figures of one context by round; raise SystemExit if tokens or bytes are not those expected."""
    world = many.world
    of_one, of_many = (False, min(world, cores()), context, a.new_tokens), (True, 1, context, a.new_tokens)
    ((expected, peak),) = one.run(_peaked, *of_one, timeout=TIMEOUT)
    found, peaks = zip(*many.run(_peaked, *of_many, timeout=TIMEOUT), strict=True)
    if any(each["tokens"] != expected["tokens"] for each in found):
        raise SystemExit(f"{context} tokens, {world} ranks: other tokens than one process; nothing is reported")
    sizes = {"batch": 1, "queries": 1, "q_heads": HEADS, "v_head_dim": DIM, "dtype": torch.float32}
    predicted = LAYERS * dealt_bytes(world=world, **sizes)
    if any(each["sent"] != predicted for each in found):
        raise SystemExit(f"{context} tokens, {world} ranks: sent {found[0]['sent']} bytes a token, not {predicted}")
    alone = partial(one.run, _generated, *of_one, timeout=TIMEOUT)
    ours = partial(many.run, _generated, *of_many, timeout=TIMEOUT)
    turns = take_turns([alone, ours], a.rounds)
    first, later = (
        [[max(of(each["seconds"]) for each in by_rank) for by_rank in side] for side in turns]
        for of in (lambda seconds: seconds[0], lambda seconds: statistics.median(seconds[1:]))
    )
    cached = [max(each["cache"] for each in side[0]) for side in turns]
    row = {"ranks": world, "context": context, "first": first, "later": later, "cache": cached, "sent": predicted}
    return row | {"peak": [peak, max(peaks)]}


def main(arguments: list[str]) -> None:
    a = asked(GenerationArguments(), __doc__, "burst bench generate", arguments)
    console, rows = console_of_tables(), list[dict[str, Any]]()
    for world in a.worlds:
        found = over_contexts(world, a)
        rows += found
        threads = min(world, cores())
        title = f"{ranks_text(world)} x 1 thread against one process x {threads}; fp32, {LAYERS} layers, H={HEADS}, "
        title += f"D={DIM}; rounds: {a.rounds}" + (f", links of {a.link}" if a.link else "")
        print_table(console, [line(row) for row in found], title=title, legend=LEGEND)
    a.write(model=SIZES, rows=rows)


def over_contexts(world: int, a: GenerationArguments) -> list[dict[str, Any]]:
    """Return the rows of all contexts for one number of ranks."""
    with ExitStack() as stack:
        entries = None
        if a.link is not None:
            try:
                entries = stack.enter_context(Cluster(world, 1, rate=parse_rate(a.link))).entries()
            except (ClusterError, ValueError) as error:
                raise SystemExit(f"burst bench generate: {error}") from None
        one = stack.enter_context(WorkerPool(1, timeout=TIMEOUT))
        many = stack.enter_context(WorkerPool(world, timeout=TIMEOUT, entries=entries))
        return [measured(one, many, context, a) for context in a.contexts]


LEGEND = {
    "context": "tokens of the prompt",
    "first token, ms": "from the prompt to the first new token, median and range of the rounds",
    "first token, ratio": "one process's time divided by ours, round by round",
    "later token, ms": "each further token, the same way",
    "later token, ratio": "the same of further tokens",
    "cache per rank": "bytes of keys and values",
    "one process's": "the same in one process",
    "peak per rank": "the highest rank's memory, without that before the prompt",
    "one process's peak": "the same in one process",
    "sent per token": "bytes that a rank sends for each further token",
}


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one context. Ratios are one process's seconds over ours."""
    cells = {"context": f"{row['context']:,}"}
    for name, (alone, ours) in (("first token", row["first"]), ("later token", row["later"])):
        cells |= {f"{name}, ms": spread([1e3 * x for x in ours], ".3g"), f"{name}, ratio": spread(ratios(ours, alone))}
    alone, ours = row["cache"]
    cells |= {"cache per rank": mebibytes(ours, 1), "one process's": mebibytes(alone, 1)}
    alone, ours = row["peak"]
    cells |= {"peak per rank": mebibytes(ours, 1), "one process's peak": mebibytes(alone, 1)}
    return cells | {"sent per token": bytes_text(row["sent"])}
