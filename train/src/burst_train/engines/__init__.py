"""Engines that train on one sequence with several ranks: ours, and those it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from burst_attention.plan.strategy import Strategy
from burst_attention.planner.planner import Remat

from .contract import Attend, Engine, Heads
from .sequence import SequenceEngine, burst, published, ring, single, ulysses, usp
from .tensor import TensorEngine

_MAKERS: dict[str, Callable[[Strategy], Engine]] = {
    "burst": burst,
    "ring": ring,
    "ulysses": ulysses,
    "usp": usp,
    "tensor": partial(TensorEngine.named, "tensor"),
    "tensor-sequence": partial(TensorEngine.named, "tensor-sequence"),
    "single": single,
}
ENGINES = tuple(_MAKERS)

if TYPE_CHECKING:
    EngineName: TypeAlias = str
else:  # command lines and configurations read the names at run time
    EngineName = Literal[ENGINES]

__all__ = [
    "ENGINES",
    "Attend",
    "Engine",
    "EngineName",
    "Heads",
    "SequenceEngine",
    "TensorEngine",
    "burst",
    "choose",
    "published",
]


def choose(name: str, *, strategy: Strategy | None = None, remat: Remat = "none", attention_chunks: int = 1) -> Engine:
    """Return the engine called ``name``.

    Args:
        name: ``burst`` (ours), ``ring`` (RingAttention, arXiv 2310.01889), ``ulysses`` (DeepSpeed-Ulysses, arXiv
            2309.14509), ``usp`` (Unified Sequence Parallelism, arXiv 2405.07719), ``tensor`` (Megatron-LM, arXiv
            1909.08053), ``tensor-sequence`` (the same with sequence parallelism, arXiv 2205.05198) or ``single`` (one
            rank for each sequence, PyTorch's own attention).
        strategy: for burst, as for :func:`burst_attention.make_plan`. Other engines support a layout at most, and
            usp a Ulysses degree.
        remat: recompute policy, which burst's planner takes into account.
        attention_chunks: the number of chunks of heads, for burst and ring.

    Raises:
        ValueError: the name is unknown, or the engine does not support that layout, route or number of heads.
    """
    if name not in _MAKERS:
        raise ValueError(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")
    engine = _MAKERS[name](strategy or Strategy())
    if not isinstance(engine, SequenceEngine):
        return engine
    return replace(engine, remat=remat, attention_chunks=attention_chunks)
