"""What of a model lets tokens see each other outside of the attention, or draws random values: part by part.

Identity decides: the class that defines a module's forward must be known, not what a subclass of it is called. Inside
of packages whose classes are named by what they do, a name will do; a user's own class needs more than a name.
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

from .adapters import reason_of_adapter

NAME = "burst"
ALONE = "run it with one rank, where it sees the whole sequence"
# Layers of torch.nn that treat each token by itself; subclasses too where they inherit the forward.
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
# Packages in which a class's name says what it does.
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
# What classes of models are called that only hold others or treat each token by itself.
_KNOWN = re.compile(
    r"(Model|ForCausalLM|LMHeadModel|ForConditionalGeneration|Decoder|Encoder|Layer|Block|Stack|Wrapper|OptimizedModule"
    r"|MLP|Mlp|GLU|FeedForward|FFN|Experts?|MoE|Moe|MoA|AltUp|Router|Gate|Gating|Statics"
    r"|Norm|NormGated|Norm1P|Activation|Gelu|Linear|Linear4bit|Linear8bitLt|Conv1D|Dense|Intermediate|Output|Transform"
    r"|Projector|Adapter|Embeddings?|HyperConnection|HyperHead|Head)$"
)
# They run what they wrap as it is.
_TRANSPARENT = ("CheckpointWrapper", "OptimizedModule")
# Who may put hooks on parts, or another forward in a part's place: none of these changes what a token sees.
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
    "trl",  # a fused head, over the whole model's forward
)
_DECLARED = "_burst_token_wise"  # by token_wise, on a class or a hook
_Declared = TypeVar("_Declared", bound=Callable[..., Any])
_UNKNOWN = "is not known to treat each token by itself"
_SHARD_ALONE = "and each rank would see its shard alone"
# Settings of parts that make them draw random values, though no nn.Dropout does; attention has a check of its own.
_RANDOM = re.compile(r"^(?!.*att).*(drop|jitter)")
_SAMPLING = ("PhimoeTopKRouter",)  # whenever it is in training mode


def token_wise(treats: _Declared) -> _Declared:
    """Declare that a module class, or a hook, treats each token by itself, so that each rank may give it a shard.

    Use it as a decorator, or call it on a class of another package before ``parallelize``. What is declared is not
    proved: ``hf.check_model`` measures it. A subclass with another ``forward`` needs a declaration of its own.

    Args:
        treats: an ``nn.Module`` class that defines ``forward``, or a function for ``register_forward_hook`` and the
            like.

    Returns:
        The class itself, or a function that calls the hook.

    Raises:
        TypeError: it is neither, or the class inherits its ``forward``.
    """
    if isinstance(treats, type):
        if not issubclass(treats, nn.Module) or "forward" not in vars(treats):
            raise TypeError(f"token_wise({treats.__name__}): needs an nn.Module class that defines forward itself")
        setattr(treats, _DECLARED, True)
        return treats
    if not callable(treats):
        raise TypeError(f"token_wise({treats!r}): needs an nn.Module class or a hook, a function")

    @functools.wraps(treats)
    def hook(*given: Any, **named: Any) -> Any:
        return treats(*given, **named)

    setattr(hook, _DECLARED, True)
    return cast("_Declared", hook)


def _is_declared(treats: Any) -> bool:
    return _DECLARED in getattr(treats, "__dict__", ())


def check_structure(model: nn.Module) -> None:
    """Refuse a model with a part that is not known to treat each token by itself, or with another attention."""
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason:
            raise ValueError(f"{_shown(name, module)} {reason}, {_SHARD_ALONE}; {ALONE}")


def check_hooks(model: nn.Module, *, root: bool = True) -> None:
    """Refuse hooks on a model's parts: each would be given this rank's shard.

    Args:
        root: False leaves out those on the model itself.
    """
    for name, module in model.named_modules():
        if hasattr(module, "stock_class") or not (root or name):  # parallelized: it is given whole batches
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
                    f"{_shown(name, module)} has the hook {_called(hook)}, which would be given this rank's shard of "
                    "the tokens; remove it, put it on the model itself, or, if it treats each token by itself, put "
                    "hf.token_wise(hook) there"
                )


def check_randomness(model: nn.Module) -> None:
    """Refuse parts in training mode that draw random values, but for ``nn.Dropout``."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        if _definer(type(module)).__name__ in _SAMPLING:
            raise ValueError(
                f"{_shown(name, module)} draws random values in training, each rank others; {ALONE}, or call eval()"
            )
        for setting, value in vars(module).items():
            if _RANDOM.match(setting) and _positive(value):
                raise ValueError(
                    f"{_shown(name, module)} has {setting}={value}, by which it draws random values, each rank others; "
                    f"set {setting} to 0, or call eval()"
                )


