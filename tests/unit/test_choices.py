"""Every command offers every layout, route, dtype, strategy and circulated tensor."""

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from burst_bench import command as bench

from burst_attention.attention.call import DTYPES
from burst_attention.cli import check
from burst_attention.plan.assignment import CIRCULATIONS
from burst_attention.plan.layout import LAYOUTS
from burst_attention.plan.route import ROUTES
from burst_train.parallel import STRATEGIES, choose
from burst_train.step.evaluation import EvalConfig

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
        (check.CheckArguments, "route", ROUTES),
        (check.CheckArguments, "circulate", CIRCULATIONS),
        (check.CheckArguments, "masks", check.MASKS),
        (check.CheckArguments, "dtypes", DTYPE_NAMES),
        (bench.Arguments, "dtype", DTYPE_NAMES),
    ],
)
def test_a_command_offers_all_there_are(settings, field, made):
    assert offered(settings, field) == set(made)


def test_what_is_run_unasked_is_all_there_is():
    assert check.CheckArguments().layouts == tuple(LAYOUTS) and check.CheckArguments().circulate == tuple(CIRCULATIONS)
    assert {*bench.EVERY} < {*STRATEGIES} and EvalConfig(model="m", data="d").strategies == STRATEGIES


def test_strategies_are_called_by_their_names():
    assert [choose(name).name for name in STRATEGIES] == list(STRATEGIES)
