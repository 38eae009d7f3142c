"""The variants of ``compare.py``: one causal attention over W ranks, by other packages and by ours.

A package's variant defines which tokens a rank holds, their layout in memory, and how to call the package. Functions
called by ``build`` run on a rank, which has a process group.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.plan.layout import Layout
from burst_attention.plan.strategy import NAMED, Strategy

from ..harness.calls import Call, Ours, Variant, by_autograd
from ..harness.workload import Workload

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
FLASH_ATTN = ("ring_flash_attn", "yunchang", "ringmaster")  # the packages that import flash_attn on a GPU
REQUIREMENTS = {  # the versions that these calls were written for
    "ring_flash_attn": "ring-flash-attn==0.1.8",
    "yunchang": "yunchang==0.6.4",
    "ringmaster": "axolotl-ringmaster==0.2.7",
}
ALL = 0  # ranks of a head-parallel group


@dataclass(frozen=True, kw_only=True)
class Theirs(Variant):
    """A package's variant; the first word of its name is the package."""

    # Return the package's attention over [B, S, H, D] on a device; all ranks call it at the same time.
    function: Callable[[str], Attention]
    order: str = "contiguous"  # layout over the ring: ``contiguous``, ``zigzag`` or ``striped``
    ulysses: int = 1  # ranks of one head-parallel group, or :data:`ALL`. The group's ranks split one shard of the ring
    whole_scores: bool = False  # whether it has no flash kernel on CPUs and computes whole matrices of scores in fp32

    @property
    def package(self) -> str:
        return self.name.split()[0].replace("-", "_")

    def build(self, workload: Workload) -> Call:
        group = self.ulysses or dist.get_world_size()
        held = positions(self.order, workload.seq_len, dist.get_world_size(), group, dist.get_rank())
        return Call(begin=by_autograd(self.function(workload.device)), positions=held, heads_first=False)


