"""Experts of a mixture: what a part of them, such as those of one rank, adds to the result.

The stock class computes a row for each pair of a token and one of its experts, with only a part's weights. All
implementations of transformers take that: no index has to say that an expert is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from burst_attention.integrations.hf.classes import stock_class

Weights = dict[str, Tensor]  # of one module, by the names of its parameters


def are_experts(module: Any) -> bool:
    """Return whether a module of transformers has the stacked weights of experts, the first dimension theirs."""
    kind, own = type(module), vars(module)
    stock = kind.__module__.startswith("transformers.models.") and stock_class(module) is kind
    if not stock or not {"has_gate", "is_transposed"} <= own.keys():
        return False
    weights = weights_of(module)
    return "down_proj" in weights and {x.shape[:1] for x in weights.values()} == {(own.get("num_experts"),)}


def adds_up(module: Any, rows: Sequence[range]) -> bool:
    """Return whether the parts of the ranks add up to what experts compute of a few drawn tokens."""
    down, count = module.down_proj, module.num_experts
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, width_of(module), generator=draw).to(down)
    index = torch.rand(8, count, generator=draw).topk(min(2, count)).indices.to(down.device)
    weights = torch.rand(index.shape, generator=draw).to(down)
    parts = [{own: whole[each.start : each.stop] for own, whole in weights_of(module).items()} for each in rows]
    try:
        with torch.no_grad():
            whole = module(x, index, weights)
            found = sum_of_parts(module, (x, index, weights), rows, parts)
    except RuntimeError:  # of grouped products, which have no fp64
        return False
    bound = 4 * torch.finfo(whole.dtype).eps ** 0.75  # wrong experts differ by about 1, other sums by a few eps
    return bool((found - whole).abs().max() <= bound * whole.abs().max())


def sum_of_parts(
    module: Any, chosen: tuple[Tensor, Tensor, Tensor], rows: Sequence[range], parts: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Return what experts compute, from the weights of each rank's experts; ``chosen``: of :func:`add_chosen`."""
    x = chosen[0]
    out = torch.zeros_like(x, dtype=sum_dtype(x))
    for each, own in zip(rows, parts, strict=True):
        add_chosen(out, module, chosen, each, own)
    return out.to(x.dtype)


def add_chosen(
    out: Tensor, module: Any, chosen: tuple[Tensor, Tensor, Tensor], rows: range, own: Mapping[str, Tensor]
) -> None:
    """Add the results of the experts ``rows``, of the weights ``own``, to those tokens that chose them.

    ``out`` [n, E], fp32 or fp64. ``chosen``: tokens x [n, E], their experts [n, K] and the weights of these [n, K].
    The module runs on a row for each pair of a token and an expert, as in transformers' ``AllToAllEP``.
    """
    x, index, weights = chosen
    tokens, slots = torch.where((index >= rows.start) & (index < rows.stop))
    if not len(tokens):
        return
    experts = index[tokens, slots, None] - rows.start
    with using(module, own, num_experts=len(rows)):
        done = stock_class(module).forward(module, x[tokens], experts, torch.ones_like(weights[tokens, slots, None]))
    out.index_add_(0, tokens, done.to(out.dtype) * weights[tokens, slots, None].to(out.dtype))


def width_of(experts: Any) -> int:
    """Return the width of the tokens that experts take and return."""
    return int(experts.down_proj.shape[2 if experts.is_transposed else 1])


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which results of experts are added: fp32, or fp64 of fp64."""
    return torch.promote_types(x.dtype, torch.float32)


@contextmanager
def using(module: Any, weights: Mapping[str, Tensor], **attributes: Any) -> Iterator[None]:
    """Let a module compute with other weights, and with other attributes, inside this context."""
    own, before = {name: module._parameters[name] for name in weights}, {x: vars(module)[x] for x in attributes}
    module._parameters.update(weights)
    vars(module).update(attributes)
    try:
        yield
    finally:
        module._parameters.update(own)
        vars(module).update(before)


def weights_of(module: Any) -> dict[str, nn.Parameter]:
    """Return a module's own parameters."""
    return {own: x for own, x in module._parameters.items() if x is not None}
