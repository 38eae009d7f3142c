"""What decides how a model's parts compute, apart from the values of weights: all ranks of a call must have it alike.

These are attributes that the code of a part's class reads (``scaling``, ``eps``, adapters that are active, whether a
layer is computed again), the fields of configurations that it reads, classes, hooks, and of each weight whether it is
trained, its dtype and its shape. Attributes that no code of the classes reads may differ by rank, as device maps do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import CellType, CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from burst_attention.attention.batch import digest_text, weight_samples

from .reading import Reading
from .reading.attached import HOOKS, added_by_package, origin_of
from .reading.known import names

_SKIPPED: Any = object()  # in place of a value that is no setting: a module, a tensor, any other object
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# Read by our code, or by that of all models.
_OURS = names("training forward is_causal gradient_checkpointing _gradient_checkpointing_func loss_type _loss_function")
# On a parallelized model. ``save_pretrained`` writes the dtype on one rank; those of weights are compared.
_WITHOUT_EFFECT = names("use_cache return_dict dtype")
_NOT_RUN = names("__init__ __repr__ extra_repr reset_parameters _init_weights")  # in a forward
_CONTAINERS = (list, tuple, dict, set, frozenset)

_PARTS = "settings of the model's parts"
_TRAINED = "which parameters need a gradient"
_DTYPES = "dtypes and shapes of the weights"
_BUFFERS = "a sample of the buffers"
REMEDIES = {
    _PARTS: "Change the model alike on every rank of the group, before the same call",
    _TRAINED: "Set requires_grad of the same parameters on every rank",
    **dict.fromkeys((_DTYPES, _BUFFERS), "Load, convert and change the model alike on every rank of the group"),
}

Named = Mapping[str, Any]


class Settings:
    """A model's settings. To compare them with those before takes 0.3 ms for 400 modules; a digest is made again."""

    def __init__(self, reading: Reading) -> None:
        parts = [(part.name, part.module) for part in reading]
        self._places = [*_places(parts)]
        self._weights = [(name, vars(part)["_parameters"]) for name, part in parts]
        self._fixed: dict[str, Any] = {f"the class of {_shown(name)}": _called(type(part)) for name, part in parts}
        self._fixed |= {
            f"hooks of {_shown(name)}": [_function(hook) for hook in vars(part)[kind].values()]
            for name, part in parts
            for kind in HOOKS
            if vars(part)[kind]
        }
        self._buffers = [(name, vars(part)["_buffers"]) for name, part in parts]
        self._sampled: list[torch.Tensor] = []  # held, so that their ids stay theirs
        # What changes with each kind of settings, and these settings by name.
        self._kinds: dict[str, tuple[Callable[[], list[Any]], Callable[[], Named]]] = {
            _PARTS: (lambda: [_frozen(own.get(key)) for _, own, key, _ in self._places], self._named_parts),
            _TRAINED: (lambda: self._of_weights("requires_grad"), self._named_trained),
            _DTYPES: (lambda: self._of_weights("dtype"), self._named_dtypes),
            _BUFFERS: (self._versions, lambda: weight_samples(_named(self._buffers))),
        }
        self._digests: dict[str, tuple[list[Any], str]] = dict.fromkeys(self._kinds, ([], ""))

    def fields(self) -> dict[str, Any]:
        """Return what ranks compare: digests, by what they are of."""
        for kind, (state, named) in self._kinds.items():
            now = state()
            if now != self._digests[kind][0]:
                self._digests[kind] = now, digest_text(named())
        return {kind: digest for kind, (_, digest) in self._digests.items()}

    def details(self) -> dict[str, Callable[[], Named]]:
        """Return functions that return the values of :meth:`fields` by name, for an error."""
        return {kind: named for kind, (_, named) in self._kinds.items()}

    def _named_parts(self) -> Named:
        """Return attributes, configurations, classes and hooks."""
        values = {name: (described(own.get(key)), usual) for name, own, key, usual in self._places}
        changed = {name: value for name, (value, usual) in values.items() if value is not _SKIPPED and value != usual}
        return changed | self._fixed

    def _of_weights(self, attribute: str) -> list[Any]:
        return [getattr(x, attribute, None) for _, own in self._weights for x in own.values()]

    def _named_trained(self) -> Named:
        return {name: x.requires_grad for name, x in _named(self._weights)}

    def _named_dtypes(self) -> Named:
        """Return dtypes and shapes; of a weight that is cut, its whole shape."""
        return {name: f"{x.dtype} {list(x.shape)}" for name, x in _named(self._weights)}

    def _versions(self) -> list[Any]:
        """Return which buffers there are, and how often each was written."""
        self._sampled = [x for _, own in self._buffers for x in own.values() if x is not None]
        return [(id(x), None if x.is_inference() else x._version) for x in self._sampled]


