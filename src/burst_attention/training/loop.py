"""The training loop: every rank reads the same sequences and computes its shard of those of its group."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from burst_attention import Plan
from burst_attention.attention.batch import Plans
from burst_attention.engines import Heads, choose
from burst_attention.integrations import hf

from ..launch.join import RankContext, join
from .claim import check_inputs
from .config import TrainConfig
from .data import TokenSequence, digest_of, open_sequences
from .evaluate import token_losses
from .export import save_model, saved_dtype
from .interrupt import InterruptedRunError, StopRequests
from .metrics import MODEL, UNFINISHED, Reporter, RunFolder, StepRecord, Summary, claim_run, without_auto
from .model import batch_of, build_model, model_config
from .optim import clip_by_global_norm, make_optimizer, make_schedule
from .saving import Saver, resume


def train(config: TrainConfig, reporters: Sequence[Reporter] = (), *, held: bool = False) -> Summary:
    """Train, evaluate, save. Every rank of the job must call it with the same ``config``.

    Args:
        reporters: what rank 0 tells besides the run's folder; ignored on other ranks.
        held: whether the caller holds the run's folder, by :func:`burst_attention.training.metrics.claim_run`.

    Returns:
        The same summary on every rank.

    Raises:
        ValueError: a setting can't be, or the run's folder is not to be written to; names the flag.
        FloatingPointError: the loss is no longer a number.
        InterruptedRunError: a rank was asked to stop before the last step; what there is was saved.
    """
    config.check()
    config, chosen = without_auto(config)
    parallel, summary = config.parallel, None
    with (
        StopRequests(config.run.deadline).listening() as requests,
        join(device=parallel.device, timeout=parallel.timeout, data_parallel=parallel.data_parallel) as context,
        _folder(config, context, held=held) as folder,
    ):
        config.check_world(context.world)
        trainer = Trainer(config, context)
        notes = [chosen] * bool(chosen) + trainer.go_on()
        reporters = [folder, *reporters] if folder else []

        def tell(note: str) -> None:
            for reporter in reporters:
                reporter.note(note)

        for reporter in reporters:
            reporter.start(config, sum(parameter.numel() for parameter in trainer.model.parameters()), trainer.step)
        for note in notes:
            tell(note)
        try:
            saver = Saver(trainer, requests, tell)
            records = _run(trainer, saver, reporters)
        except InterruptedRunError as interrupted:
            stopped = interrupted  # raised below, when the ranks have left their group
            for reporter in reporters:
                reporter.interrupt(stopped)
        else:
            summary = _finish(trainer, folder, records)
            if saver.best is not None:
                summary = replace(summary, best_step=saver.best.step, best_held_out_loss=saver.best.loss)
            for reporter in reporters:
                reporter.finish(summary)
    if summary is None:
        raise stopped
    return summary


def _run(trainer: Trainer, saver: Saver, reporters: Sequence[Reporter]) -> list[StepRecord]:
    """The steps that are left."""
    records = []
    for record in trainer.steps():
        began = time.perf_counter()
        records.append(replace(record, held_out_loss=trainer.evaluate_if_due()))
        for reporter in reporters:
            reporter.step(records[-1])
        saver.after_step(record.seconds + time.perf_counter() - began)
    saver.finish()
    return records


def _finish(trainer: Trainer, folder: RunFolder | None, records: list[StepRecord]) -> Summary:
    """Write the trained model, evaluate it."""
    save_model(
        trainer.model,
        trainer.tokenizer,
        Path(trainer.config.run.out) / UNFINISHED,
        rank=trainer.context.rank,
        dtype=saved_dtype(trainer.model_config, trainer.config.model.save_dtype),
    )
    if folder:
        folder.marker.move(UNFINISHED, MODEL)
    return trainer.summarise(records)


@contextmanager
def _folder(config: TrainConfig, context: RankContext, *, held: bool) -> Iterator[RunFolder | None]:
    """Rank 0's folder of the run, held for it; None on other ranks. Every rank raises if it is not to be had."""
    refusal = None
    with ExitStack() as stack:
        if context.rank == 0 and not held:
            try:
                check_inputs(config.run.out, config.inputs)
                stack.enter_context(claim_run(config))
            except ValueError as error:
                refusal = str(error)
        if (refusal := context.collect(refusal)[0]) is not None:
            raise ValueError(refusal)
        yield RunFolder(config.run.out) if context.rank == 0 else None


