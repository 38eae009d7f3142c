"""``burst train`` as a user starts it: its own workers, torchrun, a lost worker, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from burst_attention import cli
from burst_train.cli.train import parse
from burst_train.run.folder import list_checkpoints
from burst_train.step.export import export
from burst_train.step.loop import train
from tests.support.processes import is_alive, workers_of
from tests.support.training import config_of, losses


def command(corpus, out, *flags):
    shared = ["--data", corpus, "--seq-len", "97", "--out", str(out), "--warmup", "2", "--device", "cpu"]
    return ["train", *shared, "--held-out", "0.2", "--held-out-sequences", "3", *flags]


def environment():
    """Without what makes a process a rank of something."""
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}


def start(*words):
    return subprocess.Popen(
        [sys.executable, *words], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def steps_of(process, last):
    """Read what a run says until it has finished a step."""
    for line in process.stdout:
        if line.startswith(f"step {last}/"):
            return
    pytest.fail(f"the run ended before step {last}")


FIXED = ("--steps", "4", "--strategy", "layout=zigzag,ulysses_degree=1")  # measured rates may choose otherwise


def test_the_command_trains_as_one_process_does(pools, corpus, tmp_path):
    script = str(Path(sys.executable).with_name("burst"))
    plain = start(script, *command(corpus, tmp_path / "plain", "--ranks", "2", *FIXED))
    reported, _ = plain.communicate(timeout=120)
    assert plain.returncode == 0, reported
    rows = ("first loss", "last loss", "held-out loss", "tokens/s", "peak memory", "sent per step", "predicted")
    assert all(row in reported for row in rows), reported
    assert "Warning" not in reported, reported
    assert len(re.findall(r"^step \d/4  loss \d", reported, re.M)) == 4, "one rank speaks"
    pools(1).run(train, config_of(corpus, tmp_path / "pool"))
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "pool"), abs=2e-5)


@pytest.mark.slow
def test_torchrun_trains_as_ranks_of_a_pool_do(pools, corpus, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "burst_attention.cli"]
    found = start(*torchrun, *command(corpus, tmp_path / "torchrun", *FIXED))
    reported, _ = found.communicate(timeout=120)
    assert found.returncode == 0, reported
    pools(2).run(train, config_of(corpus, tmp_path / "pool", strategy="layout=zigzag,ulysses_degree=1"))
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "pool")


@pytest.mark.parametrize(("signalled", "status"), [("worker", 1), pytest.param("launcher", 75, marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_lost_worker_and_ctrl_c_end_the_run(corpus, tmp_path, signalled, status):
    process = start("-m", "burst_attention.cli", *command(corpus, tmp_path, "--ranks", "2", "--steps", "100000"))
    steps_of(process, 2)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    began = time.monotonic()
    if signalled == "worker":
        os.kill(workers[1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
    reported, _ = process.communicate(timeout=30)
    assert process.returncode == status, reported
    assert time.monotonic() - began < 20
    if signalled == "worker":
        assert reported.splitlines()[-1].startswith("burst train: rank 1 failed: killed by SIGKILL")
    else:
        assert "Ctrl-C after step" in reported and "SIGTERM" not in reported
    deadline = time.monotonic() + 5
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_run_that_hangs_at_once_and_tells_what_is_kept(corpus, tmp_path):
    shared = command(corpus, tmp_path, "--ranks", "2", "--steps", "100000", "--save-every", "1", "--keep", "1")
    process = start("-m", "burst_attention.cli", *shared)
    steps_of(process, 3)
    assert cli.main([*shared, "--overwrite"]) == cli.main([*shared, "--resume"]) == 2, "another run is not let in"
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)  # so that the first Ctrl-C can have no end
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGINT)
    reported, _ = process.communicate(timeout=30)
    assert process.returncode == 130, reported
    assert not any(map(is_alive, workers))
    kept, *older = list_checkpoints(tmp_path)
    assert len(older) <= 1  # killed before it had removed what the newest one replaces
    last = f"burst train: newest checkpoint: {kept}; to resume: burst train --out {tmp_path} --resume"
    assert reported.splitlines()[-1] == last, reported


@pytest.mark.slow
def test_under_torchrun_a_rank_that_is_killed_once_has_the_run_go_on_by_itself(pools, corpus, tmp_path):
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.1",
    ]
    shared = command(corpus, tmp_path / "run", "--steps", "8", "--save-every", "1")
    process = start(*torchrun, "-m", "burst_attention.cli", *shared)
    steps_of(process, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    try:
        reported, _ = process.communicate(timeout=240)
    finally:
        process.terminate()  # its ranks go with it
    assert process.returncode == 0, reported
    assert re.search(r"resuming after step \d", reported), reported
    pools(1).run(train, config_of(corpus, tmp_path / "whole", steps=8))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=2e-5)


@pytest.mark.long
def test_an_interrupted_command_goes_on_and_its_checkpoint_can_be_exported(pools, corpus, tmp_path, capsys):
    shared = command(corpus, tmp_path / "run", "--ranks", "2", "--steps", "40", "--lr", "1e-3")
    process = start("-m", "burst_attention.cli", *shared)
    steps_of(process, 2)
    process.send_signal(signal.SIGTERM)
    reported, _ = process.communicate(timeout=60)
    assert process.returncode == 75, reported
    (saved,) = list_checkpoints(tmp_path / "run")
    assert f"to resume: burst train --out {tmp_path}/run --resume" in reported
    assert cli.main(shared) == 2
    assert "add --resume to continue, or --overwrite to start over" in capsys.readouterr().err
    # What is not said again is as it was: the data, the rate.
    step = int(saved.name.removeprefix("step-"))
    settings = parse(["--out", str(tmp_path / "run"), "--resume", "--steps", str(step + 2)])
    assert (settings.data.seq_len, settings.optim.lr, settings.optim.global_batch) == (97, 1e-3, 1)
    pools(1).run(train, settings)
    assert len(losses(tmp_path / "run")) == step + 2
    with warnings.catch_warnings(action="error"):
        export(saved, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("ab")["input_ids"] == [256, 97, 98]
    shards = sorted(saved.glob("shard-*"))
    embedded = torch.cat([load_file(path)["weights.model.model.embed_tokens.weight"] for path in shards])
    assert torch.equal(model.model.embed_tokens.weight, embedded)
    with pytest.raises(ValueError, match="already exists and is not empty"):
        export(saved, tmp_path / "exported")
