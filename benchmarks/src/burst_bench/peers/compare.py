"""One causal attention, forward and backward: ours against the packages that people would use instead, in one run.

All take turns, round by round, on the same ranks and cores, 1 thread a rank, over the same flash kernels: on CPU
torch's, which flash_attn_stand_in.py gives the packages under flash_attn's names. Each result is first compared with
one device's in fp32; a variant whose result is wrong is shown with its error and without a time. Variants that have
only a forward are compared with our forward alone. ring-attention-pytorch's ring has a loop of its own for CPUs.

    python benchmarks/peers.py [--world 2] [--seq-len 8192] [--heads 8] [--head-dim 128] [--rounds 5] [--json FILE]

The packages are the extra ``peers``; without them ours are shown, and what to install. With --device cuda the same file
runs one rank per GPU on NCCL and the real flash_attn; that was written but has never been run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_attention.testing import WorkerPool
from burst_attention.testing.pool import WorkerError

from ..arguments import TimedArguments, asked
from ..harness.measure import rotated
from ..texts import bytes_text, spread
from .ranks import NAMES, Problem, checked, make_inputs, prepare, timed
from .variants import OURS, OURS_FORWARD, STRONGEST, VARIANTS, Size, Variant, package_version, refusal

# Times the relative L2 error of torch's own kernel in the same dtype. Over flash kernels a right result is at 0.7 to
# 1.3, in ring-attention-pytorch's ring, whose scores and accumulator are bf16, at 2.5; a tile that is left out, doubled
# or rescaled is far above.
TOLERANCE = 5.0


def compare(
    world: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    rounds: int,
    entries: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """Check, count and time every variant; a dict for each, in the order of ``VARIANTS``.

    Args:
        rounds: timed ones; with 0 results are checked and bytes counted only.
        entries: for :class:`burst_attention.testing.WorkerPool`, where the ranks run; None for plain processes.
        dtype: in fp32 ring-flash-attn's gradients are wrong (its accumulators alias its buffers).
        names: of the variants wanted; None for all. Ours are always among them.
        timeout: seconds that one call may take.

    Returns:
        ``name``, ``package``, ``version``, ``passes`` (``forward`` or ``forward and backward``), ``detail``;
        ``refused``: why there is no result, or None; ``errors`` and ``bounds``: relative L2 by tensor; ``correct``;
        ``bytes``: sent by each rank in one call, as handed to the process group; ``transport_bytes``: by the plan's own
        count, without the records by which ranks agree on a call (None for others); ``seconds``: of each round, the
        slowest rank's; ``copying``: how many of them the stand-in spent on copies; ``ratios``: by round, to ours of the
        same passes (above 1: ours is faster); ``ratios_without_copies``: as if those copies cost nothing.
    """
    if world < 2:
        raise ValueError(f"world={world} must be at least 2: the packages' rings can't send to themselves")
    unknown = sorted(set(names or ()) - {v.name for v in VARIANTS})
    if unknown:
        raise ValueError(f"names has {unknown}; choose from {', '.join(v.name for v in VARIANTS)}")
    size = Size(world, seq_len, heads, head_dim)
    chosen = [v for v in VARIANTS if names is None or v.is_ours or v.name in names]
    rows = [_row(variant, refusal(variant, size, device)) for variant in chosen]
    options = {} if entries is None else {"entries": entries}
    with tempfile.TemporaryDirectory(prefix="burst-peers-") as folder:
        problem = Problem(size, dtype, device, str(Path(folder) / "reference.pt"))
        stock = _write_reference(problem)
        with WorkerPool(world, threads=1, timeout=timeout, **options) as pool:
            pool.run(prepare, problem, str(Path(folder) / "meeting"), timeout=timeout)
            for variant, row in zip(chosen, rows, strict=True):
                if row["refused"] is None:
                    _check(pool, problem, variant, row, stock, timeout)
            runnable = [row for row in rows if row["correct"]]
            # One before the first: TorchScript, which peers use, compiles in the second call.
            for n in range(-1, rounds) if rounds else ():
                for row in rotated(runnable, n):
                    seconds, copying = max(pool.run(timed, problem, row["name"], timeout=timeout))
                    if n >= 0:
                        row["seconds"].append(seconds)
                        row["copying"].append(copying)
    _add_ratios(rows)
    return rows


def _row(variant: Variant, refused: str | None) -> dict[str, Any]:
    installed = refused is None or not refused.startswith("not installed")
    return {
        "name": variant.name,
        "package": variant.package,
        "version": package_version(variant.package) if installed else None,
        "passes": "forward and backward" if variant.backward else "forward",
        "detail": "",
        "refused": refused,
        "errors": {},
        "bounds": {},
        "correct": False,
        "bytes": None,
        "transport_bytes": None,
        "seconds": [],
        "copying": [],
        "ratios": [],
        "ratios_without_copies": [],
    }


def _check(
    pool: WorkerPool, problem: Problem, variant: Variant, row: dict[str, Any], stock: dict[str, float], timeout: float
) -> None:
    """Fill in the row's result of one checked and counted call."""
    try:
        answers = pool.run(checked, problem, variant.name, timeout=timeout)
    except WorkerError as error:
        if pool.broken:  # a rank is lost or out of step: nothing more can be compared
            raise
        row["refused"] = str(error.errors[0]).strip().splitlines()[0] or type(error.errors[0]).__name__
        return
    for name in answers[0]["squares"]:
        difference, whole = (sum(answer["squares"][name][n] for answer in answers) for n in (0, 1))
        row["errors"][name] = math.sqrt(difference / whole)
        row["bounds"][name] = TOLERANCE * stock[name]
    row["correct"] = all(error <= row["bounds"][name] for name, error in row["errors"].items())
    row["detail"] = answers[0]["detail"]
    for what in ("bytes", "transport_bytes"):
        values = [answer[what] for answer in answers]
        row[what] = None if None in values else values


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    ours = {row["passes"]: row["seconds"] for row in rows if row["name"] in (OURS, OURS_FORWARD)}
    for row in rows:
        mine = ours[row["passes"]]
        if row["seconds"] and mine:
            row["ratios"] = [theirs / own for theirs, own in zip(row["seconds"], mine, strict=True)]
            alone = [total - copies for total, copies in zip(row["seconds"], row["copying"], strict=True)]
            row["ratios_without_copies"] = [theirs / own for theirs, own in zip(alone, mine, strict=True)]


