"""``burst train --tensor-parallel``: the losses of a run without it, and checkpoints of any mesh."""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config

from burst_attention.launch.join import join
from burst_train.checkpoint.manifest import discard
from burst_train.health.finite import first_gradient
from burst_train.run.folder import list_checkpoints
from burst_train.step.loop import train
from burst_train.step.model import model_in
from burst_train.step.optim import clip_by_global_norm
from burst_train.step.trainer import Trainer
from tests.distributed.test_resume import changed, end_at
from tests.support.conditioning import greatest
from tests.support.hf_models import SMALL
from tests.support.training import config_of, losses, norms, saved_model, summary_of, weights

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = SMALL | {"vocab_size": 259, "tie_word_embeddings": True}
    return saved_model(Qwen3Config(**sizes), tmp_path_factory.mktemp("model"), 0)


def apart(found, wanted):
    return greatest(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))


def test_losses_do_not_depend_on_the_mesh(pools, corpus, model, tmp_path):
    common = {"model": model, "tokenizer": "bytes", "global_batch": 2, "dtype": "float64", "steps": 3}
    meshes = {"one": (1, 1, 1), "tp": (2, 1, 2), "cp tp": (4, 1, 2), "dp tp": (4, 2, 2)}
    for name, (world, groups, cut) in meshes.items():
        own = {"data_parallel": groups, "tensor_parallel": cut, "remat": "layer" if name == "cp tp" else "none"}
        pools(world).run(train, config_of(corpus, tmp_path / name, **common, **own))
    summaries = {name: summary_of(tmp_path / name) for name in meshes}
    for name in meshes:
        assert apart(losses(tmp_path / name), losses(tmp_path / "one")) <= 1e-7  # some norms are in fp32
        assert apart(norms(tmp_path / name), norms(tmp_path / "one")) <= 1e-6
        assert summaries[name]["held_out_loss"] == pytest.approx(summaries["one"]["held_out_loss"], rel=1e-7)
        assert summaries[name]["held_out_tokens"] == summaries["one"]["held_out_tokens"]
    found, wanted = weights(tmp_path / "cp tp"), weights(tmp_path / "one")
    assert found.keys() == wanted.keys()
    assert greatest((found[key] - wanted[key]).abs().max().item() for key in wanted) <= 1e-5  # AdamW's steps are 1e-3
    AutoModelForCausalLM.from_pretrained(tmp_path / "cp tp" / "model")


def test_a_run_goes_on_over_another_mesh(pools, corpus, tmp_path):
    """From two ranks to four, which cut the model too, and back."""
    shared = {"global_batch": 2, "steps": STEPS, "dtype": "float64"}
    two = shared | {"data_parallel": 2}
    pools(2).run(train, config_of(corpus, tmp_path / "whole", **two))
    lost = changed(config_of(corpus, tmp_path / "lost", **two), save_every="2")
    end_at(pools(2), lost, 3)
    discard(list_checkpoints(tmp_path / "lost")[0])
    other = changed(config_of(corpus, tmp_path / "lost", **shared, tensor_parallel=2), resume="newest")
    pools(4).run(train, other)
    assert apart(losses(tmp_path / "lost"), losses(tmp_path / "whole")) <= 2.4e-7
    saved = list_checkpoints(tmp_path / "lost")[0]  # of the end, over the other mesh
    again = config_of(corpus, tmp_path / "again", **two | {"steps": STEPS + 1}, decay_steps=STEPS, resume=str(saved))
    pools(2).run(train, again)
    assert len(losses(tmp_path / "again")) == 1


def named_and_timed(corpus, out):
    """Find the first gradient that is not finite, after clipping; return its name and the axes' timeouts."""
    config = config_of(corpus, out, tensor_parallel=2)
    with join(device="cpu", timeout=45, tensor_parallel=2) as context:
        trainer = Trainer(config, context)
        sequences = [*itertools.islice(trainer.sequences, 1)]
        trainer.backward(sequences)
        with torch.no_grad():
            model_in(trainer.model).model.layers[0].mlp.up_proj.weight.grad.to_local().view(-1)[0] = torch.nan
        norm = clip_by_global_norm(trainer.model, 1.0)
        groups = [context.mesh[name].get_group() for name in context.mesh.mesh_dim_names]
        groups.append(context.mesh["data", "context"]._flatten("shards").get_group())
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        seconds = [each._timeout.total_seconds() for each in options]
        return norm, first_gradient(model_in(trainer.model), []).name, seconds


def test_a_gradient_that_is_not_finite_is_left_as_it_is(pools, corpus, tmp_path):
    for norm, name, seconds in pools(2).run(named_and_timed, corpus, str(tmp_path / "out")):
        assert math.isnan(norm) and name == "the gradient of model.layers.0.mlp.up_proj.weight"
        assert seconds == [45.0] * 4


@pytest.mark.parametrize("name", ["gemma3_text"])
def test_buffers_of_a_loaded_model_follow_its_dtype(pools, corpus, tmp_path, name):
    torch.manual_seed(0)
    Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | {"vocab_size": 259})).save_pretrained(tmp_path / name)
    own = {"model": str(tmp_path / name), "tokenizer": "bytes", "dtype": "float64", "steps": 1}
    pools(2).run(train, config_of(corpus, tmp_path / "out", **own))
