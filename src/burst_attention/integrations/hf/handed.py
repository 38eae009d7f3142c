"""Plans for modules that get no keywords from the modules around them."""

from __future__ import annotations

from typing import Any

from torch import nn

ATTRIBUTE = "_burst_plans"
ALONE: Any = object()  # in place of plans: run the stock forward on this rank alone


def plans_of(module: nn.Module) -> Any:
    """Return the plans handed to a module, or ``ALONE``.

    Raises:
        ValueError: it got none.
    """
    plans = vars(module).get(ATTRIBUTE)
    if plans is None:
        raise ValueError(
            f"plan did not reach {type(module).__name__}, so it would see only this rank's shard; call the "
            "parallelized model itself, or call model(..., plan=plan)"
        )
    return plans
