"""A pretrained model over ranks against plain transformers.

Plain transformers (sdpa) reads each sequence in one process, in fp64 and in --dtype. Ranks read it by hf.parallelize
with each strategy. A strategy is wrong, and nothing is reported, if a log-probability is five times as far from fp64 as
plain transformers' worst. Then both generate greedily after the first sequence, the ranks with a sharded cache. Both
train LoRA adapters of rank 8 on it, each step with the same batch; losses must be equal to 1e-4 (1e-2 in bfloat16).
``examples/pretrained.py`` makes a folder of a model.

    burst bench pretrained [--model runs/smollm2] [--data stdlib] [--seq-len 1024] [--sequences 2] [--worlds 2]
                           [--strategies auto burst ring] [--dtype float32] [--new-tokens 16] [--steps 3]"""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.plan.strategy import NAMED, strategy_of
from burst_attention.testing import WorkerError
from burst_train.data.sequences import open_sequences
from burst_train.step.evaluation import EvalConfig

from ..arguments import WrittenArguments, asked
from ..harness.calls import TOLERANCE
from ..pool import WorkerPool
from ..tables import ranks_text

TIMEOUT = 3600.0  # seconds
RANK, RATE = 8, 1e-3  # of the adapters, and of AdamW
LIMITS = {"float32": 1e-4, "bfloat16": 1e-2}  # relative difference of a loss
PLAIN = "transformers, one process"
LARGEST, MEAN, OF_EXACT = "largest difference", "mean difference", "largest from fp64"
LEGEND = {
    "perplexity": "of all tokens but the first of each sequence",
    LARGEST: "of a token's log-probability from that of transformers in one process in the same dtype, in nats",
    MEAN: "the mean of these differences over the tokens",
    OF_EXACT: "of a token's log-probability from that of transformers in fp64",
}


@dataclass(frozen=True, kw_only=True)
class PretrainedArguments(WrittenArguments):
    model: str = "runs/smollm2"
    """Folder of a causal language model with its tokenizer."""
    data: str = "stdlib"
    """Text, as for burst eval with --pack none: each sequence is cut from one document."""
    seq_len: int = 1024
    sequences: int = 2
    worlds: tuple[int, ...] = (2,)
    strategies: tuple[str, ...] = tuple(NAMED)
    dtype: Literal["float32", "bfloat16"] = "float32"
    new_tokens: int = 16
    """Tokens to generate; 0: none."""
    steps: int = 3
    """Steps of LoRA; 0: none. Needs peft."""


@lru_cache(maxsize=1)
def _model(folder: str, dtype: str) -> Any:
    """Return a rank's model, which no function leaves parallelized."""
    logging.disable_progress_bar()
    return _loaded(folder, dtype).eval()


