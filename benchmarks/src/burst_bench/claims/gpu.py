"""The first minutes on a GPU: one line for each part.

    burst bench gpu {explain|nan|kernels|step|waits|packed|profile|offload} [--device cpu]

The line is ``name: value (bound)``. benchmarks/gpu_first.sh runs all parts, each with a time limit. On a CPU the sizes
are tiny: this only shows that the parts run."""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.integrations import hf
from burst_attention.kernels import KERNELS, choose, cudnn_graphs, explain
from burst_attention.kernels.contract import BackwardInputs, Kernel
from burst_attention.kernels.prove import BOUNDS
from burst_attention.kernels.reference import Reference
from burst_attention.plan.tile import Tile, Tiles

from ..arguments import asked
from ..harness.memory import peak_during
from . import kernels, step

Part = Literal["explain", "nan", "kernels", "step", "waits", "packed", "profile", "offload"]
WAITS = 2  # most waits of the host for the device in a forward and a backward
HALF = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class GpuArguments:
    part: tyro.conf.Positional[Part] = "explain"
    """What to run."""
    device: Literal["cpu", "cuda"] = "cuda"
    """cpu: tiny sizes, to see that the parts run."""

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


def part_explain(a: GpuArguments) -> str:
    """Versions, what ``auto`` takes, and the seconds that this process needed to know."""
    name = "a CPU" if a.tiny else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    started = time.perf_counter()
    for options in ({}, {"banded": True}, {"documents": 20}):
        print(explain(device=a.place, dtype=HALF, head_dims=(128, 128), **options))
    took = time.perf_counter() - started
    kernel = choose("auto", device=a.place, dtype=HALF, head_dims=(128, 128)).name
    return f"{name}, {versions}; auto = {kernel}, {took:.1f} s (at most 60; 5 in a later process)"


