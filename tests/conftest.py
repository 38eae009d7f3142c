"""Shared fixtures: one persistent pool of ranks per world size, replaced after a fault."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: without a GPU it runs interpreted

from burst_attention.testing import WorkerPool
from tests.support.memory import poison_memory

# Plans keep there what they measure. Tests neither read the user's files nor leave any.
_CONFIG = tempfile.TemporaryDirectory(prefix="burst-config-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name
torch.set_num_threads(1)  # as the ranks of the pools have: two cores serve them all
if not torch.cuda.is_available():  # on a GPU it would choose other algorithms, and block sizes, than calls do
    poison_memory()


_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which a slow machine still runs all everyday tests in time."""
    text = "run long tests last, and start none after this many minutes; those left over are skipped, and named"
    parser.addoption("--long-minutes", type=float, help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a limit, put long tests last. Their files take turns by date, so that no test is left over each time."""
    if config.getoption("--long-minutes") is not None:
        today = str(datetime.now(UTC).date())
        items.sort(key=lambda item: _is_long(item) and 1 + zlib.crc32(f"{today} {item.path.name}".encode()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a long test if the time for these is over."""
    most = item.config.getoption("--long-minutes")
    if most is not None and _is_long(item) and time.monotonic() - _BEGAN > 60 * most:
        pytest.skip(f"a long test, and {most:g} minutes are over; `make test-all` runs it")


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """``pools(world)``: the pool of that size."""
    alive: dict[int, WorkerPool] = {}

    def get(world: int) -> WorkerPool:
        if world not in alive or alive[world].broken:
            if world in alive:
                alive.pop(world).close()
            alive[world] = WorkerPool(world)
            if not torch.cuda.is_available():
                alive[world].run(poison_memory)
        return alive[world]

    yield get
    for pool in alive.values():
        pool.close()