def check_attention_is_ours(model: nn.Module) -> None:
    """Refuse a model none of whose attention layers asks transformers which attention to use.

    They get no mask, and would look ahead even with one rank.
    """
    attentions = {name: module for name, module in model.named_modules() if "Attention" in type(module).__name__}
    if attentions and not any(_calls_interface(module) for module in attentions.values()):
        name, module = next(iter(attentions.items()))
        raise ValueError(
            f"{name} ({type(module).__name__}) computes its attention itself, whatever attn_implementation is asked "
            f"for; use another model, or load this one without attn_implementation={NAME!r}"
        )


def attention_configs(model: nn.Module) -> list[Any]:
    """The configurations by which the model's layers choose their attention; mostly it is one."""
    every = [getattr(module, "config", None) for module in model.modules() if _calls_interface(module)]
    return list({id(config): config for config in every if config is not None}.values())


def check_implementations(model: nn.Module, configs: list[Any], names: Sequence[str] = (NAME,)) -> None:
    """Refuse a model some of whose layers ask for another attention."""
    for config in configs:
        if config._attn_implementation not in names:
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} of layers of {type(model).__name__}: their "
                f"attention would see each rank's shard alone; call model.set_attn_implementation({names[0]!r})"
            )


def _positive(value: Any) -> bool:
    """Whether it is a number above 0, or a mapping with one."""
    values = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(each, (int, float)) and not isinstance(each, bool) and each > 0 for each in values)


def _shown(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _origin(function: Any) -> str:
    """The module that holds a function's code, whatever wraps it says of itself."""
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)
    own = getattr(function, "__globals__", None)
    return own["__name__"] if own else type(function).__module__


def _within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _definer(kind: type) -> type:
    """The class that defines a module class's forward, under FSDP's; ``nn.Module`` for one that has none."""
    bases = (base for base in kind.__mro__ if not _within(base.__module__, ["torch.distributed.fsdp"]))
    return next(base for base in bases if "forward" in vars(base))


def _reason(module: nn.Module) -> str | None:
    """Why a module may let tokens see each other, or place them wrongly; its children are asked by themselves."""
    if hasattr(module, "stock_class"):
        return None  # parallelized: its forward is ours, which runs its body over shards
    kind = _definer(type(module))
    own = vars(module).get("forward")
    if own is not None and kind.__name__ not in _TRANSPARENT and not _within(_origin(own), _ADDED_BY):
        return f"has a forward of its own, {_called(own)}"
    if _own_attention(module):
        return "computes its attention itself"
    if is_called(module, "CrossAttention") or getattr(module, "is_cross_attention", False):
        return "looks at another sequence"
    if kind is nn.Module or kind in _TOKENWISE or _is_declared(kind):
        return None
    if _within(kind.__module__, ["peft"]):
        return reason_of_adapter(module, kind)
    if _within(kind.__module__, ["torch"]):
        return None if kind.__name__ in _TRANSPARENT else _UNKNOWN
    if not _within(kind.__module__, _NAMED):
        return f"{_UNKNOWN} (if it does, say so: hf.token_wise({kind.__name__}))"
    return _reason_by_name(module, kind)


def _reason_by_name(module: nn.Module, kind: type) -> str | None:
    """The same of a class from a package whose names say what they do."""
    if _calls_interface(module) or kind.__name__.endswith("RotaryEmbedding"):
        return None
    if kind.__module__ == "transformers.activations":
        return None
    if _places_tokens(module):
        return "counts positions itself, from its input's start"
    return None if _KNOWN.search(kind.__name__) or kind.__name__.endswith("Attention") else _UNKNOWN


def is_called(module: nn.Module, role: str) -> bool:
    """Whether the name of a module's class ends so."""
    return type(module).__name__.endswith(role)


def _own_attention(module: nn.Module) -> bool:
    """Whether it is an attention, and neither it nor a part of it asks transformers which attention to use."""
    return "Attention" in type(module).__name__ and not any(_calls_interface(part) for part in module.modules())


def _calls_interface(module: nn.Module) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in names for names in _names_in_code(type(module)))


def _names_in_code(kind: type) -> Iterator[tuple[str, ...]]:
    """The global names and attributes that the methods of a class use."""
    for base in kind.__mro__:
        if base in (PreTrainedModel, nn.Module):
            return
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if isinstance(code, CodeType):
                yield code.co_names


def _places_tokens(module: nn.Module) -> bool:
    """Whether it embeds positions that it is not given."""
    learned = (name for name, child in module.named_children() if not is_called(child, "RotaryEmbedding"))
    return any("position" in name for name in learned) and "position_ids" not in _parameters(module)


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters
