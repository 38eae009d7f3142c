"""Find parts of a model that mix tokens outside of the attention, or that draw random values.

A part is judged by the class that defines its forward: transformers' and remote code's by its operations
(:mod:`token_code`), linear layers of other packages by a measurement (:mod:`token_measure`). A user's class must be
declared by :func:`token_wise`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from . import checks, converted, known, token_code, token_measure
from .checks import dropouts_of
from .known import is_called, names

NAME = "burst"
ALONE = "run it on one rank, where it sees the whole sequence"
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
# Packages whose hooks and replaced forwards don't let tokens see each other (TRL's: a model's, with a fused head).
_ADDED_BY = (
    *("accelerate", "burst_attention.integrations.hf.tensor_styles", "deepspeed", "liger_kernel", "torch"),
    *("peft.mixed_model", "peft.peft_model", "peft.tuners.glora.model", "peft.tuners.lora.model"),
    *("peft.tuners.road.model", "peft.utils", "transformers", "trl"),
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes that change what runs, and which of our forwards it needs.
_SET = names("forward gradient_checkpointing _gradient_checkpointing_func attn_temperature_tuning use_rope rope_type")
_DECLARED = "_burst_token_wise"  # token_wise sets it on a class or a hook
_Declared = TypeVar("_Declared", bound=Callable[..., Any])
_UNKNOWN = "is not known to treat each token independently"


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
    def hook(*given: Any, **named: Any) -> Any:
        return treats(*given, **named)

    setattr(hook, _DECLARED, True)
    return cast("_Declared", hook)


class Watched:
    """A model's parts and what the checks depend on. Comparing takes 0.3 ms for 400 modules; the checks take 14 ms."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [*model.modules()]
        self._configs = [vars(part).get("config") for part in self._parts]  # held, so that their ids stay theirs
        self._rates = [(vars(part), name) for part in self._parts for name in vars(part) if token_code.is_rate(name)]
        self._found = self._state()

    def unchanged(self) -> bool:
        """Return whether no part, hook, mode or rate has changed since this object was made."""
        return self._found == self._state()

    def _state(self) -> list[Any]:
        own = [vars(part) for part in self._parts]
        return [
            [*map(type, self._parts)],
            [each.get("training") for each in own],
            [*map(len, own)],
            [id(each.get("config")) for each in own],
            [*chain.from_iterable(each["_modules"].values() for each in own)],
            [tuple(each[name]) for name in HOOKS for each in own if each[name]],
            [each.get(name) for name in _SET for each in own if name in each],
            [_positive(each.get(name)) for each, name in self._rates],
        ]


def check_structure(model: nn.Module) -> None:
    """Refuse a model with another attention, or with a part not known to treat each token independently."""
    mixers = [mixer for _, mixer in known.mixers_of(model)]
    of_mixers = {id(part) for mixer in mixers for part in mixer.children()}
    whole = {id(pooler) for pooler in converted.poolers_of(model)}
    found: list[tuple[bool, str]] = []
    judged: dict[Any, str | None] = {}
    for name, module in model.named_modules():
        # A mixer passes the weight of its convolution to a kernel.
        if id(module) in whole or (isinstance(module, nn.Conv1d) and id(module) in of_mixers):
            continue
        reason = _reason(module, judged)
        if reason:
            found.append((reason.startswith(_UNKNOWN), f"{_shown(name, module)} {reason}"))
    if found:  # a stated reason rather than an unknown part around it
        text = min(found, key=lambda each: each[0])[1]
        raise ValueError(f"{text}, and each rank would see only its shard; {ALONE}")
    _check_measured(model)
    # What a configuration calls a mixer may be a part that mixes nothing.
    for attribute, kinds in known.layer_lists(getattr(model, "config", None)):
        listed = [kind for kind in kinds if known.LAYERS.get(kind) == "state"]
        if len(mixers) < len(listed):
            raise ValueError(
                f"{attribute} of the configuration has {listed[0]!r} {len(listed)} times, but {type(model).__name__} "
                f"has {len(mixers)} token mixers that are known to run on shards; {ALONE}"
            )


def _check_measured(model: nn.Module) -> None:
    """Refuse declared classes, remote code, and layers with a product of their own, if tokens depend on each other."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    measured: set[Any] = set()
    for name, module in model.named_modules():
        trusted = _is_declared(_definer(type(module))) or _is_remote(module)
        if not (trusted or _is_measured(module)) or (key := token_measure.key(module)) in measured:
            continue
        measured.add(key)
        width = token_measure.width_of(module) or hidden
        reason = token_measure.reason(module, width, dtype, trusted=trusted) if isinstance(width, int) else None
        if reason:
            raise ValueError(f"{_shown(name, module)} {reason}, or {ALONE}")


def _is_remote(module: nn.Module) -> bool:
    """Return whether a part is remote code without an attention or a mixer. What reads its code can't prove all."""
    home = _definer(type(module)).__module__
    return _within(home, ["transformers_modules"]) and not any(
        attends(part) or known.mechanism(part) for part in module.modules()
    )


