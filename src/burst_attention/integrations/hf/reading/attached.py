"""What is attached to parts: declarations, hooks, replaced forwards and rates of random values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar, cast

from torch import nn

from . import known
from .configs import dropouts_of
from .known import ALONE
from .parts import Reading
from .token_code import is_rate

# Packages whose hooks and replaced forwards don't let tokens see each other (TRL's: a model's, with a fused head).
_ADDED_BY = (
    *("accelerate", "burst_attention.integrations.hf.tensor.styles", "deepspeed", "liger_kernel", "torch"),
    *("peft.mixed_model", "peft.peft_model", "peft.tuners.glora.model", "peft.tuners.lora.model"),
    *("peft.tuners.road.model", "peft.utils", "transformers", "trl"),
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_DECLARED = "_burst_token_wise"  # token_wise sets it on a class or a hook
_Declared = TypeVar("_Declared", bound=Callable[..., Any])


def token_wise(treats: _Declared) -> _Declared:
    """Declare that a module class, or a hook, treats each token independently and may run on shards.

    Use it as a decorator, or call it on a class of another package before ``parallelize``. A class whose forward takes
    one tensor of the model's width is run on random tokens, and refused if they depend on each other. Others are not
    verified; ``hf.check_model`` measures them. A subclass with another ``forward`` needs another declaration.

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
            raise TypeError(f"token_wise({treats.__name__}): pass an nn.Module class that defines forward")
        setattr(treats, _DECLARED, True)
        return treats
    if not callable(treats):
        raise TypeError(f"token_wise({treats!r}): the argument is not callable; pass an nn.Module class or a hook")

    @functools.wraps(treats)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return treats(*args, **kwargs)

    setattr(hook, _DECLARED, True)
    return cast("_Declared", hook)


def is_declared(treats: Any) -> bool:
    """Return whether a class or a hook was declared by :func:`token_wise`."""
    return _DECLARED in getattr(treats, "__dict__", ())


def hooks_of(module: nn.Module) -> Iterable[Any]:
    """Return a module's hooks, before and after its forward and backward."""
    return chain.from_iterable(vars(module)[kind].values() for kind in HOOKS)


def origin_of(function: Any) -> str:
    """Return the name of the module that holds a function's code; wrappers may claim another one."""
    function = getattr(function, "func", function)  # unwrap functools.partial
    function = getattr(function, "__func__", function)
    scope = getattr(function, "__globals__", None)
    return scope["__name__"] if scope else type(function).__module__


def added_by_package(function: Any) -> bool:
    """Return whether a hook, or a forward, comes from a package that adds only those that mix no tokens."""
    return known.within(origin_of(function), _ADDED_BY)


def called(function: Any) -> str:
    """Return a function's name for a message."""
    return getattr(function, "__qualname__", None) or repr(function)


def check_hooks(reading: Reading, *, root: bool = True) -> None:
    """Refuse hooks on a model's parts, because each would get only this rank's shard; ``root``: on the model too."""
    for part in reading:
        if hasattr(part.module, "stock_class") or not (root or part.name):  # a parallelized model takes whole batches
            continue
        for hook in hooks_of(part.module):
            if not (is_declared(hook) or added_by_package(hook)):
                raise ValueError(
                    f"{part} has the hook {called(hook)}, which would get only this rank's shard of the tokens; remove "
                    "it, or register it on the whole model. If it treats each token independently, register "
                    "hf.token_wise(hook) instead"
                )
            if origin_of(hook) == "transformers.integrations.neftune":
                raise ValueError(f"{part} adds the noise of NEFTune by shard; set neftune_noise_alpha=None")


def check_random(reading: Reading, body: Reading | None = None, *, dropout: bool = True) -> None:
    """Refuse parts in training mode that draw random values; ``body``: what runs on shards; ``dropout``: those too."""
    inside = (reading if body is None else body).by_id
    for part in reading:
        if not part.module.training:
            continue
        sharded = id(part.module) in inside
        if sharded and part.definer.__name__ in known.SAMPLING:
            raise ValueError(f"{part} draws random values in training, different on each rank; call eval(), or {ALONE}")
        of_module = isinstance(part.module, nn.modules.dropout._DropoutNd)
        for setting, value in vars(part.module).items() if dropout or not of_module else ():
            # The attention refuses its own dropout, in the words of its configuration.
            random = is_rate(setting) and (of_module or setting != "p") and not (sharded and "att" in setting)
            if random and is_positive(value):
                rates = dropouts_of(getattr(reading.model, "config", None))
                where = f" (of the configuration: {rates})" if rates else ""
                raise ValueError(
                    f"{part} has {setting}={value}, so it draws random values: they differ between ranks, and where "
                    f"layers are computed again; set it to 0{where}, or call eval()"
                )


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0, or a dict that holds one."""
    values = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in values)
