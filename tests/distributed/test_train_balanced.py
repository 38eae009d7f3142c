"""``burst train --packing balanced``: the run of one process, also if it evaluates or has windows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from burst_train.step.loop import train
from tests.support.training import config_of, losses, metrics, norms, weights

from .test_train import SMALL

STEPS = 6
SHARED = {"seq_len": 240, "steps": STEPS, "eval_every": 2, "global_batch": 4}
BALANCED = {"packing": "balanced", "batch": 4}
MODELS = {
    "window": MistralConfig(**SMALL, head_dim=8, sliding_window=13, initializer_range=0.2),
    "some windows": Qwen2Config(
        **SMALL,
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
    ),
}


@pytest.fixture(scope="module")
def one_process(pools, corpus, tmp_path_factory):
    """Return the settings and the folder of a run in one process, by model."""
    made = {}

    def run(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("one")
            model = {} if name == "tiny" else {"model": str(folder / "start"), "tokenizer": "bytes"}
            if model:
                torch.manual_seed(3)
                AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder / "start")
            pools(1).run(train, config_of(corpus, folder / "run", **SHARED, **model))
            made[name] = model, folder / "run"
        return made[name]

    return run


def held_out(folder):
    return [loss for loss in metrics(folder, "held_out_loss") if loss is not None]


def assert_same(folder, expected):
    """Compare each step's loss and norm, each evaluation, and the final weights."""
    assert len(losses(folder)) == STEPS and len(held_out(folder)) == STEPS // 2
    assert losses(folder) == pytest.approx(losses(expected), abs=2e-5)
    assert norms(folder) == pytest.approx(norms(expected), rel=2e-4)
    assert held_out(folder) == pytest.approx(held_out(expected), abs=2e-5)
    for name, value in weights(expected).items():
        assert torch.allclose(weights(folder)[name], value, atol=2e-4), name


@pytest.mark.parametrize(
    ("model", "world", "changes"),
    [
        pytest.param("tiny", 4, {}, marks=pytest.mark.slow),
        pytest.param("tiny", 3, {"batch": 2}, marks=pytest.mark.slow),
        pytest.param("window", 3, {"batch": 2}, marks=pytest.mark.long),
        pytest.param("some windows", 3, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_is_the_run_of_one_process(pools, corpus, one_process, tmp_path, model, world, changes):
    """With two sequences at a time, a step accumulates two micro-steps. The sequences don't fill three ranks evenly."""
    own, expected = one_process(model)
    config = config_of(corpus, tmp_path / "run", **SHARED, **own, **(BALANCED | changes))
    summary = pools(world).run(train, config)[0]
    assert_same(tmp_path / "run", expected)
    assert summary.bytes_sent == summary.bytes_predicted and max(summary.bytes_sent) > 0
