"""What modules read besides their weights: their attributes and configurations, compared between calls.

Users may change these at any time: adapters, hooks, a scaling, a soft cap. What was derived from them holds only while
nothing has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from .reading import Reading
from .reading.attached import HOOKS, is_positive
from .reading.known import names
from .reading.token_code import is_rate

_COPIED = (dict, OrderedDict, list, set)  # others are shared, so that a change in place reaches a replica
_SHARED = ("_parameters",)  # those who use weights compare them
_MISSING = object()
# Attributes that change what runs, and which of our forwards it needs.
_SET = names("forward gradient_checkpointing _gradient_checkpointing_func attn_temperature_tuning use_rope rope_type")


class Watched:
    """What the checks of a model depend on. Comparing takes 0.3 ms for 400 modules; the checks take 14 ms."""

    def __init__(self, reading: Reading) -> None:
        self._parts = [part.module for part in reading]
        self._configs = [vars(part).get("config") for part in self._parts]  # held, so that their ids stay theirs
        self._rates = [(vars(part), name) for part in self._parts for name in vars(part) if is_rate(name)]
        self._before = self._state()

    def unchanged(self) -> bool:
        """Return whether no part, hook, mode or rate has changed since this object was made."""
        return self._before == self._state()

    def _state(self) -> list[Any]:
        attributes = [vars(part) for part in self._parts]
        return [
            [*map(type, self._parts)],
            [own.get("training") for own in attributes],
            [*map(len, attributes)],
            [id(own.get("config")) for own in attributes],
            [*chain.from_iterable(own["_modules"].values() for own in attributes)],
            [tuple(own[name]) for name in HOOKS for own in attributes if own[name]],
            [own.get(name) for name in _SET for own in attributes if name in own],
            [is_positive(own.get(name)) for own, name in self._rates],
        ]


def inside(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside of it."""
    return [*module.modules()]


class Snapshot:
    """The classes, attributes and configurations of modules, as they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = [*modules]
        self._kinds = [_kind(part) for part in self._parts]
        configs = (config for part in self._parts for config in _configs(vars(part).get("config")))
        self._owners = [*self._parts, *{id(config): config for config in configs}.values()]
        self._kept = [{name: _kept(name, value) for name, value in vars(owner).items()} for owner in self._owners]

    def unchanged(self) -> bool:
        """Return whether nothing has changed. Takes 1 µs a module."""
        same = all(_equal(vars(owner), kept) for owner, kept in zip(self._owners, self._kept, strict=True))
        return same and self._kinds == [_kind(part) for part in self._parts]

    def check_since_forward(self, module: nn.Module, option: str) -> None:
        """Raise ValueError if what the module computes may have changed since its forward, because it runs again.

        Numbers and tensors that a forward may store, and the training mode, are left out: dropout is refused.
        """
        for owner, kept in zip(self._owners, self._kept, strict=True):
            own = vars(owner)
            if _equal(own, kept):
                continue
            for name in own.keys() | kept.keys():
                now, before = own.get(name, _MISSING), kept.get(name, _MISSING)
                if not (name == "training" or _is_stored(now) or _is_stored(before) or _equal(now, before)):
                    raise ValueError(
                        f"{name} of {type(owner).__name__} has changed since the forward of {type(module).__name__}, "
                        f"which {option} runs again in the backward; change it after the backward"
                    )


def replica(module: nn.Module, weight: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module with the same classes and attributes, part by part, but with other weights.

    It has a copy of what :class:`Snapshot` compares, and shares everything else with the module. ``weight`` returns
    what takes the place of a weight.
    """
    parts = inside(module)
    twins: dict[int, Any] = {id(part): object.__new__(type(part)) for part in parts}

    def twin(value: Any) -> Any:
        if isinstance(value, MethodType) and id(value.__self__) in twins:  # some packages replace forwards so
            return MethodType(value.__func__, twins[id(value.__self__)])
        return _copied(value)

    for part in parts:
        own = vars(part)
        new = {name: twin(value) for name, value in own.items()}
        new["_parameters"] = {name: None if x is None else weight(x) for name, x in own["_parameters"].items()}
        new["_modules"] = {name: None if x is None else twins[id(x)] for name, x in own["_modules"].items()}
        new.pop("_compiled_call_impl", None)  # it runs the part itself
        vars(twins[id(part)]).update(new)
    made: nn.Module = twins[id(module)]
    return made


def _kind(part: nn.Module) -> tuple[type, Any, int]:
    """Return what equal attributes can't show: the class, its forward, and which configuration it is."""
    return type(part), type(part).forward, id(vars(part).get("config"))


def _configs(config: Any) -> Iterator[PreTrainedConfig]:
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _configs(value)


def _kept(name: str, value: Any) -> Any:
    return value if name in _SHARED else _copied(value)


def _copied(value: Any) -> Any:
    if type(value) not in _COPIED:
        return value
    if isinstance(value, dict):
        return type(value)((key, _copied(x)) for key, x in value.items())
    return type(value)(map(_copied, value))


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # another tensor or array in place of one
        return False


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) is int
