"""Perplexity of one model with each strategy, and their largest differences per token."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from burst_attention import Plan, make_plan
from burst_attention.launch.join import DATA, RankContext, join, make_mesh

from ..data.sequences import TokenSequence, digest_of, open_sequences
from ..strategies import SINGLE, Heads, choose
from .evaluation import EvalConfig, StrategyResult
from .model import batch_of, build_model, model_config


@torch.no_grad()
def token_losses(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    *,
    plan: Plan,
    context: RankContext,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, fp32 or fp64 [S] in global order on the CPU, 0 without a target), each sequence on one rank.

    All ranks must exhaust it; groups of ranks share the sequences. ``plan``: of the model.
    """
    groups = context.mesh[DATA].size()
    for start in range(0, len(sequences), groups):
        # Every group takes part in every round, because parameters are gathered from all ranks.
        index = min(start + context.group_index, len(sequences) - 1)
        sequence = sequences[index]
        loss = -model(**batch_of([sequence], context.device), fused_lm_head="log_probs").log_probs[0]
        if start + context.group_index < len(sequences) and start // groups % plan.world == plan.rank:
            yield index, loss.cpu()
        if progress:
            progress(min(start + groups, len(sequences)))


def refusal(strategy: str, heads: Heads, length: int, world: int) -> str | None:
    """Return why a strategy can't share ``length`` tokens among ``world`` ranks; None if it can."""
    sharing = 1 if strategy == SINGLE else world
    try:
        choose(strategy).check(heads, length, sharing)
    except ValueError as error:
        return str(error)
    if length < sharing:
        return f"sequences of {length} tokens are shorter than the {sharing} ranks that share them; lower --ranks"
    return None


def nothing_to_evaluate(config: EvalConfig) -> ValueError:
    """Return the error for documents that give no sequence."""
    least = f"a document of --seq-len {config.seq_len} tokens, or --pack documents" if config.pack == "none" else "text"
    share = f"--held-out {config.held_out} of " if config.held_out < 1 else ""
    return ValueError(f"{share}--data {config.data!r} leaves no token to evaluate; it needs {least}")


def evaluate(
    config: EvalConfig,
    report: Callable[[StrategyResult], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[StrategyResult]:
    """Evaluate every strategy, on every rank of the job; return the results in the order of ``config.strategies``.

    Rank 0 calls ``report`` with each result and ``progress`` with (strategy, finished sequences, all).
    ValueError names a wrong flag; DisagreementError: the ranks read different sequences; FloatingPointError: a loss.
    """
    config.check()
    with join(device=config.device, timeout=config.timeout) as context:
        evaluator = _Evaluator(config, context)
        results = {name: StrategyResult(strategy=name, refused=evaluator.refused(name)) for name in config.strategies}
        able = [name for name, result in results.items() if result.refused is None]
        reference = SINGLE if SINGLE in able else next(iter(able), None)
        for name in sorted(able, key=lambda name: name != reference):  # the reference first
            tell = partial(progress, name) if progress and context.rank == 0 else None
            results[name] = replace(evaluator.run(name, tell), reference=reference)
            if report and context.rank == 0:
                report(results[name])
            gc.collect()  # a sharded model is part of reference cycles, and the next model needs its memory
    return list(results.values())


class _Evaluator:
    """State that the strategies share on one rank; the first one that runs is the reference."""

    def __init__(self, config: EvalConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        reader, tokenizer = open_sequences(config.as_training)
        self.sequences = list(itertools.islice(reader.held_out(), config.sequences))
        agreement = make_plan(config.seq_len, group=context.everyone, timeout=config.timeout).agreement
        agreement.agree("the sequences to evaluate", {"digest of tokens and borders": digest_of(self.sequences)})
        self.tokens = sum(sequence.valid_tokens for sequence in self.sequences)
        if not self.tokens:
            raise nothing_to_evaluate(config)
        self.length = len(self.sequences[0].tokens)
        self.dtype = config.as_training.model.compute_dtype(context.device.type)
        self.model_config = model_config(
            config.model,
            tokenizer,
            config.seq_len,
            training=False,
            rope_scaling=config.rope_scaling,
            named=config.as_training.data.tokenizer,
        )
        self.reference: dict[int, Tensor] | None = None

    def refused(self, name: str) -> str | None:
        """Return why the strategy can't run this model, or None."""
        return refusal(name, Heads.of(self.model_config), self.length, self.context.world)

    def run(self, name: str, progress: Callable[[int, int], None] | None = None) -> StrategyResult:
        """Evaluate all sequences with one strategy."""
        sharing, groups = choose(name), self.context.world if name == SINGLE else 1
        context = replace(self.context, mesh=make_mesh(self.context.device.type, data_parallel=groups))
        heads, timeout = Heads.of(self.model_config), self.config.timeout
        plan = sharing.plan(self.length, group=context.context_mesh, timeout=timeout, heads=heads, dtype=self.dtype)
        model = build_model(
            self.config.model,
            self.model_config,
            sharing,
            plan,
            dtype=self.dtype,
            mesh=context.mesh,
            everyone=context.everyone,
            seed=self.config.as_training.run.seed,
        ).eval()
        context.collect(None)  # a barrier: all ranks start the clock together
        began = time.perf_counter()
        tell = (lambda done: progress(done, len(self.sequences))) if progress else None
        pairs = token_losses(model, self.sequences, plan=plan, context=context, progress=tell)
        losses = dict(pairs)
        return self._result(name, losses, time.perf_counter() - began)

    def _result(self, name: str, losses: dict[int, Tensor], seconds: float) -> StrategyResult:
        """Combine all ranks' losses. A rank reports the same sequences with every strategy."""
        if self.reference is None:
            self.reference = losses
        sums = {index: loss.sum(dtype=torch.float64).item() for index, loss in losses.items()}
        differences = [(loss - self.reference[index]).abs().max().item() for index, loss in losses.items()]
        by_rank = self.context.collect((sums, max(differences, default=0.0), seconds))
        by_index = {index: value for rank in by_rank for index, value in rank[0].items()}
        loss = math.fsum(by_index[index] for index in range(len(self.sequences))) / self.tokens
        if not math.isfinite(loss):
            raise FloatingPointError(f"--strategies {name}: loss {loss}; the model's weights or --dtype are to blame")
        return StrategyResult(
            strategy=name,
            loss=loss,
            tokens=self.tokens,
            sequences=len(self.sequences),
            seconds=max(rank[2] for rank in by_rank),
            greatest_difference=max(rank[1] for rank in by_rank),
        )
