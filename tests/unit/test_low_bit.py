"""``burst train --optimizer adamw-8bit``: its package, its schedule, and its moments in checkpoints."""

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burst_train.checkpoint import snapshot
from burst_train.checkpoint.snapshot import MOMENTS, plain, put_back, put_moments, tensors_of
from burst_train.config import OptimConfig, RunConfig, TrainConfig
from burst_train.memory import MemoryConfig
from burst_train.step.optim import make_optimizer, make_schedule

EIGHT = TrainConfig(run=RunConfig(steps=30), optim=OptimConfig(lr=0.5), memory=MemoryConfig(optimizer="adamw-8bit"))


def in_8_bits(values: Tensor) -> Tensor:
    """Return a tensor with what is used of torchao's: codes, dequantize, and copy_, which rounds."""
    held: Any = torch.zeros_like(values)
    held.codes = held
    held.dequantize = lambda: torch.Tensor(held).clone()
    held.copy_ = lambda new: Tensor.copy_(held, new.round())
    held.copy_(values)
    return held


def test_moments_in_8_bits_are_copied_out_and_rounded_back() -> None:
    wide = torch.tensor([1.25, -2.5])
    assert plain(wide).data_ptr() == wide.data_ptr()
    put_back(wide, torch.zeros(2))  # a checkpoint was read straight into it
    assert wide.tolist() == [1.25, -2.5]
    held = in_8_bits(wide)
    values = plain(held)
    assert values.tolist() == [1.0, -2.0] and values.data_ptr() != held.data_ptr()
    put_back(held, values.fill_(3.75))
    assert held.tolist() == [4.0, 4.0]


def test_loaded_moments_reach_the_optimizer() -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters())
    tensors_of(model, optimizer)
    state = optimizer.state[model["model"].weight]
    state |= {name: in_8_bits(torch.ones(2, 2)) for name in MOMENTS}
    tensors = tensors_of(model, optimizer)
    for n, name in enumerate(MOMENTS):
        tensors[f"{name}.model.weight"].fill_(5 + n)
    put_moments(model, optimizer, tensors)
    assert [state[name].unique().item() for name in MOMENTS] == [5, 6]


needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@needs_torchao
@pytest.mark.long
def test_torchaos_adamw_follows_the_schedule_and_is_saved() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(64, 128), nn.Linear(64, 128)]
    models[1].load_state_dict(models[0].state_dict())
    configs = [EIGHT, replace(EIGHT, memory=MemoryConfig())]
    made = [make_optimizer(model, config) for model, config in zip(models, configs, strict=True)]
    schedules = [make_schedule(each, EIGHT) for each in made]
    for _ in range(3):
        x = torch.randn(8, 64)
        for model, optimizer, schedule in zip(models, made, schedules, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert [float(each.get_last_lr()[0]) for each in schedules] == pytest.approx([schedules[1].get_last_lr()[0]] * 2)
    moved = (models[1].weight - models[0].weight).abs().mean() / models[1].weight.abs().mean()
    assert moved < 0.2
    fresh = make_optimizer(models[0], EIGHT)
    tensors = tensors_of(models[0], fresh)  # moments of a run that took no step
    assert not tensors["exp_avg.weight"].any() and hasattr(fresh.state[models[0].weight]["exp_avg"], "codes")
    saved = tensors_of(models[0], made[0])
    for name, x in saved.items():
        tensors[name].copy_(x)
    put_moments(models[0], fresh, tensors)
    again = tensors_of(models[0], fresh)
    for name, x in saved.items():
        assert (again[name] - x).abs().max() <= 0.01 * x.abs().max(), name
    run = SimpleNamespace(optimizer=made[0], model=models[0], schedule=schedules[0])
    groups = [{k: snapshot._number(v) for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    json.dumps([groups, [*map(snapshot._number, run.schedule.get_last_lr())]])
