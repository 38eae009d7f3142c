"""The paper's tables at this machine's scale: every engine, measured, as docs/results/*.md beside the raw figures.

    python benchmarks/paper.py [--out docs/results] [--only training prefill ...] [--quick]

BurstAttention's claims (arXiv 2403.09347, section 4) are relative, so are these: each is a ratio of two engines that
took turns in one run. The cluster is emulated: a network namespace for each node, and three link rates, chosen so that
tensor parallelism with sequence parallelism spends none, half and most of its step communicating. It needs root and
iproute2. A full run takes about an hour on two cores; --quick shrinks everything to minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ablation
import paper_tables as tables
import peers
import torch
from rich.console import Console

from burst_attention.bench.cluster import Cluster
from burst_attention.bench.job import Job
from burst_attention.bench.results import Results, Row
from burst_attention.bench.run import World, results_of

ENGINES = ("burst", "ring", "ulysses", "tensor", "tensor-sequence")
REFERENCE = "tensor-sequence"
PEERS = ("ring-flash-attn zigzag", "yunchang ulysses")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is. ``train`` and ``prefill``: (tokens, rounds); 0 rounds: once."""

    nodes: int = 8
    train: tuple[tuple[int, int], ...] = ((8192, 3), (16384, 3), (32768, 2))
    prefill: tuple[tuple[int, int], ...] = ((16384, 3), (32768, 2), (65536, 1), (131072, 0))
    rounds: int = 3
    worlds: tuple[int, ...] = (1, 2, 4, 8)
    fixed_len: int = 16384
    per_rank: int = 4096
    ablation_len: int = 8192
    peer_len: int = 8192
    peer_rounds: int = 9
    count_len: int = 2048
    train_steps: int = 60
    eval_len: int = 2048
    eval_sequences: int = 100
    long_len: int = 131072
    long_ranks: int = 4
    job: Job = field(default_factory=partial(Job, task="train", engines=ENGINES, seq_len=0))


QUICK = Scale(
    nodes=2,
    train=((256, 1), (512, 1)),
    rounds=1,
    prefill=((256, 1), (512, 1)),
    worlds=(1, 2),
    fixed_len=256,
    per_rank=128,
    ablation_len=256,
    peer_len=256,
    peer_rounds=1,
    count_len=256,
    train_steps=2,
    eval_len=256,
    eval_sequences=3,
    long_len=1024,
    long_ranks=2,
    job=Job(task="train", engines=ENGINES, seq_len=0, heads=4, kv_heads=4, head_dim=16),
)


