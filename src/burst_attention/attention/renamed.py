"""Refuse arguments of version 0.2 by the names that replaced them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

OF_PLAN = {
    "layout": "strategy=Strategy(layout=...)",
    "route": "strategy=Strategy(route=...)",
    "heads": "strategy=Strategy(ulysses_degree=...)",
    "keep": "strategy=Strategy(cache_qkv=...)",
    "assignment": "strategy=Strategy(circulate=...)",
    "waves": "strategy=Strategy(chunks=...)",
    "nodes": "hardware=Hardware(nodes=...)",
    "rates": "hardware=Hardware(rates=...)",
    "q_heads": "call=CallShape(q_heads=...)",
    "kv_heads": "call=CallShape(kv_heads=...)",
    "head_dim": "call=CallShape(head_dim=...)",
    "dtype": "call=CallShape(dtype=...)",
    "remat": "call=CallShape(remat=...)",
}
OF_CALL = {"travels": "make_plan(..., strategy=Strategy(circulate=...)): what circulates belongs to the plan"}


def renamed(old: dict[str, str]) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Make a function refuse old keywords with a TypeError that names the new ones.

    Args:
        old: by old keyword, what to write instead.
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        """Wrap ``function`` so that an old argument name raises TypeError with the new name."""

        @functools.wraps(function)
        def call(*given: Given.args, **named: Given.kwargs) -> Result:
            for name in named:
                if name in old:
                    raise TypeError(f"{function.__name__}({name}=...) is now {old[name]}")
            return function(*given, **named)

        return call

    return decorate
