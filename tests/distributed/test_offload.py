"""Two ranks that keep layers' inputs in files: gradients stay, and a failure on one rank is an error on both."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_attention import Plan, burst_attention, make_plan
from burst_attention.memory.disk import DiskStore
from burst_attention.memory.host import OffloadError
from burst_attention.memory.offload import Offloading, offloading
from burst_attention.testing import local_world
from tests.support.processes import files_in_use

SEQLEN, LAYERS = 24, 3


def run(plan: Plan, hidden: torch.Tensor, offload: Offloading | None) -> torch.Tensor:
    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + burst_attention(hidden, hidden, hidden, plan).sin()

    for _ in range(LAYERS):
        if offload is None:
            hidden = layer(hidden)
        else:
            with offload.hooks(hidden):
                hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False)
    return hidden.square().sum()


def gradient(plan: Plan, offload: Offloading | None) -> torch.Tensor:
    x = torch.randn(1, 2, SEQLEN, 8, generator=torch.Generator().manual_seed(4))
    x = plan.shard(x, 2).clone().requires_grad_()
    run(plan, x, offload).backward()
    assert x.grad is not None
    return x.grad


def caught(call: Any, *arguments: Any) -> tuple[str, str]:
    try:
        call(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def keeps_the_gradient(folder: str) -> bool:
    plan = make_plan(SEQLEN, timeout=5)
    return torch.equal(gradient(plan, offloading(f"disk:{folder}")), gradient(plan, None))


def test_gradients_have_the_same_bits_and_no_file_is_left(pools, tmp_path) -> None:
    assert pools(2).run(keeps_the_gradient, str(tmp_path)) == [True, True]
    assert not files_in_use(tmp_path)


class Failing(DiskStore):
    """A store whose file is closed, on rank 1, before the ``count``-th call of ``method``."""

    def __init__(self, folder: str, method: str, count: int) -> None:
        super().__init__(folder)
        self.method, self.left = method, count

    def damage(self, method: str) -> None:
        self.left -= method == self.method
        if not self.left:
            self._finish_writes(0)
            self._file.close()

    def put(self, x: torch.Tensor) -> Any:
        self.damage("put")
        return super().put(x)

    def get(self, ticket: Any) -> torch.Tensor:
        self.damage("get")
        return super().get(ticket)


def fails(group: Any, folder: str, method: str, count: int) -> tuple[str, str]:
    """What a step raises if a file of rank 1 is damaged."""
    plan = make_plan(SEQLEN, timeout=2, group=group)
    made = Failing(folder, method, count) if plan.rank == 1 else DiskStore(folder)
    return caught(gradient, plan, Offloading(made))


@pytest.mark.parametrize(("method", "count"), [("get", 1), ("get", LAYERS - 1), ("put", 2)])
def test_a_failure_on_one_rank_is_raised_there_and_the_rank_named_elsewhere(tmp_path, method: str, count: int) -> None:
    with local_world(2) as ranks:
        other, own = ranks.run(fails, str(tmp_path), method, count)
    assert own[0] == OffloadError.__name__ and "was closed" in own[1] and str(tmp_path) in own[1]
    assert other[0] == "ExchangeError" and "rank 0 could not receive from rank 1" in other[1]


def folder_is_missing(group: Any, folder: str) -> tuple[str, str]:
    plan = make_plan(SEQLEN, timeout=30, group=group)
    where = f"disk:{folder}/missing" if plan.rank == 1 else f"disk:{folder}"

    def run() -> None:
        with plan.agreement.entering("offload"):
            offload = offloading(where)
        gradient(plan, offload)

    return caught(run)


def test_a_missing_folder_on_one_rank_is_refused_on_both(tmp_path) -> None:
    with local_world(2) as ranks:
        for kind, text in ranks.run(folder_is_missing, str(tmp_path)):
            assert kind == "ValueError" and "memory=Memory(offload='disk:" in text and "missing'" in text
