"""Memory-saving options of a run, and the check that the run fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from burst_attention.cli.flags import BYTES, Count, Size, byte_count, flag, require, text
from burst_attention.planner.planner import Remat as RematName

from .strategies import MEGATRON

OptimizerName = Literal["adamw", "adamw-8bit"]
DISK = "disk:"


def where(value: str) -> str:
    """Require a place for saved layer inputs: none, host, or disk:DIR."""
    if value in ("none", "host") or (value.startswith(DISK) and value != DISK):
        return text(value)
    return f"{value!r} must be none, host or disk:DIR, as in disk:/scratch"


Offload = Annotated[str, where]


@dataclass(frozen=True)
class Saving:
    """Save memory by moving or splitting work. The loss does not change."""

    offload: Offload = "none"
    """Where the layer inputs saved by --remat are kept: none, host or disk:DIR. none: on the device.
    host: pinned host memory (GPUs only; on one H100 it freed half of them). disk:DIR: a file in the folder DIR."""
    attention_chunks: Count = 1
    """Project, attend and project back this many groups of heads, one group at a time.
    The backward recomputes q, k and v group by group."""
    mlp_chunks: Count = 1
    """Feed-forward layers process a rank's tokens in this many chunks; the backward recomputes each chunk."""
    optimizer: OptimizerName = "adamw"
    """adamw-8bit: AdamW with its moments in 8 bits, 2 bytes per weight instead of 8. Needs torchao."""
    optimizer_offload: bool = False
    """Keep weights, gradients and AdamW's moments in host memory; run AdamW there (GPUs only; not yet run on one)."""


@dataclass(frozen=True)
class MemoryConfig(Saving):
    """Save memory by recomputing, offloading or splitting work, for longer sequences. The loss does not change."""

    remat: RematName = "none"
    """What the backward recomputes. layer: whole decoder layers, of which only the inputs are kept.
    keep-attention: all but the attention, so that its exchanges are not repeated."""
    compile: bool = False
    """Compile norms and feed-forward layers with torch.compile; not for tensor and tensor-sequence."""
    ignore_memory: Size | None = None
    """Start although the predicted memory exceeds the free memory, if it is at most this amount, as in 32GiB.
    On a CPU, of all ranks of a machine; on GPUs, of each. The system may then end the run or other processes."""

    @property
    def of_layers(self) -> Any:
        """The options of ``hf.parallelize``."""
        from burst_attention.integrations import hf  # imports transformers

        offload = None if self.offload == "none" else self.offload
        chunks = {"attention_chunks": self.attention_chunks, "mlp_chunks": self.mlp_chunks}
        return hf.Memory(recompute=self.remat, **chunks, offload=offload)

    def check(self, strategy: str, device: str) -> None:
        """Raise ValueError naming the first flag that the strategy or device does not support."""
        keeps = f"is not for --strategy {strategy}; use --remat layer"
        require(self.remat != "keep-attention" or strategy not in MEGATRON, "remat", self.remat, keeps)
        if self.attention_chunks > 1:
            works = f"is not for --strategy {strategy}; leave one of them out"
            require(strategy not in MEGATRON, "attention_chunks", self.attention_chunks, works)
            whole = "can't keep the results of --remat keep-attention; use --remat layer"
            require(self.remat != "keep-attention", "attention_chunks", self.attention_chunks, whole)
        saved = "moves the layer inputs that --remat layer or keep-attention saves; add one of the two"
        require(self.offload == "none" or self.remat != "none", "offload", self.offload, saved)
        there = "is for GPUs; with --device cpu everything is already in host memory"
        require(self.offload != "host" or device != "cpu", "offload", "host", f"{there}. Use disk:DIR, or leave it out")
        if self.optimizer_offload and device == "cpu":
            raise ValueError(f"{flag('optimizer_offload')} {there}. Leave it out")
        for name in ("optimizer_offload", "compile"):
            if getattr(self, name) and strategy in MEGATRON:
                raise ValueError(f"{flag(name)} is not for --strategy {strategy}; leave one of them out")


def free_memory(root: Path = Path("/")) -> tuple[int, str] | None:
    """Return the bytes free for new processes and the limit's name; None if unknown. Tests pass another ``root``."""
    limits = [*_of_machine(root / "proc/meminfo"), *_of_cgroup(root)]
    return min(limits) if limits else None


def _of_machine(meminfo: Path) -> Iterator[tuple[int, str]]:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024, "memory available"


def _of_cgroup(root: Path) -> Iterator[tuple[int, str]]:
    """Memory left by the limits of this process's control groups (version 2)."""
    own = root / "proc/self/cgroup"
    lines = own.read_text().splitlines() if own.is_file() else []
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    top = root / "sys/fs/cgroup"
    for folder in (top / inside, *(top / inside).parents):
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
            yield max(0, int(most) - int(used.read_text())), "left of the control group's limit"
        if folder == top:
            return


def check_fits(
    parts: Mapping[str, int], free: tuple[int, str] | None, memory: MemoryConfig, *, seq_len: int, ranks: int
) -> str:
    """Check that ``ranks`` ranks of ``parts`` bytes each fit in the free memory.

    Return a warning if they don't, and ``--ignore-memory`` names at least what they need; else an empty text.
    Raise ValueError, with remedies, if it names less or nothing.
    """
    per_rank, named = sum(parts.values()), memory.ignore_memory
    needed = per_rank * ranks
    if free is None or needed <= free[0]:
        return ""
    all_ranks = f"{binary_text(needed)} for {ranks} ranks here" if ranks > 1 else "here"
    amounts = f"{binary_text(per_rank)} per rank ({parts_text(parts)}), {all_ranks}"
    there = f"there is only {binary_text(free[0])} {free[1]}"
    if named is not None and needed <= byte_count(named):
        return f"--ignore-memory {named}: the run will allocate {amounts}; {there}. The system may end processes"
    lower = ["--remat layer"] if memory.remat == "none" else []
    lower += ["--mlp-chunks 8"] if memory.mlp_chunks == 1 else []
    lower += ["a shorter --seq-len, a smaller --batch or ranks on more machines"]
    less = "" if named is None else f"--ignore-memory {named} is less than that. "
    raise ValueError(
        f"{flag('seq_len')} {seq_len} is predicted to need {amounts}; {there}. {less}Try {', '.join(lower)}, or start "
        f"anyway by naming the amount: --ignore-memory {_rounded_up(needed)}"
    )


def _rounded_up(size: int) -> str:
    """Return an amount of at least ``size`` bytes as ``--ignore-memory`` takes it."""
    unit = "GiB" if size >= BYTES["GiB"] else "MiB"
    return f"{ceil(size / BYTES[unit])}{unit}"


def parts_text(parts: Mapping[str, int]) -> str:
    """Return the non-zero parts as text."""
    return ", ".join(f"{name} {binary_text(size)}" for name, size in parts.items() if size)


def binary_text(size: float) -> str:
    """Format bytes in powers of 1024, as operating systems count memory: 735 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 999.5:
            return f"{size:,.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"