def _is_measured(module: nn.Module) -> bool:
    """Return whether a part is a linear layer with a product of its own: of a tensor's class, or of a package."""
    home = _definer(type(module)).__module__
    if token_measure.width_of(module) is None:
        return False
    if _within(home, ["torch"]):
        return not token_measure.has_plain_weight(module)
    return _within(home, _NAMED) and not _within(home, ["transformers.models", "transformers_modules"])


def check_rotary(model: nn.Module) -> None:
    """Refuse rotary angles that depend on the largest position, set after the model was made of its configuration."""
    for module in model.modules():
        if is_called(module, "RotaryEmbedding"):
            kinds = getattr(module, "rope_type", None)
            checks.check_rope_type("rope_type", kinds.values() if isinstance(kinds, dict) else [kinds])


def check_exchanges(model: nn.Module) -> None:
    """Refuse a model without an attention or a recurrence that is known: something else mixes its tokens (FNet)."""
    if not any(attends(module) or known.mechanism(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no attention and no recurrence that is known to run on shards, and each rank "
            f"would see only its shard; {ALONE}"
        )


def check_hooks(model: nn.Module, *, root: bool = True) -> None:
    """Refuse hooks on a model's parts, because each would get only this rank's shard; ``root``: on the model too."""
    for name, module in model.named_modules():
        if hasattr(module, "stock_class") or not (root or name):  # a parallelized model takes whole batches
            continue
        for hook in hooks_of(module):
            if not (_is_declared(hook) or added_by_package(hook)):
                raise ValueError(
                    f"{_shown(name, module)} has the hook {_called(hook)}, which would get only this rank's shard of "
                    "the tokens; remove it, or register it on the whole model. If it treats each token independently, "
                    "register hf.token_wise(hook) instead"
                )
            if origin_of(hook) == "transformers.integrations.neftune":
                raise ValueError(
                    f"{_shown(name, module)} adds the noise of NEFTune by shard; set neftune_noise_alpha=None"
                )


def hooks_of(module: nn.Module) -> Iterable[Any]:
    """Return a module's hooks, before and after its forward and backward."""
    return chain.from_iterable(vars(module)[kind].values() for kind in HOOKS)


def check_random(model: nn.Module, body: nn.Module | None = None, *, dropout: bool = True) -> None:
    """Refuse parts in training mode that draw random values; ``body``: what runs on shards; ``dropout``: those too."""
    inside = {id(part) for part in (model if body is None else body).modules()}
    for name, part in model.named_modules():
        if not part.training:
            continue
        sharded = id(part) in inside
        if sharded and _definer(type(part)).__name__ in known.SAMPLING:
            raise ValueError(
                f"{_shown(name, part)} draws random values in training, different on each rank; call eval(), or {ALONE}"
            )
        of_module = isinstance(part, nn.modules.dropout._DropoutNd)
        for setting, value in vars(part).items() if dropout or not of_module else ():
            # The attention refuses its own dropout, in the words of its configuration.
            random = (
                token_code.is_rate(setting) and (of_module or setting != "p") and not (sharded and "att" in setting)
            )
            if random and _positive(value):
                asked = dropouts_of(getattr(model, "config", None))
                where = f" (of the configuration: {asked})" if asked else ""
                raise ValueError(
                    f"{_shown(name, part)} has {setting}={value}, so it draws random values: they differ between "
                    f"ranks, and where layers are computed again; set it to 0{where}, or call eval()"
                )


def check_added_losses(model: nn.Module) -> None:
    """Refuse adapters that add to the loss on every rank, if gradients are summed over the ranks."""
    if any(type(module).__module__.startswith("peft.tuners.adalora.") for module in model.modules()):
        raise ValueError("gradients='sum' is refused: AdaLoRA adds to the loss on every rank; use gradients='mean'")


def check_attention_is_ours(model: nn.Module) -> None:
    """Refuse a model without an attention that uses transformers' interface: no layer would get a mask."""
    attentions = {name: each for name, each in model.named_modules() if _is_attention(each)}
    ours = (calls_interface(module) or hasattr(module, "stock_class") for module in attentions.values())
    if attentions and not any(ours):
        name, module = next(iter(attentions.items()))
        raise ValueError(
            f"{name} ({type(module).__name__}) computes its attention itself and ignores attn_implementation; use "
            f"another model, or load this one without attn_implementation={NAME!r}"
        )


def attention_configs(model: nn.Module) -> list[Any]:
    """Return the configurations from which the layers read their attention implementation; usually one."""
    every = [getattr(module, "config", None) for module in model.modules() if calls_interface(module)]
    if any(known.scores_itself(module) for module in model.modules()):  # their model reads it, to make masks
        every += [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(config): config for config in every if config is not None}.values())


