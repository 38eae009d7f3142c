"""Find parts of a model that mix tokens outside of the attention, or that draw random values.

A part is judged by the class that defines its forward, not by the name of a subclass. For a few packages with
descriptive class names, the name decides. A user's class must be declared by :func:`token_wise`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel

from . import mixers, own_attention, positions, reasons
from .adapters import reason_of_adapter
from .checks import dropouts_of
from .pooler import poolers_of

NAME = "burst"
ALONE = "run it on one rank, where it sees the whole sequence"
# Layers of torch.nn that treat each token independently, and their subclasses that inherit the forward.
_TOKENWISE = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.Sequential,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)
# Packages whose class names describe what the classes do.
_NAMED = (
    "transformers",
    "transformers_modules",
    "aqlm",
    "auto_gptq",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "eetq",
    "gptqmodel",
    "hqq",
    "liger_kernel",
    "optimum",
    "torchao",
)
# Endings of the names of classes that only contain others, or that treat each token independently.
_KNOWN = re.compile(
    r"(Model|ForCausalLM|LMHeadModel|ForConditionalGeneration|Decoder|Encoder|Layer|Block|Stack|Wrapper|OptimizedModule"
    r"|MLP|Mlp|GLU|FeedForward|FFN|Experts?|MoE|Moe|MoA|AltUp|Router|Gate|Gating|Statics"
    r"|Norm|NormGated|Norm1P|Activation|Gelu|Linear|Linear4bit|Linear8bitLt|Conv1D|Dense|Intermediate|Output|Transform"
    r"|Projector|Adapter|Embeddings?|Predictions|HyperConnection|HyperHead|Head)$"
)
# Wrappers that run the wrapped module unchanged.
_TRANSPARENT = ("CheckpointWrapper", "OptimizedModule")
# Packages whose hooks and replaced forwards are allowed, because they don't let tokens see each other.
_ADDED_BY = (
    "accelerate",
    "deepspeed",
    "liger_kernel",
    "peft.mixed_model",
    "peft.peft_model",
    "peft.tuners.glora.model",
    "peft.tuners.lora.model",
    "peft.tuners.road.model",
    "peft.utils",
    "torch",
    "transformers",
    "trl",  # replaces the whole model's forward by one with a fused head
)
_DECLARED = "_burst_token_wise"  # token_wise sets it on a class or a hook
_Declared = TypeVar("_Declared", bound=Callable[..., Any])
_UNKNOWN = "is not known to treat each token independently"
_SHARD_ALONE = "and each rank would see only its shard"
_SAMPLING = ("PhimoeTopKRouter",)  # draws random values whenever it is in training mode


def token_wise(treats: _Declared) -> _Declared:
    """Declare that a module class, or a hook, treats each token independently and may run on shards.

    Use it as a decorator, or call it on a class of another package before ``parallelize``. It does not verify the
    declaration; ``hf.check_model`` measures it. A subclass with another ``forward`` needs another declaration.

    Args:
        treats: an ``nn.Module`` class that defines ``forward``, or a hook, for ``register_forward_hook`` and similar
            methods.

    Returns:
        The same class, or a function that calls the hook.

    Raises:
        TypeError: ``treats`` is neither, or the class inherits its ``forward``.
    """
    if isinstance(treats, type):
        if not issubclass(treats, nn.Module) or "forward" not in vars(treats):
            raise TypeError(
                f"token_wise({treats.__name__}): {treats.__name__} is not an nn.Module class that defines forward; "
                "pass one that does"
            )
        setattr(treats, _DECLARED, True)
        return treats
    if not callable(treats):
        raise TypeError(f"token_wise({treats!r}): the argument is not callable; pass an nn.Module class or a hook")

    @functools.wraps(treats)
    def hook(*given: Any, **named: Any) -> Any:
        return treats(*given, **named)

    setattr(hook, _DECLARED, True)
    return cast("_Declared", hook)


def _is_declared(treats: Any) -> bool:
    return _DECLARED in getattr(treats, "__dict__", ())


def state_of(model: nn.Module, rates: Sequence[tuple[nn.Module, str]] = ()) -> list[Any]:
    """Return what the checks of parts depend on, in one pass: 1 ms for 400 modules, where the checks take 14 ms.

    ``rates``: :func:`rates_of` the model at the last check.
    """
    state: list[Any] = [_positive(getattr(module, name, None)) for module, name in rates]
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        own = vars(module)
        before, after = module._forward_pre_hooks, module._forward_hooks
        if before or after or module._backward_pre_hooks or module._backward_hooks:
            state.append([*before, *after, *module._backward_pre_hooks, *module._backward_hooks])
        state += (module, type(module), module.training, tuple(own))
        if "gradient_checkpointing" in own or "forward" in own:
            state += (own.get("forward"), own.get("gradient_checkpointing"), own.get("_gradient_checkpointing_func"))
        waiting += [child for child in module._modules.values() if child is not None]
    return state


def rates_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the attributes of a model's parts that may make them draw random values: (part, name)."""
    every = ((module, name) for module in model.modules() for name in vars(module))
    return [(module, name) for module, name in every if name == "p" or "drop" in name or "jitter" in name]