@dataclass(frozen=True, kw_only=True)
class OneProcess(Variant):
    """PyTorch's own kernel over the whole sequence: rank 0 runs it with a thread for each rank, which wait."""

    name: str = "PyTorch, one process"

    def build(self, workload: Workload) -> Call:
        busy = dist.get_rank() == 0
        own = by_autograd(partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True))

        def begin(*inputs: Tensor) -> tuple[Tensor, Callable[[], Sequence[Tensor]]]:
            if not busy:
                return inputs[0], lambda: inputs[:3]
            with threads(dist.get_world_size()):
                out, backward = own(*inputs)
            return out, threads(dist.get_world_size())(backward)

        return Call(begin=begin, positions=torch.arange(workload.seq_len if busy else 0))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def positions(order: str, seq_len: int, world: int, ulysses: int, rank: int) -> Tensor:
    """Return int64 [S / W]: global positions of ``rank``'s tokens, in the order in which it holds them."""
    ring = Layout(order, seq_len, world // ulysses)
    return torch.from_numpy(ring.positions(rank // ulysses)).chunk(ulysses)[rank % ulysses]


def refusal(variant: Variant, world: int, workload: Workload) -> str | None:
    """Return the known reason why ``variant`` can't run, or None."""
    if variant.name == ULYSSES and (workload.heads % world or workload.kv_heads % world):
        return f"needs a multiple of {world} heads"
    if not isinstance(variant, Theirs):
        return None
    if importlib.util.find_spec(variant.package) is None:
        return f"not installed: pip install {REQUIREMENTS[variant.package]}"
    needs_flash = workload.device == "cuda" and variant.package in FLASH_ATTN
    if needs_flash and importlib.util.find_spec("flash_attn") is None:
        return "on a GPU it needs flash-attn: pip install flash-attn --no-build-isolation"
    ulysses = variant.ulysses or world
    if variant.order != "contiguous" and world < 2 * ulysses:
        return f"needs at least {2 * ulysses} ranks, not {world}"
    shared_out = {
        "ranks": (ulysses, world),
        "heads": (ulysses, workload.heads),
        "tokens": (2 * world, workload.seq_len),
    }
    for what, (unit, given) in shared_out.items():
        if given % unit:
            return f"needs a multiple of {unit} {what}, not {given}"
    return None


def comparable(variant: Variant, workload: Workload) -> bool:
    """Whether a variant runs the kernels of the others, so that its time compares schemes."""
    return workload.device != "cpu" or not (isinstance(variant, Theirs) and variant.whole_scores)


def package_version(variant: Variant) -> str | None:
    """Return the version of the package that computes a variant; None if it is not installed."""
    if not isinstance(variant, Theirs):
        return version("torch" if isinstance(variant, OneProcess) else "burst-attention")
    installed = importlib.util.find_spec(variant.package) is not None
    return version(REQUIREMENTS[variant.package].partition("==")[0]) if installed else None


def _ring_flash_attn(name: str, _device: str) -> Attention:
    import ring_flash_attn

    return partial(getattr(ring_flash_attn, name), causal=True)


def _yunchang(ring: str, ulysses: int, _device: str) -> Attention:
    import yunchang

    world = dist.get_world_size()
    yunchang.set_seq_parallel_pg(ulysses, world // ulysses, dist.get_rank(), world)
    # LongContextAttention uses the groups set last.
    return partial(yunchang.LongContextAttention(ring_impl_type=ring), causal=True)


def _yunchang_ulysses(_device: str) -> Attention:
    import yunchang

    return partial(yunchang.UlyssesAttention(sequence_process_group=dist.group.WORLD), causal=True)


def _ringmaster(backend: str, load_balance: str, device: str) -> Attention:
    """Return the function that ringmaster registers with transformers, whose tensors are [B, H, S, D]."""
    import ringmaster
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = ringmaster.RingmasterConfig(
        size=dist.get_world_size(),
        backend=ringmaster.Backend(backend),
        load_balance=ringmaster.LoadBalance(load_balance),
        rotate_method=ringmaster.RotateMethod.ALLTOALL,  # gathering has no kernel on CPUs
    )
    inner = "flash_attention_2"
    if device == "cpu":
        inner = "sdpa"
        logging.getLogger("ringmaster").setLevel(logging.ERROR)  # it warns that flash_attn's kernels are missing
    runtime = ringmaster.setup(config, device_type=device, inner_attn=inner)
    function, module = ALL_ATTENTION_FUNCTIONS[runtime.attn_implementation], torch.nn.Module()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ringmaster.set_runtime(runtime)  # one for the process: the variant that was set up last
        out, _ = function(module, *(x.transpose(1, 2) for x in (q, k, v)), None, is_causal=True)
        return out

    return attention


Planned = partial(Ours, strategy=Strategy())
CALIBRATED = "burst, calibrated"
OURS, ULYSSES, STRONGEST = "burst", "Ulysses", "ring-flash-attn zigzag"
VARIANTS = (
    Planned(name=OURS),
    Planned(name=CALIBRATED),
    OneProcess(),
    Ours(name=ULYSSES, strategy=NAMED["ulysses"]),
    Ours(name="burst, heads whole"),
    Ours(name="burst, as RingAttention", strategy=NAMED["zigzag-ring"]),
    Theirs(name="ring-flash-attn basic", function=partial(_ring_flash_attn, "ring_flash_attn_func")),
    Theirs(name=STRONGEST, function=partial(_ring_flash_attn, "zigzag_ring_flash_attn_func"), order="zigzag"),
    Theirs(
        name="ring-flash-attn stripe", function=partial(_ring_flash_attn, "stripe_flash_attn_func"), order="striped"
    ),
    Theirs(name="yunchang basic", function=partial(_yunchang, "basic", 1)),
    Theirs(name="yunchang zigzag", function=partial(_yunchang, "zigzag", 1), order="zigzag"),
    Theirs(name="yunchang stripe", function=partial(_yunchang, "strip", 1), order="striped"),
    Theirs(name="yunchang ulysses", function=_yunchang_ulysses, ulysses=ALL),
    Theirs(name="yunchang hybrid zigzag", function=partial(_yunchang, "zigzag", 2), ulysses=2, order="zigzag"),
    Theirs(name="ringmaster ulysses", function=partial(_ringmaster, "ulysses", "none"), ulysses=ALL),
    Theirs(name="ringmaster ring", function=partial(_ringmaster, "ring", "none"), whole_scores=True),
    Theirs(name="ringmaster distflash", function=partial(_ringmaster, "ring", "distflash"), whole_scores=True),
)
