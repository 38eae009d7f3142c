"""Training steps of models with recurrent layers.

W ranks compete with one process, each with one thread. The two take turns, round by round. Figures are the median and
the range over rounds. The first ratio is the speed-up in seconds; it can't exceed the machine's cores. The second is
the CPU time of all ranks together over that of one process: what state passing computes twice, and the exchange. Memory
is the peak resident memory of a rank during a step, minus the memory before it. The model has random weights and one
attention layer in four. Its loss and gradients are first compared.

    burst bench hybrid [--families qwen3_5_text bamba] [--seq-len 2048] [--worlds 1 2 4] [--rounds 5]"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burst_attention.integrations import hf
from burst_attention.testing import WorkerPool

from ..arguments import WrittenArguments, asked
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, seconds_of, take_turns
from ..tables import mebibytes, ranks_text, spread, terminal

VOCABULARY, LAYERS = 512, 4
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
COMMON = HEADS | {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {  # gated delta rule
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    },
    "bamba": {  # Mamba 2
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_expand": 2,
        "mamba_chunk_size": 128,
        "attn_layer_indices": [LAYERS - 1],
    },
}


@dataclass(frozen=True, kw_only=True)
class HybridArguments(WrittenArguments):
    families: tuple[Literal["qwen3_5_text", "bamba"], ...] = ("qwen3_5_text", "bamba")
    seq_len: int = 2048
    worlds: tuple[int, ...] = (1, 2, 4)
    rounds: int = 5


@cache
def _model(family: str, parallel: bool) -> Any:
    """Build a rank's model; the weights are the same on all ranks."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**COMMON | FAMILIES[family], use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    if parallel:
        hf.parallelize(model, gradients="sum")
    return model


def _step(family: str, parallel: bool, seq_len: int) -> float:
    """Run one step, without an optimizer; return the loss."""
    model = _model(family, parallel)
    model.zero_grad()
    ids = torch.randint(VOCABULARY, (1, seq_len), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for parameter in model.parameters() if parallel else ():
        dist.all_reduce(parameter.grad)
    return loss.item()


def _prepared(family: str, parallel: bool, seq_len: int) -> tuple[float, float]:
    """Run on a rank: warm up; return the loss and the gradients' norm."""
    torch.set_num_threads(1)
    loss = _step(family, parallel, seq_len)
    return loss, torch.stack([p.grad.norm() for p in _model(family, parallel).parameters()]).norm().item()


def _seconds(family: str, parallel: bool, seq_len: int) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a step."""
    started = time.process_time()
    seconds = seconds_of(partial(_step, family, parallel, seq_len))
    return seconds, time.process_time() - started


def _memory(family: str, parallel: bool, seq_len: int) -> int:
    _model(family, parallel).zero_grad()
    give_back()
    before = resident()
    return peak_during(partial(_step, family, parallel, seq_len))[1] - before


def measured(pools: Sequence[WorkerPool], family: str, a: HybridArguments) -> dict[str, Any]:
    """Return the figures by round, and the memory, of one process and of the ranks."""
    sides = [(pool, (family, parallel, a.seq_len)) for pool, parallel in zip(pools, (False, True), strict=True)]
    (expected,), found = (pool.run(_prepared, *given) for pool, given in sides)
    if any(abs(x / y - 1) > 1e-4 for each in found for x, y in zip(each, expected, strict=True)):
        raise SystemExit(f"{family}: {len(found)} ranks have {found}, one process has {expected}; nothing is reported")
    calls = [partial(pool.run, _seconds, *given) for pool, given in sides]
    turns = [[tuple(zip(*by_rank, strict=True)) for by_rank in each] for each in take_turns(calls, a.rounds)]
    seconds, cpu = ([[of(turn[n]) for turn in each] for each in turns] for n, of in ((0, max), (1, sum)))
    memory = [max(pool.run(_memory, *given)) for pool, given in sides]
    return {"family": family, "ranks": len(found), "seconds": seconds, "cpu_seconds": cpu, "memory": memory}


def main(arguments: list[str]) -> None:
    a = asked(HybridArguments(), __doc__, "burst bench hybrid", arguments)
    rows = []
    for world in a.worlds:
        with WorkerPool(1, timeout=900) as one, WorkerPool(world, timeout=900) as many:
            rows += (found := [measured((one, many), family, a) for family in a.families])
        lines = [_line(row) for row in found]
        title = f"{ranks_text(world)}, S={a.seq_len}, fp32, {LAYERS} layers, width 256; {a.rounds} rounds"
        Console().print(terminal(lines, title=title))
    a.write(rows=rows)


def _line(row: dict[str, Any]) -> dict[str, str]:
    return {
        "model": row["family"],
        "seconds": spread(row["seconds"][1]),
        "one process": spread(row["seconds"][0]),
        "speed-up": spread(ratios(row["seconds"][1], row["seconds"][0])),
        "CPU time, of one process's": spread(ratios(row["cpu_seconds"][0], row["cpu_seconds"][1])),
        "memory": mebibytes(row["memory"][1]),
        "one process's": mebibytes(row["memory"][0]),
    }
