"""Seed faults one at a time and see the tests that each names go red.

    python tests/mutation.py [NAME ...]       (make mutation)

Each fault is one replacement in a copy of the sources, which a fresh pytest imports in place of the installed ones.
Caught means that pytest ran and tests failed; a fault that survives, or whose text is no longer in the source, is an
error here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "tests/distributed/test_attention.py"
KERNELS = "tests/unit/test_kernels.py"
PLAN = "tests/unit/test_plan.py"
FAULTS = "tests/distributed/test_faults.py"
PLANNING = "tests/distributed/test_planning.py"
LOSS = "tests/distributed/test_loss.py"
HF = "tests/unit/test_hf_refusals.py"
TRAIN = "tests/distributed/test_train.py"
ENGINES = "tests/distributed/test_engines.py"
BENCH = "tests/distributed/test_bench.py"
STOCK = "tests/unit/test_stock_kernels.py"
FOOTPRINT = "tests/distributed/test_footprint.py"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``tests`` (a pytest file and, optionally, a -k expression) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    only: str = ""


SEEDED = [
    Fault(
        "merge without rescaling",
        "kernels/merge.py",
        "weight = weight.to(out.dtype).unsqueeze(-1)",
        "weight = torch.full_like(weight, 0.5).to(out.dtype).unsqueeze(-1)",
        ATTENTION,
        "every_two_values_meet and 2",
    ),
    Fault(
        "merge gives NaN where nothing is seen",
        "kernels/merge.py",
        ".masked_fill_(part_lse == -math.inf, 0.0)",
        "",
        KERNELS,
        "merge",
    ),
    Fault(
        "stale keys: a relay forwards its own shard",
        "sweep.py",
        "tensors = self._indices.take(self.held[edge.side, edge.owner], message.where)",
        "tensors = self._indices.take(self.held[edge.side, self._transport.rank], message.where)",
        ATTENTION,
        "any_assignment and ring-3",
    ),
    Fault(
        "stale keys in the backward: the first shard that came is used for all",
        "sweep.py",
        "self.held[edge.side, edge.owner] = tensors",
        "self.held[edge.side, edge.owner] = self.held.setdefault((edge.side, -1), tensors)",
        ATTENTION,
        "any_assignment and direct-3",
    ),
    Fault(
        "dQ from the wrong owner's queries",
        "sweep.py",
        "self._indices.take(self.held[side, op.owner(side)], op.held[side])",
        "self._indices.take(self.held[side, self._transport.rank], op.held[side])",
        ATTENTION,
        "every_two_values_meet and 2",
    ),
    Fault(
        "only one partial result comes home",
        "plan/route.py",
        "yield Edge(use.last + 2, rank, owner, side, owner, use.rows, True, self.exact)",
        "yield Edge(use.last + 2, rank, owner, side, owner, use.rows, True, self.exact)\n                return",
        PLAN,
        "bring_every_pair_home",
    ),
    Fault("window too wide by one", "plan/mask.py", "self.window - 1)", "self.window)", PLAN, "tiles_cover"),
    Fault(
        "causal mask off by one", "plan/mask.py", "lo = 0 if self.causal", "lo = 1 if self.causal", PLAN, "tiles_cover"
    ),
    Fault(
        "ranks may differ in a mask's last field",
        "plan/mask.py",
        "for field in fields(self)}",
        "for field in fields(self)[:-1]}",
        PLAN,
        "agree_on",
    ),
    Fault(
        "a missing extra is found by a traceback",
        "cli/__init__.py",
        "if importlib.util.find_spec(name) is None)",
        "if importlib.util.find_spec(name) is None and False)",
        "tests/unit/test_package.py",
        "one_line",
    ),
    Fault(
        "tiles joined that do not belong together",
        "plan/tile.py",
        "if band_area(q1 - q0, k1 - k0, lo, hi) == area else None",
        "if band_area(q1 - q0, k1 - k0, lo, hi) >= area else None",
        PLAN,
        "tiles_cover",
    ),
    Fault(
        "zigzag that does not fold back",
        "plan/layout.py",
        "mirror = 2 * world - 1 - rank",
        "mirror = world + rank",
        PLAN,
        "balanced",
    ),
    Fault(
        "the last visit is skipped",
        "plan/program.py",
        "for n, visit in enumerate(sorted(visits, key=lambda v: v.step)):",
        "for n, visit in enumerate(sorted(visits, key=lambda v: v.step)[: len(visits) - (len(visits) > 1)]):",
        PLAN,
        "bring_every_pair_home",
    ),
    Fault(
        "partial results rounded to bf16 at every hop",
        "sweep.py",
        "wide = self._work.wire_dtypes(side, exact=True)",
        "wide = self._work.wire_dtypes(side, exact=False)",
        PLANNING,
        "errors_do_not_grow",
    ),
    Fault(
        "rounded on the wire where the route is exact",
        "sweep.py",
        "dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)",
        "dtype = wire_dtype(self.q.dtype)",
        ATTENTION,
        "bytes_are_as_predicted and ring-attention",
    ),
    Fault(
        "backwards are not told apart",
        "op.py",
        '{"call number": int(number)}',
        "{}",
        FAULTS,
        "different_orders",
    ),
    Fault(
        "kernels are given what is not dense",
        "op.py",
        "return x if x.stride(-1) == 1 else x.contiguous()",
        "return x",
        ATTENTION,
        "views",
    ),
    Fault(
        "the gradient of lse with the wrong sign",
        "op.py",
        "delta = delta - dlse",
        "delta = delta + dlse",
        ATTENTION,
        "every_two_values_meet and 2",
    ),
    Fault(
        "the gradient of lse lost where dO is 0",
        "kernels/surrogate.py",
        "return ((rest.abs() > allowed) | ~torch.isfinite(rest)).any()",
        "return (rest.abs() < 0).any()",
        ATTENTION,
        "lse_alone and aten",
    ),
    Fault(
        "a surrogate of one rounded column",
        "kernels/surrogate.py",
        "columns = min(2, dout.shape[-1])",
        "columns = 1",
        KERNELS,
        "surrogate",
    ),
    Fault(
        "query heads meet the wrong key heads",
        "kernels/reference.py",
        "unflatten(1, (k.shape[1], -1))",
        "unflatten(1, (-1, k.shape[1])).transpose(1, 2)",
        KERNELS,
        "oracle and reference",
    ),
    Fault(
        "a mask in a dtype that the stock kernel misreads",
        "kernels/aten.py",
        "torch.full((rows, columns), -math.inf, dtype=like.dtype",
        "torch.full((rows, columns), -math.inf, dtype=torch.float32",
        KERNELS,
        "oracle and aten and float64",
    ),
    Fault(
        "lse 0 for rows that a piece does not see",
        "kernels/aten.py",
        "lse.masked_fill(blind, -math.inf)",
        "lse",
        KERNELS,
        "no_tile_covers or documents",
    ),
    Fault(
        "the scale from the wrong head dim",
        "call.py",
        "scale = 1 / math.sqrt(q.shape[3])",
        "scale = 1 / math.sqrt(v.shape[3])",
        ATTENTION,
        "value_dim",
    ),
    Fault(
        "masks are not agreed on",
        "call.py",
        "**call.plan.schedule.told,",
        '"seqlen": call.plan.seqlen,',
        FAULTS,
        "disagreement_raises and mask",
    ),
    Fault(
        "no deadline",
        "comm/transport.py",
        "if limit is None:\n                    work.wait()",
        "if True:\n                    work.wait()",
        FAULTS,
        "lost_rank and stopped-before and call",
    ),
    Fault(
        "a prediction that forgets lse and D",
        "plan/cost.py",
        "* self.io + 2 * self.accumulate",
        "* self.io",
        ATTENTION,
        "bytes_are_as_predicted and direct and query",
    ),
    Fault(
        "rows sent that nobody needs",
        "plan/route.py",
        "yield Edge(distance, owner, rank, side, owner, uses[rank].rows)",
        "yield Edge(distance, owner, rank, side, owner, Rows.union(u.rows for u in uses.values()))",
        PLAN,
        "sends_half or bring_every_pair_home",
    ),
    Fault(
        "a document's last token keeps a target",
        "planning.py",
        "targets[:, ends.to(labels.device)] = ignore_index",
        "targets[:, -1:] = ignore_index",
        PLANNING,
        "labels_are_shifted",
    ),
    Fault(
        "positions that do not restart",
        "plan/mask.py",
        'return positions - borders[np.searchsorted(borders, positions, side="right") - 1]',
        "return positions",
        PLANNING,
        "world_of_one",
    ),
    Fault(
        "a gradient slice that is not summed",
        "resharding.py",
        "        for part in arrived:\n            total += part",
        "        total += arrived[rank]",
        PLANNING,
        "come_together",
    ),
    Fault(
        "loss scaled by the world",
        "loss.py",
        "value, ctx.divisor = _mean(settings, local, len(rows))",
        "value, ctx.divisor = _mean(settings, local, len(rows))\n        ctx.divisor /= settings.plan.world",
        LOSS,
    ),
    Fault(
        "each rank's loss divided by its own tokens",
        "loss.py",
        "divisor = count if settings.num_valid is None else",
        "divisor = float(local_count) or 1.0 if settings.num_valid is None else",
        LOSS,
    ),
    Fault(
        "forgotten positions are not noticed",
        "integrations/hf.py",
        "self._check_positions(position_ids, query, chosen)",
        "pass",
        "tests/unit/test_hf_refusals.py tests/distributed/test_hf.py",
        "position",
    ),
    Fault(
        "a padding mask is dropped",
        "integrations/hf_checks.py",
        "attention_mask.dim() == 2 and attention_mask.all()",
        "attention_mask.dim() == 2",
        HF,
        "padding or mask",
    ),
    Fault(
        "gradients averaged over ranks",
        "engines/parameters.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        TRAIN,
    ),
    Fault(
        "tensor parallelism keeps one rank's share of the head's gradient",
        "engines/tensor.py",
        "grad_placements=[Partial()]",
        "grad_placements=[Replicate()]",
        ENGINES,
        "every_gradient and tensor",
    ),
    Fault(
        "tensor parallelism sums the gradients of each projection by themselves",
        "engines/tensor.py",
        '"self_attn": enter_attention,',
        "",
        ENGINES,
        "megatron",
    ),
    Fault(
        "Ulysses counts one exchange in place of two",
        "engines/ulysses.py",
        "forward = (inputs * tokens_out + outputs * tokens_back)",
        "forward = (inputs * tokens_out)",
        ENGINES,
        "ulysses_is_exact",
    ),
    Fault(
        "Ulysses' backward gives other tokens' gradients of k",
        "engines/ulysses.py",
        'return None, *ctx.trade.to_tokens(grads, "backward")',
        'return None, *ctx.trade.to_tokens([grads[0], grads[1].flip(2), grads[2]], "backward")',
        ENGINES,
        "ulysses_is_exact",
    ),
    Fault(
        "windows of whole attention start a key late",
        "engines/whole.py",
        "max(top - window + 1, start)",
        "max(top - window + 2, start)",
        ENGINES,
        "windows_longer",
    ),
    Fault(
        "a wrong engine is timed all the same",
        "bench/run.py",
        "if not error <= bound:",
        "if error < 0:",
        BENCH,
        "no_figure_is_told",
    ),
    Fault(
        "engines that disagree at the timed length are timed all the same",
        "bench/run.py",
        "return apart, agreement",
        "return error, bound",
        BENCH,
        "no_figure_is_told",
    ),
    Fault(
        "an all-reduce is counted as a gather",
        "bench/trace.py",
        '"all_reduce": 2',
        '"all_reduce": 1',
        BENCH,
        "counted_is_what",
    ),
    Fault(
        "the nearer end is the farther one",
        "plan/assignment.py",
        "2 * ((i - j) % world) < world",
        "2 * ((j - i) % world) < world",
        PLAN,
        "either_balances",
    ),
    Fault(
        "a partial result is passed on before the one from behind has come",
        "plan/program.py",
        "ready[key] = max(ready.get(key, posted), (step, 0, 1))",
        "ready[key] = ready.get(key, posted)",
        PLAN,
        "every_pair_home_once",
    ),
    Fault(
        "one exchange under way at a time",
        "plan/program.py",
        "IN_FLIGHT = 2",
        "IN_FLIGHT = 1",
        PLAN,
        "two_exchanges",
    ),
    Fault(
        "gradients of parameters are those of the first rank",
        "engines/parameters.py",
        "torch.sum(parts.view(group.size(), *output_tensor.shape), 0, out=output_tensor)",
        "output_tensor.copy_(parts.view(group.size(), *output_tensor.shape)[0])",
        ENGINES,
        "every_gradient and burst",
    ),
    Fault(
        "a stock kernel's window is counted from the top left",
        "kernels/windowed.py",
        "d = tile.columns - tile.rows",
        "d = 0",
        STOCK,
        "every_band and flash2",
    ),
    Fault(
        "a kernel that proves wrong is taken",
        "kernels/prove.py",
        "if not error <= BOUNDS[dtype]:",
        "if error < 0:",
        STOCK,
        "proves",
    ),
    Fault(
        "an efficient kernel's lse keeps its padding",
        "kernels/aten_ops.py",
        "return out, lse[..., : q.shape[2]]",
        "return out, lse",
        STOCK,
        "every_band and efficient",
    ),
    Fault(
        "a tall tile's first rows lose keys to FlashAttention 2's window",
        "kernels/windowed.py",
        "tall = part.rows > part.columns + 1 and part.bounded_below and not part.bounded_above",
        "tall = False",
        STOCK,
        "every_band and flash2",
    ),
    Fault(
        "an efficient kernel reads out in another order of memory",
        "kernels/aten_ops.py",
        "out = out.transpose(1, 2).contiguous().transpose(1, 2)",
        "out = out.contiguous()",
        STOCK,
        "over_a_wire and efficient",
    ),
    Fault(
        "what arrives is held until all of it is folded in",
        "sweep.py",
        "message, tensors = arriving.pop(0)",
        "message, tensors = arriving.pop(0); self.kept = getattr(self, 'kept', []); self.kept.append(tensors)",
        FOOTPRINT,
        "query",
    ),
    Fault(
        "copies of what is sent are not foretold",
        "plan/footprint.py",
        "elif edge.owner == self._rank or not _is_all(message.where, self._held[key][0]):",
        "elif False:",
        FOOTPRINT,
        "query",
    ),
    Fault(
        "a graph on disk of another formula may be run",
        "op.py",
        "FORMULA = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]",
        'FORMULA = "1"',
        "tests/distributed/test_operator.py",
        "names_the_formula",
    ),
    Fault(
        "a rank draws other inputs than the positions that it holds",
        "bench/subjects.py",
        "block[positions[first:last] - start]",
        "block[: last - first]",
        BENCH,
        "drawn_for_some_positions",
    ),
    Fault(
        "keys beyond a block's last are taken for seen by all rows",
        "kernels/triton/programs.py",
        "left, right = tl.where(whole, left, stop), tl.where(whole, right, stop)",
        "left, right = tl.where(whole, left, stop), tl.where(whole, right, left)",
        "tests/unit/test_triton.py",
        "any_tile",
    ),
]


def try_fault(fault: Fault) -> tuple[Fault, str, float]:
    """'caught', or what is wrong, and the seconds it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="burst-mutation-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / "burst_attention" / fault.file
        text = target.read_text()
        if text.count(fault.old) != 1:
            return fault, f"its text stands {text.count(fault.old)} times in {fault.file}", 0.0
        target.write_text(text.replace(fault.old, fault.new))
        command = [sys.executable, "-m", "pytest", *fault.tests.split(), "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-k", fault.only] if fault.only else []
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    verdict = {0: "SURVIVED", 1: "caught"}.get(result.returncode, f"pytest exit {result.returncode}:\n{result.stdout}")
    return fault, verdict, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults whose name contains one of these; default: all")
    chosen = [f for f in SEEDED if not (names := parser.parse_args().names) or any(n in f.name for n in names)]
    console = Console()
    with ThreadPoolExecutor(2) as workers:
        missed = 0
        for fault, verdict, seconds in workers.map(try_fault, chosen):
            missed += verdict != "caught"
            console.print(f"{'ok ' if verdict == 'caught' else 'BAD'} {fault.name}: {verdict} in {seconds:.0f} s")
    console.print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
