"""``BurstMixin`` with ``Strategy(layout="balanced")``: ranks share the rows of a batch; losses are one process's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_attention import Strategy
from burst_attention.plan.balance import most_tokens
from tests.support import trainer_cases, trainer_makers
from tests.support.trainer_cases import Case
from tests.support.trainer_makers import BATCH, STEPS
from tests.tools.trainers import Sides

# Plain gradient descent: AdamW would magnify the rounding of small gradients, as the stock loss is computed in fp32.
BALANCED = {"strategy": Strategy(layout="balanced"), "long_tail": True, "dtype": torch.float64}
BALANCED |= {"optim": "sgd", "learning_rate": 1.0}
CASES = {
    "rows": Case("rows", "rows"),
    "padded": Case("padded", "padded"),
    "padding-free": Case("padding-free", "packed"),
    "window": Case("window", "packed", options={"family": "gemma2"}),
    "sft packed": Case("sft packed", "sft", options={"packing": True, "max_length": 128, "samples": 800}),
    "sft wrapped": Case(
        "sft wrapped",
        "sft",
        options={"packing": True, "packing_strategy": "wrapped", "max_length": 64, "samples": 400},
    ),
    "sft padding-free": Case("sft padding-free", "sft", options={"padding_free": True, "max_length": None}),
}
EVERYDAY = (("rows", 4), ("sft packed", 4), ("sft padding-free", 2))


@pytest.fixture(scope="module")
def stock(pools, tmp_path_factory):
    """Return a case's results in one process, by the stock trainer."""
    sides, found = Sides(pools), {}

    def run(name):
        if name not in found:
            folder = str(tmp_path_factory.mktemp("stock"))
            found[name] = sides.alone.submit(trained, name, 1, folder, False).result()
        return found[name]

    yield run
    sides.alone.shutdown()


def trained(name, ranks, folder, ours):
    """Return the logged losses and evaluations, the final weights, and (tokens, documents, layout, longest) by plan."""
    case = replace(CASES[name], ranks=ranks, context=ranks, options=CASES[name].options | BALANCED)
    with trainer_cases.as_started(case, ours):
        trainer = getattr(trainer_makers, f"make_{case.kind}")(case, ours, folder)
        trainer.train()
    log = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
    weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    plans = trainer.model._burst.plans._plans.items() if ours else ()
    used = [
        (seqlen, len(borders or ()) - 1, plans.one.layout, max(plans.one.schedule.layout.lengths))
        for (seqlen, borders), plans in plans
    ]
    return [loss for loss in log if loss is not None], weights, used


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in EVERYDAY else pytest.mark.slow)
        for name in CASES
        for ranks in (2, 4)
    ],
)
@pytest.mark.long
def test_losses_and_weights_are_those_of_one_process(pools, stock, tmp_path, name, ranks):
    losses, weights, _ = stock(name)
    assert len(losses) == STEPS + 2
    for mine, ours, used in pools(ranks).run(trained, name, ranks, str(tmp_path), True, timeout=300):
        assert mine == pytest.approx(losses, abs=2e-6)
        assert ours.keys() == weights.keys()
        assert max((ours[key] - value).abs().max().item() for key, value in weights.items()) < 2e-6
        assert all(
            layout == "balanced" and longest <= most_tokens(tokens, ranks) for tokens, _, layout, longest in used
        )
        assert max(documents for _, documents, *_ in used) >= BATCH, "the rows of a batch are documents of one row"
