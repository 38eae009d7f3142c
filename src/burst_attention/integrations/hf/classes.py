"""Replace a module's class by a subclass of the same name, as FSDP2 does; weights keep their names and places."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def stock_class(module: Any) -> Any:
    """Return the class of a module before we replaced it."""
    return getattr(module, "stock_class", type(module))


@cache
def _subclass(mixin: type, kind: Any) -> Any:
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "stock_class": kind}
    return type(kind.__name__, (mixin, kind), members)


def become(module: Any, mixin: Any, **state: Any) -> None:
    """Replace a module's class by a subclass of (mixin, its class), whose ``stock_class`` is its class."""
    kind: Any = type(module)
    if not issubclass(kind, mixin):
        module.__class__ = _subclass(mixin, kind)
    vars(module).update(state)


def revert(model: nn.Module, mixin: Any) -> None:
    """Undo :func:`become` in all modules of a model; drop the state that the mixin's annotations name."""
    for module in model.modules():
        if isinstance(module, mixin):
            module.__class__ = module.stock_class
            for name in mixin.__annotations__:
                vars(module).pop(name, None)


class Converted(nn.Module):
    """A module whose own code runs on shards: a base of the mixins of :mod:`.converted`."""

    stock_class: Any
    wrong_alone = ""  # what it would do wrong if it ran on a shard alone
