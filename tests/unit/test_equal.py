"""The comparison of a step with one process's: what is wrong is never within the bounds."""

import math

import pytest
import torch

from tests.support.conditioning import worst_share
from tests.support.equal import Alone, check, step_of

BATCH = {"x": torch.ones(2, 3, dtype=torch.float64)}


def loss_of(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("wrong", [1.001, math.nan])
def test_every_gradient_and_every_ranks_loss_counts(wrong):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
    alone, (loss, gradients) = Alone(model, BATCH, loss_of), step_of(model, BATCH, loss_of)
    check(alone.apart([loss, loss], gradients), loss=0, gradient=0, largest=0)
    for name, x in gradients.items():
        changed = gradients | {name: x * wrong}
        assert not worst_share(changed, alone.wanted, alone.moved) <= 1
        with pytest.raises(AssertionError, match=name):
            check(alone.apart([loss, loss], changed))
    with pytest.raises(AssertionError, match="the loss"):
        check(alone.apart([loss, loss * wrong], gradients))
    with pytest.raises(AssertionError, match="bias"):
        alone.apart([loss], {name: x for name, x in gradients.items() if name != "0.bias"})
