"""``burst check``: compare distributed attention and its gradients with fp64 on the available ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
import tyro
from rich.console import Console

from ..kernels import KERNELS
from ..kernels.contract import DTYPES
from ..launch import local as launch
from ..plan.assignment import CIRCULATIONS
from ..plan.layout import LAYOUTS
from ..plan.mask import Mask
from ..plan.route import ROUTES
from ..testing import Case, Report, check
from .flags import NUMBERS, DeviceOrAuto, NonNegativeInt, Ranks, Seconds, check_settings, distinct, require, whole
from .tables import print_table

COMMAND = "burst check"
COLUMNS = ("mask", "layout", "dtype", "circulate", "worst", "error", "bound", "")
LEGEND = {
    "circulate": "what moves between ranks",
    "worst": "the tensor and the rank nearest to their bound",
    "error": "of this tensor against the fp64 oracle (of lse the largest, of others the relative L2)",
    "bound": "the largest error that passes",
}
Size = Annotated[int, whole(most=65_536)]  # the oracle's memory grows with the square of the tokens
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda s: Mask(causal=False),
    "causal": lambda s: Mask(),
    "window": lambda s: Mask(window=max(1, s // 7)),
    "documents": lambda s: Mask(cu_seqlens=[0, s // 9, s // 9, s // 2, s]),
    "prefix": lambda s: Mask(prefix=s // 5),
    "together": lambda s: Mask(together=[-1] * (s // 5) + [0] * (s // 2) + [-1] * (s - s // 5 - s // 2)),
    "blocks": lambda s: Mask(blocks=_every_second(-(-s // 16)), block=16),
}


def _every_second(count: int) -> torch.Tensor:
    """Return a chessboard of blocks, bool [count, count]."""
    at = torch.arange(count)
    return (at[:, None] + at) % 2 == 0


if TYPE_CHECKING:
    MaskName: TypeAlias = str
    LayoutName: TypeAlias = str
    DtypeName: TypeAlias = str
    CirculateName: TypeAlias = str
    RouteName: TypeAlias = str
else:
    MaskName = Literal[*MASKS]
    LayoutName = Literal[*LAYOUTS]
    DtypeName = Literal[*(str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    CirculateName = Literal[*CIRCULATIONS, "auto"]
    RouteName = Literal["auto", *ROUTES]


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Compare distributed attention with a dense fp64 oracle on every rank: out, lse, dq, dk, dv.

    It runs every combination of the listed masks, layouts, dtypes and circulated tensors. Without torchrun, it
    launches local workers. Under torchrun it uses torchrun's ranks:
    torchrun --nproc-per-node 2 -m burst_attention.cli check [OPTIONS].
    """

    ranks: Ranks | None = None
    """Number of local workers. Default: one per GPU, or one per core without GPUs."""
    seq_len: Size = 512
    """Sequence length in tokens. The oracle's memory grows with its square."""
    masks: Annotated[tuple[MaskName, ...], distinct] = ("causal", "documents")
    layouts: Annotated[tuple[LayoutName, ...], distinct] = tuple(LAYOUTS)
    dtypes: Annotated[tuple[DtypeName, ...], distinct] = ("float64", "bfloat16")
    circulate: Annotated[tuple[CirculateName, ...], distinct] = tuple(CIRCULATIONS)
    route: RouteName = "auto"
    kernel: str = "auto"
    """A name from burst_attention.kernels.KERNELS, or auto."""
    q_heads: Size = 4
    kv_heads: Size = 2
    head_dim: Size = 32
    v_head_dim: Size | None = None
    seed: NonNegativeInt = 0
    device: DeviceOrAuto = "auto"
    timeout: Seconds = 60.0
    """Seconds before a pending exchange counts as failed."""
    verbose: bool = False
    """Print a row for every case, not only for the worst of each dtype."""

    def check(self) -> None:
        """Raise ValueError if a flag's value is invalid."""
        check_settings(self)
        multiple = f"must be a multiple of --kv-heads {self.kv_heads}"
        require(self.q_heads % self.kv_heads == 0, "q_heads", self.q_heads, multiple)
        halves = {"bfloat16", "float16"} & set(self.dtypes)
        if halves and (self.seq_len < 256 or min(self.head_dim, self.v_head_dim or self.head_dim) < 16):
            raise ValueError(
                f"--dtypes {' '.join(sorted(halves))} need --seq-len of at least 256 and head dims of at least 16: "
                f"the bound is PyTorch's own error in that dtype, which is unreliable on small tensors"
            )
        names = ("auto", *KERNELS)
        require(self.kernel in names, "kernel", self.kernel, f"is unknown; choose one of {', '.join(names)}")