def _loaded(folder: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")


def plain_log_probs(folder: str, dtype: str, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Run in one process: return the log-probabilities, fp64 [S - 1], of each sequence's tokens but the first."""
    model, results = _model(folder, dtype), []
    with torch.no_grad():
        for ids in sequences:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            table = (logits if dtype == "float64" else logits.float()).log_softmax(-1)  # as transformers' loss does
            results.append(table.gather(-1, ids[0, 1:, None])[:, 0].double())
    return results


def log_probs(folder: str, dtype: str, strategy: str, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Run on a rank: return the same by ``hf.parallelize``."""
    model = hf.parallelize(_model(folder, dtype), strategy=strategy, timeout=TIMEOUT)
    try:
        with torch.no_grad():
            return [model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0].double() for ids in sequences]
    finally:
        hf.unparallelize(model)


def generated(folder: str, dtype: str, ids: Tensor, count: int, parallel: bool) -> list[int]:
    """Run on a rank: return the most likely ``count`` tokens after ``ids``, one after another."""
    model = _model(folder, dtype)
    greedy = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    greedy["attention_mask"] = torch.ones_like(ids)
    if not parallel:
        return model.generate(ids, **greedy)[0, ids.shape[1] :].tolist()
    hf.parallelize(model, timeout=TIMEOUT)
    try:
        cache = ShardedCache(model.config, timeout=TIMEOUT)
        return model.generate(ids, past_key_values=cache, **greedy)[0, ids.shape[1] :].tolist()
    finally:
        hf.unparallelize(model)


def lora_losses(folder: str, dtype: str, ids: Tensor, steps: int, parallel: bool) -> list[float]:
    """Run on a rank: train new adapters on ``ids``; return the loss before each step."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(_loaded(folder, dtype), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    if parallel:
        hf.parallelize(model, gradients="sum", timeout=TIMEOUT)
    trained, losses = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter in trained if parallel else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepare(folder: str) -> None:
    """Let plans find no rates of earlier runs: ``folder`` is empty."""
    os.environ["XDG_CONFIG_HOME"] = folder


@dataclass(frozen=True)
class Plain:
    """What plain transformers computes in one process."""

    exact: Tensor  # fp64 log-probabilities of all tokens
    log_probs: Tensor  # the same in --dtype
    tokens: list[int]
    losses: list[float]

    @classmethod
    def run(cls, pool: WorkerPool, a: PretrainedArguments, sequences: list[Tensor]) -> Plain:
        def one(function: Any, *arguments: Any) -> Any:
            return pool.run(function, a.model, *arguments, timeout=TIMEOUT)[0]

        exact, own = (torch.cat(one(plain_log_probs, dtype, sequences)) for dtype in ("float64", a.dtype))
        tokens = one(generated, a.dtype, sequences[0], a.new_tokens, False) if a.new_tokens else []
        return cls(exact, own, tokens, one(lora_losses, a.dtype, sequences[0], a.steps, False) if a.steps else [])

    def row(self, ranks: int, strategy: str, own: Tensor) -> dict[str, Any]:
        """Return the figures of log-probabilities; SystemExit if they are wrong."""
        apart, wrong = (own - self.log_probs).abs(), (own - self.exact).abs()
        limit = TOLERANCE * (self.log_probs - self.exact).abs().max().item()
        if not wrong.max().item() <= limit:
            raise SystemExit(
                f"{strategy}, {ranks_text(ranks)}: a log-probability is {wrong.max().item():.1e} nats from fp64; the "
                f"limit is {limit:.1e}, and nothing is reported"
            )
        figures = {"perplexity": (-own.mean()).exp().item(), "largest": apart.max().item(), "mean": apart.mean().item()}
        return {"ranks": ranks, "strategy": strategy, **figures, "largest_from_fp64": wrong.max().item()}

    def equal_tokens(self, tokens: list[int], dtype: str) -> int:
        """Return how many tokens are equal; SystemExit in fp32 if one is not. In bf16, rounding may change a choice."""
        equal = sum(x == y for x, y in zip(tokens, self.tokens, strict=True))
        if dtype == "float32" and equal < len(tokens):
            raise SystemExit(f"the ranks generate {tokens}, one process {self.tokens}; nothing is reported")
        return equal

    def largest_difference(self, losses: list[float], dtype: str) -> float:
        """Return the largest relative difference of a step's loss; SystemExit if it is more than rounding."""
        apart, limit = [abs(x / y - 1) for x, y in zip(losses, self.losses, strict=True)], LIMITS[dtype]
        if not all(difference <= limit for difference in apart):
            raise SystemExit(f"LoRA's losses are {losses}, in one process {self.losses}; nothing is reported")
        return max(apart)


def over_ranks(
    pool: WorkerPool, a: PretrainedArguments, sequences: list[Tensor], plain: Plain, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each strategy (its figures, or why it is ``refused``), and one of tokens and losses."""
    rows, world = list[dict[str, Any]](), pool.world
    for strategy in a.strategies:
        try:
            found = pool.run(log_probs, a.model, a.dtype, strategy, sequences, timeout=TIMEOUT)[0]
        except WorkerError as error:
            if pool.broken or not isinstance(error.errors[0], ValueError):
                raise
            rows.append({"ranks": world, "strategy": strategy, "refused": str(error.errors[0]).splitlines()[0]})
        else:
            rows.append(plain.row(world, strategy, torch.cat(found)))
        say(f"{strategy}, {ranks_text(world)}: done")
    figures: dict[str, Any] = {"ranks": world}
    if a.new_tokens:
        tokens = pool.run(generated, a.model, a.dtype, sequences[0], a.new_tokens, True, timeout=TIMEOUT)[0]
        figures["equal_tokens"] = plain.equal_tokens(tokens, a.dtype)
    if a.steps:
        losses = pool.run(lora_losses, a.model, a.dtype, sequences[0], a.steps, True, timeout=TIMEOUT)[0]
        figures |= {"losses": losses, "largest": plain.largest_difference(losses, a.dtype)}
    return rows, figures


def read(a: PretrainedArguments) -> list[Tensor]:
    """Return the sequences, int64 [1, S]; ValueError names a wrong flag."""
    if not Path(a.model, "config.json").is_file():
        raise ValueError(
            f"--model {a.model} has no config.json; `python examples/pretrained.py {a.model}` makes a folder"
        )
    if a.steps and importlib.util.find_spec("peft") is None:
        raise ValueError(f"--steps {a.steps} needs peft: pip install peft, or give --steps 0")
    for strategy in a.strategies:
        strategy_of(strategy)
    config = EvalConfig(model=a.model, data=a.data, seq_len=a.seq_len, pack="none")
    config.check()
    held_out = open_sequences(config.as_training)[0].held_out()
    sequences = [torch.from_numpy(each.tokens).long()[None] for each in itertools.islice(held_out, a.sequences)]
    if not sequences:
        raise ValueError(f"--data {a.data!r} has no document of --seq-len {a.seq_len} tokens")
    return sequences


def main(arguments: list[str]) -> None:
    a = asked(PretrainedArguments(), __doc__, "burst bench pretrained", arguments)
    try:
        sequences = read(a)
    except ValueError as error:
        raise SystemExit(f"burst bench pretrained: {error}") from None
    console, rows, runs = console_of_tables(), list[dict[str, Any]](), list[dict[str, Any]]()

    def say(text: str) -> None:
        console.print(f"[dim]{text}[/]", highlight=False)

    with tempfile.TemporaryDirectory() as folder:
        with WorkerPool(1, threads=torch.get_num_threads(), timeout=TIMEOUT) as pool:
            plain = Plain.run(pool, a, sequences)
            rows.append(plain.row(1, PLAIN, plain.log_probs))
        for world in a.worlds:
            with WorkerPool(world, timeout=TIMEOUT) as pool:
                pool.run(prepare, folder)
                of_strategies, run = over_ranks(pool, a, sequences, plain, say)
                rows += of_strategies
                runs.append(run)
    _show(console, a, rows, runs, sum(ids.shape[1] - 1 for ids in sequences))
    a.write(rows=rows, runs=runs, losses_of_one_process=plain.losses)


def _show(
    console: Console, a: PretrainedArguments, rows: list[dict[str, Any]], runs: list[dict[str, Any]], tokens: int
) -> None:
    title = f"{a.model}, {a.dtype}, {tokens:,} tokens of {a.data} in sequences of {a.seq_len:,}"
    print_table(console, [_line(row) for row in rows if "refused" not in row], title=title, legend=LEGEND, keys=2)
    lines = [f"{row['strategy']}, {ranks_text(row['ranks'])}: {row['refused']}" for row in rows if "refused" in row]
    for run in runs:
        ranks = ranks_text(run["ranks"])
        if a.new_tokens:
            of = f"{run['equal_tokens']} of {a.new_tokens} greedy tokens after {a.seq_len:,} are transformers'"
            lines.append(f"{ranks}, sharded cache: {of}")
        if a.steps:
            losses = ", ".join(f"{loss:.6f}" for loss in run["losses"])
            lines.append(f"{ranks}, LoRA: losses {losses}; at most {run['largest']:.1e} (relative) from transformers'")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _line(row: dict[str, Any]) -> dict[str, str]:
    alone = row["strategy"] == PLAIN
    own = {name: "-" if alone else f"{row[name]:.1e}" for name in ("largest", "mean")}
    return {
        "ranks": str(row["ranks"]),
        "strategy": row["strategy"],
        "perplexity": f"{row['perplexity']:.6f}",
        LARGEST: own["largest"],
        MEAN: own["mean"],
        OF_EXACT: f"{row['largest_from_fp64']:.1e}",
    }
