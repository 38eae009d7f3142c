"""``burst bench``: the engines side by side, on local ranks or on an emulated cluster."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_attention.launch import local as launch
from burst_attention.testing import WorkerError
from burst_attention.training.claim import Marker, claimed
from burst_attention.training.flags import MOST_RANKS, check_counts, check_lists, check_names, check_ranks

from .cluster import ClusterError, parse_cluster, parse_rate
from .report.figures import bytes_text, link_text, number_text
from .results import TASKS, Results, Row

COMMAND = "burst bench"
NEEDED = ("transformers", "matplotlib", "plotly")
WRITES = ("results.json", "report.html", "*.png")
EVERY = ("burst", "ring", "ring:contiguous", "ulysses", "tensor", "tensor-sequence", "single")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Time, bytes, memory and error of every engine; the engines take turns, and a wrong one gets no figures.

    Runs on this machine's CPU over gloo. Writes results.json, report.html and pictures to --out.
    """

    engines: tuple[str, ...] = EVERY
    """burst, ring, ulysses, tensor, tensor-sequence or single, with :LAYOUT where it is not the engine's best."""
    seq_lens: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens of the sequence, over all ranks."""
    worlds: tuple[int, ...] | None = None
    """Numbers of local ranks, 2 if not given; not with --cluster."""
    cluster: str | None = None
    """NODESxRANKS, such as 8x1: a network namespace for each node, joined by a bridge. Needs root and iproute2."""
    link: tuple[str, ...] = ("none",)
    """Rates of the nodes' links, such as 100mbit; none for no limit. Needs --cluster."""
    rounds: int = 3
    """Timed calls of each engine."""
    layers: int = 1
    heads: int = 8
    kv_heads: int | None = None
    """--heads if not given."""
    head_dim: int = 32
    vocabulary: int = 512
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "bfloat16"
    timeline: bool = True
    """Also draw what each rank does in one more call."""
    out: str = "runs/bench"
    overwrite: bool = False
    """Replace the results that --out already holds."""

    def check(self) -> None:
        """Raise ValueError for what can't be."""
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} not installed: pip install -e '.[train,bench]' in the checkout")
        from .job import engine_of

        counts = {"rounds": self.rounds, "layers": self.layers, "heads": self.heads, "head_dim": self.head_dim}
        counts |= {"kv_heads": self.own_kv_heads, "vocabulary": self.vocabulary}
        check_counts(counts)
        check_names({"--out": self.out})
        lists = {"engines": self.engines, "seq_lens": self.seq_lens, "worlds": self.local_worlds, "link": self.link}
        check_lists(lists)
        for length in self.seq_lens:
            check_counts({"seq_lens": length})
        for world in self.local_worlds:
            check_ranks("worlds", world)
        if self.heads % self.own_kv_heads:
            raise ValueError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        for spec in self.engines:
            try:
                engine_of(spec)
            except ValueError as error:
                raise ValueError(f"--engines {spec!r}: {error}") from None
        if self.cluster is None and any(rate is not None for rate in self.rates()):
            raise ValueError(
                f"--link {' '.join(self.link)} needs --cluster NODESxRANKS: this machine's own is not touched"
            )
        if self.cluster is not None and self.worlds is not None:
            raise ValueError(
                f"--worlds can't be given with --cluster {self.cluster}, which says how many ranks there are"
            )
        shortest, most = min(self.seq_lens), max(self.ranks())
        if self.cluster is not None and most > MOST_RANKS:
            raise ValueError(f"--cluster {self.cluster} has {most} ranks; give at most {MOST_RANKS:,}")
        if shortest < most:
            raise ValueError(f"--seq-lens {shortest} is shorter than the {most} ranks: every rank needs a token")

    @property
    def own_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def local_worlds(self) -> tuple[int, ...]:
        return (2,) if self.worlds is None else self.worlds

    def rates(self) -> list[float | None]:
        """``--link`` in bits per second."""
        return [parse_rate(text) for text in self.link]

    def ranks(self) -> list[int]:
        """How many there will be."""
        if self.cluster is None:
            return list(self.local_worlds)
        nodes, each = parse_cluster(self.cluster)
        return [nodes * each]


