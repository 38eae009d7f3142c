"""The timing of memory options: all of them take the same step, or no figure is printed."""

from __future__ import annotations

import pytest
from burst_bench.claims import step_options

from burst_attention.testing import WorkerError

SMALL = {"rounds": 1, "seq_len": 64, "layers": 1, "heads": 4, "head_dim": 8, "intermediate": 32}


def test_every_option_is_timed(pools, tmp_path) -> None:
    arguments = step_options.StepOptionsArguments(folder=tmp_path, **SMALL)
    first, second = pools(2).run(step_options.measure, arguments)
    assert first == second, "the slowest rank's seconds"
    assert len(first) == len(arguments.options) == 5
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in first)


class OtherModel(step_options.StepOptionsArguments):
    """The second option gets a model with one more layer."""

    @property
    def options(self):
        return {"--remat layer": {}, "another model": {}}

    @property
    def sizes(self):
        layers = vars(self)["count"] = vars(self).get("count", 0) + 1
        return step_options.Sizes(ranks=2, layers=layers, heads=4, head_dim=8, intermediate=32, document=0)


def test_other_losses_give_no_figures(pools, tmp_path) -> None:
    with pytest.raises(WorkerError, match="losses differ"):
        pools(2).run(step_options.measure, OtherModel(folder=tmp_path, **SMALL))
