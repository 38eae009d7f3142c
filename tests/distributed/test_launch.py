"""How local ranks end: well, by an error, by a signal, or because the launcher ends them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from burst_attention.launch.join import _meeting_again, join
from burst_attention.launch.local import launch
from burst_train.run.folder import SaveError
from tests.support.processes import is_alive


class Forked(multiprocessing.get_context("fork").Process):
    """A rank that starts by a fork, after the imports, without the launcher's handlers of signals."""

    def run(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        super().run()


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Process=Forked))


FORMING = 60.0  # seconds for ranks to meet, which a busy machine may need
TIMEOUT = 1.0


def act(folder, ways):
    """Meet the other ranks, then end in the way that is this rank's."""
    with join(device="cpu", timeout=FORMING) as context:
        numbers = context.collect(context.rank)
        (Path(folder) / str(context.rank)).write_text(f"{os.getpid()} {time.time()} {numbers}")
        context.collect("all have written it")
        way = ways[context.rank]
        if way == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "raises":
            raise LookupError("no [bold]such[/] thing")
        elif way == "can't save":
            raise SaveError("checkpoint of step 3: No space left on device")
        elif way == "is lost in NaN":
            raise FloatingPointError("step 3: the loss is nan; lower --lr")
        elif way == "gives up":
            raise SystemExit(1)
        elif way == "waits":
            dist.irecv(torch.zeros(1), 1).wait(timedelta(seconds=TIMEOUT))
        elif way == "sleeps":
            time.sleep(60)


@pytest.mark.parametrize(
    ("ways", "reported"),
    [
        (("waits", "stops"), "rank 1 did not end after SIGTERM (stopped or hung)"),
        (("waits", "is killed"), "rank 1 failed: killed by SIGKILL, which the system sends when memory runs"),
        (("raises", "sleeps"), "rank 0 failed: LookupError: no [bold]such[/] thing"),
        (("can't save", "sleeps"), "rank 0 failed: checkpoint of step 3: No space left on device"),
        (("is lost in NaN", "sleeps"), "rank 0 failed: step 3: the loss is nan; lower --lr"),
        (("sleeps", "gives up"), "rank 1 failed: exit code 1"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else "",
)
def test_ranks_end_soon_and_the_first_that_failed_is_named(tmp_path, capfd, ways, reported):
    assert launch("burst x", act, str(tmp_path), ways, ranks=2) == 1
    notes = [(tmp_path / str(rank)).read_text().split(maxsplit=2) for rank in range(2)]
    assert [numbers for *_, numbers in notes] == ["[0, 1]"] * 2
    assert not any(is_alive(int(pid)) for pid, *_ in notes)
    allowed = TIMEOUT + 5 if "waits" in ways else 5
    assert time.time() - max(float(when) for _, when, _ in notes) < allowed
    error = capfd.readouterr().err
    assert reported in error.splitlines()[-1] and error.splitlines()[-1].startswith("burst x: rank")
    assert ("Traceback" in error) == bool({"raises", "stops"} & set(ways))


def test_a_rank_that_fails_after_another_is_not_the_one_named(tmp_path, capfd):
    assert launch("burst x", fail_by_rank, ranks=3) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("burst x: rank 1 failed: ValueError: 1")


def meet_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with join(device="cpu", timeout=77, tensor_parallel=2) as context:
            axes = [context.mesh.get_group(name) for name in context.mesh.mesh_dim_names]
            found = [axis._get_backend(context.device).options._timeout for axis in axes]
            assert found == [timedelta(seconds=77)] * 3


def test_the_groups_of_a_mesh_get_the_timeout(capfd):
    """By a function that this torch does not deprecate."""
    assert launch("burst x", meet_without_a_warning, ranks=2) == 0, capfd.readouterr().err


def fail_by_rank():
    rank = int(os.environ["RANK"])
    with join(device="cpu", timeout=20) as context:
        context.collect(None)
        time.sleep({1: 0, 2: 0.3, 0: 0.6}[rank])
        raise ValueError(rank)


def tell_the_launcher(number):
    for _ in range(20):
        os.kill(os.getppid(), number)
        time.sleep(0.05)
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_again_do_not_keep_ranks_from_being_ended(capfd, number):
    handler = signal.getsignal(number)
    assert launch("burst x", tell_the_launcher, number, ranks=1) == 128 + number
    assert signal.getsignal(number) == handler
    assert "Traceback" not in capfd.readouterr().err


POOL = """
import signal
from burst_attention.launch.local import prepare
from burst_bench.pool import WorkerPool

if __name__ == "__main__":
    prepare("torch")  # as a command does
    with WorkerPool(1) as pool:
        print(pool.run(signal.pthread_sigmask, signal.SIG_BLOCK, ()))
"""


@pytest.mark.long
def test_ranks_of_a_pool_hear_signals_though_their_server_must_not():
    printed = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True, timeout=120)
    assert printed.stdout == "[set()]\n", printed


RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"}
RESTARTED |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_restarted_ranks_do_not_read_what_those_before_left():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("0", "an address without a listener")
    where = _meeting_again(RESTARTED | {"MASTER_PORT": str(server.port)})
    assert (where["rank"], where["world_size"]) == (1, 2)
    assert not where["store"].check(["0"])
    where["store"].set("0", "that of now")
    again = _meeting_again(RESTARTED | {"MASTER_PORT": str(server.port), "RANK": "0"})["store"]
    assert again.get("0") == b"that of now"
    assert server.get("0") == b"an address without a listener"


@pytest.mark.parametrize(
    "other",
    [
        {"TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"GROUP_WORLD_SIZE": "2"},  # machines count their starts each for itself
    ],
)
def test_others_meet_where_torch_has_them_meet(other):
    assert _meeting_again(RESTARTED | other) == {}
    assert _meeting_again({}) == {}
