"""The token mixers of transformers, other than attention, that run on shards, and their forwards over runs.

A mixer is known by its class and by the kernels that its forward calls. If another version of transformers calls
others, the mixer is unknown and is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from burst_attention.recurrence import kernels
from burst_attention.recurrence.exchange import RunExchange

# Kernels over runs, by the names under which modeling files call the kernel over a whole sequence.
KERNELS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": kernels.convolution,
    "torch_chunk_gated_delta_rule": kernels.delta_rule,
    "chunk_kimi_delta_attention": kernels.delta_rule,
    "mamba2_chunk_scan": kernels.mamba2,
    "mamba_selective_scan": kernels.mamba1,
    "mamba2_split_conv1d_scan_combined": kernels.no_fused_kernel,
    "mamba_inner_fn": kernels.no_fused_kernel,
}
_CONVOLUTION = frozenset({"causal_conv1d_fn"})
_GATED_DELTA = _CONVOLUTION | {"torch_chunk_gated_delta_rule"}
_KIMI_DELTA = _CONVOLUTION | {"chunk_kimi_delta_attention"}
_MAMBA_2 = _CONVOLUTION | {"mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}
_SCAN = _CONVOLUTION | {"mamba_selective_scan"}
_MAMBA_1 = _SCAN | {"mamba_inner_fn"}
_DECAYS = frozenset({"slope_rate", "query_decay", "key_decay", "diagonal_decay"})  # attributes, not kernels
# Each class's mechanism, as docs/models.md names it, and which names of KERNELS and _DECAYS its forward uses.
_MIXERS: Mapping[str, tuple[str, frozenset[str]]] = {
    "BailingHybridDeltaAttention": ("Kimi delta", _KIMI_DELTA),
    "BambaMixer": ("Mamba 2", _MAMBA_2),
    "FalconH1Mixer": ("Mamba 2", _MAMBA_2),
    "FalconMambaMixer": ("Mamba 1", _MAMBA_1),
    "GraniteMoeHybridMambaLayer": ("Mamba 2", _MAMBA_2),
    "JambaMambaMixer": ("Mamba 1", _SCAN),
    "KimiLinearDeltaAttention": ("Kimi delta", _KIMI_DELTA),
    "Lfm2MoeShortConv": ("convolution", _CONVOLUTION),
    "Lfm2ShortConv": ("convolution", _CONVOLUTION),
    "Lfm3ShortConv": ("convolution", _CONVOLUTION),
    "Mamba2Mixer": ("Mamba 2", _MAMBA_2),
    "MambaMixer": ("Mamba 1", _MAMBA_1),
    "MiniMaxLightningAttention": ("lightning", _DECAYS),
    "NemotronHMamba2Mixer": ("Mamba 2", _MAMBA_2),
    "OlmoHybridGatedDeltaNet": ("gated delta", _GATED_DELTA),
    "Qwen3NextGatedDeltaNet": ("gated delta", _GATED_DELTA),
    "Qwen3_5GatedDeltaNet": ("gated delta", _GATED_DELTA),
    "Qwen3_5MoeGatedDeltaNet": ("gated delta", _GATED_DELTA),
    "Zamba2MambaMixer": ("Mamba 2", _MAMBA_2),
    "ZambaMambaMixer": ("Mamba 1", _SCAN),
}


# Kinds of layers in configurations that have one mixer each.
LISTED = frozenset({"linear_attention", "conv", "hybrid", "mamba", "mamba2"})


def mechanism(module: nn.Module) -> str | None:
    """Return the name of a known mixer's mechanism; None for any other module."""
    kind = stock_class(module)
    name, called = _MIXERS.get(kind.__name__, (None, frozenset()))
    return name if name is not None and _names_of(kind) & (KERNELS.keys() | _DECAYS) == called else None


def check_listed(model: nn.Module) -> None:
    """Refuse a model whose configuration lists more layers with a mixer than it has known mixers.

    Their classes may have harmless names, such as an ending in Layer.
    """
    config: Any = getattr(model, "config", None)
    for attribute in ("layer_types", "layers_block_type"):
        kinds = getattr(config, attribute, None)
        listed = [kind for kind in kinds if kind in LISTED] if isinstance(kinds, (list, tuple)) else []
        known = sum(1 for _ in mixers_of(model)) if listed else 0
        if known < len(listed):
            raise ValueError(
                f"{attribute} of the configuration has {listed[0]!r} {len(listed)} times, but {type(model).__name__} "
                f"has {known} token mixers that are known to run on shards; run it on one rank, where it sees the "
                "whole sequence"
            )


def over_runs(mixer: nn.Module, exchange: RunExchange) -> Callable[..., Any]:
    """Return the forward of a known mixer over runs. It takes the same arguments as the stock forward."""
    kind = stock_class(mixer)
    if mechanism(mixer) == "lightning":
        return functools.partial(_lightning, mixer, exchange)
    home = sys.modules[kind.__module__]
    used = KERNELS.keys() & _names_of(kind)
    # Looked up at each call: the modeling file's kernel may have been replaced by a faster one.
    ours = {name: functools.partial(KERNELS[name], getattr(home, name), exchange) for name in used}
    return functools.partial(_with_names(kind.forward, ours), mixer)


def _names_of(kind: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def _with_names(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function, and of its decorators, in which some global names mean other values."""
    below = getattr(function, "__wrapped__", None)
    if below is None:
        scope, closure = {**function.__globals__, **names}, function.__closure__
    else:
        inner, scope = _with_names(below, names), function.__globals__
        closure = tuple(CellType(inner) if cell.cell_contents is below else cell for cell in function.__closure__)
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _lightning(mixer: Any, exchange: RunExchange, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The forward of MiniMax's lightning attention, which calls no kernel by name. ``hidden_states``: [B, S, E]."""
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    query, key, value = qkv.unflatten(-1, (mixer.num_attention_heads, -1)).transpose(1, 2).chunk(3, -1)
    out = kernels.lightning(exchange, query, key, value, mixer.slope_rate, block=mixer.block_size)
    out = mixer.norm(out.transpose(1, 2).flatten(2))
    return mixer.out_proj(F.sigmoid(mixer.output_gate(hidden_states)) * out), None


def stock_class(module: nn.Module) -> Any:
    """Return the class of a module before we replaced it."""
    return getattr(module, "stock_class", type(module))


def mixers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, mixer) for each known mixer inside a module."""
    return ((name, part) for name, part in module.named_modules() if mechanism(part))
