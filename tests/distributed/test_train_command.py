"""``burst train`` as a user starts it: its own workers, torchrun, a lost worker, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burst_attention.training.loop import train
from tests.training import config_of, losses, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


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


def test_the_command_and_torchrun_train_alike(pools, corpus, tmp_path):
    script = str(Path(sys.executable).with_name("burst"))
    plain = start(script, *command(corpus, tmp_path / "plain", "--ranks", "2", "--steps", "4"))
    told, _ = plain.communicate(timeout=120)
    assert plain.returncode == 0, told
    rows = ("first loss", "last loss", "held-out loss", "tokens/s", "peak memory", "sent per step", "predicted")
    assert all(row in told for row in rows), told
    assert "Warning" not in told, told
    assert len(re.findall(r"^step \d/4  loss \d", told, re.M)) == 4, "one rank speaks"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "burst_attention.cli"]
    found = start(*torchrun, *command(corpus, tmp_path / "torchrun", "--steps", "4"))
    told, _ = found.communicate(timeout=120)
    assert found.returncode == 0, told
    assert losses(tmp_path / "plain") == losses(tmp_path / "torchrun")
    pools(1).run(train, config_of(corpus, tmp_path / "pool"))
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "pool"), abs=2e-5)


@pytest.mark.parametrize(("signalled", "status"), [("worker", 1), ("launcher", 130)])
def test_a_lost_worker_and_ctrl_c_end_the_run(corpus, tmp_path, signalled, status):
    process = start("-m", "burst_attention.cli", *command(corpus, tmp_path, "--ranks", "2", "--steps", "100000"))
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    else:
        pytest.fail("the run ended by itself")
    workers = workers_of(process.pid)
    assert len(workers) == 2
    began = time.monotonic()
    if signalled == "worker":
        os.kill(workers[1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == status, told
    assert time.monotonic() - began < 20
    if signalled == "worker":
        assert told.splitlines()[-1].startswith("burst train: rank 1 failed: killed by SIGKILL")
    deadline = time.monotonic() + 5
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


def workers_of(pid):
    """The processes that ``pid`` spawned, in the order of their ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
