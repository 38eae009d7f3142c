"""A single process: when it counts as the only rank, and when it is refused."""

import runpy
from pathlib import Path

import pytest
import torch

from burst_attention import CallShape, Mask, burst_attention, make_plan
from burst_attention.launch import local

ROOT = Path(__file__).resolve().parents[2]
JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


def test_a_rank_of_a_job_that_has_not_joined_the_others_is_refused(monkeypatch):
    assert make_plan(8).world == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert make_plan(8).world == 1  # a cluster's own variable: no rank is named
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=4; call torch\.distributed\.init_process_group\(\) first"):
        make_plan(8)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_plan(8).world == 1


def test_a_rank_that_can_not_meet_the_others_learns_what_is_missing(monkeypatch):
    assert local.torchrun_ranks(None) is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT are not; start the command with torchrun"):
        local.torchrun_ranks(None)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ValueError, match="MASTER_PORT is not"):
        local.torchrun_ranks(None)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert local.torchrun_ranks(None) == (2, 2)


def test_under_torchrun_an_expected_failure_is_a_sentence(monkeypatch, capfd):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    def worker(text):
        raise local.RefusedError(text)

    assert local.start("burst x", worker, "--lr 2 is another", ranks=1) == 1
    error = capfd.readouterr().err
    assert error.strip().splitlines()[-1] == "burst x: --lr 2 is another"
    assert "Traceback" not in error


def test_the_first_example_runs_without_torchrun(capsys):
    runpy.run_path(str(ROOT / "examples" / "attention.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("Plan(rank 0 of 1")


def test_tensors_with_the_sequence_before_the_heads_get_the_remedy():
    plan = make_plan(6)
    q, k, v = (torch.randn(1, 6, heads, 8) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match=r"6 tokens in dim 1; .* pass q\.transpose\(1, 2\)"):
        burst_attention(q, k, v, plan)
    assert burst_attention(*(x.transpose(1, 2) for x in (q, k, v)), plan).shape == (1, 4, 6, 8)


def test_a_plan_explains_the_calls_that_it_was_made_for():
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
    with pytest.raises(TypeError, match=r"such as plan\.explain\(batch=1, q_heads=32"):
        make_plan(64).explain()
    assert make_plan(64, call=CallShape(**sizes)).explain() == make_plan(64).explain(batch=1, **sizes)


def test_a_single_rank_goes_on_after_an_interrupted_call(monkeypatch):
    plan, (q, k, v) = make_plan(8), torch.randn(3, 1, 2, 8, 4).unbind()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("burst_attention.attention.sweep._Run.compute", interrupted)
        burst_attention(q, k, v, plan)
    assert torch.equal(plan.unshard(q, 2), q)


def test_a_head_whose_sink_counts_for_nothing_is_a_head_without_a_sink():
    plan = make_plan(8, mask=Mask(causal=False, blocks=torch.tensor([[True, True], [False, False]]).numpy(), block=4))
    tensors = torch.randn(4, 1, 2, 8, 4, dtype=torch.float64)
    results = []
    for sinks in (None, torch.tensor([-torch.inf, 0.5], dtype=torch.float64)):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]] + ([] if sinks is None else [sinks.requires_grad_()])
        out, lse = burst_attention(*leaves[:3], plan, sinks=sinks, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out, leaves, tensors[3])))
    plain, sunk = results
    of_sinks = sunk[5]
    for expected, found in zip(plain, sunk[:5], strict=True):
        torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=1e-14)
        assert not found[:, 1].isnan().any()
    assert of_sinks[0] == 0 and of_sinks[1] != 0
    assert torch.equal(sunk[0][:, :, 4:], torch.zeros(1, 2, 4, 4).double()) and plain[1][0, 0, 4] == -torch.inf
