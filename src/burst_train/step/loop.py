"""The training loop. All ranks read the same sequences; each computes its shard of its group's sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from burst_attention.launch.join import RankContext, join

from ..checkpoint.saving import Saver
from ..checkpoint.writer import all_or_raise
from ..config import TrainConfig
from ..data.sequences import SHUFFLED_TOKENS, epochs_text
from ..run.folder import SaveError
from ..run.interrupt import InterruptedRunError, StopRequests
from ..run.lock import check_inputs
from ..run.metrics import MODEL, TRACES, UNFINISHED, Reporter, RunFolder, StepRecord, Summary, claim_run, without_auto
from ..run.tracking import Tracking
from .export import save_model, saved_dtype
from .model import model_in
from .trainer import Trainer as Trainer


def train(config: TrainConfig, reporters: Sequence[Reporter] = (), *, held: bool = False) -> Summary:
    """Train, evaluate and save, on every rank of the job with the same ``config``; return the same summary on all.

    ``held``: the caller holds the run's folder. ValueError names a wrong flag; FloatingPointError: non-finite values;
    SaveError: the model could not be written; InterruptedRunError: a rank was asked to stop.
    """
    config.check()
    config, chosen = without_auto(config)
    parallel, summary = config.parallel, None
    with (
        StopRequests(config.run.deadline).listening() as requests,
        join(
            device=parallel.device,
            timeout=parallel.timeout,
            data_parallel=parallel.data_parallel,
            tensor_parallel=parallel.tensor_parallel,
        ) as context,
        _folder(config, context, held=held) as folder,
    ):
        config.check_world(context.world)
        trainer = Trainer(config, context)
        notes = [chosen] * bool(chosen) + trainer.go_on()
        reporters = [folder, *reporters] if folder else []

        def tell(note: str) -> None:
            for reporter in reporters:
                reporter.note(note)

        if folder:
            folder.tell = tell
        if folder and config.run.wandb is not None:
            reporters.append(Tracking(config.run.wandb, tell))

        for reporter in reporters:
            reporter.start(config, sum(parameter.numel() for parameter in trainer.model.parameters()), trainer.step)
        for note in notes:
            tell(note)
        try:
            saver = Saver(trainer, requests, tell)
            with closing(trainer.watch):
                records = _run(trainer, saver, reporters)
        except InterruptedRunError as interrupted:
            stopped = interrupted  # raised below, after the ranks have left their group
            for reporter in reporters:
                reporter.interrupt(stopped)
        else:
            summary = replace(_finish(trainer, folder, records), missing_checkpoints=saver.missing)
            if saver.best is not None:
                summary = replace(summary, best_step=saver.best.step, best_held_out_loss=saver.best.loss)
            for reporter in reporters:
                reporter.finish(summary)
    if summary is None:
        raise stopped
    return summary


def _run(trainer: Trainer, saver: Saver, reporters: Sequence[Reporter]) -> list[StepRecord]:
    """Run the remaining steps."""
    records, epoch_tokens = [], None
    for record in trainer.steps():
        began = time.perf_counter()
        records.append(replace(record, held_out_loss=trainer.evaluate_if_due()))
        for reporter in reporters:
            reporter.step(records[-1])
            if record.step == trainer.config.run.profile:
                folder = Path(trainer.config.run.out) / TRACES
                reporter.note(f"step {record.step} was profiled; each rank wrote a trace to {folder}")
        if epoch_tokens is None and (epoch_tokens := trainer.sequences.epoch_tokens):
            for reporter in reporters if epoch_tokens > SHUFFLED_TOKENS else ():  # else reported before the start
                reporter.note(epochs_text(trainer.config, epoch_tokens))
        trainer.watch.enter("saving")
        saver.after_step(record.seconds + time.perf_counter() - began)
    saver.finish()
    return records


def _finish(trainer: Trainer, folder: RunFolder | None, records: list[StepRecord]) -> Summary:
    """Write the trained model and evaluate it."""
    dtype = saved_dtype(trainer.model_config, trainer.config.model.save_dtype)
    context, target = trainer.context, Path(trainer.config.run.out) / UNFINISHED
    try:
        all_or_raise(
            context,
            lambda: save_model(
                model_in(trainer.model),
                trainer.tokenizer,
                target,
                rank=context.rank,
                dtype=dtype,
                lora=trainer.config.model.lora,
                source=trainer.config.model.model,
            ),
        )
    except SaveError as error:
        raise SaveError(f"the trained model could not be written to {target}: {error}") from None
    if folder:
        folder.marker.move(UNFINISHED, MODEL)
    return trainer.summarise(records)


@contextmanager
def _folder(config: TrainConfig, context: RankContext, *, held: bool) -> Iterator[RunFolder | None]:
    """Claim the run's folder on rank 0; yield None on other ranks. Every rank raises if rank 0 can't claim it."""
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
