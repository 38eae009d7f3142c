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


def become(module: Any, mixin: Any) -> None:
    """Replace a module's class by a subclass of (mixin, its class), whose ``stock_class`` is its class."""
    kind: Any = type(module)
    if not issubclass(kind, mixin):
        module.__class__ = _subclass(mixin, kind)


def revert(module: nn.Module, mixins: type | tuple[type, ...]) -> bool:
    """Undo :func:`become`; return whether there was anything to undo."""
    found = isinstance(module, mixins)
    if found:
        module.__class__ = module.stock_class  # type: ignore[assignment]
    return found


class Converted(nn.Module):
    """A module whose own code runs on shards: a base of the mixins of :mod:`.converted`."""

    stock_class: Any
    wrong_alone = ""  # what it would do wrong if it ran on a shard alone
