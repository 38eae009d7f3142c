"""Processes of a command: which it started, and whether they still run."""

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path


def workers_of(pid):
    """The ranks of a launcher, in their order: its fork server's children."""
    servers = [child for child in _children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [int(child) for server in servers for child in _children(server)]


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def run_script(words, cwd, *, ranks=1, job=False, timeout=240):
    """Run a script as one process, or as torchrun's ranks, forked by the tests' server: nothing is imported again.

    ``job``: one rank, too, has torchrun's environment. Return what rank after rank printed; all must succeed.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as logs:
        free.bind(("127.0.0.1", 0))
        port, context = free.getsockname()[1], multiprocessing.get_context("forkserver")
        free.close()
        files = [Path(logs) / f"{rank}.log" for rank in range(ranks)]
        given = (
            (rank, ranks, port if job or ranks > 1 else None, [*map(str, words)], str(cwd), str(file))
            for rank, file in enumerate(files)
        )
        processes = [context.Process(target=_run_script, args=each) for each in given]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        printed = "".join(file.read_text("utf-8") for file in files if file.exists())
    assert [process.exitcode for process in processes] == [0] * ranks, printed
    return printed


def _run_script(rank, ranks, port, words, cwd, log):
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if port is not None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        where |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in where.items()})
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def files_in_use(folder):
    """How many files of the folder a process has open, deleted ones included."""
    found = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found += os.readlink(link).startswith(f"{folder}/")
    return found