def _named(owners: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    for part, own in owners:
        yield from ((f"{part}.{name}" if part else name, x) for name, x in own.items() if x is not None)


def weights_of(model: Any, *, of: DeviceMesh | None = None) -> dict[str, str]:
    """Return digests of whole parameters and buffers by name; ``of``: of this rank's parts of those cut over a mesh."""
    every = [*model.named_parameters(), *model.named_buffers()]
    if of is not None:
        every = [(name, x.to_local()) for name, x in every if isinstance(x, DTensor) and x.device_mesh == of]
    return weight_samples(every)


def _places(parts: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield (name, where, key, value by the class) of each setting: attributes of parts, fields of configurations."""
    kinds: list[Any] = [type(part) for _, part in parts]
    every, configs = _OURS.union(*map(_names_read, kinds)), dict[int, Any]()
    for (name, part), kind in zip(parts, kinds, strict=True):
        own, read = vars(part), _names_read(kind) | _OURS
        configs |= {id(value): value for value in own.values() if isinstance(value, PreTrainedConfig)}
        for key in (own.keys() & read) - _OF_MODULES - _WITHOUT_EFFECT:
            if described(own[key]) is not _SKIPPED:
                yield f"{key} of {_shown(name)}", own, key, described(getattr(kind, key, _SKIPPED))
    for n, config in enumerate(configs.values()):  # layers may have copies of the model's
        where = f"configuration {n} ({config.model_type})"
        for key in (vars(config).keys() & every) - _WITHOUT_EFFECT:
            if described(vars(config)[key]) is not _SKIPPED:
                yield f"{key} of {where}", vars(config), key, _SKIPPED


@functools.cache
def _names_read(kind: Any) -> frozenset[str]:
    """Return the names of attributes that the code of a module's class reads, and that of all models aside."""
    bases = [base for base in kind.__mro__ if base not in (*PreTrainedModel.__mro__, *GenerationMixin.__mro__)]
    members = (value for base in bases for name, value in vars(base).items() if name not in _NOT_RUN)
    return frozenset[str]().union(*map(_names_in, members))


def _names_in(member: Any) -> frozenset[str]:
    """Return the names that a function or property uses, those of functions inside it too."""
    if isinstance(member, property):
        member = member.fget
    member = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else member
    codes = [getattr(member, "__code__", None)]
    names: set[str] = set()
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            names.update(code.co_names)
            codes += code.co_consts
    return frozenset(names)


def described(value: Any) -> Any:
    """Return a setting in JSON types, equal where ranks have it alike; ``_SKIPPED`` for a value that is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, Enum, numbers.Number)):
        return str(value)
    if isinstance(value, _CONTAINERS):
        return _described_inside(value)
    if isinstance(value, functools.partial):
        return [described(value.func), _described_inside(value.args), _described_inside(value.keywords)]
    if isinstance(value, (nn.Module, torch.Tensor, PreTrainedConfig)):
        return _SKIPPED
    if hasattr(value, "__qualname__"):
        return _called(value) if isinstance(value, type) else _function(value)
    if callable(value) and dataclasses.is_dataclass(value):
        return [_called(type(value)), _described_inside(vars(value))]
    return _SKIPPED


def _function(function: Any) -> Any:
    """Return a function's name; for one of a user, with the numbers and texts that it and what it wraps hold."""
    name, held = _called(inspect.unwrap(function)), list[Any]()
    if added_by_package(inspect.unwrap(function)):
        return name
    while function is not None:
        code = getattr(function, "__func__", function)
        owner = getattr(function, "__self__", None if hasattr(code, "__code__") else function)
        held += [cell.cell_contents for cell in getattr(code, "__closure__", None) or () if cell != CellType()]
        held += [*(getattr(code, "__defaults__", None) or ()), *(getattr(code, "__kwdefaults__", None) or {}).values()]
        if isinstance(owner, functools.partial):
            held += [*owner.args, *owner.keywords.values()]
            function = owner.func
            continue
        held += [] if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values()
        function = getattr(function, "__wrapped__", None)
    # What is collected in lists and dicts may differ by rank: times, for example.
    values = [described(x) for x in held if isinstance(x, (bool, str, tuple, torch.dtype, Enum, numbers.Number))]
    values += [weight_samples([("", x)]) for x in held if isinstance(x, torch.Tensor)]
    values += [weight_samples(x.state_dict().items()) for x in held if isinstance(x, nn.Module)]
    return [name, *values] if values else name


def _described_inside(values: Any) -> Any:
    if isinstance(values, dict):
        by_key = {str(key): described(value) for key, value in values.items()}
        return {key: by_key[key] for key in sorted(by_key) if by_key[key] is not _SKIPPED}
    inside = [None if (each := described(value)) is _SKIPPED else each for value in values]
    return sorted(inside, key=str) if isinstance(values, (set, frozenset)) else inside


def _frozen(value: Any) -> Any:
    """Return what differs once a value has changed, in place too."""
    if isinstance(value, torch.Tensor):  # what a forward keeps, such as offsets of positions
        return None
    return repr(value) if isinstance(value, _CONTAINERS) else value


def _called(function: Any) -> str:
    home = function.__module__ if isinstance(function, type) else origin_of(function)
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _shown(name: str) -> str:
    return name or "the model"
