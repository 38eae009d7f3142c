"""Mixtures of experts, counted from a model's modules: the weights of all experts, the work of those that a token uses.

A block of such a layer scores the experts by its router, and gives each token to the best. Their module has stacked
weights, [experts, rows, columns]. How many a token uses is read from a run of the block on tensors without data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from burst_attention.inference import are_experts


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixture of one layer."""

    experts: int
    per_token: int  # experts that a token uses
    hidden: int  # width of the rows that an expert takes and returns
    width: int  # columns between the two products of an expert
    shared: int  # the same of experts that every token uses
    expert: int  # multiplications of one expert per token
    router: int  # multiplications of the router per token, if it is no linear layer

    @property
    def products(self) -> int:
        """Multiplications per token that are in no linear layer."""
        return self.per_token * self.expert + self.router

    @property
    def columns(self) -> int:
        """Columns of the feed-forward layers that a token uses."""
        return self.per_token * self.width + self.shared


def mixtures_of(layers: nn.Module, config: Any) -> list[Mixture]:
    """Return the mixtures of decoder layers without data, in order; ValueError if one of them can't be counted."""
    mixtures = [_counted(block, experts, config.hidden_size) for block, experts in _found(layers)]
    if mixtures and getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "has quantised experts (quantization_config), whose work is not predicted; for other weights, leave that "
            "entry out of config.json"
        )
    return mixtures


def blocks_of(layers: nn.Module) -> list[nn.Module]:
    """Return the modules that have a router and its experts."""
    return [block for block, _ in _found(layers)]


def _found(layers: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each mixture's block and experts."""
    for name, part in layers.named_modules():
        if _is_of_experts(name, part):
            yield layers.get_submodule(name.rpartition(".")[0]), part


def _is_of_experts(name: str, part: nn.Module) -> bool:
    kind = type(part).__name__
    alone = kind.endswith("MoE") and not any(map(are_experts, part.modules()))  # a mixture of another form
    return alone or kind.endswith("Experts") or name.rpartition(".")[2] == "experts" or are_experts(part)


def _counted(block: nn.Module, experts: Any, hidden: int) -> Mixture:
    name, down = type(experts).__name__, getattr(experts, "down_proj", None)
    refusal = f"has a mixture of experts ({name}), whose work is not predicted"
    if not are_experts(experts) or down is None:
        raise ValueError(f"{refusal}: its weights are not stacked as transformers' experts are")
    rows, columns = (1, 2) if experts.is_transposed else (2, 1)
    per_token, among = _routed(block, experts, hidden)
    if not per_token:
        raise ValueError(f"{refusal}: a {type(block).__name__} does not run on hidden states alone")
    if among != experts.num_experts:
        raise ValueError(f"{refusal}: its router does not choose the best of its {experts.num_experts} experts alone")
    beside = [part for part in block.modules() if part is not experts]
    linear = [part for part in beside if isinstance(part, nn.Linear)]
    return Mixture(
        experts=experts.num_experts,
        per_token=per_token,
        hidden=down.shape[columns],
        width=down.shape[rows],
        shared=sum(part.in_features for part in linear if part.out_features == hidden),
        expert=sum(weight[0].numel() for weight in experts.parameters() if weight.ndim == 3),
        router=sum(weight.numel() for weight in _matrices(beside)),
    )


def _matrices(parts: list[nn.Module]) -> Iterator[Tensor]:
    """Yield the matrices of a router that multiplies without a linear layer."""
    for part in parts:
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(part, nn.Linear):
            yield weight


class _Reached(Exception):
    """The experts were called with this many for each token."""


class _Choices(TorchDispatchMode):
    """Note among how many the last ``topk`` chose."""

    among = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            self.among = args[0].shape[-1]
        return func(*args, **(kwargs or {}))


def _routed(block: nn.Module, experts: nn.Module, hidden: int) -> tuple[int, int]:
    """Return how many experts a token is given to, and among how many they were chosen; 0 if the block doesn't run."""

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        index = next(x for x in (*args, *kwargs.values()) if not x.dtype.is_floating_point)
        raise _Reached(index.shape[-1])

    hook = experts.register_forward_pre_hook(stop, with_kwargs=True)
    tokens = torch.zeros(1, 2, hidden, dtype=next(experts.parameters()).dtype, device="meta")
    try:
        with torch.no_grad(), _Choices() as choices:
            block(tokens)
    except _Reached as reached:
        return int(reached.args[0]), choices.among
    except Exception:  # whatever a block of another form raises
        return 0, 0
    finally:
        hook.remove()
    return 0, 0