SHAPES = {
    "full": lambda keys: [Tile(0, 256, 0, keys, 1 - keys, 255)],
    "causal": lambda keys: [Tile(0, keys, 0, keys, 0, keys - 1)],
    "masked": lambda keys: [Tile(0, keys // 2, 0, keys // 2, -9, 20), Tile(keys // 2, keys, keys // 2, keys, -9, 20)],
    "one query": lambda keys: [Tile(0, 1, 0, keys, 1 - keys, 0)],
}


def wrong_far_below_zero(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield each launch with an lse near -100 in which a result is not finite, or differs from the reference."""
    for (shape, tiles_of), keys in ((each, keys) for each in SHAPES.items() for keys in (128, 192, 320)):
        tiles = Tiles(np.array(tiles_of(keys), np.int64))
        rows, dim, make = int(tiles.table[:, 1].max()), 64, torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn(1, n, heads, dim, generator=make).to(device, dtype).transpose(1, 2)
            for n, heads in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))
        )
        q[..., 0], k[..., 0] = 100 * dim**0.5, -1
        wide, scale = [x.double() for x in (dout, q, k, v)], dim**-0.5
        out, lse = Reference().forward(*wide[1:], tiles, scale)
        right = out, lse, *Reference().backward(BackwardInputs(*wide, lse, None, tiles, scale, out=out))
        delta = (wide[0] * out).sum(-1)
        stats = torch.stack((lse, delta), -1).float().unbind(-1)
        mine = (
            *kernel.forward(q, k, v, tiles, scale),
            *kernel.backward(BackwardInputs(dout, q, k, v, *stats, tiles, scale)),
        )
        for name, actual, expected in zip(("out", "lse", "dq", "dk", "dv"), mine, right, strict=True):
            # A gradient may be 0 by cancellation: the error is relative to the terms, too.
            size = max(expected.norm().item(), 0.05 * wide[0].norm().item())
            error = (actual.double() - expected).norm().item() / size
            if not error <= BOUNDS[dtype]:
                yield f"{kernel.name}, {shape}, {keys} keys: {name} {error:.1e}"


def part_nan(a: GpuArguments) -> str:
    ran, wrong = [], []
    for name in KERNELS:
        try:
            kernel = choose(name, device=a.place, dtype=HALF).untuned()
        except ValueError as error:
            print(f"left out: {error}")
            continue
        ran.append(name)
        try:
            wrong += wrong_far_below_zero(kernel, a.place, HALF)
        except Exception as error:  # packages raise errors of any type; the other kernels are still to be seen
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    print("\n".join(wrong))
    return f"{len(wrong)} wrong results of {len(ran)} kernels ({', '.join(ran)}) with an lse of -100 (0)"


def part_kernels(a: GpuArguments) -> str:
    """The speed of ``auto`` in ``burst bench kernels``."""
    options = ["--tables", "kernels", "--head-dims", "128", "--device", a.device]
    options += ["--seq-lens", "128", "--rounds", "1"] if a.tiny else ["--seq-lens", "16384", "--rounds", "5"]
    figures = _figures(kernels.main, options)["kernels"]
    auto = [row for row in figures if row["kernel"].endswith(" (auto)") and row["mask"] == "causal"]
    rates = [f"{row['pass']} {row['TFLOP/s']} TFLOP/s, {row['of the best stock kernel']}" for row in auto]
    return f"causal, {auto[0]['kernel']}: {'; '.join(rates)} (at least 0.95)"


def part_step(a: GpuArguments) -> str:
    """A training step in ``burst bench step``."""
    options = ["--worlds", "1", "--recompute", "--device", a.device]
    if a.tiny:
        options += ["--models", "llama", "--seq-len", "64", "--rounds", "1", "--peak-tflops", "1"]
    else:
        options += ["--models", "llama-8b", "--seq-len", "32768", "--rounds", "3", "--dtype", "bfloat16"]
    row = _figures(step.main, options)["rows"][0]
    stock, ours = (statistics.median(each) for each in row["seconds"])
    return f"{stock / ours:.2f} of stock's rate, first step {row['first'][1]:.1f} s (at least 1.0; at most 8 s)"


def _figures(program: Any, options: list[str]) -> Any:
    """Run a measurement, and return what it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        program([*options, "--json", str(path)])
        return json.loads(path.read_text())


def waits_of_a_step(device: torch.device) -> list[str]:
    """Return a message for each wait of the host in a parallelized model's forward and backward; none on a CPU.

    The batch is already on the device, and two steps have been made before.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes))
    model = hf.parallelize(model.to(device, HALF))
    ids = torch.randint(256, (1, 512), device=device)

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    for _ in range(2):
        run()
    if device.type == "cpu":
        run()
        return []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "synchroniz" in str(w.message)]


def part_waits(a: GpuArguments) -> str:
    found = waits_of_a_step(a.place)
    print("\n".join(found))
    counted = "; a CPU has none" if a.tiny else ""
    return f"{len(found)} waits of the host in a step of a parallelized model (at most {WAITS}{counted})"


def _batch(generator: random.Random, documents: int, longest: int) -> list[int]:
    """Return the borders of documents of random lengths."""
    lengths = [generator.randint(2, longest) for _ in range(documents)]
    return [0, *np.cumsum(lengths).tolist()]


def _inputs(seqlen: int, heads: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, heads, seqlen, 128, dtype=HALF, device=device, requires_grad=True) for _ in "qkv")


def graphs_built() -> int:
    """Return how many of cuDNN's graphs this process has built for ``kernel="cudnn"``."""
    return len(cudnn_graphs.cudnn_graphs().built) if cudnn_graphs.cudnn_graphs.cache_info().currsize else 0


def packed_batches(device: torch.device, longest: int, batches: int = 3) -> tuple[list[float], int]:
    """Run batches of 20 documents. Return the host's ms in each but the first, and the graphs built for these."""
    generator, took, before = random.Random(0), list[float](), 0
    for batch in range(batches + 1):
        if batch == 1:
            before = graphs_built()
        borders = _batch(generator, 20, longest)
        plan = make_plan(borders[-1], mask=Mask(cu_seqlens=borders))
        q, k, v = _inputs(borders[-1], 2 if device.type == "cpu" else 16, device)
        _synchronize(device)
        started = time.perf_counter()
        out = burst_attention(q, k, v, plan)
        out.backward(torch.ones_like(out))
        took.append((time.perf_counter() - started) * 1e3)
    return took[1:], graphs_built() - before


def part_packed(a: GpuArguments) -> str:
    took, graphs = packed_batches(a.place, 40 if a.tiny else 3000)
    kernel = choose("auto", device=a.place, dtype=HALF, head_dims=(128, 128), documents=20).name
    each = ", ".join(f"{ms:.1f}" for ms in took)
    return f"{each} ms of the host in batches of 20 documents by {kernel}, {graphs} graphs built (0 graphs)"


def part_profile(a: GpuArguments) -> str:
    """Where the time of one call goes."""
    seqlen = 256 if a.tiny else 16384
    plan, activity = make_plan(seqlen), torch.profiler.ProfilerActivity
    q, k, v = _inputs(seqlen, 2 if a.tiny else 16, a.place)
    dout = torch.randn(q.shape, dtype=HALF, device=a.place)

    def run() -> None:
        torch.autograd.grad(burst_attention(q, k, v, plan), (q, k, v), dout)

    for _ in range(2):
        run()
    _synchronize(a.place)
    started = time.perf_counter()
    run()
    host = (time.perf_counter() - started) * 1e3
    _synchronize(a.place)
    whole = (time.perf_counter() - started) * 1e3
    with torch.profiler.profile(activities=[activity.CPU if a.tiny else activity.CUDA]) as profile:
        run()
        _synchronize(a.place)
    sort = "self_cpu_time_total" if a.tiny else "self_device_time_total"
    print(profile.key_averages().table(sort_by=sort, row_limit=20, max_name_column_width=80))
    launches = sum(event.count for event in profile.key_averages())
    return f"host {host:.2f} ms of {whole:.2f} ms, {launches} launches and operators (host below 0.5 of all)"


def peak_of_a_step(a: GpuArguments, offload: str | None) -> int:
    """Return the most bytes of a step of a few wide layers that recompute; of the process, on a CPU."""
    gc.collect()
    before = 0 if a.tiny else torch.cuda.memory_allocated()
    torch.manual_seed(0)
    tokens, layers = (256, 4) if a.tiny else (131072, 6)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if a.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=layers, use_cache=False, **sizes)
    with a.place:
        model = LlamaForCausalLM(config).to(HALF).train()
    memory = hf.Memory(recompute="layer", attention_chunks=4, mlp_chunks=8, offload=offload)
    model = hf.parallelize(model, memory=memory)
    ids = torch.randint(4096, (1, tokens), device=a.place)

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    if a.tiny:
        return peak_during(run)[1]
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def part_offload(a: GpuArguments) -> str:
    """The peaks of a step of 128K tokens. Three of six layers' inputs, 1 GiB each, must leave the device."""
    with tempfile.TemporaryDirectory() as folder:
        peaks = [peak_of_a_step(a, each) / 2**30 for each in (f"disk:{folder}" if a.tiny else "host", None)]
    return f"{peaks[0]:.2f} GiB at the peak with offloaded layer inputs, {peaks[1]:.2f} GiB without (3 GiB less)"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


PARTS: dict[Part, Callable[[GpuArguments], str]] = {
    "explain": part_explain,
    "nan": part_nan,
    "kernels": part_kernels,
    "step": part_step,
    "waits": part_waits,
    "packed": part_packed,
    "profile": part_profile,
    "offload": part_offload,
}


def main(arguments: list[str]) -> None:
    a = asked(GpuArguments(), __doc__, "burst bench gpu", arguments)
    if not a.tiny and not torch.cuda.is_available():
        raise SystemExit("burst bench gpu: torch.cuda.is_available() is False; give --device cpu to see that it runs")
    print(f"{a.part}: {PARTS[a.part](a)}")
