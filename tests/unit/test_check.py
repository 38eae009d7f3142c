"""``burst check`` finds errors in each tensor and reports them by its exit status."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from burst_attention import Mask
from burst_attention.cli import check as command
from burst_attention.launch import join
from burst_attention.testing import Case
from burst_attention.testing import check as run_check

SOUND = run_check.__globals__["distributed_call"]


def spoiled(name, by):
    """Return a call whose results are slightly wrong in one tensor."""

    def call(*arguments):
        found = SOUND(*arguments)
        return replace(found, **{name: getattr(found, name) * (1 + by)})

    return call


@pytest.mark.parametrize(("dtype", "by"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_each_tensor_is_compared(monkeypatch, dtype, by):
    case = Case(dtype=dtype, seqlen=256)
    assert run_check(case).passed
    for name in ("out", "lse", "dq", "dk", "dv"):
        monkeypatch.setitem(run_check.__globals__, "distributed_call", spoiled(name, by))
        report = run_check(case)
        assert {row.tensor for row in report.rows if not row.passed} == {name}
        assert not report.passed


@pytest.mark.parametrize(
    ("dtype", "seqlen", "mask", "more"),
    [
        (torch.bfloat16, 1, Mask(), {}),
        (torch.float16, 64, Mask(window=1), {"logits": 30.0}),
        (torch.bfloat16, 64, Mask(window=1), {"head_dim": 64, "v_head_dim": 1}),
        (torch.float16, 1, Mask(), {"dlse": False}),
    ],
)
def test_gradients_that_cancel_are_measured_against_dout(monkeypatch, dtype, seqlen, mask, more):
    """Each query sees one key, so dq and dk are 0; a stock kernel's error then says nothing."""
    case = Case(dtype=dtype, seqlen=seqlen, mask=mask, kernel="aten-fp32", **more)
    report = run_check(case)
    assert report.passed, report.rows
    assert {row.tensor for row in report.rows if row.measure == "error / norm of dout"} == {"dq", "dk"}

    def call(*arguments):
        found = SOUND(*arguments)
        return replace(found, dq=found.dq * 1.1 + 0.01)

    monkeypatch.setitem(run_check.__globals__, "distributed_call", call)
    assert {row.tensor for row in run_check(case).rows if not row.passed} == {"dq"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mask", "logits"), [(Mask(window=1), 1.0), (Mask(window=1), 0.03), (Mask(cu_seqlens=[*range(65)]), 1.0)]
)
def test_rows_that_see_one_key_are_within_the_bound_of_the_lse(monkeypatch, dtype, mask, logits):
    """A stock kernel's exp(0) is 5.3e-5 too small there. An error four times as large is found."""
    case = Case(dtype=dtype, seqlen=64, mask=mask, logits=logits, kernel="aten")

    def failed():
        return {row.tensor for row in run_check(case).rows if not row.passed}

    assert not failed()
    shifted = lambda *given: replace(found := SOUND(*given), lse=found.lse - 2e-4)  # noqa: E731
    monkeypatch.setitem(run_check.__globals__, "distributed_call", shifted)
    assert failed() == {"lse"}


SMALL = Case(dtype=torch.bfloat16, q_heads=1, kv_heads=1, batch=1, kernel="aten-fp32")


def test_gradients_that_are_only_small_are_measured_against_themselves():
    """Under a full mask they shrink with the number of keys."""
    rows = run_check(replace(SMALL, seqlen=1024, mask=Mask(causal=False))).rows
    assert {row.measure for row in rows if row.tensor in ("dq", "dk", "dv")} == {"max error / max"}


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_fails_where_a_tensor_is_wrong(monkeypatch, capsys, wrong):
    @contextmanager
    def alone(**_):
        yield SimpleNamespace(device=torch.device("cpu"), rank=0)

    monkeypatch.setattr(join, "join", alone)
    asked = command.CheckArguments(seq_len=64, masks=("causal",), layouts=("zigzag",), dtypes=("float64",))
    if wrong:
        monkeypatch.setitem(run_check.__globals__, "distributed_call", spoiled("dk", 1e-9))
        with pytest.raises(SystemExit) as ended:
            command._check(asked)
        assert ended.value.code == 1
    else:
        command._check(asked)
    assert ("WRONG" in capsys.readouterr().out) == wrong