def main(arguments: list[str]) -> int:
    """Run ``burst bench``; returns the exit status: 1 if an engine was wrong or a rank failed, 2 if none could run."""
    if not arguments or arguments[0] not in TASKS:
        given = arguments[0] if arguments else "nothing"
        if given in ("-h", "--help"):
            Console().print(
                f"usage: {COMMAND} {{{','.join(TASKS)}}} [OPTIONS]; --help after the task lists the options"
            )
            return 0
        return launch.refuse(COMMAND, ValueError(f"give what to compare, {', '.join(TASKS)}, not {given}"))
    task, rest = arguments[0], launch.spelled_out(arguments[1:])
    parsed = tyro.cli(Arguments, prog=f"{COMMAND} {task}", args=rest)
    try:
        if launch.started_by_torchrun():
            raise ValueError("starts its own ranks; run it without torchrun")
        parsed.check()
        with claimed(parsed.out, by=COMMAND, overwrite=parsed.overwrite, writes=WRITES) as marker:
            results = _run(task, parsed, shlex.join(["burst", "bench", *arguments]), marker)
    except WorkerError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{COMMAND}:[/] {escape(str(error))}", highlight=False)
        return 1
    except (ValueError, ClusterError) as error:
        return launch.refuse(COMMAND, error)
    except KeyboardInterrupt:
        return 130
    if all(row.refused for row in results.rows):
        return 2
    return 0 if all(row.passed or row.refused for row in results.rows) else 1


def _run(task: str, arguments: Arguments, command: str, marker: Marker) -> Results:
    from .job import Job
    from .report.write import write_report
    from .run import Bench

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has no width of its own
    job = Job(
        task=task,
        engines=arguments.engines,
        seq_len=0,
        rounds=arguments.rounds,
        timeline=arguments.timeline,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.own_kv_heads,
        head_dim=arguments.head_dim,
        vocabulary=arguments.vocabulary,
        dtype=arguments.dtype,
    )
    bench = Bench(
        job=job,
        seq_lens=arguments.seq_lens,
        worlds=arguments.local_worlds,
        cluster=None if arguments.cluster is None else parse_cluster(arguments.cluster),
        links=arguments.rates(),
    )
    results = bench.run(command=command, say=lambda text: console.print(f"[dim]{text}[/]", highlight=False))
    _show(results, console)
    marker.remove_old()
    marker.add("results.json")
    results.write(marker.folder / "results.json")
    written = write_report(results, marker.folder)
    marker.add(*(path.name for path in written))
    console.print(
        f"results.json, {', '.join(path.name for path in written[:1])} and pictures: [bold]{escape(arguments.out)}[/]"
    )
    return results


def _show(results: Results, console: Console) -> None:
    columns = ("engine", "tokens", "ranks", "link", "s", "tokens/s", "GFLOP/s", "sent", "predicted", "on the wire")
    title = f"{results.task}, {results.setting['dtype']}; median and spread of the rounds, bytes of each rank"
    table = Table(*columns, "uncounted", "peak memory", "error", title=title)
    for row in results.rows:
        if not row.refused:
            link = link_text(row.link)
            table.add_row(row.engine, f"{row.seq_len:,}", str(row.world), link, *_figures(row))
    console.print(table)
    for told in dict.fromkeys(f"{row.engine}, {row.world} ranks: {row.refused}" for row in results.rows if row.refused):
        console.print(f"left out: {escape(told)}", highlight=False)


def _figures(row: Row) -> list[str]:
    error = f"{row.error:.1e}"
    if not row.passed:
        return ["[red]WRONG[/]", *[""] * 7, f"{error} > {row.bound:.1e}"]
    sizes = (row.bytes_counted, row.bytes_predicted, row.bytes_wire, row.bytes_uncounted, row.peak_memory)
    speeds = (number_text(row.tokens_per_second), number_text((row.flops_per_second or 0.0) / 1e9))
    seconds = f"{row.median:.3g} ({min(row.seconds):.3g}-{max(row.seconds):.3g})"
    return [seconds, *speeds, *map(bytes_text, sizes), error]
