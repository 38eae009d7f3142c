"""Find parts of a model that mix tokens outside of the attention.

A part is judged by the class that defines its forward: transformers' and remote code's by its operations
(:mod:`token_code`), linear layers of other packages by a measurement (:mod:`token_measure`). A user's class must be
declared by :func:`token_wise`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import known, token_code, token_measure
from .attached import added_by_package, called, is_declared
from .configs import check_rope_type
from .known import ALONE, NAME
from .parts import ATTENTIONS, EXCHANGING, INTERFACE, Kind, Part, Reading

_LAYERS = "Linear Embedding LayerNorm RMSNorm Dropout Identity Sequential ReLU GELU SiLU Tanh Sigmoid"
# Layers of torch.nn that treat each token independently, and their subclasses that inherit the forward.
_TOKENWISE = [getattr(nn, name) for name in _LAYERS.split()]
# Packages whose classes are judged by their code, or measured if they are linear layers.
_NAMED = (
    *("transformers", "transformers_modules", "aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors"),
    *("eetq", "gptqmodel", "hqq", "liger_kernel", "optimum", "torchao"),
)
# Wrappers that run the wrapped module unchanged.
_TRANSPARENT = ("CheckpointWrapper", "OptimizedModule")
_UNKNOWN = "is not known to treat each token independently"


def check_structure(reading: Reading) -> None:
    """Refuse a model with another attention, or with a part not known to treat each token independently."""
    mixers = reading.of(Kind.MIXER)
    of_mixers = {id(child) for mixer in mixers for child in mixer.module._modules.values()}
    reasons: list[tuple[bool, str]] = []
    for part in reading:
        # A mixer passes the weight of its convolution to a kernel.
        if part.kind is Kind.POOLER or (isinstance(part.module, nn.Conv1d) and id(part.module) in of_mixers):
            continue
        if reason := reason_against(part, reading.judged):
            reasons.append((reason.startswith(_UNKNOWN), f"{part} {reason}"))
    if reasons:  # a stated reason rather than an unknown part around it
        text = min(reasons, key=lambda reason: reason[0])[1]
        raise ValueError(f"{text}, and each rank would see only its shard; {ALONE}")
    _check_measured(reading)
    # What a configuration calls a mixer may be a part that mixes nothing.
    for attribute, kinds in known.layer_lists(getattr(reading.model, "config", None)):
        listed = [kind for kind in kinds if known.LAYERS.get(kind) == "state"]
        if len(mixers) < len(listed):
            raise ValueError(
                f"{attribute} of the configuration has {listed[0]!r} {len(listed)} times, but "
                f"{type(reading.model).__name__} has {len(mixers)} token mixers that are known to run on shards; "
                f"{ALONE}"
            )


def _check_measured(reading: Reading) -> None:
    """Refuse declared classes, remote code, and layers with a product of their own, if tokens depend on each other."""
    hidden = getattr(getattr(reading.model, "config", None), "hidden_size", None)
    dtype = next((x.dtype for x in reading.model.parameters() if x.is_floating_point()), torch.float32)
    measured: set[Any] = set()
    for part in reading:
        # What reads the code of remote parts without an attention or a mixer can't prove all.
        remote = known.within(part.definer.__module__, ["transformers_modules"]) and not part.holds(*EXCHANGING)
        trusted = is_declared(part.definer) or remote
        if not (trusted or _is_measured(part)) or (key := token_measure.key(part.module)) in measured:
            continue
        measured.add(key)
        width = token_measure.width_of(part.module) or hidden
        reason = token_measure.reason(part.module, width, dtype, trusted=trusted) if isinstance(width, int) else None
        if reason:
            raise ValueError(f"{part} {reason}, or {ALONE}")


def _is_measured(part: Part) -> bool:
    """Return whether a part is a linear layer with a product of its own: of a tensor's class, or of a package."""
    home = part.definer.__module__
    if token_measure.width_of(part.module) is None:
        return False
    if known.within(home, ["torch"]):
        return not token_measure.has_plain_weight(part.module)
    return known.within(home, _NAMED) and not known.within(home, ["transformers.models", "transformers_modules"])


def check_rotary(reading: Reading) -> None:
    """Refuse rotary angles that depend on the largest position, set after the model was made of its configuration."""
    for part in reading:
        if known.is_called(part.module, "RotaryEmbedding"):
            kinds = getattr(part.module, "rope_type", None)
            check_rope_type("rope_type", kinds.values() if isinstance(kinds, dict) else [kinds])


def check_exchanges(reading: Reading) -> None:
    """Refuse a model without an attention or a recurrence that is known: something else mixes its tokens (FNet)."""
    if not reading.of(*EXCHANGING):
        raise ValueError(
            f"{type(reading.model).__name__} has no attention and no recurrence that is known to run on shards, and "
            f"each rank would see only its shard; {ALONE}"
        )


