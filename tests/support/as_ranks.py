"""A script's ranks as torchrun would start them, but forked after the imports: seconds less for each.

python tests/support/as_ranks.py WORLD SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch.multiprocessing as mp

import burst_attention  # noqa: F401  # once, for all ranks


def run(rank: int, world: int, port: int, words: list[str]) -> None:
    """The script ``words[0]``, in an environment like torchrun's."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in (where | {"LOCAL_WORLD_SIZE": world}).items()})
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = int(sys.argv[1])
    mp.start_processes(run, (world, port, sys.argv[2:]), nprocs=world, start_method="fork")
