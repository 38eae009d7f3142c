"""How ranks share a model and a sequence: by the tokens with a strategy of the library, or by tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from burst_attention.plan.layout import BALANCED
from burst_attention.plan.strategy import NAMED, strategy_of
from burst_attention.planner.planner import Remat

from .contract import Attend, Heads, whole_attention
from .sequence import SequenceParallelism
from .tensor import TensorParallelism

SINGLE, TENSOR = "single", ("tensor", "tensor-sequence")
FOREIGN = (SINGLE, *TENSOR)  # those whose attention is not :func:`burst_attention`
STRATEGIES = (*NAMED, *FOREIGN)
Parallelism = SequenceParallelism | TensorParallelism  # the same loss and gradients, other shards and messages

__all__ = [
    "FOREIGN",
    "STRATEGIES",
    "TENSOR",
    "Attend",
    "Heads",
    "Parallelism",
    "SequenceParallelism",
    "TensorParallelism",
    "choose",
]


def choose(name: str, *, balanced: bool = False, remat: Remat = "none", attention_chunks: int = 1) -> Parallelism:
    """Return how ranks share a sequence; ValueError if the strategy is unknown.

    ``name``: a strategy of :func:`burst_attention.make_plan`, by name or by its fields; ``tensor`` (Megatron-LM, arXiv
    1909.08053), ``tensor-sequence`` (the same with sequence parallelism, arXiv 2205.05198), or ``single`` (one rank for
    each sequence, PyTorch's own attention). The planner takes recompute policy and chunks of heads into account.
    """
    if name in TENSOR:
        return TensorParallelism(name)
    if name == SINGLE:
        return SequenceParallelism(name=name, attend=whole_attention)
    try:
        strategy = strategy_of(name)
    except ValueError as error:
        more = "" if "=" in name else f"; or {', '.join(FOREIGN)}"
        raise ValueError(f"{error}{more}") from None
    if balanced:
        strategy = replace(strategy, layout=BALANCED)
    return SequenceParallelism(name=name, strategy=strategy, remat=remat, attention_chunks=attention_chunks)
