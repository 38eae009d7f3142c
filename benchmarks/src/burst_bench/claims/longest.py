"""The longest sequence that trains within a memory limit.

Lengths double until a step does not fit. Each length is run; none is extrapolated. A rank's figure is its peak resident
memory minus the memory before its model was built. A limit on the data segment, a quarter above the memory limit, ends
a step that needs far more. The sequence consists of packed documents, so the attention's time grows with the length and
not with its square; a few cores can then run such lengths. Lengths for which no time was left are printed as not run.

    burst bench longest [--ranks 4] [--gib 2] [--minutes 60] [--json FILE]"""

from __future__ import annotations

import gc
import re
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.launch.join import CONTEXT, make_mesh
from burst_attention.testing import WorkerError
from burst_train.cli.preflight import predict_memory
from burst_train.config import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from burst_train.data.sequences import TokenSequence
from burst_train.memory import MemoryConfig
from burst_train.step.model import batch_of, build_model
from burst_train.strategies import Heads, Sharing, choose

from ..arguments import WrittenArguments, asked
from ..harness.memory import give_back, peak_during, resident
from ..pool import WorkerPool

GIB = 2**30
REFUSED = re.compile(r"can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError", re.IGNORECASE)
SHOWN = ("remat", "mlp_chunks", "attention_chunks", "offload")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("auto", {}),
    ("auto", {"remat": "layer"}),
    ("auto", {"remat": "keep-attention"}),
    ("auto", {"remat": "layer", "mlp_chunks": 8}),
    ("auto", {"remat": "layer", "mlp_chunks": 32, "attention_chunks": 4}),
    ("auto", {"remat": "layer", "mlp_chunks": 32, "attention_chunks": 4, "offload": f"disk:{tempfile.gettempdir()}"}),
    ("zigzag-ring", {}),
    ("ulysses", {}),
    ("tensor-sequence", {}),
)


@dataclass(frozen=True, kw_only=True)
class LongestArguments(WrittenArguments):
    """Sizes of a small model, the range of lengths, and the time limit."""

    ranks: int = 4
    gib: float = 2.0
    """Memory per rank."""
    first: int = 65536
    """The first length; a power of two times 1,024."""
    most: int = 2**22
    """The largest length to try."""
    minutes: float = 60.0
    """Minutes after which no further step starts."""
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    intermediate: int = 1024
    document: int = 4096
    """Tokens of each document; 0: the whole sequence is one document."""

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=512,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=2**24,
        )


def _shared(name: str, flags: dict[str, Any]) -> Sharing:
    """Return the strategy that ``burst train`` uses with these flags."""
    return choose(name, remat=flags.get("remat", "none"), attention_chunks=flags.get("attention_chunks", 1))


def make_step(sizes: LongestArguments, strategy: str, flags: dict[str, Any], length: int) -> Callable[[], float]:
    """Build a model; return an optimizer step on ``length`` random tokens, which returns the loss of its rank."""
    sharing, mesh = _shared(strategy, flags), make_mesh("cpu")
    everyone = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharing.check(Heads.of(sizes.config), length, everyone.size())
    options = {"dtype": torch.float32, "mesh": mesh, "everyone": everyone, "seed": 0, "memory": MemoryConfig(**flags)}
    plan = sharing.plan(length, group=mesh[CONTEXT], timeout=900)
    model = build_model("tiny", sizes.config, sharing, plan, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    borders = (*range(0, length, sizes.document), length) if sizes.document else None

    def step() -> float:
        ids = torch.randint(0, sizes.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
        batch = batch_of([TokenSequence(ids.int().numpy(), borders)], torch.device("cpu"))
        loss = model(**batch, num_items_in_batch=length - 1).loss
        loss.backward()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()}")
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def peak_of_step(sizes: LongestArguments, strategy: str, flags: dict[str, Any], length: int) -> int:
    """Return this rank's peak resident bytes during a step, minus those before it.

    A short step runs first, so that memory allocated on first use doesn't count.
    """
    make_step(sizes, strategy, flags, 1024 * sizes.ranks)()
    gc.collect()
    give_back()
    before = resident()
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    most = resident("VmData") + int(1.25 * sizes.gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (most, unlimited[1]))
    try:
        return peak_during(lambda: make_step(sizes, strategy, flags, length)())[1] - before
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)