def check_structure(model: nn.Module) -> None:
    """Refuse a model with another attention, or with a part not known to treat each token independently."""
    of_mixers = {id(part) for _, mixer in mixers.mixers_of(model) for part in mixer.children()}
    whole = {id(pooler) for pooler in poolers_of(model)}
    for name, module in model.named_modules():
        if id(module) in whole:
            continue
        known = isinstance(module, nn.Conv1d) and id(module) in of_mixers  # the mixer passes its weight to a kernel
        reason = None if known else _reason(module)
        if reason:
            raise ValueError(f"{_shown(name, module)} {reason}, {_SHARD_ALONE}; {ALONE}")
    mixers.check_listed(model)


def check_hooks(model: nn.Module, *, root: bool = True) -> None:
    """Refuse hooks on a model's parts, because each would get only this rank's shard.

    Args:
        model: the model.
        root: False allows hooks on the model itself.
    """
    for name, module in model.named_modules():
        if hasattr(module, "stock_class") or not (root or name):  # a parallelized model takes whole batches
            continue
        hooks = (
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *module._backward_pre_hooks.values(),
            *module._backward_hooks.values(),
        )
        for hook in hooks:
            if not (_is_declared(hook) or _within(_origin(hook), _ADDED_BY)):
                raise ValueError(
                    f"{_shown(name, module)} has the hook {_called(hook)}, which would get only this rank's shard of "
                    "the tokens; remove it, or register it on the whole model. If it treats each token independently, "
                    "register hf.token_wise(hook) instead"
                )
            if _origin(hook) == "transformers.integrations.neftune":
                raise ValueError(
                    f"{_shown(name, module)} adds the noise of NEFTune, which each rank would scale by the length of "
                    "its shard; set neftune_noise_alpha to None"
                )


def check_randomness(model: nn.Module) -> None:
    """Refuse parts in training mode that draw random values.

    :func:`check_dropout` refuses ``nn.Dropout``, and :func:`~.checks.check_keywords` attention dropout.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        if _definer(type(module)).__name__ in _SAMPLING:
            raise ValueError(
                f"{_shown(name, module)} draws random values in training, different on each rank; call eval(), or "
                f"{ALONE}"
            )
        for setting, value in vars(module).items():
            random = "drop" in setting or "jitter" in setting
            if random and "att" not in setting and _positive(value):
                raise ValueError(
                    f"{_shown(name, module)} has {setting}={value}, so it draws random values, different on each rank; "
                    f"set {setting} to 0, or call eval()"
                )


def dropouts(model: nn.Module) -> Iterator[tuple[str, nn.modules.dropout._DropoutNd]]:
    """Yield the names and modules of dropout above 0, in training mode or not."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield name, module


def check_dropout(model: nn.Module) -> None:
    """Refuse ``nn.Dropout`` in training mode.

    Ranks with equal seeds would draw the same values for different tokens. A layer that is computed again would draw
    other values than before.
    """
    for name, module in dropouts(model):
        if module.training:
            asked = dropouts_of(getattr(model, "config", None))
            settings = f" (of the configuration: {asked})" if asked else ""
            raise ValueError(
                f"{_shown(name, module)} has p={module.p}: dropout is not supported over ranks, nor where layers are "
                f"computed again; set it to 0{settings}, or call eval()"
            )


def check_attention_is_ours(model: nn.Module) -> None:
    """Refuse a model if no attention layer of it uses transformers' attention interface.

    Its layers would get no mask, so that even on one rank tokens would see later tokens.
    """
    attentions = {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ and next(mixers.mixers_of(module), None) is None
    }
    ours = (calls_interface(module) or _is_converted(module) for module in attentions.values())
    if attentions and not any(ours):
        name, module = next(iter(attentions.items()))
        raise ValueError(
            f"{name} ({type(module).__name__}) computes its attention itself and ignores attn_implementation; use "
            f"another model, or load this one without attn_implementation={NAME!r}"
        )


def attention_configs(model: nn.Module) -> list[Any]:
    """Return the configurations from which the layers read their attention implementation; usually one."""
    every = [getattr(module, "config", None) for module in model.modules() if calls_interface(module)]
    if any(own_attention.is_known(module) for module in model.modules()):  # their model reads it, to make masks
        every += [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(config): config for config in every if config is not None}.values())


