"""Every command offers every layout, route, dtype, engine and circulated tensor."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from burst_bench import command as bench
from burst_bench.harness.workload import engine_of
from burst_train.cli import plan
from burst_train.config import ParallelConfig
from burst_train.engines import ENGINES, choose
from burst_train.step.evaluation import EvalConfig

from burst_attention.attention.checks import DTYPES
from burst_attention.cli import check
from burst_attention.plan.assignment import CIRCULATIONS
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.route import ROUTES
from burst_attention.plan.strategy import Strategy

DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def offered(settings: type, field: str) -> set[str]:
    """Return a setting's values except ``auto``."""

    def names(hint: Any) -> set[str]:
        return set(get_args(hint)) if get_origin(hint) is Literal else set().union(*map(names, get_args(hint)), set())

    return names(get_type_hints(settings)[field]) - {"auto"}


@pytest.mark.parametrize(
    ("settings", "field", "made"),
    [
        (check.CheckArguments, "layouts", LAYOUTS),
        (plan.PlanArguments, "layout", LAYOUTS),
        (ParallelConfig, "layout", LAYOUTS),
        (check.CheckArguments, "route", ROUTES),
        (plan.PlanArguments, "route", ROUTES),
        (ParallelConfig, "route", ROUTES),
        (check.CheckArguments, "circulate", CIRCULATIONS),
        (plan.PlanArguments, "circulate", CIRCULATIONS),
        (check.CheckArguments, "masks", check.MASKS),
        (check.CheckArguments, "dtypes", DTYPE_NAMES),
        (plan.PlanArguments, "dtype", DTYPE_NAMES),
        (bench.Arguments, "dtype", DTYPE_NAMES),
        (ParallelConfig, "engine", ENGINES),
        (EvalConfig, "engines", ENGINES),
    ],
)
def test_a_command_offers_all_there_are(settings, field, made):
    assert offered(settings, field) == set(made)


def test_what_is_run_unasked_is_all_there_is():
    assert check.CheckArguments().layouts == tuple(LAYOUTS) and check.CheckArguments().circulate == tuple(CIRCULATIONS)
    assert {spec.partition(":")[0] for spec in bench.EVERY} == set(ENGINES) - {"single"}


def test_engines_are_called_by_their_names_and_a_rank_alone_holds_any_layout():
    assert [choose(name).name for name in ENGINES] == list(ENGINES)
    assert [choose("single", strategy=Strategy(layout=layout)).strategy.layout for layout in LAYOUTS] == list(LAYOUTS)


@pytest.mark.parametrize(
    ("spec", "layout", "degree", "cache"),
    [
        ("burst", "auto", "auto", "auto"),
        ("burst:contiguous", "contiguous", "auto", "auto"),
        ("burst:ulysses_degree=4", "auto", 4, "auto"),
        ("burst:contiguous,ulysses_degree=2,cache_qkv=no", "contiguous", 2, False),
        ("burst:published", "zigzag", 1, "auto"),
        ("ring", "zigzag", 1, "auto"),
    ],
)
def test_variants_of_an_engine_have_names(spec: str, layout: str, degree: int | str, cache: bool | str) -> None:
    strategy = engine_of(spec).strategy
    assert (strategy.layout, strategy.ulysses_degree, strategy.cache_qkv) == (layout, degree, cache)


@pytest.mark.parametrize(
    "spec",
    ["burst:a,b", "burst:ulysses_degree=x", "burst:depth=2", "ring:cache_qkv=no", "tensor:ulysses_degree=2", "air"],
)
def test_what_is_no_variant_is_refused(spec: str) -> None:
    with pytest.raises(ValueError):
        engine_of(spec)
