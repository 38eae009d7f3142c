"""The ways to train on one sequence with several ranks, behind one interface: ours, and those it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from burst_attention.planner.choice import HeadsOrAuto, Remat

from .contract import Attend, Engine, Heads
from .sequence import SequenceEngine, burst, published, ring, single, ulysses, usp
from .tensor import TensorEngine

_MAKERS: dict[str, Callable[[str, str, HeadsOrAuto], Engine]] = {  # from (layout, route, heads)
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
else:  # what command lines and configurations take
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


def choose(
    name: str, *, layout: str = "auto", route: str = "auto", heads: HeadsOrAuto = "auto", remat: Remat = "none"
) -> Engine:
    """The engine called ``name``.

    Args:
        name: ``burst`` (ours), ``ring`` (RingAttention, arXiv 2310.01889), ``ulysses`` (DeepSpeed-Ulysses, arXiv
            2309.14509), ``usp`` (Unified Sequence Parallelism, arXiv 2405.07719), ``tensor`` (Megatron-LM, arXiv
            1909.08053), ``tensor-sequence`` (the same with sequence parallelism, arXiv 2205.05198) or ``single`` (one
            rank for each sequence, PyTorch's own attention).
        layout: which tokens a rank holds; ``auto`` takes the engine's best: zigzag for ring and usp, and for burst
            what is predicted to be fastest.
        route, heads: for burst, as for :func:`burst_attention.make_plan`; of usp ``heads`` is how many neighbours
            exchange tokens for heads.
        remat: what is recomputed, for burst to plan by.

    Raises:
        ValueError: the name is unknown, or the engine does not come in that layout or route.
    """
    if name not in _MAKERS:
        raise ValueError(f"engine {name!r} is unknown; choose one of {', '.join(ENGINES)}")
    engine = _MAKERS[name](layout, route, heads)
    return replace(engine, remat=remat) if isinstance(engine, SequenceEngine) else engine