def _is_converted(module: nn.Module) -> bool:
    return own_attention.is_known(module) and isinstance(module, own_attention.OwnAttention)


def attends(module: nn.Module) -> bool:
    """Return whether a module calls an attention that can run on shards."""
    return calls_interface(module) or own_attention.is_known(module)


def check_implementations(model: nn.Module, configs: list[Any], names: Sequence[str] = (NAME,)) -> None:
    """Refuse a model if any layer's configuration selects another attention."""
    for config in configs:
        if config._attn_implementation not in names:
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} of layers of {type(model).__name__}: their "
                f"attention would see only each rank's shard; call model.set_attn_implementation({names[0]!r})"
            )


def _positive(value: Any) -> bool:
    """Return whether a value is a number above 0, or a dict that holds one."""
    values = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(each, (int, float)) and not isinstance(each, bool) and each > 0 for each in values)


def _shown(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _origin(function: Any) -> str:
    """Return the name of the module that holds a function's code; wrappers may claim another one."""
    function = getattr(function, "func", function)  # unwrap functools.partial
    function = getattr(function, "__func__", function)
    own = getattr(function, "__globals__", None)
    return own["__name__"] if own else type(function).__module__


def _within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _definer(kind: type) -> type:
    """Return the class that defines a module class's forward, FSDP's classes aside; ``nn.Module`` if none does."""
    bases = (base for base in kind.__mro__ if not _within(base.__module__, ["torch.distributed.fsdp"]))
    return next(base for base in bases if "forward" in vars(base))


def _reason(module: nn.Module) -> str | None:
    """Return why a module may mix tokens or use wrong positions, or None. Its children are checked separately."""
    if hasattr(module, "stock_class"):
        return None  # the forward of a parallelized model is ours
    if mixers.mechanism(module) or own_attention.is_known(module) or positions.is_counted(module):
        return None  # parallelize replaces its forward
    kind = _definer(type(module))
    own = vars(module).get("forward")
    if own is not None and kind.__name__ not in _TRANSPARENT and not _within(_origin(own), _ADDED_BY):
        return f"has the forward {_called(own)} in place of its class's forward"
    if kind.__name__ in reasons.OF_PARTS and _within(kind.__module__, _NAMED):
        return reasons.OF_PARTS[kind.__name__]
    if _own_attention(module):
        known = (reasons.OF_PARTS.get(type(part).__name__) for part in module.modules())
        return next(filter(None, known), "computes its attention itself")
    if is_called(module, "CrossAttention") or getattr(module, "is_cross_attention", False):
        return "attends to another sequence"
    if kind is nn.Module or kind in _TOKENWISE or _is_declared(kind):
        return None
    if _within(kind.__module__, ["peft"]):
        return reason_of_adapter(module, kind)
    if _within(kind.__module__, ["torch"]):
        return None if kind.__name__ in _TRANSPARENT else _UNKNOWN
    if not _within(kind.__module__, _NAMED):
        return f"{_UNKNOWN} (if it does, declare it: hf.token_wise({kind.__name__}))"
    return _reason_by_name(module, kind)


def _reason_by_name(module: nn.Module, kind: type) -> str | None:
    """Return the same for a class from a package with descriptive class names."""
    if calls_interface(module) or kind.__name__.endswith("RotaryEmbedding"):
        return None
    if kind.__module__ == "transformers.activations":
        return None
    if _places_tokens(module):
        return "counts positions itself, from the start of its input"
    return None if _KNOWN.search(kind.__name__) or kind.__name__.endswith("Attention") else _UNKNOWN


def is_called(module: nn.Module, role: str) -> bool:
    """Return whether the name of a module's class ends with ``role``."""
    return type(module).__name__.endswith(role)


def _own_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention that doesn't use transformers' attention interface."""
    if "Attention" not in type(module).__name__ or next(mixers.mixers_of(module), None) is not None:
        return False
    return not any(map(attends, module.modules()))


def calls_interface(module: nn.Module) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _names_in_code(type(module)))


def _names_in_code(kind: type) -> Iterator[tuple[str, ...]]:
    """Yield the global names and attributes that each method of a class uses."""
    for base in kind.__mro__:
        if base in (PreTrainedModel, nn.Module):
            return
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if isinstance(code, CodeType):
                yield code.co_names


def _places_tokens(module: nn.Module) -> bool:
    """Return whether a module embeds positions but takes no ``position_ids``."""
    learned = (
        name
        for name, child in module.named_children()
        if not (is_called(child, "RotaryEmbedding") or positions.is_counted(child))
    )
    return any("position" in name for name in learned) and "position_ids" not in _parameters(module)


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters
