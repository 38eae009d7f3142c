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
TOKENS = "tests/distributed/test_token_log_probs.py"
TOKENS_OF_ONE = "tests/unit/test_token_log_probs.py"
HF = "tests/unit/test_hf_refusals.py"
HEADS = "tests/unit/test_hf_head.py"
HF_MODELS = "tests/unit/test_hf_models.py"
TRAIN = "tests/distributed/test_train.py"
ENGINES = "tests/distributed/test_engines.py"
BENCH = "tests/distributed/test_bench.py"
STOCK = "tests/unit/test_stock_kernels.py"
TRITON = "tests/unit/test_triton.py"
NAN = "tests/unit/test_nan.py"
ENTERING = "tests/distributed/test_entering.py"
DERIVATIVES = "tests/distributed/test_derivatives.py"
FOOTPRINT = "tests/distributed/test_footprint.py"
DATA = "tests/unit/test_data.py"
TOKENIZER = "tests/unit/test_tokenizer.py"
CORPUS = "tests/unit/test_corpus.py"
ODD_CORPORA = "tests/unit/test_odd_corpora.py"
EVAL = "tests/distributed/test_eval_command.py"
UPDATES = "tests/distributed/test_updates.py"
COMPAT = "tests/distributed/test_compat_ring_flash_attn.py"
LAUNCH = "tests/distributed/test_launch.py"
CHECK = "tests/unit/test_check.py"
CLAIM = "tests/unit/test_claim.py"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``tests`` (a pytest file and, optionally, a -k expression) must fail.

    ``file`` is one of the package, or begins with ``benchmarks/``.
    """

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
        "attention/sweep.py",
        "tensors = self._held.at(message.place)",
        "tensors = self._held.at((edge.side, self._program.rank, edge.key.part))",
        ATTENTION,
        "any_assignment and ring-3",
    ),
    Fault(
        "stale keys in the backward: the first shard that came is used for all",
        "attention/sweep.py",
        "self._held.tensors[message.place] = tensors",
        "self._held.tensors[message.place] = self._held.tensors.setdefault((message.edge.side, -1, 0), tensors)",
        ATTENTION,
        "any_assignment and direct-3",
    ),
    Fault(
        "dQ from the wrong owner's queries",
        "attention/sweep.py",
        "self._indices.take(self._held.at(op.places[side]), op.held[side])",
        "self._indices.take(self._held.at((side, self._program.rank, op.places[side][2])), op.held[side])",
        ATTENTION,
        "every_two_values_meet and 2",
    ),
    Fault(
        "only one partial result comes home",
        "plan/route.py",
        "yield Edge(use.last + 2, rank, key.owner, key, use.rows, True, self.exact, finished)",
        "yield Edge(use.last + 2, rank, key.owner, key, use.rows, True, self.exact, finished)\n                return",
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
        "plan/build.py",
        "for n, visit in enumerate(sorted(visits, key=lambda v: v.step)):",
        "for n, visit in enumerate(sorted(visits, key=lambda v: v.step)[: len(visits) - (len(visits) > 1)]):",
        PLAN,
        "bring_every_pair_home",
    ),
    Fault(
        "partial results rounded to bf16 at every hop",
        "attention/sweep.py",
        "wide = self._work.wire_dtypes(place[0], exact=True)",
        "wide = self._work.wire_dtypes(place[0], exact=False)",
        PLANNING,
        "errors_do_not_grow",
    ),
    Fault(
        "rounded on the wire where the route is exact",
        "attention/passes.py",
        "dtype = accumulation_dtype(self.q.dtype) if exact else wire_dtype(self.q.dtype)",
        "dtype = wire_dtype(self.q.dtype)",
        ATTENTION,
        "bytes_are_as_predicted and ring-attention",
    ),
    Fault(
        "backwards are not told apart",
        "attention/operator.py",
        '{"call number": forward.number}',
        "{}",
        FAULTS,
        "different_orders",
    ),
    Fault(
        "kernels are given what is not dense",
        "attention/operator.py",
        "return x if x.stride(-1) == 1 else x.contiguous()",
        "return x",
        ATTENTION,
        "views",
    ),
    Fault(
        "the gradient of lse with the wrong sign",
        "attention/operator.py",
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
        "attention/checks.py",
        "scale = 1 / math.sqrt(q.shape[3])",
        "scale = 1 / math.sqrt(v.shape[3])",
        ATTENTION,
        "value_dim",
    ),
    Fault(
        "masks are not agreed on",
        "attention/checks.py",
        "**call.plan.schedule.description,",
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
        "self.v_head_dim * self.io + 2 * self.accumulate",
        "self.v_head_dim * self.io",
        ATTENTION,
        "bytes_are_as_predicted and direct and query",
    ),
    Fault(
        "rows sent that nobody needs",
        "plan/route.py",
        "yield Edge(distance, key.owner, rank, key, uses[rank].rows)",
        "yield Edge(distance, key.owner, rank, key, Rows.union(u.rows for u in uses.values()))",
        PLAN,
        "sends_half or bring_every_pair_home",
    ),
    Fault(
        "a document's last token keeps a target",
        "attention/plan.py",
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
        "attention/unshard.py",
        "        for part in arrived:\n            total += part",
        "        total += arrived[rank]",
        PLANNING,
        "come_together",
    ),
    Fault(
        "loss scaled by the world",
        "loss/next_token.py",
        "value, ctx.divisor = _mean(settings, local, log_probs.numel())",
        "value, ctx.divisor = _mean(settings, local, log_probs.numel())\n        ctx.divisor /= settings.plan.world",
        LOSS,
    ),
    Fault(
        "each rank's loss divided by its own tokens",
        "loss/next_token.py",
        "divisor = count if settings.num_valid is None else",
        "divisor = float(local_count) or 1.0 if settings.num_valid is None else",
        LOSS,
    ),
    Fault(
        "the logits' factor is dropped in the backward",
        "loss/tokens.py",
        "form = measurement.form.factor / measurement.temperature",
        "form = 1 / measurement.temperature",
        LOSS,
        "one_device_gradient and factor",
    ),
    Fault(
        "the derivative of the logits' cap is dropped",
        "loss/tokens.py",
        "return dlogits if slope is None else dlogits.mul_(slope)",
        "return dlogits",
        LOSS,
        "one_device_gradient and softcap",
    ),
    Fault(
        "the bias of a head gets the gradient of one chunk of tokens",
        "loss/tokens.py",
        "dbias += dproduct.sum(0)",
        "dbias.copy_(dproduct.sum(0))",
        LOSS,
        "one_device_gradient and bias",
    ),
    Fault(
        "the bias of a head gets no gradient",
        "loss/tokens.py",
        "_rounded(dbias, bias)",
        "_rounded(dbias.mul_(0) if dbias is not None else None, bias)",
        LOSS,
        "one_device_gradient and bias",
    ),
    Fault(
        "ranks with other factors of their logits are not noticed",
        "loss/next_token.py",
        '"factor": settings.form.factor,',
        '"factor": 1.0,',
        LOSS,
        "refused_on_all and factor",
    ),
    Fault(
        "the gradient of an entropy has the other sign",
        "loss/tokens.py",
        "of_entropy = torch.where(divides, dentropy / row, 0)",
        "of_entropy = torch.where(divides, -dentropy / row, 0)",
        TOKENS,
        "one_device_gradient and entropy",
    ),
    Fault(
        "the gradient of an entropy knows no entropy",
        "loss/tokens.py",
        "dlogits = log_p.add_(entropy).mul_(-of_entropy)",
        "dlogits = log_p.mul_(-of_entropy)",
        TOKENS,
        "one_device_gradient and entropy",
    ),
    Fault(
        "logits are divided by a temperature before they are capped",
        "loss/tokens.py",
        "logits = head.chunk(operand(flat[rows[part]], compute), w, compute)\n"
        "                logits = _divided_(logits, measurement.temperature)",
        "logits = head.chunk(operand(flat[rows[part]], compute) / measurement.temperature, w, compute)",
        TOKENS,
        "one_device_gradient and softcap",
    ),
    Fault(
        "a temperature is forgotten in the backward",
        "loss/tokens.py",
        "form = measurement.form.factor / measurement.temperature",
        "form = measurement.form.factor",
        TOKENS,
        "one_device_gradient and temperature",
    ),
    Fault(
        "results have a column for the last position",
        "loss/log_probs.py",
        "return _of_table(whole[..., : max(plan.seqlen - 1, 0)], measures)",
        "return _of_table(whole, measures)",
        TOKENS,
        "one_device_gradient and zigzag",
    ),
    Fault(
        "sums over tokens of small and great gradients take each as the greatest",
        "loss/tokens.py",
        "return unit, None if (of_unit == 1).all() else of_unit",
        "return unit, None",
        TOKENS,
        "one_device_gradient and striped",
    ),
    Fault(
        "tokens' shares of a gradient are multiplied by probabilities before the products",
        "loss/tokens.py",
        "of_label = torch.where(divides, -dlog_probs / row, 1)",
        "row, of_label = torch.ones_like(row), -dlog_probs",
        TOKENS_OF_ONE,
        "lose_no_digits",
    ),
    Fault(
        "results are summed over ranks in the backward",
        "loss/log_probs.py",
        '2, grad="slice")',
        '2, grad="sum")',
        TOKENS,
        "one_device_gradient and zigzag",
    ),
    Fault(
        "ranks with other temperatures are not noticed",
        "loss/log_probs.py",
        'same = {"temperature": temperature, "outputs"',
        'same = {"temperature": 1.0, "outputs"',
        TOKENS,
        "refused_on_all and temperature",
    ),
    Fault(
        "gradients of the mean of a chunk of tokens alone",
        "loss/tokens.py",
        "dweight += product(narrow.T, h, compute)",
        "dweight.copy_(product(narrow.T, h, compute))",
        TOKENS,
        "one_device_gradient and zigzag",
    ),
    Fault(
        "what a model does to its logits is not looked at",
        "integrations/hf_head.py",
        "return _form(type(model).__name__, product, logits)",
        "return LogitForm()",
        HEADS,
        "models_own",
    ),
    Fault(
        "logits that differ by token are taken for one form",
        "integrations/hf_head.py",
        "    if wrong.any():\n",
        "    if wrong.all():\n",
        HEADS,
        "refused_by_name",
    ),
    Fault(
        "hidden states that a model changes before its head are not noticed",
        "integrations/hf_head.py",
        "if instead.seen is None or not torch.equal(instead.seen.detach().cpu().double(), hidden):",
        "if instead.seen is None:",
        HEADS,
        "changed_before",
    ),
    Fault(
        "forgotten positions are not noticed",
        "integrations/hf_attention.py",
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
        "a window of all but one token taken for none",
        "integrations/hf_checks.py",
        "window >= longest else",
        "window >= longest - 1 else",
        HF,
        "least_window",
    ),
    Fault(
        "a part that mixes tokens is not noticed by the attention",
        "integrations/hf_attention.py",
        "self._models.check(module, chosen)",
        "pass",
        HF_MODELS,
        "part or layer",
    ),
    Fault(
        "unknown parts are taken for known",
        "integrations/hf_models.py",
        "or not _has_own_forward(module) or",
        "or _has_own_forward(module) or",
        HF_MODELS,
        "part",
    ),
    Fault(
        "positions that a model counts itself are not noticed",
        "integrations/hf_models.py",
        "if _places_tokens(module):",
        "if False:",
        "tests/unit/test_families.py",
        "bart",
    ),
    Fault(
        "layers with another attention are not noticed",
        "integrations/hf_models.py",
        "if config._attn_implementation not in names:",
        "if False:",
        HF_MODELS,
        "switched",
    ),
    Fault(
        "tokens that see each other outside of the attention are not measured",
        "integrations/hf_models.py",
        "_check_by_measure(model, plan)\n",
        "pass\n",
        HF_MODELS,
        "measured",
    ),
    Fault(
        "a plan that was ignored is not noticed",
        "attention/usage.py",
        "        if not self._batch_of(labels)[0]:",
        "        if False:",
        HF_MODELS,
        "loss",
    ),
    Fault(
        "an attention counts for every batch",
        "attention/usage.py",
        "for batch in [self._batches[positions]] if known else self._batches.values():",
        "for batch in self._batches.values():",
        HF_MODELS,
        "own_batch",
    ),
    Fault(
        "a loaded configuration is not asked for dropout",
        "training/model.py",
        "hf.check_config(config, training=training)",
        "pass",
        HF_MODELS,
        "training_asks",
    ),
    Fault(
        "a batch of fewer tokens than ranks is cut",
        "attention/batch.py",
        "        check_tokens(one)",
        "        pass",
        HF_MODELS,
        "fewer",
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
        "benchmarks/src/burst_bench/harness/run.py",
        "if not error <= bound:",
        "if error < 0:",
        BENCH,
        "no_figure_is_told",
    ),
    Fault(
        "engines that disagree at the timed length are timed all the same",
        "benchmarks/src/burst_bench/harness/run.py",
        "return apart, agreement",
        "return error, bound",
        BENCH,
        "no_figure_is_told",
    ),
    Fault(
        "an all-reduce is counted as a gather",
        "benchmarks/src/burst_bench/harness/trace.py",
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
        "plan/build.py",
        "ready[key] = max(ready.get(key, posted), (step, 0, 1))",
        "ready[key] = ready.get(key, posted)",
        PLAN,
        "every_pair_home_once",
    ),
    Fault(
        "one exchange under way at a time",
        "plan/build.py",
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
        "attention/sweep.py",
        "self._arrived(*arriving.pop(0))",
        "one = arriving.pop(0); self.all = [*getattr(self, 'all', []), one]; self._arrived(*one)",
        "tests/unit/test_estimate.py",
        "holds_no_more",
    ),
    Fault(
        "what a kernel gives is foretold in another dtype",
        "attention/footprint.py",
        "wide if self.exact else q.dtype)",
        "wide)",
        FOOTPRINT,
    ),
    Fault(
        "what is made anew at a known address is not counted",
        "attention/footprint.py",
        "self._now += x.untyped_storage().nbytes()",
        "self._now += 0",
        "tests/unit/test_estimate.py",
        "live_bytes",
    ),
    Fault(
        "a graph on disk of another formula may be run",
        "attention/entry.py",
        "formula_version=FORMULA_VERSION",
        "formula_version=0",
        "tests/distributed/test_operator.py",
        "names_the_formula",
    ),
    Fault(
        "a formula is changed under its old version",
        "attention/operator.py",
        "row_dot(dout, out, lse.dtype)",
        "row_dot(out, dout, lse.dtype)",
        "tests/distributed/test_operator.py",
        "version_of_its_own",
    ),
    Fault(
        "the backward takes another scale than the forward",
        "attention/operator.py",
        "stats, forward.scale,",
        "stats, q.shape[3] ** -0.5,",
        ATTENTION,
        "extreme_logits",
    ),
    Fault(
        "a rank draws other inputs than the positions that it holds",
        "benchmarks/src/burst_bench/harness/subjects.py",
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
        TRITON,
        "any_tile",
    ),
    Fault(
        "a lone column that all rows see is dropped",
        "kernels/pieces.py",
        "if edge < tile.k_stop:",
        "if edge < tile.k_stop - 1:",
        KERNELS,
        "large_bands",
    ),
    Fault(
        "as many keys after a query as there are, taken for a limit",
        "kernels/windowed.py",
        "right >= tile.columns else 0",
        "right > tile.columns else 0",
        STOCK,
        "every_band and flash2 or windows_say",
    ),
    Fault(
        "a NaN marks the rows before the first that sees it",
        "kernels/poison.py",
        "rows - tile.hi, rows - tile.lo)",
        "rows - tile.hi, rows - tile.lo + 1)",
        NAN,
        "nothing_else and aten",
    ),
    Fault(
        "a NaN in dO is lost on the way to dV",
        "kernels/triton/programs.py",
        'p = tl.where(seen & lost[None, :], float("nan"), p)\n                dv +=',
        "dv +=",
        NAN,
        "our_triton",
    ),
    Fault(
        "a NaN in a value spoils the block's other rows",
        "kernels/triton/programs.py",
        "            v, lost = _whole(v)\n",
        "            _, lost = _whole(v)\n",
        NAN,
        "our_triton",
    ),
    Fault(
        "threads meet in the interpreter",
        "kernels/triton/kernel.py",
        "return _INTERPRETING if interpreted() else nullcontext()",
        "return nullcontext()",
        TRITON,
        "threads",
    ),
    Fault(
        "a lone first column that all rows see is dropped",
        "kernels/pieces.py",
        "if edge > tile.k_start:",
        "if edge > tile.k_start + 1:",
        KERNELS,
        "large_bands",
    ),
    Fault(
        "a kernel is taken whose carried state was never tried",
        "kernels/prove.py",
        "if isinstance(kernel, Continuing):",
        "if False:",
        STOCK,
        "must_prove_right",
    ),
    Fault(
        "a kernel is taken whose gradients were never tried",
        "kernels/prove.py",
        "zip(names, runs[0], expected, strict=True)",
        "zip(names[:2], runs[0][:2], expected[:2], strict=True)",
        STOCK,
        "must_prove_right",
    ),
    Fault(
        "a kernel is taken that has an lse for rows that see nothing",
        "kernels/prove.py",
        'return float("inf")',
        "pass",
        STOCK,
        "must_prove_right",
    ),
    Fault(
        "rows without a gradient are left unwritten",
        "kernels/triton/programs.py",
        "rows, d, exists, dq * scale, D)",
        "rows, d, exists & (tl.sum(tl.abs(dq), 1) > 0), dq * scale, D)",
        TRITON,
        "every_band",
    ),
    Fault(
        "the first held-out character is trained on",
        "training/data.py",
        "document.text[: self._cut(document)]",
        "document.text[: self._cut(document) + 1]",
        DATA,
        "cut_in_two",
    ),
    Fault(
        "the first character after the split is lost",
        "training/data.py",
        "document.text[self._cut(document) :]",
        "document.text[self._cut(document) + 1 :]",
        DATA,
        "all_of_it",
    ),
    Fault(
        "every epoch in the same order",
        "training/data.py",
        "[self.seed, epoch, 0]",
        "[self.seed, 0, 0]",
        DATA,
        "every_epoch_and_seed",
    ),
    Fault(
        "the order of documents is every seed's",
        "training/data.py",
        "[self.seed, epoch, 0]",
        "[epoch, 0]",
        DATA,
        "every_epoch_and_seed",
    ),
    Fault(
        "a stream is shuffled alike for every seed",
        "training/data.py",
        "[self.seed, 0, 1]",
        "[0, 1]",
        DATA,
        "stream_gives",
    ),
    Fault(
        "what is held out comes in the seed's order",
        "training/data.py",
        "np.random.default_rng(0))",
        "np.random.default_rng(self.seed))",
        DATA,
        "stream_gives",
    ),
    Fault(
        "the rest of a short document is held out",
        "training/data.py",
        "keep_rest=self.split.tail",
        "keep_rest=True",
        DATA,
        "not_held_out_either",
    ),
    Fault(
        "packing drops a token at a cut",
        "training/data.py",
        "document[seq_len - borders[-1] :]",
        "document[seq_len - borders[-1] + 1 :]",
        DATA,
        "packing_loses",
    ),
    Fault(
        "the last of the shuffled is dropped",
        "training/data.py",
        "order.permutation(len(waiting)))",
        "order.permutation(len(waiting) - 1))",
        DATA,
        "shuffled",
    ),
    Fault(
        "the borders of a short sequence reach beyond it",
        "training/data.py",
        "    if parts:\n        yield TokenSequence(np.concatenate(parts), tuple(borders))",
        "    if parts:\n        yield TokenSequence(np.concatenate(parts), (*borders[:-1], seq_len))",
        DATA,
        "packing_loses",
    ),
    Fault(
        "perplexity of a mean of means",
        "training/evaluate.py",
        "math.fsum(by_index[index] for index in range(len(self.sequences))) / self.tokens",
        "math.fsum(by_index[i] / s.valid_tokens for i, s in enumerate(self.sequences)) / len(self.sequences)",
        EVAL,
        "plain_transformers",
    ),
    Fault(
        "a special token's name in a text is that token",
        "training/tokenizer.py",
        "        self.inner.split_special_tokens = True\n",
        "",
        TOKENIZER,
        "trained_with",
    ),
    Fault(
        "what was saved finds special tokens in a text",
        "training/tokenizer.py",
        'settings["split_special_tokens"] = not tokenizer.chat_template',
        "pass",
        TOKENIZER,
        "trained_with",
    ),
    Fault(
        "what was saved closes a prompt",
        "training/tokenizer.py",
        'single="<s> $A"',
        'single="<s> $A </s>"',
        TOKENIZER,
        "trained_with",
    ),
    Fault(
        "a Qwen2 beside it makes another tokenizer of it",
        "training/tokenizer.py",
        " or not _reads_the_same(tokenizer, folder)",
        "",
        TOKENIZER,
        "trained_with",
    ),
    Fault(
        "JSON nested too deeply crashes",
        "training/corpus.py",
        "except RecursionError:",
        "except ZeroDivisionError:",
        ODD_CORPORA,
        "rows",
    ),
    Fault(
        "files are read in the order of the disk",
        "training/corpus.py",
        "return sorted(files, key=lambda path: path.relative_to(root).parts)",
        "return files[::-1]",
        CORPUS,
        "one_order",
    ),
    Fault(
        "a line is named by the one before",
        "training/corpus.py",
        "enumerate(lines, start=1)",
        "enumerate(lines)",
        CORPUS,
        "bad_line",
    ),
    Fault(
        "a folder that can't be listed is passed over",
        "training/corpus.py",
        "os.walk(root, onerror=refuse)",
        "os.walk(root)",
        ODD_CORPORA,
        "listed",
    ),
    Fault(
        "the greatest difference is a mean",
        "training/evaluate.py",
        "(loss - self.reference[index]).abs().max().item()",
        "(loss - self.reference[index]).abs().mean().item()",
        EVAL,
        "greatest_difference_of_one",
    ),
    Fault(
        "a plan read elsewhere keeps the number of the plan that was written",
        "attention/plan.py",
        "return partial(lone_plan, self.seqlen, mask=self.mask, layout=self.layout, route=self.route), ()",
        "return object.__new__, (Plan,), vars(self)",
        "tests/distributed/test_plan_values.py",
        "value or worker",
    ),
    Fault(
        "what a rank dies of on its way into a call is kept to itself",
        "comm/agreement.py",
        "if self.transport.world > 1:",
        "if self.transport.world > 99:",
        ENTERING,
        "heard_at_once",
    ),
    Fault(
        "the text of a refusal outgrows its record",
        "comm/agreement.py",
        "accumulate(len(json.dumps(character)) - 2 for",
        "accumulate(len(character) for",
        ENTERING,
        "any_text_fits",
    ),
    Fault(
        "forward-mode tangents are dropped",
        "attention/derivatives.py",
        "if x is not None and forward_ad.unpack_dual(x).tangent is not None:",
        "if False:",
        DERIVATIVES,
        "burst_attention and forward",
    ),
    Fault(
        "gradients of the loss pass for constants",
        "attention/derivatives.py",
        "sources = [x for x in (*grads, *saved) if x is not None and x.requires_grad]",
        "sources = []",
        DERIVATIVES,
        "next_token_loss and backwards",
    ),
    Fault(
        "in inference mode positions are compared once",
        "integrations/hf_attention.py",
        "version = None if position_ids.is_inference() else position_ids._version",
        "version = 0 if position_ids.is_inference() else position_ids._version",
        "tests/unit/test_hf.py",
        "inference",
    ),
    Fault(
        "the learning rate is that of the next step",
        "training/loop.py",
        "        self.optimizer.step()\n        self.schedule.step()\n",
        "        self.schedule.step()\n        self.optimizer.step()\n",
        UPDATES,
        "adamws",
    ),
    Fault(
        "gradients are summed over ranks in bf16",
        "engines/parameters.py",
        "reduce_dtype=torch.float32 if halved else None",
        "reduce_dtype=dtype if halved else None",
        UPDATES,
        "bf16",
    ),
    Fault(
        "norms decay too",
        "training/optim.py",
        '"weight_decay": 0.0}',
        '"weight_decay": optim.weight_decay}',
        UPDATES,
        "adamws",
    ),
    Fault(
        "gradients are not clipped",
        "training/optim.py",
        "    if largest:",
        "    if largest < 0:",
        UPDATES,
        "adamws",
    ),
    Fault(
        "the mean over accumulation steps is taken twice",
        "training/loop.py",
        "plans, max(num_valid, 1))",
        "plans, max(num_valid, 1) * self.config.optim.accumulate)",
        TRAIN,
        "gradients_are_those and 1-1-3",
    ),
    Fault(
        "groups of ranks read each other's sequences",
        "launch/join.py",
        "return self.mesh.get_local_rank(DATA)",
        "return 0",
        TRAIN,
        "gradients_are_those and 2-2-2",
    ),
    Fault(
        "a check compares a tensor with itself",
        "testing/check.py",
        "expected = {name: plan.shard(x, 2) for name, x in oracle.items()}",
        "expected = dict(actual.items())",
        CHECK,
        "each_tensor",
    ),
    Fault(
        "a check of halves has room for anything",
        "testing/check.py",
        "relative_l2(actual, expected), 1.5 * relative_l2(theirs, truth))",
        "relative_l2(actual, expected), 150 * relative_l2(theirs, truth))",
        CHECK,
        "each_tensor",
    ),
    Fault(
        "a check that found something wrong ends well",
        "cli/check.py",
        "raise SystemExit(1)",
        "raise SystemExit(0)",
        CHECK,
        "command",
    ),
    Fault(
        "a rank that failed is no failure",
        "launch/local.py",
        "killed)\n            return 1",
        "killed)\n            return 0",
        LAUNCH,
        "another",
    ),
    Fault(
        "a stopped rank is waited for",
        "launch/local.py",
        "GRACE = 1.5",
        "GRACE = 20.0",
        LAUNCH,
        "stops",
    ),
    Fault(
        "a run writes where another does",
        "training/claim.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        CLAIM,
    ),
    Fault(
        "a folder that no run marked is taken",
        "training/claim.py",
        "and folder.is_dir() and any(folder.iterdir())",
        "and folder.is_dir() and False",
        CLAIM,
    ),
    Fault(
        "a linked folder's files are removed",
        "training/claim.py",
        "            if not _is_own(self.folder, name):",
        "            if not path.exists():",
        CLAIM,
    ),
    Fault(
        "a number that nothing can hold is taken",
        "training/flags.py",
        "if value > most else",
        "if False else",
        "tests/unit/test_bad_values.py",
        "values_that",
    ),
    Fault(
        "times are compared with another engine than the first",
        "benchmarks/src/burst_bench/harness/results.py",
        "return ratios(first, row) if",
        "return ratios(row, row) if",
        "tests/unit/test_report.py",
        "round_by_round",
    ),
    Fault(
        "all ranks of a trace are one process",
        "benchmarks/src/burst_bench/report/trace_events.py",
        '"cat": span.kind, "pid": rank}',
        '"cat": span.kind, "pid": 0}',
        "tests/unit/test_report.py",
        "trace_events",
    ),
    Fault(
        "the README's ratios are of the medians",
        "benchmarks/src/burst_bench/paper/readme.py",
        "statistics.median(ratios(_one(rows, engine, link), _one(rows, other, link)))",
        "_one(rows, other, link).median / _one(rows, engine, link).median",
        "tests/unit/test_results_pages.py",
        "what_the_figures_draw",
    ),
    Fault(
        "each document's chunks are those of the whole sequence",
        "plan/layout.py",
        "apart = self.per_document and self.documents and self.world > 1",
        "apart = None",
        PLAN,
        "cut_each_document or whatever_the_documents",
    ),
    Fault(
        "segments that begin before a region are not met",
        "plan/tile.py",
        "low = np.searchsorted(np.maximum.accumulate(last[order]), start)",
        "low = np.searchsorted(first[order], start)",
        PLAN,
        "tiles_cover",
    ),
    Fault(
        "a step that is no permutation of the ranks",
        "plan/groups.py",
        "% (world // size) * size + (rank - source) % size",
        "% (world // size) * size + (rank != source)",
        PLAN,
        "own_context_first",
    ),
    Fault(
        "a head group takes another's key-value head",
        "plan/groups.py",
        "return group * self.count(side) // self.query",
        "return group % self.count(side)",
        ATTENTION,
        "assignment_of_cells and 4-4",
    ),
    Fault(
        "shards that lie side by side are joined across a gap of positions",
        "plan/slices.py",
        "goes_on &= first[1:] == (first + length * stride)[:-1]",
        "pass",
        PLAN,
        "every_cell_home",
    ),
    Fault(
        "results leave a slice before the last of them is there",
        "plan/build.py",
        "for owner in visit.owners[side]:",
        "for owner in visit.owners[side][:1]:",
        PLAN,
        "every_cell_home",
    ),
    Fault(
        "own rows are missing beside those that came",
        "plan/build.py",
        "if edge.source == edge.target and self._place(edge.key)[1] >= self.world:",
        "if edge.source == edge.target and self._place(edge.key)[1] >= self.world and edge.partial:",
        PLAN,
        "every_cell_home",
    ),
    Fault(
        "a backward fetches again what its forward has kept",
        "plan/uses.py",
        "return self.groups.keep and self.direction is Direction.BACKWARD",
        "return False",
        ATTENTION,
        "ring_flash_attn_that_are_left and 4",
    ),
    Fault(
        "what was kept is the first head group's",
        "plan/build.py",
        "side: (side, self.world + own, self.groups.part(side, rank % self.groups.query))",
        "side: (side, self.world + own, 0)",
        PLAN,
        "every_cell_home",
    ),
    Fault(
        "what stays on a rank is counted as if it were sent",
        "plan/tally.py",
        "sizes = np.where(source == target, 0, sizes)",
        "pass",
        PLAN,
        "counted_for_a_choice",
    ),
    Fault(
        "finished results are sent as if something were added to them",
        "plan/uses.py",
        "finished = groups.query > 1",
        "finished = False",
        PLAN,
        "counted_for_a_choice",
    ),
    Fault(
        "blocks that leave ranks without work",
        "plan/assignment.py",
        "first = j // keys * keys",
        "first = 0 * j",
        PLAN,
        "blocks_are",
    ),
    Fault(
        "flash-attn's window counts the query itself",
        "compat/call.py",
        "window=left + 1 if left >= 0 else None",
        "window=left if left > 0 else None",
        COMPAT,
        "every_function and 2",
    ),
    Fault(
        "a rank's first document always begins with its tokens",
        "compat/ring_flash_attn.py",
        "begins[:1] = local_k_slice.start == transport.rank * length",
        "begins[:1] = 1",
        COMPAT,
        "every_function and 2",
    ),
    Fault(
        "a model's attention takes the documents told first",
        "compat/hf.py",
        'self._plans = {None: plan_for(total, mask, "contiguous", group)}',
        'self._plans = self._plans or {None: plan_for(total, mask, "contiguous", group)}',
        COMPAT,
        "trains_the_same",
    ),
    Fault(
        "copied labels are of the latest batch",
        "attention/usage.py",
        "for given, batch in reversed(list(self._batches.items())):",
        "for given, batch in ():",
        HF_MODELS,
        "copied_labels_are",
    ),
    Fault(
        "what was added to a head is not noticed",
        "integrations/hf_head.py",
        'if added or "forward" in vars(head):',
        "if False:",
        HEADS,
        "added_to",
    ),
    Fault(
        "plans of other documents are taken for one call",
        "integrations/hf_checks.py",
        "if len({(each.mask.cu_seqlens, each.mask.prefix) for each in plans.values()}) > 1:",
        "if False:",
        HF_MODELS,
        "other_documents",
    ),
    Fault(
        "a rank that lost what it saved keeps it to itself",
        "attention/operator.py",
        "with nullcontext() if ctx.plan is None else ctx.plan.agreement.entering(name):",
        "with nullcontext():",
        ENTERING,
        "lost_what_it_saved",
    ),
]


def try_fault(fault: Fault) -> tuple[Fault, str, float]:
    """'caught', or what is wrong, and the seconds it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="burst-mutation-") as folder:
        copies = [Path(folder) / name for name in ("src", "benchmarks")]
        for copy in copies:
            shutil.copytree(ROOT / copy.name, copy, ignore=shutil.ignore_patterns("__pycache__"))
        home = copies[0] / "burst_attention" if not fault.file.startswith("benchmarks/") else Path(folder)
        target = home / fault.file
        text = target.read_text()
        if text.count(fault.old) != 1:
            return fault, f"its text stands {text.count(fault.old)} times in {fault.file}", 0.0
        target.write_text(text.replace(fault.old, fault.new))
        command = [sys.executable, "-m", "pytest", *fault.tests.split(), "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-k", fault.only] if fault.only else []
        paths = f"{copies[0]}{os.pathsep}{copies[1] / 'src'}"
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
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
