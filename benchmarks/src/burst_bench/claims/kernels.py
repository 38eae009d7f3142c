"""Kernels on a GPU: TFLOP/s, cost of distribution, memory.

    burst bench kernels [--seq-lens 8192 ... --head-dims 64 128] [--tables kernels] [--rounds 9] [--json FILE]

A kernel is timed only after small results agree with the reference; they must have equal bits in two runs only under
torch's deterministic algorithms, because faster kernels have none. On a CPU it only shows that it runs. All kernels
take turns, round by round. A figure is the median, and its ratio is the median of the rounds' ratios. FLOPs count the
unmasked (query, key) pairs: 4 D forward and 10 D backward for each pair and head."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.kernels import KERNELS, choose, explain
from burst_attention.kernels.contract import BackwardInputs, Kernel
from burst_attention.kernels.prove import check_against_reference
from burst_attention.plan.layout import Layout
from burst_attention.plan.tile import Tiles, segment_tiles
from burst_attention.testing import local_world

from ..arguments import WrittenArguments, asked
from ..harness.turns import ratios, take_turns
from ..tables import spread

WINDOW = 4096
MASKS = {"full": Mask(causal=False), "causal": Mask(), f"window {WINDOW}": Mask(window=WINDOW)}
# PyTorch's own calls without our code; other kernels are compared with these.
STOCK = {"torch cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
DEVICE = torch.device("cuda")
OF_CPUS = ("aten", "aten-fp32")
PLACE = ("tokens", "D", "mask", "pass", "kernel")
COLUMNS = (*PLACE, "TFLOP/s", "of the best stock kernel", "of a matrix product")
RATIO, PEAK_OF_ALL, PER_BYTE = "ratio", "all ranks' peak / ranks", "all ranks' by inputs, outputs, gradients"
LEGEND = {
    "D": "head dimension",
    "TFLOP/s": "of the tiles that the mask leaves, by the median round",
    "of the best stock kernel": "its time divided by this kernel's, median of the rounds",
    "of a matrix product": "this rate divided by that of an 8192 x 8192 product in bf16 (256 x 256 on a CPU)",
    RATIO: "median and range of the rounds",
    PEAK_OF_ALL: "the most that was allocated at once on the one device, divided by the ranks",
    PER_BYTE: "the same of all ranks, divided by the bytes of q, k, v, out and their gradients",
}


@dataclass(frozen=True)
class TimedKernel:
    """A kernel's forward and backward over one sequence."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[], Any]


def tiles_of(mask: Mask, seqlen: int) -> Tiles:
    layout = Layout("contiguous", seqlen, 1)
    return segment_tiles(layout.table([0]), layout.table([0]), mask.regions(seqlen))[0, 0]


