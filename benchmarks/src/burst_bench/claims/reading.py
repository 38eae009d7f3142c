"""Measure the memory of reading: many small documents of one gzip file pass through the real reader.

The reader, packer, shuffler and read-ahead deliver sequences as fast as they can for some minutes. The program prints
the resident memory of the process over time. It fits a line through the later half, because the shuffler and the
allocator fill up first, and prints the line's growth per hour with twice its standard error. Memory is flat if the
growth plus that error stays within the bound; otherwise the exit status is 1.

    burst bench reading [--minutes 3] [--documents 2000000] [--through files datasets] [--bound 64]"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from burst_train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from burst_train.data.ahead import ReadAhead
from burst_train.data.corpus import HUB
from burst_train.data.sequences import open_sequences
from rich.console import Console

from ..harness.memory import resident
from ..tables import terminal

Through = Literal["files", "datasets"]


@dataclass(frozen=True, kw_only=True)
class ReadingArguments:
    minutes: float = 3.0
    """Minutes for each value of --through."""
    documents: int = 2_000_000
    through: tuple[Through, ...] = ("files", "datasets")
    """files: our own reader of JSON lines; datasets: a stream of the datasets library over the same file."""
    seq_len: int = 1024
    every: float = 10.0
    """Seconds between two samples of the memory."""
    bound: float = 64.0
    """Allowed growth in MiB per hour."""


@dataclass(frozen=True)
class Look:
    """The state after some seconds."""

    seconds: float
    sequences: int
    bytes: int


def write_documents(path: Path, documents: int) -> None:
    """Write documents of 5 to 40 words each, as gzipped JSON lines."""
    dice = random.Random(0)
    words = [f"w{n:x}" for n in range(5000)]
    with gzip.open(path, "wt", compresslevel=1) as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(dice.choices(words, k=dice.randint(5, 40)))}) + "\n")


def config_of(folder: Path, through: Through, seq_len: int) -> TrainConfig:
    """Return the configuration of a run that reads the file in ``folder``."""
    data = str(folder / "documents.jsonl.gz") if through == "files" else f"{HUB}{folder}"
    return TrainConfig(
        run=RunConfig(out=str(folder / "out")),
        model=ModelConfig(model="tiny"),
        data=DataConfig(data=data, seq_len=seq_len, held_out=0.01, pack="documents"),
    )


def watch(config: TrainConfig, *, seconds: float, every: float) -> list[Look]:
    """Take sequences for ``seconds``, and sample the memory at the start and every ``every`` seconds."""
    reader, _ = open_sequences(config)
    sequences, taken, looks = ReadAhead(reader.training(), 2), 0, list[Look]()
    began = time.monotonic()
    try:
        while (now := time.monotonic() - began) < seconds:
            if not looks or now - looks[-1].seconds >= every:
                looks.append(Look(now, taken, resident()))
            next(sequences)
            taken += 1
            if looks[-1].sequences + 1 == taken:  # after each sample, as a checkpoint does
                sequences.cursor()
    finally:
        sequences.close()
    return [*looks, Look(now, taken, resident())]


def growth(looks: list[Look]) -> tuple[float, float]:
    """Fit a line through the later half; return (bytes per hour, twice their standard error)."""
    later = [look for look in looks if look.seconds >= looks[-1].seconds / 2]
    hours = np.array([look.seconds for look in later]) / 3600
    held = np.array([look.bytes for look in later], dtype=np.float64)
    (slope, start), apart = np.polyfit(hours, held, 1), hours - hours.mean()
    left = held - (slope * hours + start)
    error = (left @ left / max(1, len(later) - 2) / (apart @ apart)) ** 0.5
    return float(slope), float(2 * error)


def main(arguments: list[str]) -> None:
    a, console, flat = (
        tyro.cli(ReadingArguments, prog="burst bench reading", description=__doc__, args=arguments),
        Console(),
        True,
    )
    with tempfile.TemporaryDirectory(prefix="burst-reading-") as name:
        write_documents(Path(name) / "documents.jsonl.gz", a.documents)
        for through in a.through:
            looks = watch(config_of(Path(name), through, a.seq_len), seconds=60 * a.minutes, every=a.every)
            rows = (
                {"s": f"{x.seconds:.0f}", "tokens": f"{x.sequences * a.seq_len:,}", "MiB": f"{x.bytes / 2**20:.1f}"}
                for x in looks
            )
            console.print(terminal(rows, title=f"resident, through {through}"))
            grown, error = (n / 2**20 for n in growth(looks))
            flat = flat and grown + error <= a.bound
            grows, surely = grown > a.bound, abs(grown - a.bound) > error
            verdict = ("not flat" if grows else "flat") if surely else "so few minutes can't tell"
            summary = f"{through}: grows by {grown:.1f} (+- {error:.1f}) MiB an hour, {a.bound:g} allowed: {verdict}"
            console.print(summary, soft_wrap=True)
    sys.exit(0 if flat else 1)