def _write_reference(problem: Problem) -> dict[str, float]:
    """Write what one device gives in fp32 (fp64 for fp32 inputs); return its error in the inputs' dtype by tensor."""
    inputs = make_inputs(problem)
    wide = torch.float64 if problem.dtype == torch.float32 else torch.float32
    right, plain = (_one_device([x.to(dtype) for x in inputs]) for dtype in (wide, problem.dtype))
    torch.save(right, problem.reference)
    return {n: ((x.to(wide) - y).norm() / y.norm()).item() for n, x, y in zip(NAMES, plain, right, strict=True)}


def _one_device(tensors: list[Tensor]) -> list[Tensor]:
    *inputs, dout = [x.detach().requires_grad_() for x in tensors]
    out = scaled_dot_product_attention(*inputs, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def cells(row: dict[str, Any]) -> dict[str, str]:
    """One of ``compare``'s rows, as the terminal and the page show it."""
    name = {"variant": f"{row['name']} {row['version'] or ''}".strip(), "passes": row["passes"]}
    if not row["correct"]:
        return name | {"s": row["refused"] or "WRONG"}
    return name | {
        "s": spread(row["seconds"]),
        "ratio": spread(row["ratios"], ".3f"),
        "without copies": spread(row["ratios_without_copies"], ".3f"),
        "sent per rank": bytes_text(statistics.fmean(row["bytes"])) if row["bytes"] else "-",
    }


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    """Print ``compare``'s rows: a table, and under it why some have no figures."""
    share, notes = f"of {STRONGEST}'s", []
    strongest = next((row["bytes"] for row in rows if row["name"] == STRONGEST and row["correct"]), None)
    table = Table("variant", "passes", "s", "ratio", "without copies", "sent per rank", share, title=title)
    for row in rows:
        shown = cells(row)
        if row["refused"]:
            shown["s"] = "not run"
            notes.append(f"{row['name']}: {row['refused']}")
        elif strongest and row["bytes"] and row["passes"] != "forward":
            shown[share] = f"{statistics.fmean(row['bytes']) / statistics.fmean(strongest):.3f}"
        table.add_row(*(shown.get(str(column.header), "") for column in table.columns))
        wrong = {name: error for name, error in row["errors"].items() if not error <= row["bounds"][name]}
        for name, error in wrong.items():
            notes.append(f"{row['name']}: relative L2 of {name} is {error:.1e} and may be {row['bounds'][name]:.1e}")
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Arguments(TimedArguments):
    rounds: int = 5
    """0: check the results and count the bytes only."""
    device: Literal["cpu", "cuda"] = "cpu"
    only: tuple[str, ...] | None = None
    """Of the others, such as "yunchang zigzag"."""


def main() -> None:
    a = asked(Arguments(), __doc__)
    options = {"dtype": a.torch_dtype, "device": a.device, "names": a.only}
    rows = compare(a.world, a.seq_len, a.heads, a.head_dim, a.rounds, **options)
    show(Console(width=max(Console().width, 130)), rows, f"{a.title}, {a.world} ranks x 1 thread")
    a.write("peers", rows=rows)