def subjects(names: list[str], q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[list[TimedKernel], list[str]]:
    """Return the kernels that run here with correct results, and why the others can't run."""
    able, refused, scale, dout = [], [], q.shape[3] ** -0.5, torch.randn_like(q)
    for name in names:
        try:
            dims, fixed_order = (q.shape[3], v.shape[3]), torch.are_deterministic_algorithms_enabled()
            kernel = choose(name, device=q.device, dtype=q.dtype, head_dims=dims)
            check_against_reference(kernel, q.device, q.dtype, dims, fixed_order=fixed_order)
            out, lse = kernel.forward(q, k, v, tiles, scale)
        except Exception as error:  # packages raise errors of any type
            refused.append(f"{name}: {error}")
            continue
        delta = (out.float() * dout.float()).sum(-1)
        able.append(_subject(name, kernel, BackwardInputs(dout, q, k, v, lse, delta, tiles, scale, final=True)))
    return able, refused


def _subject(name: str, kernel: Kernel, x: BackwardInputs) -> TimedKernel:
    return TimedKernel(name, lambda: kernel.forward(x.q, x.k, x.v, x.tiles, x.scale), lambda: kernel.backward(x))


def stock(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> list[TimedKernel]:
    """Return PyTorch's own kernels; none if they lack the mask."""
    if mask.window is not None:
        return []
    able, dout = [], torch.randn_like(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    for name, backend in STOCK.items():

        def forward(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*leaves, is_causal=mask.causal)

        try:
            out = forward()
        except RuntimeError as error:
            print(f"left out: {name}: {error}")
            continue
        able.append(TimedKernel(name, forward, partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)))
    return able


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call on the device."""
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def compare(seqlen: int, dim: int, mask_name: str, rounds: int, device: torch.device = DEVICE) -> list[dict[str, str]]:
    """Return a row for each kernel and pass."""
    heads = 2048 // dim
    tiles = tiles_of(MASKS[mask_name], seqlen)
    q, k, v = (torch.randn(1, heads, seqlen, dim, dtype=torch.bfloat16, device=device) for _ in "qkv")
    names = [name for name in KERNELS if name != "reference" and (device.type == "cpu" or name not in OF_CPUS)]
    able, refused = subjects(names, q, k, v, tiles)
    able = [*stock(MASKS[mask_name], q, k, v), *able]
    auto = choose("auto", device=device, dtype=q.dtype, head_dims=(dim, dim)).name
    side = 256 if device.type == "cpu" else 8192
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    rows = []
    for direction, each in (("forward", 4), ("backward", 10)):
        calls = {s.name: getattr(s, direction) for s in able} | {"matmul": lambda: a @ a}
        for call in (*calls.values(), *calls.values()):  # after two calls everything is compiled
            call()
        turns = take_turns([partial(seconds, call, device) for call in calls.values()], rounds)
        taken = dict(zip(calls, turns, strict=True))
        best = min((n for n in taken if n in STOCK), key=lambda n: statistics.median(taken[n]), default=None)
        peak = 2 * side**3 / statistics.median(taken["matmul"]) / 1e12
        for name in (s.name for s in able):
            speed = each * dim * heads * tiles.area / statistics.median(taken[name]) / 1e12
            ratio = f"{statistics.median(ratios(taken[name], taken[best])):.2f} of {best}" if best else "-"
            place = (f"{seqlen:,}", str(dim), mask_name, direction, f"{name} (auto)" if name == auto else name)
            rows.append(dict(zip(COLUMNS, (*place, f"{speed:.0f}", ratio, f"{speed / peak:.2f}"), strict=True)))
    for reason in refused:
        print(f"left out: {reason.splitlines()[0]}")
    return rows


def distribution(world: int, seqlen: int, dim: int, rounds: int) -> dict[str, str]:
    """Return one rank's device time divided by the total device time of ``world`` ranks.

    The time counts all kernels (tiles, merges, casts) except copies.
    """
    shape = (1, 2048 // dim, seqlen, dim)
    whole = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)]

    def prepare(group: Any) -> tuple[Any, list[Tensor]]:
        plan = make_plan(seqlen, group=group)
        return plan, [plan.shard(x, 2).requires_grad_() for x in whole]

    def call(group: Any, prepared: list[tuple[Any, list[Tensor]]]) -> None:
        plan, (q, k, v, dout) = prepared[group.rank()]
        out = burst_attention(q, k, v, plan, kernel="triton")
        torch.autograd.grad(out, (q, k, v), dout)

    ratios, activity = [], torch.profiler.ProfilerActivity.CUDA
    for n in range(rounds + 1):
        took = []
        for ranks in (1, world):
            with local_world(ranks) as group:
                prepared = group.run(prepare)
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[activity]) as profile:
                    group.run(call, prepared)
                    torch.cuda.synchronize()
            kernels = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
            took.append(sum(e.device_time_total for e in kernels if "Memcpy" not in e.name))
        if n:  # the first round compiles
            ratios.append(took[0] / took[1])
    sizes = {"ranks": str(world), "tokens": f"{seqlen:,}", "D": str(dim)}
    return sizes | {RATIO: spread(ratios, ".3f")}


def memory(seqlen: int, heads: int, dim: int, world: int) -> dict[str, str]:
    """Return all ranks' peak memory, also per byte of inputs, outputs and gradients."""
    tensor = seqlen * heads * dim * 2
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def call(group: Any) -> None:
        plan = make_plan(seqlen, group=group)
        q, k, v = (
            torch.randn(1, heads, plan.length, dim, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            for _ in "qkv"
        )
        out = burst_attention(q, k, v, plan, kernel="triton")
        out.backward(torch.ones_like(out))

    with local_world(world) as ranks:
        ranks.run(call)
    peak = (torch.cuda.max_memory_allocated() - before) / world
    return {
        "ranks": str(world),
        "tokens": f"{seqlen:,}",
        PEAK_OF_ALL: f"{peak / 2**30:.2f} GiB",
        PER_BYTE: f"{peak * world / (8 * tensor):.2f}",
    }


@dataclass(frozen=True, kw_only=True)
class KernelsArguments(WrittenArguments):
    seq_lens: tuple[int, ...] = (8192, 16384, 32768, 65536)
    head_dims: tuple[int, ...] = (64, 128)
    rounds: int = 9
    """Timed calls of each kernel."""
    tables: tuple[Literal["kernels", "ranks", "memory"], ...] = ("kernels", "ranks", "memory")
    """kernels: each by itself; ranks: the cost of distribution; memory: of one rank and of eight."""
    device: Literal["cpu", "cuda"] = "cuda"
    """On cpu: give --tables kernels."""


def main(arguments: list[str]) -> None:
    a = asked(KernelsArguments(), __doc__, "burst bench kernels", arguments)
    device = torch.device(a.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("burst bench kernels: torch.cuda.is_available() is False; run it on a machine with a GPU")
    if device.type == "cpu" and a.tables != ("kernels",):
        raise SystemExit(
            f"burst bench kernels: --tables {' '.join(a.tables)} needs a GPU; on a CPU give --tables kernels"
        )
    name = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name()
    console = console_of_tables()
    console.print(f"{name}, torch {torch.__version__}; bf16, batch 1, heads x D = 2,048")
    console.print(explain(device=device, dtype=torch.bfloat16), markup=False)
    sizes = [(seqlen, dim, mask) for dim in a.head_dims for seqlen in a.seq_lens for mask in MASKS]
    tables: dict[str, list[dict[str, str]]] = {}
    if "kernels" in a.tables:
        tables["kernels"] = [row for size in sizes for row in compare(*size, a.rounds, device)]
    if "ranks" in a.tables:
        rows = [distribution(8, max(a.seq_lens), dim, 3) for dim in a.head_dims]
        tables["one rank's device time / all ranks'"] = rows
    if "memory" in a.tables:
        tables["memory, H = 32, D = 128, Triton"] = [memory(131072, 32, 128, world) for world in (1, 8)]
    for title, rows in tables.items():
        print_table(console, rows, title=title, legend=LEGEND, keys=len(PLACE) if title == "kernels" else 1)
    a.write(device=name, **tables)
