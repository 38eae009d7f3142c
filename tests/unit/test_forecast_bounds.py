"""What a forecast must hold whatever is asked: groups that straddle nodes, no negative waits, uneven shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from burst_train.engines import choose
from burst_train.forecast import collectives
from burst_train.forecast.calls import Pass, _Line, predict_call
from burst_train.forecast.footprint import training_memory
from burst_train.forecast.models import MODELS
from burst_train.forecast.step_memory import Step
from burst_train.memory import MemoryConfig
from transformers import LlamaConfig

from tests.unit.test_forecast import H100, SHAPE, TINY, WAYS, read, setting


def members_elsewhere(world: int, groups: int, per_node: int) -> int:
    """The most members of a rank's group of neighbours that are on another node than it."""
    most = 0
    for start in range(0, world, groups):
        nodes = Counter(rank // per_node for rank in range(start, start + groups))
        most = max(most, groups - min(nodes.values()))
    return most


@pytest.mark.parametrize(
    ("world", "groups", "per_node"), [(24, 12, 8), (24, 6, 8), (24, 8, 8), (48, 12, 8), (32, 4, 8)]
)
def test_groups_that_straddle_nodes_cost_what_the_worst_member_sends(world: int, groups: int, per_node: int) -> None:
    links = {name: replace(getattr(H100, name), latency=0.0, bytes_per_second=1e9) for name in ("inside", "across")}
    shape = replace(SHAPE, q_heads=24, kv_heads=24)
    asked = replace(setting(world, 96, shape=shape, per_node=per_node), rates=replace(H100, **links))
    mesh, ring = (
        each.forward
        for each in (collectives.usp(asked, groups), predict_call(collectives.RING, collectives.ring_of(asked, groups)))
    )
    inside, across = mesh.inside - ring.inside, mesh.across - ring.across
    far = members_elsewhere(world, groups, per_node)
    assert across == pytest.approx((inside + across) * far / (groups - 1))
    assert mesh.exposed - ring.exposed == pytest.approx(max(inside, across) / 1e9)


def test_no_wait_is_less_than_nothing() -> None:
    """Where less and less is exposed, a line goes on below zero."""
    line, sent = _Line(WAYS[0], (8, 16), 64), {"inside": 0.0, "across": 0.0, "busiest": (0.0, 0.0)}
    few, many = (Pass(seconds=seconds, computing=1.0, **sent) for seconds in (1.5, 1.1))
    assert line.extended(few, many).exposed == pytest.approx(0.1)
    for way in WAYS:
        if way.route == "direct":
            call = predict_call(way, setting(32, 64, per_node=2), most=16)
            assert call.standing is not None and min(call.forward.exposed, call.backward.exposed) >= 0


@pytest.mark.parametrize("world", [3, 7, 48])
def test_weights_of_a_world_that_divides_no_width_are_those_of_the_fullest_rank(world: int) -> None:
    model = MODELS["llama-3-8b"]
    step = Step(model=model, tokens=64, batch=1, world=world, io=2, buffers=0)
    matrices = [*model.root(), *(matrix for matrix in model.layer() for _ in range(model.layers))]
    shards = [torch.empty(rows, columns, device="meta").chunk(world)[0] for rows, columns in matrices]
    assert step.weights == 4 * sum(shard.numel() for shard in shards)


def test_weights_of_three_ranks_are_what_the_model_itself_shows(tmp_path: Path) -> None:
    config: Any = LlamaConfig(**TINY, head_dim=16)
    true = training_memory(
        config, engine=choose("ring"), seq_len=3 * 64, world=3, dtype=torch.float32, memory=MemoryConfig()
    )
    step = Step(model=read(config, tmp_path), tokens=64, batch=1, world=3, io=4, buffers=0)
    assert true is not None and step.weights == true["weights"]