class Trainer:
    """One rank of a training run."""

    def __init__(self, config: TrainConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.reader, self.tokenizer = open_sequences(config)
        self.dtype = config.model.compute_dtype(context.device.type)
        self.model_config = model_config(
            config.model.model,
            self.tokenizer,
            config.data.seq_len,
            max_positions=config.model.max_positions,
            named=config.data.tokenizer,
        )
        self.windows = hf.layer_windows(self.model_config)
        self.engine = choose(**config.parallel.how)
        self.heads = Heads.of(self.model_config)
        self.plan = self._make_plan(config.data.seq_len)
        self.model = build_model(
            config.model.model,
            self.model_config,
            self.engine,
            dtype=self.dtype,
            mesh=context.mesh,
            everyone=context.everyone,
            seed=config.run.seed,
            memory=config.memory,
        )
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(self.optimizer, config)
        self.sequences = self.reader.training()
        self.step, self.first_loss, self.last_loss = 0, math.nan, math.nan
        self.held_out: float | None = None
        self.held_out_tokens = 0

    def go_on(self) -> list[str]:
        """Take over what ``--resume`` names, if rank 0 was told to; returns what is to be told about it."""
        notes: list[str] = []
        if resumed := self.context.collect(self.config.run.resume)[0]:
            resume(self, resumed, notes.append)
        return notes

    def steps(self) -> Iterator[StepRecord]:
        """Run the optimizer steps that are left, one by one."""
        per_step = self.config.sequences_per_step
        for step in range(self.step + 1, self.config.run.steps + 1):
            start, sent = time.perf_counter(), self.plan.transport.sent
            lr = float(self.schedule.get_last_lr()[0])
            loss, predicted = self.backward(list(itertools.islice(self.sequences, per_step)))
            norm = self.update()
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}; lower --lr")
            self.step, self.last_loss = step, loss
            self.first_loss = loss if step == 1 else self.first_loss
            seconds = time.perf_counter() - start
            tokens = self.tokens_per_step
            yield StepRecord(
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                tokens_per_second=tokens / seconds,
                seconds=seconds,
                tokens=step * tokens,
                bytes_sent=self.plan.transport.sent - sent if self.engine.posts else None,
                bytes_predicted=predicted,
            )

    @property
    def tokens_per_step(self) -> int:
        return self.config.sequences_per_step * self.config.data.seq_len

    def backward(self, sequences: list[TokenSequence]) -> tuple[float, int]:
        """Sum up the gradient of the mean loss over the sequences of one step.

        Args:
            sequences: those of all groups and accumulation steps.

        Returns:
            The mean loss, and the bytes that this rank's plans predict for its attention.
        """
        self._agree_on(sequences)
        # Known to every rank without a word: all of them read all sequences.
        num_valid = sum(sequence.valid_tokens for sequence in sequences)
        loss, predicted = 0.0, 0
        for batch in self._micro_batches(sequences):
            plans = Plans.by_windows(self.plan, self.windows, batch[0].cu_seqlens)
            shard = self.engine.shard(batch_of(batch, self.context.device), plans)
            part_loss = self.model(shard, plans, max(num_valid, 1))
            part_loss.backward()
            loss += part_loss.item()
            predicted += self._predict_sent(plans)
        return self.context.sum_over_groups(loss), predicted

    def update(self) -> float:
        """Clip the gradient, take an optimizer step, forget the gradient; returns its norm before clipping."""
        norm = clip_by_global_norm(self.model, self.config.optim.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def evaluate_if_due(self) -> float | None:
        """The loss of the held-out documents after the latest step, if ``--eval-every`` has it measured there."""
        every = self.config.run.eval_every
        self.held_out = None
        if every and (self.step % every == 0 or self.step == self.config.run.steps):
            self.held_out, self.held_out_tokens = self.evaluate()
        return self.held_out

    def evaluate(self) -> tuple[float | None, int]:
        """(mean loss per valid token over the held-out sequences, how many tokens those are)."""
        sequences = list(itertools.islice(self.reader.held_out(), self.config.data.held_out_sequences))
        self._agree_on(sequences)
        tokens = sum(sequence.valid_tokens for sequence in sequences)
        if not tokens:
            return None, 0
        length = len(sequences[0].tokens)
        plan = self.plan if length == self.plan.seqlen else self._make_plan(length)
        self.model.eval()
        losses = token_losses(self.model, sequences, plan=plan, windows=self.windows, context=self.context)
        mine = sum(loss.sum(dtype=torch.float64).item() for _, loss in losses)
        self.model.train()
        for module in self.model.modules():  # the outermost one waits for a backward, and what is saved are the shards
            if isinstance(module, FSDPModule):
                module.reshard()
        return sum(self.context.collect(mine)) / tokens, tokens

    def summarise(self, records: list[StepRecord]) -> Summary:
        """Evaluate, and collect what the ranks have to tell."""
        measured = self.held_out is not None  # after the last step
        held_out_loss, held_out_tokens = (self.held_out, self.held_out_tokens) if measured else self.evaluate()
        counted = [record.bytes_sent for record in records if record.bytes_sent is not None]
        sent = sum(counted) / len(counted) if counted else None
        predicted = sum(record.bytes_predicted for record in records) / max(len(records), 1)
        seconds = sum(record.seconds for record in records)
        by_rank = self.context.collect((self.context.peak_memory(), sent, predicted, seconds))
        peak_memory, bytes_sent, bytes_predicted, durations = (list(column) for column in zip(*by_rank, strict=True))
        return Summary(
            steps=self.step,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            held_out_loss=held_out_loss,
            held_out_tokens=held_out_tokens,
            tokens_per_second=len(records) * self.tokens_per_step / durations[0] if records else 0.0,
            skipped_files=self.reader.corpus.skipped,
            peak_memory=peak_memory,
            bytes_sent=bytes_sent,
            bytes_predicted=bytes_predicted,
        )

    def _agree_on(self, sequences: list[TokenSequence]) -> None:
        """Raise DisagreementError if ranks that share a sequence read other tokens, as from another copy of a file."""
        record = {"digest of tokens and borders": digest_of(sequences)}
        self.plan.agreement.agree("the sequences to train on", record)

    def _make_plan(self, seqlen: int) -> Plan:
        self.engine.check(self.heads, seqlen, self.context.context_mesh.size())
        group, timeout = self.context.context_mesh, self.config.parallel.timeout
        return self.engine.plan(seqlen, group=group, timeout=timeout, heads=self.heads, dtype=self.dtype)

    def _micro_batches(self, sequences: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
        """This group's sequences, one batch for each accumulation step."""
        batch, groups = self.config.optim.batch, self.config.parallel.data_parallel
        for start in range(self.context.group_index * batch, len(sequences), groups * batch):
            yield sequences[start : start + batch]

    def _predict_sent(self, plans: Plans) -> int:
        """Bytes that this rank's attention sends in one forward and backward of all layers."""
        layers = [plans[window] for window in self.windows]
        forward, backward = self.engine.sent(layers, self.heads, batch=self.config.optim.batch, dtype=self.dtype)
        # A layer that is recomputed exchanges again, but for the results that no backward needs.
        return forward * (2 if self.config.memory.remat == "layer" else 1) + backward
