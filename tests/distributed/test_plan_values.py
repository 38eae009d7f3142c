"""A plan as an object: copied, pickled, sent by a DataLoader's worker, passed through modules that others wrap."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention.plan import plan_of
from burst_attention.testing import attend, local_world
from tests.support.conditioning import greatest

MASKS = [Mask(), Mask(window=3), Mask(causal=False), Mask(cu_seqlens=[0, 4, 4, 10]), Mask(prefix=4)]


def test_indices_are_copied_to_a_device_once():
    plan, device = make_plan(10), torch.device("meta")
    index = np.array([1, 3])
    copied, alive = plan.indices.on_device(index, device), weakref.ref(index)
    assert plan.indices.on_device(index, device) is copied
    assert copy.copy(plan).indices is plan.indices
    del index
    gc.collect()
    assert alive() is not None  # or another array at its address would be taken for it


def saved_and_loaded(plan):
    buffer = io.BytesIO()
    torch.save({"plan": plan}, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)["plan"]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan)),
    "torch.save": saved_and_loaded,
}


def error_of(plan) -> float:
    q = torch.randn(1, 2, plan.seqlen, 4, dtype=torch.float64)
    return (burst_attention(q, q, q, plan) - attend(q, q, q, plan.mask).out).abs().max().item()


@pytest.mark.parametrize("how", COPIES)
def test_a_plan_of_one_rank_is_a_value(how) -> None:
    plans = [make_plan(10, mask=mask, strategy=Strategy(layout="zigzag")) for mask in MASKS]
    copies = [COPIES[how](plan) for plan in plans]
    assert len({plan.handle for plan in [*plans, *copies]}) == 2 * len(plans)
    reported = [(plan.schedule.description, plan.layout, plan.positions.tolist()) for plan in plans]
    del plans
    gc.collect()
    for before, plan in zip(reported, copies, strict=True):
        assert (plan.schedule.description, plan.layout, plan.positions.tolist()) == before
        assert plan_of(plan.handle) is plan and error_of(plan) < 1e-14


@pytest.mark.parametrize("value", [*MASKS, make_plan(10, mask=MASKS[3]).schedule], ids=lambda value: repr(value)[:30])
def test_masks_and_schedules_are_values(value) -> None:
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value


def test_a_plan_does_not_change() -> None:
    plan = make_plan(10)
    with pytest.raises(AttributeError, match="plans are immutable"):
        plan.schedule = plan.with_mask(Mask(window=2)).schedule


class Windows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, n):
        return make_plan(10).with_mask(Mask(window=n + 1))


def test_the_plans_of_a_loaders_worker_are_not_mistaken_for_plans_of_this_process() -> None:
    here = [make_plan(10) for _ in range(8)]
    loader = DataLoader(Windows(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    came = list(loader)
    assert [plan.mask.window for plan in came] == [1, 2, 3, 4]
    assert greatest(error_of(plan) for plan in [*came, *here]) < 1e-14


def over_a_group(group=None):
    plan = make_plan(10, group=group)
    texts = []
    for how in ("deepcopy", "pickle", "torch.save"):
        with pytest.raises(TypeError) as raised:
            COPIES[how](plan)
        texts.append(str(raised.value))
    other = copy.copy(plan)
    handle = other.handle
    q = torch.randn(1, 2, 10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shard = plan.shard(q, 2)
    del plan
    gc.collect()
    out = other.unshard(burst_attention(shard, shard, shard, other), 2)
    assert plan_of(handle) is other and (out - attend(q, q, q, Mask()).out).abs().max() < 1e-14
    return texts


def test_a_plan_over_a_group_stays_where_it_is(pools) -> None:
    with local_world(2) as ranks:
        threads = ranks.run(over_a_group)
        with pytest.raises(TypeError, match="local group"):
            ranks.run(lambda group: group)[0].__reduce__()
    for texts in [*pools(2).run(over_a_group), *threads]:
        assert all("over 2 ranks can't be pickled or deep-copied" in text and "make_plan" in text for text in texts)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x, *, plan):
        q, k, v = self.project(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        return burst_attention(q, k, v, plan["all"] if isinstance(plan, dict) else plan).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x, *, plan):
        return self.second(self.first(x, plan=plan), plan={"all": plan})


def under_mixed_precision() -> bool:
    """Is it what the model gives whose weights were rounded to bf16?"""
    torch.manual_seed(0)
    model, plan = Model(), make_plan(23)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    x = plan.shard(torch.randn(2, 23, 8), 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    out, expected = model(x, plan=plan), rounded(x.bfloat16(), plan=plan)
    out.sum().backward()
    return torch.equal(out, expected) and model.first.project.weight.grad.full_tensor().abs().max().item() > 0


def test_fsdp_with_mixed_precision_takes_a_plan(pools) -> None:
    assert pools(2).run(under_mixed_precision) == [True, True]
