"""Shared fixtures: one persistent pool of ranks per world size, replaced after a fault."""

import gc
import multiprocessing
import os
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: without a GPU it runs interpreted

from burst_bench.pool import WorkerPool

from tests.support.memory import poison_memory

# Plans keep there what they measure; ranks of a pool share one folder. Tests neither read nor leave the user's files.
_CONFIG = tempfile.TemporaryDirectory(prefix="burst-config-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; the commands' tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # as the ranks of the pools have: two cores serve them all
if not torch.cuda.is_available():  # on a GPU it would choose other algorithms, and block sizes, than calls do
    poison_memory()

# All pools share one fork server. It imports these once; a rank then starts in milliseconds.
PRELOAD = [
    "torch",
    "burst_attention.testing",
    "burst_attention.integrations.hf",
    "burst_train.step.loop",
    "matplotlib.figure",
    "transformers.models.llama.modeling_llama",
    "tests.support.frozen",
]


def pytest_collection_finish() -> None:
    """Let no garbage collection go through what was imported: transformers alone has a million objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the interpreter's end all is collected again: some extensions report what is left."""
    gc.unfreeze()


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the small training runs' corpus; a test that changes it puts it back."""
    from tests.support.training import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def _own_figures(request: pytest.FixtureRequest) -> None:
    """Give each test a folder of measured figures: whichever test ran before, none are known."""
    os.environ["XDG_CONFIG_HOME"] = f"{_CONFIG.name}/{zlib.crc32(request.node.nodeid.encode())}"


@pytest.fixture(scope="session", autouse=True)
def _preload() -> None:
    """Name the modules before the first pool starts the server."""
    multiprocessing.set_forkserver_preload(PRELOAD)
