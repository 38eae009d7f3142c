"""``burst bench``: compare strategies on local ranks or on an emulated cluster, or run another measurement."""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from burst_attention.cli.check import DtypeName
from burst_attention.cli.flags import MOST_RANKS, Count, Name, Ranks, check_settings, distinct
from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.launch import local as launch
from burst_attention.testing import WorkerError
from burst_train.run.lock import RunFolderLock, claimed

from .cluster import ClusterError, parse_cluster, parse_rate
from .harness.results import TASKS, Results, Row

EVERY = ("auto", "burst", "ring", "zigzag-ring", "ulysses", "usp", "tensor", "tensor-sequence")
CLUSTER = "python -m burst_bench.cluster"
# Measurements next to the tasks: each is the main of a module.
PROGRAMS: Mapping[str, str] = {
    "compiled": "claims.compiled",
    "cost-model": "claims.cost_model",
    "generate": "claims.generation",
    "gpu": "claims.gpu",
    "hybrid": "claims.hybrid",
    "indexed": "claims.indexed",
    "kernels": "claims.kernels",
    "longest": "claims.longest",
    "memory": "claims.memory",
    "packing": "claims.packing",
    "peers": "peers.compare",
    "pretrained": "claims.pretrained",
    "step": "claims.step",
}
WRITES = ("results.json", "report.html")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure time, bytes, memory and error of each strategy. The strategies take turns; a wrong one gets no figures.

    Runs on this machine's CPU over gloo. Writes results.json and report.html to --out.
    """

    strategies: Annotated[tuple[str, ...], distinct] = EVERY
    """Strategies, as for burst train. STRATEGY/tp:N adds tensor parallelism over N neighbours (train, prefill).
    single runs on one rank only: give --worlds 1."""
    seq_lens: Annotated[tuple[Count, ...], distinct] = (1024, 2048, 4096)
    """Tokens of the whole sequence."""
    worlds: Annotated[tuple[Ranks, ...], distinct] | None = None
    """Numbers of local ranks; 2 if not given."""
    rounds: Count = 3
    """Timed calls of each strategy."""
    layers: Count = 1
    heads: Count = 8
    kv_heads: Count | None = None
    """Key-value heads; --heads if not given."""
    head_dim: Count = 32
    vocabulary: Count = 512
    dtype: DtypeName = "bfloat16"
    calibrate: bool = False
    """First measure ranks and links, and let burst plan with these rates; otherwise with burst calibrate's file or a
    preset."""
    timeline: bool = True
    """Also run one more call, and draw a timeline of each rank."""
    out: Name = "runs/bench"
    overwrite: bool = False
    """Replace results that are already in --out."""

    def check(self) -> None:
        """Check the arguments.

        ValueError: An argument, or a combination of them, is invalid.
        """
        from .harness.subjects import shared

        check_settings(self)
        if self.heads % self.own_kv_heads:
            raise ValueError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        for spec in self.strategies:
            try:
                shared(spec)
            except ValueError as error:
                raise ValueError(f"--strategies {spec!r}: {error}") from None
        shortest, most = min(self.seq_lens), max(self.ranks())
        if shortest < most:
            raise ValueError(
                f"--seq-lens {shortest} is shorter than the {most} ranks; give at least one token per rank"
            )

    @property
    def own_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def ranks(self) -> tuple[int, ...]:
        """Return the numbers of ranks to run."""
        return (2,) if self.worlds is None else self.worlds

    @property
    def nodes(self) -> tuple[int, int] | None:
        """Return (nodes, ranks per node) of the emulated cluster; None without one."""
        return None

    def rates(self) -> list[float | None]:
        """Return the rates of the nodes' links in bits per second."""
        return [None]


@dataclass(frozen=True, kw_only=True)
class ClusterArguments(Arguments):
    __doc__ = f"{Arguments.__doc__}\n\nThe nodes are network namespaces connected by a bridge. Needs root and iproute2."
    cluster: str = "8x1"
    """NODESxRANKS: number of nodes and ranks per node. It replaces --worlds."""
    link: Annotated[tuple[str, ...], distinct] = ("none",)
    """Rates of the nodes' links, such as 100mbit; none: no limit."""
    calibrate: bool = True
    """First measure ranks and links, and let burst plan with these rates, separately for each link rate."""

    def check(self) -> None:
        if self.worlds is not None:
            raise ValueError(
                f"--worlds can't be given with --cluster {self.cluster}, which sets the number of ranks; leave it out"
            )
        check_settings(self)
        self.rates()
        if max(self.ranks()) > MOST_RANKS:
            raise ValueError(f"--cluster {self.cluster} has {max(self.ranks())} ranks; give at most {MOST_RANKS:,}")
        super().check()

    def ranks(self) -> tuple[int, ...]:
        return (math.prod(self.nodes),)

    @property
    def nodes(self) -> tuple[int, int]:
        return parse_cluster(self.cluster)

    def rates(self) -> list[float | None]:
        return [parse_rate(text) for text in self.link]


