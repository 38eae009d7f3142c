"""Every command offers every layout, route, kernel, engine and what travels: a new one is named where it is made."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from burst_attention.cli import check, plan
from burst_attention.engines import ENGINES
from burst_attention.plan.assignment import TRAVELS
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.route import ROUTES
from burst_attention.training.config import ParallelConfig
from burst_attention.training.evaluation import EvalConfig


def offered(settings: type, field: str) -> set[str]:
    """What a setting takes, but for ``auto``."""

    def names(hint: Any) -> set[str]:
        return set(get_args(hint)) if get_origin(hint) is Literal else set().union(*map(names, get_args(hint)), set())

    return names(get_type_hints(settings)[field]) - {"auto"}


@pytest.mark.parametrize(
    ("settings", "field", "made"),
    [
        (check.Arguments, "layouts", LAYOUTS),
        (plan.Arguments, "layout", LAYOUTS),
        (ParallelConfig, "layout", LAYOUTS),
        (check.Arguments, "route", ROUTES),
        (plan.Arguments, "route", ROUTES),
        (ParallelConfig, "route", ROUTES),
        (check.Arguments, "travels", TRAVELS),
        (plan.Arguments, "travels", TRAVELS),
        (ParallelConfig, "engine", ENGINES),
        (EvalConfig, "engines", ENGINES),
    ],
)
def test_a_command_offers_all_there_are(settings, field, made):
    assert offered(settings, field) == set(made)
