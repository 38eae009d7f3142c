"""Recomputing, chunks and compiling change no loss; repeated exchanges are predicted; logits stay in their chunk."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_attention.launch.join import join
from burst_attention.loss.head import default_chunk
from burst_train.step.loop import Trainer, train
from burst_train.strategies import FOREIGN
from tests.support.training import config_of, losses, norms, records, saved_model

STEPS = 4
SMALL = {"seq_len": 96, "steps": STEPS, "held_out": 0.0}
FLAGS = {
    "layer": {"remat": "layer"},
    "keep": {"remat": "keep-attention"},
    "pieces": {"mlp_chunks": 3},
    "layer, pieces": {"remat": "layer", "mlp_chunks": 5},
    "keep, pieces": {"remat": "keep-attention", "mlp_chunks": 4},
    "heads": {"attention_chunks": 2},
    "layer, heads": {"remat": "layer", "attention_chunks": 2, "mlp_chunks": 2},
}


@pytest.fixture(scope="module")
def expected(pools, corpus, tmp_path_factory):
    """Losses and norms of a single rank that does nothing of it."""
    out = tmp_path_factory.mktemp("plain")
    pools(1).run(train, config_of(corpus, out, **SMALL))
    return losses(out), norms(out)


@pytest.mark.parametrize(
    ("flags", "strategy", "world"),
    [
        ("keep", "burst", 2),
        ("layer, heads", "burst", 3),
        ("layer, pieces", "tensor-sequence", 2),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                *((flags, "burst", 1 + n % 3) for n, flags in enumerate(FLAGS) if flags != "keep"),
                ("keep, pieces", "burst", 3),
                ("keep", "zigzag-ring", 2),
                ("layer, pieces", "ulysses", 2),
                ("layer, pieces", "tensor", 2),
                ("layer, pieces", "single", 1),
                ("layer, heads", "usp:2", 2),
                ("layer, heads", "burst", 4),
            )
        ),
    ],
)
def test_no_flag_changes_the_loss(pools, corpus, tmp_path, expected, flags, strategy, world):
    pools(world).run(train, config_of(corpus, tmp_path, strategy=strategy, **SMALL, **FLAGS[flags]))
    assert losses(tmp_path) == pytest.approx(expected[0], abs=1e-5)
    assert norms(tmp_path) == pytest.approx(expected[1], rel=1e-4)
    if strategy not in FOREIGN:
        assert all(record["bytes_sent"] == record["bytes_predicted"] for record in records(tmp_path))


@pytest.mark.parametrize(
    "flags", ["layer, heads", *(pytest.param(each, marks=pytest.mark.slow) for each in ("layer", "keep"))]
)
def test_inputs_on_a_disk_change_no_bit(pools, corpus, tmp_path, flags):
    for name, offload in (("memory", "none"), ("disk", f"disk:{tmp_path}")):
        out = tmp_path / name
        pools(2).run(train, config_of(corpus, out, **SMALL, **FLAGS[flags], offload=offload))
    assert losses(tmp_path / "disk") == losses(tmp_path / "memory")
    assert norms(tmp_path / "disk") == norms(tmp_path / "memory")


@pytest.mark.slow  # compilers take their time
def test_compiling_changes_no_loss(pools, corpus, tmp_path, expected):
    flags = {"compile": True, "remat": "keep-attention", "mlp_chunks": 2}
    pools(2).run(train, config_of(corpus, tmp_path, **SMALL, **flags))
    assert losses(tmp_path) == pytest.approx(expected[0], abs=1e-5)


class Largest(TorchDispatchMode):
    """Record the largest tensor whose last dim is the vocabulary, except the head's weight [width, vocabulary]."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.vocabulary, self.width, self.most = vocabulary, width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if (
                isinstance(x, torch.Tensor)
                and x.ndim > 1
                and x.shape[-1] == self.vocabulary
                and x.shape[0] != self.width
            ):
                self.most = max(self.most, x.numel())
        return result


def largest_logits(config):
    parallel = config.parallel
    with join(device="cpu", timeout=parallel.timeout) as context:
        trainer = Trainer(config, context)
        sequences = list(itertools.islice(trainer.reader.training(), 1))
        with Largest(trainer.model_config.vocab_size, trainer.model_config.hidden_size) as seen:
            trainer.backward(sequences)
        names = [name for name, parameter in trainer.model.named_parameters() if parameter.grad is not None]
        tied = {name.rpartition("model.")[2]: p.grad.full_tensor() for name, p in trainer.model.named_parameters()}
        return seen.most, trainer.plan.length, names, tied.get("embed_tokens.weight")


@pytest.mark.parametrize("flags", [{}, FLAGS["layer, heads"]], ids=str)
def test_no_logits_are_larger_than_a_chunk(pools, corpus, tmp_path, flags):
    for most, length, _, _ in pools(2).run(largest_logits, config_of(corpus, tmp_path, pack="none", **SMALL, **flags)):
        chunk = default_chunk(length, 258, 256)
        assert chunk < length / 2
        assert most == chunk * 258


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1}
    return saved_model(LlamaConfig(**sizes, **heads), tmp_path_factory.mktemp("tied"), 1)


def test_a_tied_embedding_has_one_gradient(pools, corpus, tmp_path, tied):
    shared = {"model": tied, "tokenizer": "bytes", **SMALL}
    plain = pools(1).run(largest_logits, config_of(corpus, tmp_path, **shared))[0]
    for flags in ({"remat": "layer", "mlp_chunks": 3}, {"remat": "keep-attention"}):
        for _, _, names, gradient in pools(2).run(largest_logits, config_of(corpus, tmp_path, **shared, **flags)):
            assert not any("lm_head" in name for name in names)
            assert torch.allclose(gradient, plain[3], atol=1e-6)
