"""The comparison of a step with one process's: what is wrong is never within the bounds."""

import math

import pytest
import torch

from tests.support.conditioning import certain, margin_of_choices, worst_share
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


class Chooser(torch.nn.Module):
    """Chooses 2 of 4 scores [4] for each of its queries, by what a test gives."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.tensor(scores, dtype=torch.float64))

    def forward(self, choose):
        return choose(self.scores)


CHOICES = {
    "topk": lambda x: x.topk(2).indices,
    "the least": lambda x: torch.topk(-x, k=2, largest=False, sorted=False)[1],
    "of a column": lambda x: x[:, None].topk(2, dim=0).indices,
    "of a mask": lambda x: torch.cat([x, torch.full((4,), -math.inf)]).topk(2).indices,
    "argmax": lambda x: x[1:].argmax(-1),
    "argmax of all": lambda x: x[1:].view(1, 3).argmax(),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_choice_that_is_nearly_a_tie_is_uncertain(choose):
    near, clear = [3.0, 1.0, 1.0 + 1e-8, 0.5], [3.0, 1.0, 1.1, 0.5]
    assert margin_of_choices(Chooser(near), lambda model: model(choose)) < 1
    assert margin_of_choices(Chooser(clear), lambda model: model(choose)) > 1000
    assert margin_of_choices(Chooser(near), lambda model: model(choose), torch.float64) > 1000


def test_between_hidden_scores_nothing_is_chosen():
    hidden = torch.finfo(torch.float64).min
    for few in ([1.0, 0.5, -math.inf, -math.inf], [1.0, 0.5, hidden, hidden]):
        assert margin_of_choices(Chooser(few), lambda model: model(lambda x: x.topk(3).indices)) == math.inf
    assert margin_of_choices(Chooser([1.0] * 4), lambda model: model(lambda x: x.topk(4).indices)) == math.inf
    assert margin_of_choices(Chooser([math.inf] * 4), lambda model: model(lambda x: x.topk(3).indices)) == 0


def test_the_first_certain_draw_is_taken():
    assert certain([3, 5, 7], {3: 0.5, 5: 1.0, 7: 2.0}.get) == 5
    with pytest.raises(ValueError, match=r"nearly a tie; the margins are \[0.5, 0.0, nan\]"):
        certain([3, 5, 7], {3: 0.5, 5: 0.0, 7: math.nan}.get)
