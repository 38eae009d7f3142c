"""Training steps of transformers models: stock against parallelized.

One process with stock transformers (sdpa) and W ranks with hf.parallelize take turns, round by round: a forward and a
backward, without an optimizer. The loss and the gradients' norm are compared first. Figures are the median and the
range over rounds. The ratio is stock's seconds over ours; on one machine it can't exceed its cores or devices. CPU time
is that of all ranks together over one process's. Memory is the peak of a rank during a step, minus that before it. The
first step includes what is compiled, proved and planned. MFU: 6 operations for each weight of a linear layer and token
(the head counts, the embedding does not) and 12 D for each head and visible pair, as a share of the devices' peak;
what is recomputed does not count. The weights are random. With --recompute, stock uses gradient checkpointing.

    burst bench step [--models llama] [--seq-len 2048] [--worlds 1 2] [--kernels auto] [--recompute] [--rounds 5]
    burst bench step --device cuda --dtype bfloat16 --models llama-8b --seq-len 32768 --worlds 1 --recompute"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burst_attention import kernels
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.integrations import hf
from burst_train.data.sequences import TokenSequence
from burst_train.health.flops import ModelFlops, peak_of
from burst_train.strategies import Heads

from ..arguments import WrittenArguments, asked
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, seconds_of, take_turns
from ..pool import WorkerPool
from ..tables import mebibytes, ranks_text, spread

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SMALL = HEADS | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
MIXED = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {f"linear_{name}": n for name, n in (("num_key_heads", 4), ("num_value_heads", 4), ("key_head_dim", 64))}
MAMBA = {f"mamba_{name}": n for name, n in (("n_heads", 8), ("d_head", 64), ("d_state", 64), ("expand", 2))}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    # Eight layers of Llama-3-8B, with the vocabulary of Llama 2.
    "llama-8b": ("llama", {"intermediate_size": 14336, "num_hidden_layers": 8, "num_key_value_heads": 8}),
    # Gated delta rule, and Mamba 2; one attention layer in four.
    "qwen3_5_text": ("qwen3_5_text", SMALL | DELTA | {"linear_value_head_dim": 64, "layer_types": MIXED}),
    "bamba": ("bamba", SMALL | MAMBA | {"mamba_chunk_size": 128, "attn_layer_indices": [3]}),
}


@dataclass(frozen=True, kw_only=True)
class StepArguments(WrittenArguments):
    models: tuple[Literal["llama", "llama-8b", "qwen3_5_text", "bamba"], ...] = ("llama",)
    seq_len: int = 2048
    worlds: tuple[int, ...] = (1, 2)
    kernels: tuple[str, ...] = ("auto",)
    """Kernels of our side; each is compared with stock transformers by itself."""
    recompute: bool = False
    """Recompute each layer in the backward, on both sides."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 5
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device, for MFU. If not given, that of known GPUs."""


@dataclass(frozen=True)
class Side:
    """What one side runs; ``kernel`` None: stock transformers."""

    model: str
    kernel: str | None
    given: StepArguments


@cache
def _model(side: Side) -> Any:
    """Build a rank's model; the weights are the same on all ranks."""
    if side.kernel not in (None, "auto"):
        kernels.candidates = lambda *_, **__: (side.kernel,)
    torch.manual_seed(0)
    family, sizes = MODELS[side.model]
    config = CONFIG_MAPPING[family](**sizes, use_cache=False, max_position_embeddings=1 << 21)
    recompute, dtype = side.given.recompute, getattr(torch, side.given.dtype)
    with torch.device(side.given.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if side.kernel is not None:
        return hf.parallelize(model, gradients="sum", memory=hf.Memory(recompute="layer" if recompute else "none"))
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _step(side: Side) -> float:
    """Run one step, without an optimizer; return the loss."""
    model = _model(side)
    model.zero_grad()
    sizes, generator = (1, side.given.seq_len), torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, sizes, generator=generator).to(side.given.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for parameter in model.parameters() if side.kernel and dist.get_world_size() > 1 else ():
        dist.all_reduce(parameter.grad)
    return loss.item()


def _prepared(side: Side) -> tuple[float, float, float]:
    """Run on a rank: warm up; return the loss, the gradients' norm, and the seconds of the first step."""
    torch.set_num_threads(1)
    _model(side)
    started = time.perf_counter()
    loss = _step(side)
    seconds = time.perf_counter() - started
    _step(side)
    return loss, torch.stack([p.grad.float().norm() for p in _model(side).parameters()]).norm().item(), seconds


def _seconds(side: Side) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a step."""
    started = time.process_time()
    seconds = seconds_of(partial(_step, side))
    return seconds, time.process_time() - started


def _memory(side: Side) -> int:
    """Return the peak bytes of a step, minus those before it."""
    _model(side).zero_grad()
    give_back()
    if side.given.device == "cpu":
        before = resident()
        return peak_during(partial(_step, side))[1] - before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(side)
    return torch.cuda.max_memory_allocated() - before


def _operations(side: Side) -> tuple[int | None, float | None]:
    """Return the model's operations in a step, None if it has recurrent layers; and the device's known peak."""
    model, given = _model(side), side.given
    layers, tokens = [None] * model.config.num_hidden_layers, TokenSequence(np.zeros(given.seq_len, np.int32), None)
    count = ModelFlops.of(model, Heads.of(model.config), layers, model.config).of_step([tokens])
    peak = peak_of(torch.device(given.device), getattr(torch, given.dtype), given.peak_tflops)
    return count if MODELS[side.model][0] == "llama" else None, peak


def measured(pools: Sequence[WorkerPool], sides: Sequence[Side], a: StepArguments) -> dict[str, Any]:
    """Return the figures of stock transformers and of ours, by round."""
    (expected,), found = (pool.run(_prepared, side, timeout=1800) for pool, side in zip(pools, sides, strict=True))
    most = 1e-4 if a.dtype == "float32" else 1e-2
    if any(not abs(x / y - 1) <= most for each in found for x, y in zip(each[:2], expected[:2], strict=True)):
        raise SystemExit(f"{sides[1]}: loss and norm are {found}, stock transformers' {expected}; nothing is reported")
    calls = [partial(pool.run, _seconds, side, timeout=1800) for pool, side in zip(pools, sides, strict=True)]
    turns = [[tuple(zip(*by_rank, strict=True)) for by_rank in each] for each in take_turns(calls, a.rounds)]
    seconds, cpu = ([[of(turn[n]) for turn in each] for each in turns] for n, of in ((0, max), (1, sum)))
    row = {"model": sides[1].model, "kernel": sides[1].kernel, "ranks": len(found), "loss": [expected[0], found[0][0]]}
    row |= {"first": [expected[2], max(each[2] for each in found)], "seconds": seconds, "cpu_seconds": cpu}
    operations, peak = pools[0].run(_operations, sides[0])[0]
    of_peak = operations / peak if operations and peak else None
    row["mfu"] = [[of_peak / s / n for s in each if of_peak] for each, n in zip(seconds, (1, len(found)), strict=True)]
    row["memory"] = [max(pool.run(_memory, side, timeout=1800)) for pool, side in zip(pools, sides, strict=True)]
    return row


def main(arguments: list[str]) -> None:
    report(asked(StepArguments(), __doc__, "burst bench step", arguments))


def report(a: StepArguments) -> None:
    """Measure each case, print its table, and write the rows."""
    rows = []
    if a.device == "cuda" and max(a.worlds) > 1:
        raise SystemExit("burst bench step: --device cuda runs one rank; give --worlds 1")
    for world, name, kernel in itertools.product(a.worlds, a.models, a.kernels):
        with WorkerPool(1, timeout=900) as one, WorkerPool(world, timeout=900) as many:
            rows.append(measured((one, many), (Side(name, None, a), Side(name, kernel, a)), a))
        title = f"{name}, {ranks_text(world)}, S={a.seq_len}, {a.dtype}, {a.device}; {a.rounds} rounds"
        print_table(console_of_tables(), _lines(rows[-1], a.seq_len), title=title, legend=LEGEND)
    a.write(rows=rows)


LEGEND = {
    "stock": "transformers with PyTorch's own attention, on one rank",
    "rows": "median and range of the rounds; seconds: a step of the slowest rank; MFU: the model's operations, as a "
    "share of the device's peak; CPU time: of all ranks; memory: the highest rank's peak; first step: with compilation",
}


def _lines(row: dict[str, Any], tokens: int) -> list[dict[str, str]]:
    stock, ours = row["seconds"]
    figures = {
        "loss": [f"{each:.5f}" for each in row["loss"]],
        "seconds": [spread(stock), spread(ours)],
        "stock's seconds over ours": ["", spread(ratios(ours, stock))],
        "tokens/s": [spread([tokens / s for s in each], ",.0f") for each in (stock, ours)],
        "MFU": [spread(each) for each in row["mfu"]],
        "CPU time over stock's": ["", spread(ratios(*row["cpu_seconds"]))],
        "memory": [mebibytes(each) for each in row["memory"]],
        "first step, s": [f"{each:.1f}" for each in row["first"]],
    }
    return [{"": name, "stock": old, f"kernel {row['kernel']}": new} for name, (old, new) in figures.items()]