def tried(
    pool: WorkerPool, sizes: LongestArguments, strategy: str, flags: dict[str, Any], length: int
) -> dict[str, Any]:
    """Run one length, and return its row."""
    began = time.monotonic()
    row = {"strategy": strategy, **asdict(MemoryConfig(**flags)), "tokens": length}
    row = {name: row[name] for name in ("strategy", *SHOWN, "tokens")} | {"offload": row["offload"].partition(":")[0]}
    try:
        peaks = pool.run(peak_of_step, sizes, strategy, flags, length, timeout=3600, patience=60)
    except WorkerError as error:
        if not REFUSED.search(str(error)):  # any other error is a bug
            raise
        peaks = None
    config = TrainConfig(
        data=DataConfig(seq_len=length),
        model=ModelConfig(dtype="float32"),
        parallel=ParallelConfig(strategy=strategy, device="cpu"),
        memory=MemoryConfig(**flags),
    )
    memory = predict_memory(config, sizes.config, sizes.ranks)
    return row | {
        "peak": None if peaks is None else max(peaks),
        "predicted": None if memory is None else sum(memory.values()),
        "fits": peaks is not None and max(peaks) <= sizes.gib * GIB,
        "seconds": round(time.monotonic() - began, 1),
    }


def search(sizes: LongestArguments, until: float, tell: Any) -> list[dict[str, Any]]:
    """Run every case at one length before the next length; stop when the monotonic clock reaches ``until``."""
    rows: list[dict[str, Any]] = []
    going, length, pool = list(CASES), sizes.first, WorkerPool(sizes.ranks, timeout=900)
    while going and length <= sizes.most and time.monotonic() < until:
        for case in list(going):
            if pool.broken:  # by a step without memory
                pool.close()
                pool = WorkerPool(sizes.ranks, timeout=900)
            if time.monotonic() < until:
                rows.append(tried(pool, sizes, *case, length))
                tell(rows[-1])
                going = going if rows[-1]["fits"] else [each for each in going if each != case]
        length *= 2
    pool.close()
    return rows


def main(arguments: list[str]) -> None:
    a = asked(LongestArguments(), __doc__, "burst bench longest", arguments)
    console, until = console_of_tables(), time.monotonic() + 60 * a.minutes
    rows = search(a, until, lambda row: console.print(str(row), highlight=False, soft_wrap=True))
    print_table(console, longest_of(rows), title=f"{a.gib:g} GiB per rank, {a.ranks} ranks", legend=LEGEND)
    a.write(rows=rows)


LEGEND = {
    "longest": "the longest sequence that fits, of lengths that double",
    "peak per rank": "the highest rank's memory at that length, as measured",
    "predicted": "the same, as burst train predicts it",
    "twice that": "a step with the next length",
}


def longest_of(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return, for each case, the longest length that fits and the result of the next longer one."""
    lines = []
    for key in dict.fromkeys(map(_policy, rows)):
        own = [row for row in rows if _policy(row) == key]
        fits = [row for row in own if row["fits"]]
        beyond = [row for row in own if not row["fits"]]
        best = max(fits, key=lambda row: row["tokens"], default=None)
        cells = dict(zip(("strategy", "--remat", "--mlp-chunks", "--attention-chunks", "--offload"), key, strict=True))
        cells["longest"] = "none of those tried" if best is None else f"{best['tokens']:,} tokens"
        cells["peak per rank"] = "-" if best is None else f"{best['peak'] / 2**20:,.0f} MiB"
        predicted = best and best["predicted"]
        cells["predicted"] = f"{predicted / 2**20:,.0f} MiB" if predicted else "-"
        cells["twice that"] = _beyond(beyond[0]) if beyond else "not run"
        lines.append(cells)
    return lines


def _policy(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the strategy and the memory options of a row."""
    return (row["strategy"], *(str(row[name]) for name in SHOWN))


def _beyond(row: dict[str, Any]) -> str:
    return "does not fit" if row["peak"] is None else f"takes {row['peak'] / 2**20:,.0f} MiB"