def check_added_losses(reading: Reading) -> None:
    """Refuse adapters that add to the loss on every rank, if gradients are summed over the ranks."""
    if any(type(part.module).__module__.startswith("peft.tuners.adalora.") for part in reading):
        raise ValueError("gradients='sum' is refused: AdaLoRA adds to the loss on every rank; use gradients='mean'")


def check_attention_is_ours(reading: Reading) -> None:
    """Refuse a model without an attention that uses transformers' interface: no layer would get a mask."""
    attentions = [part for part in reading if part.is_attention]
    if attentions and not any(part.kind in INTERFACE or hasattr(part.module, "stock_class") for part in attentions):
        part = attentions[0]
        raise ValueError(
            f"{part.name} ({type(part.module).__name__}) computes its attention itself and ignores "
            f"attn_implementation; use another model, or load this one without attn_implementation={NAME!r}"
        )


def attention_configs(reading: Reading) -> list[Any]:
    """Return the configurations from which the layers read their attention implementation; usually one."""
    owners = [part.module for part in reading.of(*INTERFACE)]
    if reading.of(Kind.SCORES):  # their model reads it, to make masks
        owners += [part.module for part in reading if isinstance(part.module, PreTrainedModel)]
    configs = (getattr(owner, "config", None) for owner in owners)
    return list({id(config): config for config in configs if config is not None}.values())


def check_implementations(model: nn.Module, configs: list[Any], names: Sequence[str] = (NAME,)) -> None:
    """Refuse a model if any layer's configuration selects another attention."""
    for config in configs:
        if config._attn_implementation not in names:
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} of layers of {type(model).__name__}: their "
                f"attention would see only each rank's shard; call model.set_attn_implementation({names[0]!r})"
            )


def reason_against(part: Part, judged: dict[Any, str | None]) -> str | None:
    """Return why a part may mix tokens or use wrong positions, or None. Parts inside are checked separately."""
    module = part.module
    if hasattr(module, "stock_class"):
        return None  # the forward of a parallelized model is ours
    if part.kind in (Kind.MIXER, Kind.INDEXER, Kind.SCORES, Kind.PLACES):
        return None  # parallelize replaces its forward
    definer, forward = part.definer, vars(module).get("forward")
    home, kind = definer.__module__, definer.__name__
    if forward is not None and kind not in _TRANSPARENT and not added_by_package(forward):
        return f"has the forward {called(forward)} in place of its class's forward"
    if kind in known.REFUSED_PARTS and known.within(home, _NAMED):
        return known.REFUSED_PARTS[kind]
    if part.is_attention and not part.holds(*ATTENTIONS):
        reasons = (known.REFUSED_PARTS.get(type(inner.module).__name__) for inner in part.inside)
        return next(filter(None, reasons), "computes its attention itself")
    if known.is_called(module, "CrossAttention") or getattr(module, "is_cross_attention", False):
        return "attends to another sequence"
    if definer is nn.Module or definer in _TOKENWISE or is_declared(definer):
        return None
    if known.within(home, ["peft"]):
        return _reason_against_adapter(module, definer)
    if known.within(home, ["torch"]):
        return None if kind in _TRANSPARENT else _UNKNOWN
    declare = f"(if it does, declare it: hf.token_wise({kind}))"
    if not known.within(home, _NAMED):
        return f"{_UNKNOWN} {declare}"
    is_head = isinstance(module, PreTrainedModel) and module.base_model is not module
    if home == "transformers.activations" or is_head or _is_measured(part):
        return None
    attends = part.kind in ATTENTIONS
    if not attends and _places_tokens(module):
        return "counts positions itself, from the start of its input"
    operation = token_code.mixing(module, definer, judged, attends=attends)
    return None if operation is None else f"{_UNKNOWN}: it uses {operation} {declare}"


def _reason_against_adapter(module: nn.Module, kind: type) -> str | None:
    """Return why a PEFT adapter can't run on shards, or None; ``kind`` defines its forward."""
    if f"{kind.__module__}.{kind.__qualname__}" in known.ADAPTER_WRAPPERS:
        return None
    name = f"{kind.__module__.removeprefix('peft.tuners.')}.{kind.__qualname__}"
    if name not in known.ADAPTERS:
        return f"is peft.tuners.{name}, which {known.REFUSED_ADAPTERS.get(name, known.UNKNOWN_ADAPTER)}"
    variants: Any = getattr(module, "lora_variant", {})
    for variant in map(type, variants.values()):
        if variant.__module__ != "peft.tuners.lora.variants" or variant.__name__ not in known.VARIANTS:
            why = known.REFUSED_VARIANTS.get(variant.__name__, known.UNKNOWN_ADAPTER)
            return f"uses {variant.__name__}, which {why}"
    return None


def _places_tokens(module: nn.Module) -> bool:
    """Return whether a module embeds positions but takes no ``position_ids``."""
    children = ((name, child) for name, child in module._modules.items() if child is not None and "position" in name)
    placing = (not (known.is_called(child, "RotaryEmbedding") or known.is_counted(child)) for _, child in children)
    return any(placing) and "position_ids" not in inspect.signature(module.forward).parameters