class Paper:
    """A run over some of the tables."""

    def __init__(self, scale: Scale, out: Path, command: str, console: Console) -> None:
        self.scale, self.out, self.command, self.console = scale, out, command, console
        self.cluster = (scale.nodes, 1)
        self._links: list[float | None] | None = None

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')} {text}[/]", highlight=False)

    def write(self, name: str, text: str, results: Sequence[Results] = (), raw: Any = None) -> None:
        """``NAME.md``, and beside it the figures that it was made from as ``NAME.json``."""
        (self.out / f"{name}.md").write_text(text, "utf-8")
        if results:
            raw = [asdict(each.without_timelines()) for each in results]
        (self.out / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n", "utf-8")
        self.say(f"wrote {self.out / name}.md")

    def links(self, world: World) -> list[float | None]:
        """No limit; the rate at which the reference exchanges for half of its step at the greatest length; a quarter.

        Found from a step without a limit and its bytes, then corrected by a step at that rate.
        """
        if self._links is None:
            job = replace(self.scale.job, engines=(REFERENCE,), rounds=1)
            longest = [self.scale.train[-1][0]]
            (free,) = world.rows(job, longest)
            rate = 8 * free.bytes_wire / free.median
            (limited,) = world.rows(job, longest, [rate])
            rate = max(rate * (limited.median - free.median) / free.median, 1e6)
            self._links = [None, rate, rate / 4]
            self.say(f"links: {rate / 1e6:.1f} and {rate / 4e6:.1f} Mbit/s")
        return self._links

    def results(self, job: Job, rows: Sequence[Row], cluster: tuple[int, int] | None) -> Results:
        return results_of(job, rows, command=self.command, cluster=cluster)

    def training(self) -> None:
        """Tables 1, 3 and 4: time, memory and bytes of a training step."""
        job, lens = self.scale.job, [length for length, _ in self.scale.train]
        with World.of(self.scale.nodes, self.cluster, say=self.say) as world:
            links = self.links(world)
            rows = [
                row
                for length, rounds in self.scale.train
                for row in world.rows(replace(job, rounds=rounds), [length], links)
            ]
            # Gloo's reduce-scatter sends twice what it needs to: on links faster by that, what a better one would do.
            faster = [tables.MADE_UP * link for link in links if link is not None]
            rows += world.rows(replace(job, engines=(REFERENCE,), rounds=1), lens[-1:], faster)
            results = self.results(job, rows, self.cluster)
        with World.of(1, say=self.say) as world:
            alone = self.results(job, world.rows(replace(job, engines=("single",)), lens), None)
        self.write("training", tables.training(results, alone), [results, alone])
        self.write("memory", tables.memory(results, alone), [results, alone])
        size = (self.scale.nodes, self.scale.count_len, 8, 128)
        counted = peers.compare(*size, 0)
        self.write("bytes", tables.sent(results, counted, size), raw=counted)

    def prefill(self) -> None:
        """Table 2: the first token's latency."""
        job = replace(self.scale.job, task="prefill")
        with World.of(self.scale.nodes, self.cluster, say=self.say) as world:
            middle = self.links(world)[1]
            rows = [
                row
                for length, rounds in self.scale.prefill
                for row in world.rows(replace(job, rounds=rounds), [length], [middle])
            ]
        results = self.results(job, rows, self.cluster)
        self.write("prefill", tables.prefill(results), [results])

    def perplexity(self) -> None:
        """Table 5: every engine on one trained model."""
        scale = self.scale
        with tempfile.TemporaryDirectory(prefix="burst-paper-") as folder:
            told = Path(folder) / "eval.json"
            sizes = f"--seq-len {scale.eval_len} --ranks 2 --device cpu --data stdlib --held-out 0.05"
            train = f"train {sizes} --steps {scale.train_steps} --held-out-sequences 1 --out {folder}/run"
            evaluate = f"eval {sizes} --model {folder}/run/model --sequences {scale.eval_sequences} --json {told}"
            for command in (train, evaluate):
                self.say(f"burst {command}")
                burst = [sys.executable, "-m", "burst_attention.cli"]
                subprocess.run([*burst, *shlex.split(command)], check=True, stdout=subprocess.DEVNULL)
            raw = json.loads(told.read_text())
        commands = [f"burst {text}".replace(folder, "runs/paper") for text in (train, evaluate)]
        self.write("perplexity", tables.perplexity(raw, commands, self.command), raw=raw)

    def ablation(self) -> None:
        """Table 6: what each part is worth."""
        scale = self.scale
        with World.of(scale.nodes, self.cluster, say=self.say) as world:
            middle = self.links(world)[1]
        with Cluster(*self.cluster, rate=middle) as made:
            self.say(f"ablation at {scale.ablation_len:,} tokens")
            rows = ablation.compare(
                scale.nodes,
                seq_len=scale.ablation_len,
                heads=scale.job.heads,
                head_dim=scale.job.head_dim,
                dtype=torch.bfloat16,
                rounds=scale.rounds,
                entries=made.entries(),
            )
        self.write("ablation", tables.ablation(rows, scale, middle, self.command), raw=rows)

    def scaling(self) -> None:
        """Table 7: more ranks, at a fixed length and at a fixed length per rank."""
        job = replace(self.scale.job, rounds=1)
        strong: list[Row] = []
        weak: list[Row] = []
        for n in self.scale.worlds:
            engines = (*ENGINES, "single") if n == 1 else ENGINES
            with World.of(n, say=self.say) as world:
                strong += world.rows(replace(job, engines=engines), [self.scale.fixed_len])
                weak += world.rows(replace(job, engines=engines), [self.scale.per_rank * n])
        results = [self.results(job, rows, None) for rows in (strong, weak)]
        self.write("scaling", tables.scaling(*results), results)

    def long(self) -> None:
        """128K tokens through one attention layer, forward and backward."""
        job = replace(self.scale.job, task="attention", engines=("burst",), heads=4, kv_heads=4, head_dim=64, rounds=0)
        with World.of(self.scale.long_ranks, say=self.say) as world:
            results = self.results(job, world.rows(job, [self.scale.long_len]), None)
            imports = sum(world.baselines)
        self.write("long", tables.long(results, imports), [results])

    def peers(self) -> None:
        """Ours against the packages themselves."""
        scale = self.scale
        self.say(f"peers at {scale.peer_len:,} tokens")
        size = (2, scale.peer_len, 8, 128)
        rows = peers.compare(*size, scale.peer_rounds, names=PEERS)
        self.write("peers", tables.peers(rows, size, self.command), raw=rows)


SECTIONS: dict[str, Callable[[Paper], None]] = {
    "training": Paper.training,
    "prefill": Paper.prefill,
    "perplexity": Paper.perplexity,
    "ablation": Paper.ablation,
    "scaling": Paper.scaling,
    "long": Paper.long,
    "peers": Paper.peers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks in namespaces have no host names, and would say so
    began = time.monotonic()
    command = "python benchmarks/paper.py" + " --quick" * a.quick
    paper = Paper(QUICK if a.quick else Scale(), a.out, command, Console())
    for name in a.only:
        SECTIONS[name](paper)
    paper.say(f"{len(a.only)} sections in {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
