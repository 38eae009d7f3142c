"""The sections of the paper's tables: each measures, and returns the figures for its JSON."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from burst_attention.kernels.aten_ops import has_bf16_products

from ..ablation import compare as ablation
from ..cluster import Cluster
from ..harness.results import Row
from ..harness.run import World, setting
from ..harness.workload import Workload
from ..peers import compare as peers
from .markdown import GLOO_WASTE, PUBLISHED, REFERENCE, Page
from .targets import limits

ENGINES = ("burst", "ring", "ulysses", "tensor", "tensor-sequence")
SCALED = (*ENGINES, "usp", PUBLISHED)
HALF, TRIES = 0.03, 3  # allowed distance of the reference's share from a half; most corrections of its link rate
PEERS = ("ring-flash-attn zigzag", "yunchang ulysses")


def model(**sizes: int) -> Workload:
    """Return the workload of a small model; in fp32 on CPUs whose linear layers are several times slower in bf16."""
    dtype = "bfloat16" if has_bf16_products() else "float32"
    return Workload(task="train", engines=ENGINES, seq_len=0, dtype=dtype, **sizes)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of all sections.

    Steps at the slow rate take long and vary least, so they get fewer rounds.

    Attributes:
        train: (tokens, rounds, rounds at the slow rate) of each length.
        prefill: (tokens, rounds) of each length.
    """

    nodes: int = 8
    train: tuple[tuple[int, int, int], ...] = ((8192, 2, 1), (16384, 1, 1), (32768, 3, 2))
    prefill: tuple[tuple[int, int], ...] = ((16384, 2), (32768, 1), (65536, 1), (131072, 1))
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
    workload: Workload = field(default_factory=model)

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the engines of the training table.

        With as many key-value heads as nodes, the best USP is Ulysses. So USP here has rings of two nodes.
        """
        return (*ENGINES, f"usp:ulysses_degree={max(1, self.nodes // 2)}", PUBLISHED)

    def at_most(self, rounds: int) -> Scale:
        """Return the same sizes with at most ``rounds`` rounds of everything."""
        return replace(
            self,
            train=tuple((length, min(n, rounds), min(slow, rounds)) for length, n, slow in self.train),
            prefill=tuple((length, min(n, rounds)) for length, n in self.prefill),
            rounds=min(self.rounds, rounds),
            peer_rounds=min(self.peer_rounds, 3 * rounds),
        )


QUICK = Scale(
    nodes=2,
    train=((256, 1, 1), (512, 1, 1)),
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
    workload=model(heads=4, kv_heads=4, head_dim=16),
)


class Paper:
    """A run over some sections.

    Args:
        scale: Sizes of the sections.
        out: Folder with the figures of sections that ran before.
        console: Console for progress messages.
    """

    def __init__(self, scale: Scale, out: Path, console: Console) -> None:
        self.scale, self.out, self.console = scale, out, console
        self.cluster = (scale.nodes, 1)

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')} {text}[/]", highlight=False)

    def links(self, world: World) -> list[float | None]:
        """Return three link rates: no limit, the middle rate, and a quarter of the middle rate.

        They are those of the training table in this folder, if it exists.
        """
        links = limits(self.trained())
        return self.find_links(world) if None in links else [None, *links]

    def find_links(self, world: World) -> list[float | None]:
        """Find the middle rate, at which the reference exchanges for half of its step at the greatest length.

        The first estimate comes from a step without a limit and its bytes. Pairs of steps then correct it, until the
        share is within :data:`HALF` of a half.
        """
        workload = replace(self.scale.workload, engines=(REFERENCE,), rounds=1, resources=False)
        longest = [self.scale.train[-1][0]]
        (free,) = world.rows(workload, longest)
        rate = 8 * free.bytes_wire / free.median
        for _ in range(TRIES):
            free, limited = world.rows(workload, longest, [None, rate])
            share = 1 - free.median / limited.median
            self.say(f"link {rate / 1e6:.1f} Mbit/s: {100 * share:.0f} % of {REFERENCE}'s step is exchange")
            if abs(share - 0.5) <= HALF:
                break
            # Limit the correction, because two steps on a busy machine are noisy.
            rate *= min(max((limited.median - free.median) / free.median, 0.5), 2.0)
        return [None, rate, rate / 4]

    @contextmanager
    def world(self, ranks: int | None = None) -> Iterator[World]:
        """Start ``ranks`` local ranks, or the cluster's for None, and measure them and their links first."""
        cluster = self.cluster if ranks is None else None
        with World.of(ranks or self.scale.nodes, cluster, calibrate=True, say=self.say) as world:
            yield world

    def results(self, workload: Workload, rows: list[Row], cluster: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return the rows of one task as :meth:`Page.results` reads them, without the large timelines."""
        content = [{name: value for name, value in vars(row).items() if name != "timeline"} for row in rows]
        return {"task": workload.task, "setting": setting(workload, cluster, by_rates=True), "rows": content}

    def alone(self, workload: Workload) -> dict[str, Any]:
        """Measure the training table's lengths on one rank with all cores."""
        with self.world(1) as world:
            at = replace(workload, engines=("single",))
            return self.results(workload, world.rows(at, [length for length, *_ in self.scale.train]))

    def training(self) -> dict[str, Any]:
        """Table 1: time and bytes of a training step."""
        workload = replace(self.scale.workload, engines=self.scale.trained, resources=False)
        with self.world() as world:
            links = self.find_links(world)
            rows = [
                row
                for length, rounds, slow_rounds in self.scale.train
                for some, at in ((rounds, links[:-1]), (slow_rounds, links[-1:]))
                for row in world.rows(replace(workload, rounds=some), [length], at)
            ]
            # Gloo's reduce-scatter sends twice the bytes it needs. Faster links show the time of a better one.
            faster = [GLOO_WASTE * link for link in links if link is not None]
            longest = [self.scale.train[-1][0]]
            rows += world.rows(replace(workload, engines=(REFERENCE,), rounds=1), longest, faster)
        results = self.results(workload, rows, self.cluster)
        return {"results": results, "alone": self.alone(replace(workload, rounds=1))}

    def memory(self) -> dict[str, Any]:
        """Tables 3 and 4: memory and bytes of a training step, each engine alone."""
        workload = replace(self.scale.workload, engines=self.scale.trained, rounds=0)
        with self.world() as world:
            rows = world.rows(workload, [length for length, *_ in self.scale.train])
        results, alone = self.results(workload, rows, self.cluster), self.alone(workload)
        packages = self.beside_packages(self.scale.nodes, self.scale.count_len, rounds=0)
        counted = {"counted": packages["rows"], "size": packages["size"]}
        return {"results": results, "alone": alone, **counted, "wire": self.wire()}

    def trained(self) -> list[Row]:
        """Return the training table's rows in this folder; none if it does not exist."""
        known = self.out / "training.json"
        return Page.read(known).results("results").rows if known.exists() else []

    def wire(self) -> list[tuple[str, int, float]]:
        """Return (engine, tokens, bytes on the wire) of the training table's steps with unlimited links."""
        free = (row for row in self.trained() if row.link is None and row.bytes_wire)
        return [(row.engine, row.seq_len, row.bytes_wire) for row in free]

    def prefill(self) -> dict[str, Any]:
        """Table 2: latency of the first token."""
        workload = replace(self.scale.workload, task="prefill", resources=False)
        with self.world() as world:
            middle = self.links(world)[1]
            rows = [
                row
                for length, rounds in self.scale.prefill
                for row in world.rows(replace(workload, rounds=rounds), [length], [middle])
            ]
        return {"results": self.results(workload, rows, self.cluster)}

    def perplexity(self) -> dict[str, Any]:
        """Table 5: every engine on one trained model."""
        scale = self.scale
        with tempfile.TemporaryDirectory(prefix="burst-paper-") as folder:
            evaluated = Path(folder) / "eval.json"
            sizes = f"--seq-len {scale.eval_len} --ranks 2 --device cpu --data stdlib --held-out 0.05"
            train = f"train {sizes} --steps {scale.train_steps} --held-out-sequences 1 --out {folder}/run"
            evaluate = f"eval {sizes} --model {folder}/run/model --sequences {scale.eval_sequences} --json {evaluated}"
            for command in (train, evaluate):
                self.say(f"burst {command}")
                burst = [sys.executable, "-m", "burst_attention.cli"]
                subprocess.run([*burst, *shlex.split(command)], check=True, stdout=subprocess.DEVNULL)
            raw = json.loads(evaluated.read_text())
        commands = [f"burst {text}".replace(folder, "runs/paper") for text in (train, evaluate)]
        return {"engines": raw["results"], "commands": commands}

    def ablation(self) -> dict[str, Any]:
        """Table 6: the effect of each feature."""
        scale, workload = self.scale, self.scale.workload
        with self.world() as world:
            middle = self.links(world)[1]
        with Cluster(*self.cluster, rate=middle) as made:
            self.say(f"ablation at {scale.ablation_len:,} tokens")
            sizes = {"seq_len": scale.ablation_len, "heads": workload.heads, "head_dim": workload.head_dim}
            at = Workload(**sizes, kv_heads=workload.heads)
            network = {"entries": made.entries(), "calibrate": True, "link": middle}
            rows = ablation.compare(scale.nodes, at, scale.rounds, **network)
        return {"rows": rows, "sizes": {**sizes, "ranks": scale.nodes, "link": middle}}

    def scaling(self) -> dict[str, Any]:
        """Table 7: more ranks, at a fixed length and at a fixed length per rank."""
        base = replace(self.scale.workload, rounds=1)
        strong: list[Row] = []
        weak: list[Row] = []
        for n in self.scale.worlds:
            workload = replace(base, engines=(*SCALED, "single") if n == 1 else SCALED)
            with self.world(n) as world:
                strong += world.rows(workload, [self.scale.fixed_len])
                weak += world.rows(workload, [self.scale.per_rank * n])
        return {"strong": self.results(base, strong), "weak": self.results(base, weak)}

    def long(self) -> dict[str, Any]:
        """128K tokens through one attention layer, forward and backward."""
        sizes = {"heads": 4, "kv_heads": 4, "head_dim": 64}
        at = {"task": "attention", "engines": ("burst",), "rounds": 0, "dtype": "bfloat16"}
        workload = replace(self.scale.workload, **at, **sizes)
        with self.world(self.scale.long_ranks) as world:
            return {"results": self.results(workload, world.rows(workload, [self.scale.long_len]))}

    def peers(self) -> dict[str, Any]:
        """Our attention against the other packages."""
        return self.beside_packages(2, self.scale.peer_len, rounds=self.scale.peer_rounds, names=PEERS)

    def beside_packages(
        self, world: int, seq_len: int, *, rounds: int, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        self.say(f"peers at {seq_len:,} tokens")
        workload = Workload(seq_len=seq_len, heads=8, kv_heads=8, head_dim=128)
        rows = peers.compare(world, workload, rounds, names=names)
        return {"rows": rows, "size": (world, seq_len, workload.heads, workload.head_dim)}


NAMES = ("training", "memory", "prefill", "perplexity", "ablation", "scaling", "long", "peers")
SECTIONS: dict[str, Callable[[Paper], dict[str, Any]]] = {name: getattr(Paper, name) for name in NAMES}
