"""A step of a DeepSeek V3.2 layer: stock sdpa against one rank.

Both run in one process each, with the same threads, and take turns. The layer is small: hidden 512, 8 heads, 8 index
heads, 256 chosen keys, a dense MLP of 64, a vocabulary of 128, in fp32 with random weights. A step is a forward and a
backward. A first step is not timed: it compares the losses and counts peak memory, the most resident bytes minus those
before. --ours lists lengths that stock is not run at.

    burst bench indexed [--seq-lens 4096 8192] [--ours 16384] [--threads 2] [--rounds 3]"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.integrations import hf

from ..arguments import WrittenArguments, asked
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, seconds_of, take_turns
from ..pool import WorkerPool
from ..tables import mebibytes, spread

TIMEOUT = 3600.0  # seconds
APART = 1e-3  # of the losses: keys with nearly equal scores may be chosen otherwise
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "mlp_layer_types": ["dense"],
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 32,
    "index_topk": 256,
    "index_head_dim": 64,
    "index_n_heads": 8,
    "max_position_embeddings": 1 << 20,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class IndexedArguments(WrittenArguments):
    seq_lens: tuple[int, ...] = (4096, 8192)
    """Tokens of the sequence."""
    ours: tuple[int, ...] = (16384,)
    """Lengths at which only ours is run."""
    threads: int = 2
    rounds: int = 3


@cache
def _model(parallel: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV32Config(**SIZES), attn_implementation="sdpa").train()
    return hf.parallelize(model, strategy="burst") if parallel else model


def _step(parallel: bool, threads: int, length: int) -> float:
    """Run on a rank: one step; return the loss."""
    torch.set_num_threads(threads)
    model = _model(parallel)
    ids = torch.randint(1, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **({} if parallel else {"use_cache": False})).loss
    loss.backward()
    return float(loss.item())


def _timed(parallel: bool, threads: int, length: int) -> float:
    return seconds_of(partial(_step, parallel, threads, length))


def _peaked(parallel: bool, threads: int, length: int) -> tuple[float, int]:
    """Run on a rank: a step; return the loss, and the peak resident bytes minus those before."""
    _step(parallel, threads, 512)  # in the first step libraries also allocate what they keep
    give_back()
    before = resident()
    loss, peak = peak_during(partial(_step, parallel, threads, length))
    return loss, peak - before


def measured(pools: list[WorkerPool], length: int, a: IndexedArguments) -> dict[str, Any]:
    """Return seconds by round and peaks, of stock and ours; raise SystemExit if the losses differ."""
    sides = [(parallel, pool) for parallel, pool in zip((False, True), pools, strict=True)]
    sides = [(parallel, pool) for parallel, pool in sides if parallel or length in a.seq_lens]
    found = [pool.run(_peaked, parallel, a.threads, length, timeout=TIMEOUT)[0] for parallel, pool in sides]
    losses, peaks = zip(*found, strict=True)
    if abs(losses[0] / losses[-1] - 1) > APART:
        raise SystemExit(f"{length} tokens: the loss is {losses[-1]}, stock's {losses[0]}; nothing is reported")
    calls = [partial(pool.run, _timed, parallel, a.threads, length, timeout=TIMEOUT) for parallel, pool in sides]
    seconds = [[by_rank[0] for by_rank in side] for side in take_turns(calls, a.rounds)]
    return {"tokens": length, "seconds": seconds, "peak": peaks, "losses": losses}


def main(arguments: list[str]) -> None:
    a = asked(IndexedArguments(), __doc__, "burst bench indexed", arguments)
    with WorkerPool(1, timeout=TIMEOUT) as stock, WorkerPool(1, timeout=TIMEOUT) as ours:
        rows = [measured([stock, ours], length, a) for length in (*a.seq_lens, *a.ours)]
    title = f"a step of a DeepSeek V3.2 layer, fp32, one process x {a.threads} threads; rounds: {a.rounds}"
    print_table(console_of_tables(), [line(row) for row in rows], title=title, legend=LEGEND)
    a.write(model=SIZES, rows=rows)


LEGEND = {
    "seconds": "a forward and a backward, median and range of the rounds",
    "ratio": "stock's time divided by ours, round by round",
    "peak": "the most resident memory, without that before the step",
    "share": "our peak divided by stock's",
}


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one length."""
    *stock, ours = row["seconds"]
    *stock_peak, peak = row["peak"]
    cells = {"tokens": f"{row['tokens']:,}", "stock's seconds": spread(stock[0]) if stock else "not run"}
    cells |= {"seconds": spread(ours), "ratio": spread(ratios(ours, stock[0])) if stock else "-"}
    cells |= {"stock's peak": mebibytes(stock_peak[0]) if stock else "not run", "peak": mebibytes(peak)}
    return cells | {"share": f"{peak / stock_peak[0]:.2f}" if stock else "-"}