def attends(module: nn.Module) -> bool:
    """Return whether a module calls an attention that can run on shards."""
    return calls_interface(module) or known.scores_itself(module)


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


def _is_declared(treats: Any) -> bool:
    return _DECLARED in getattr(treats, "__dict__", ())


def _shown(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def origin_of(function: Any) -> str:
    """Return the name of the module that holds a function's code; wrappers may claim another one."""
    function = getattr(function, "func", function)  # unwrap functools.partial
    function = getattr(function, "__func__", function)
    own = getattr(function, "__globals__", None)
    return own["__name__"] if own else type(function).__module__


def added_by_package(function: Any) -> bool:
    """Return whether a hook, or a forward, comes from a package that adds only those that mix no tokens."""
    return _within(origin_of(function), _ADDED_BY)


def _within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _definer(kind: type) -> type:
    """Return the class that defines a module class's forward, FSDP's classes aside; ``nn.Module`` if none does."""
    bases = (base for base in kind.__mro__ if not _within(base.__module__, ["torch.distributed.fsdp"]))
    return next(base for base in bases if "forward" in vars(base))


def _reason(module: nn.Module, judged: dict[Any, str | None]) -> str | None:
    """Return why a module may mix tokens or use wrong positions, or None. Its children are checked separately."""
    if hasattr(module, "stock_class"):
        return None  # the forward of a parallelized model is ours
    if known.mechanism(module) or known.scores_itself(module) or known.is_counted(module):
        return None  # parallelize replaces its forward
    kind = _definer(type(module))
    own = vars(module).get("forward")
    if own is not None and kind.__name__ not in _TRANSPARENT and not _within(origin_of(own), _ADDED_BY):
        return f"has the forward {_called(own)} in place of its class's forward"
    if kind.__name__ in known.REFUSED_PARTS and _within(kind.__module__, _NAMED):
        return known.REFUSED_PARTS[kind.__name__]
    if _is_attention(module) and not any(map(attends, module.modules())):
        reasons = (known.REFUSED_PARTS.get(type(part).__name__) for part in module.modules())
        return next(filter(None, reasons), "computes its attention itself")
    if is_called(module, "CrossAttention") or getattr(module, "is_cross_attention", False):
        return "attends to another sequence"
    if kind is nn.Module or kind in _TOKENWISE or _is_declared(kind):
        return None
    if _within(kind.__module__, ["peft"]):
        return _reason_of_adapter(module, kind)
    if _within(kind.__module__, ["torch"]):
        return None if kind.__name__ in _TRANSPARENT else _UNKNOWN
    if not _within(kind.__module__, _NAMED):
        return f"{_UNKNOWN} (if it does, declare it: hf.token_wise({kind.__name__}))"
    is_head = isinstance(module, PreTrainedModel) and module.base_model is not module
    if kind.__module__ == "transformers.activations" or is_head or _is_measured(module):
        return None
    if not calls_interface(module) and _places_tokens(module):
        return "counts positions itself, from the start of its input"
    operation = token_code.mixing(module, kind, judged, attends=calls_interface(module))
    if operation is None:
        return None
    return f"{_UNKNOWN}: it uses {operation} (if it does, declare it: hf.token_wise({kind.__name__}))"


def _reason_of_adapter(module: nn.Module, kind: type) -> str | None:
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


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and next(known.mixers_of(module), None) is None


def calls_interface(module: nn.Module) -> bool:
    """Return whether a method of a module's class uses transformers' attention interface."""
    bases = takewhile(lambda base: base not in (PreTrainedModel, nn.Module), type(module).__mro__)
    methods = (value for base in bases for value in vars(base).values() if callable(value))
    return any("ALL_ATTENTION_FUNCTIONS" in known.code_names(value) for value in methods)


def _places_tokens(module: nn.Module) -> bool:
    """Return whether a module embeds positions but takes no ``position_ids``."""
    places = [child for name, child in module.named_children() if "position" in name]
    placing = [each for each in places if not (is_called(each, "RotaryEmbedding") or known.is_counted(each))]
    return bool(placing) and "position_ids" not in inspect.signature(module.forward).parameters