def main(arguments: list[str]) -> int:
    """Run ``burst bench`` and return its exit status.

    The status is 1 if a strategy was wrong or a rank failed, and 2 if no strategy could run.
    """
    if arguments and arguments[0] in PROGRAMS:
        import_module(f"{__package__}.{PROGRAMS[arguments[0]]}").main(arguments[1:])
        return 0
    flags = {given.partition("=")[0] for given in arguments}
    if "--cluster" in flags or "--link" in flags:
        what = "--cluster is an option" if "--cluster" in flags else "--link needs --cluster, an option"
        return launch.print_error(
            "burst bench", ValueError(f"{what} of `{CLUSTER}`; burst bench never changes this machine's network")
        )
    return compare("burst bench", Arguments, arguments)


def usage(name: str) -> str:
    """Return the help of ``burst bench``, or of the command for emulated clusters."""
    text = f"usage: {name} {{{','.join(TASKS)}}} [OPTIONS]"
    if name == CLUSTER:
        return text
    text += f"""

Compare strategies in one attention call, a training step or a prefill.
{CLUSTER} does the same on an emulated cluster.

Other measurements:
"""
    text += "".join(f"  {program:11} {summary(module)}\n" for program, module in PROGRAMS.items())
    return f"{text}\nGive --help after a name for its options."


def summary(module: str) -> str:
    """Return the first line of a module's docstring, without importing it."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]


def compare(name: str, kind: type[Arguments], arguments: list[str]) -> int:
    """Run the command ``name`` with arguments of type ``kind``, as :func:`main` does."""
    if not arguments or arguments[0] not in TASKS:
        given = arguments[0] if arguments else "nothing"
        if given in ("-h", "--help"):
            Console(soft_wrap=True).print(usage(name), highlight=False, markup=False)
            return 0
        known = ", ".join(TASKS if kind is ClusterArguments else (*TASKS, *PROGRAMS))
        return launch.print_error(name, ValueError(f"the task is {given}; give one of {known}"))
    task, rest = arguments[0], arguments[1:]
    parsed = tyro.cli(kind, prog=f"{name} {task}", args=rest)
    try:
        if launch.started_by_torchrun():
            raise ValueError("this command starts its own ranks; run it without torchrun")
        parsed.check()
        with claimed(parsed.out, by=name, overwrite=parsed.overwrite, writes=WRITES) as marker:
            results = _run(task, parsed, f"{name} {shlex.join(arguments)}", marker)
    except WorkerError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{name}:[/] {escape(str(error))}", highlight=False)
        return 1
    except (ValueError, ClusterError) as error:
        return launch.print_error(name, error)
    except KeyboardInterrupt:
        return 130
    if all(row.refused for row in results.rows):
        return 2
    return 0 if all(row.passed or row.refused for row in results.rows) else 1


def _run(task: str, arguments: Arguments, command: str, marker: RunFolderLock) -> Results:
    from .harness.run import World, results_of
    from .harness.workload import Workload
    from .report import page

    console = console_of_tables()
    shared = ("strategies", "rounds", "timeline", "layers", "heads", "head_dim", "vocabulary", "dtype")
    sizes = {name: getattr(arguments, name) for name in shared}
    workload = Workload(task=task, seq_len=0, kv_heads=arguments.own_kv_heads, **sizes)

    def say(text: str) -> None:
        console.print(f"[dim]{text}[/]", highlight=False)

    rows: list[Row] = []
    for ranks in arguments.ranks():
        with World.of(ranks, arguments.nodes, calibrate=arguments.calibrate, say=say) as world:
            rows += world.rows(workload, arguments.seq_lens, arguments.rates())
    described = {"cluster": arguments.nodes, "by_rates": arguments.calibrate}
    results = results_of(workload, rows, command=command, **described)
    _show(results, console)
    marker.remove_old()
    marker.add(*WRITES)
    results.write(marker.folder / "results.json")
    (marker.folder / "report.html").write_text(page(results), "utf-8")
    console.print(f"results.json and report.html: [bold]{escape(arguments.out)}[/]")
    return results


def _show(results: Results, console: Console) -> None:
    from .report import CHECK, PLACE, cells, measured

    right = [row for row in results.rows if row.passed]
    # A terminal is narrow; the page shows all columns.
    shown = (c for c in measured(results) if c.header not in ("min to max s", "bytes uncounted"))
    columns = tuple(c for c in shown if any(c.text(row) != "-" for row in right))
    every = (*PLACE, *columns, *CHECK)
    headers = [column.header for column in every]
    rows = []
    for row in results.rows:
        if not row.refused:
            texts = (part for text, width in cells(row, columns) for part in (text, *[""] * (width - 1)))
            styled = texts if row.passed else (f"[red]{text}[/]" for text in texts)
            rows.append(dict(zip(headers, styled, strict=True)))
    title = f"{results.task}, {results.setting['dtype']}; median of the rounds, bytes of each rank"
    legend = {column.header: column.meaning for column in every if column.meaning}
    print_table(console, rows, title=title, legend=legend, keys=len(PLACE))
    refused = (f"{row.strategy}, {row.world} ranks: {row.refused}" for row in results.rows if row.refused)
    for reason in dict.fromkeys(refused):
        console.print(f"left out: {escape(reason)}", soft_wrap=True)
