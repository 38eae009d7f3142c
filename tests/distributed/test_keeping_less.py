"""Recomputing, pieces and compiling change no loss; what is exchanged again is foretold; no logits exceed their chunk."""

from __future__ import annotations

import itertools
import json
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_attention.launch.join import join
from burst_attention.loss.head import default_chunk
from burst_attention.training import activations
from burst_attention.training.loop import Trainer, train
from tests.training import config_of, losses, norms, write_corpus

STEPS = 4
SMALL = {"seq_len": 96, "steps": STEPS, "held_out": 0.0}
FLAGS = {
    "layer": {"remat": "layer"},
    "keep": {"remat": "keep-attention"},
    "pieces": {"mlp_chunks": 3},
    "layer, pieces": {"remat": "layer", "mlp_chunks": 5},
    "keep, pieces": {"remat": "keep-attention", "mlp_chunks": 4},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(pools, corpus, tmp_path_factory):
    """Losses and norms of a single rank that does nothing of it."""
    out = tmp_path_factory.mktemp("plain")
    pools(1).run(train, config_of(corpus, out, **SMALL))
    return losses(out), norms(out)


@pytest.mark.parametrize(
    ("flags", "engine", "world"),
    [
        *((flags, "burst", 1 + n % 3) for n, flags in enumerate(FLAGS)),
        ("keep, pieces", "burst", 3),
        ("keep", "ring", 2),
        ("layer, pieces", "ulysses", 2),
        ("layer, pieces", "tensor", 2),
        ("layer, pieces", "tensor-sequence", 2),
        ("layer, pieces", "single", 1),
    ],
)
def test_no_flag_changes_the_loss(pools, corpus, tmp_path, expected, flags, engine, world):
    pools(world).run(train, config_of(corpus, tmp_path, engine=engine, **SMALL, **FLAGS[flags]))
    assert losses(tmp_path) == pytest.approx(expected[0], abs=1e-5)
    assert norms(tmp_path) == pytest.approx(expected[1], rel=1e-4)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    if engine in ("burst", "ring", "ulysses"):
        assert all(record["bytes_sent"] == record["bytes_predicted"] for record in records)