def cases(arguments: CheckArguments, device: str) -> list[Case]:
    """Return one case for each combination of the listed options."""
    s = arguments.seq_len
    same = ("route", "kernel", "q_heads", "kv_heads", "head_dim", "v_head_dim", "seed")
    shape = {name: getattr(arguments, name) for name in same} | {"seqlen": s, "device": device}
    combinations = itertools.product(arguments.masks, arguments.layouts, arguments.dtypes, arguments.circulate)
    return [
        Case(mask=MASKS[mask](s), layout=layout, dtype=getattr(torch, dtype), circulate=circulate, **shape)
        for mask, layout, dtype, circulate in combinations
    ]


def main(arguments: list[str]) -> int:
    """Run ``burst check``; return the exit status: 0 if all cases pass, 1 if one fails, 2 for invalid arguments."""
    parsed = tyro.cli(CheckArguments, prog=COMMAND, args=arguments, registry=NUMBERS)
    return launch.start_checked(COMMAND, _check, parsed)


def _check(arguments: CheckArguments) -> None:
    from burst_attention.launch.join import join

    with join(device=arguments.device, timeout=arguments.timeout) as context:
        todo = cases(arguments, context.device.type)
        reports = [check(case, timeout=arguments.timeout) for case in todo]
        if context.rank == 0:
            _show(arguments, todo, reports)
    if not all(report.passed for report in reports):
        raise SystemExit(1)


def _show(arguments: CheckArguments, todo: list[Case], reports: list[Report]) -> None:
    """Print the worst case of each dtype and all that failed, or every case: the tensor furthest from its bound."""
    console, verbose = Console(highlight=False), arguments.verbose
    pairs = [*zip(todo, reports, strict=True)]
    worst = {case.dtype: max((pair for pair in pairs if pair[0].dtype == case.dtype), key=_severity) for case in todo}
    shown = pairs if verbose else [pair for pair in pairs if not pair[1].passed or pair in worst.values()]
    rows = []
    names = {MASKS[name](arguments.seq_len): name for name in arguments.masks}
    for case, report in shown:
        row = max(report.rows, key=_excess)
        figures = (f"{row.tensor}, {row.rank}", f"{row.error:.1e}", f"{row.bound:.1e}")
        verdict = "[green]ok[/]" if report.passed else "[red]WRONG[/]"
        named = names.get(case.mask, str(case.mask)), case.layout, str(case.dtype).removeprefix("torch.")
        rows.append(dict(zip(COLUMNS, (*named, case.circulate, *figures, verdict), strict=True)))
    print_table(console, rows, title=f"S={todo[0].seqlen}", legend=LEGEND, keys=4)
    failed = [report for report in reports if not report.passed]
    for report in failed:
        console.print(report.table())
    every = f"all {len(pairs)} cases ok" if not failed else f"{len(failed)} of {len(pairs)} cases WRONG"
    console.print(every if verbose else f"{every}; the worst of each dtype is shown (--verbose: every case)")


def _excess(row: Any) -> tuple[bool, float]:
    return not row.passed, row.error / row.bound if row.bound else row.error


def _severity(pair: tuple[Case, Report]) -> tuple[bool, float]:
    return max(map(_excess, pair[1].rows))
