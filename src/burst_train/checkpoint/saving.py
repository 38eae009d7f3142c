"""When a run saves checkpoints, and how it resumes from one."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from burst_attention.launch.join import RankContext
from burst_attention.launch.local import RefusedError
from burst_attention.planner.rates import Rates

from ..config import TrainConfig
from ..data.sequences import Cursor
from ..run.folder import FOLDER, SaveError, list_checkpoints, step_of
from ..run.interrupt import InterruptedRunError, StopRequests, reason_of
from ..run.metrics import NEWEST, goes_on_in
from . import files
from .files import Best, best_checkpoint
from .manifest import UNFINISHED, discard, discard_unfinished, read_state
from .snapshot import MOMENTS, WAITING, TrainingState, check_same_run, put_moments, restore, state_of, tensors_of
from .state import State, read_generators
from .writer import CheckpointWriter, all_or_raise, seconds_to_write


class Saver:
    """Saves one rank's part of due checkpoints, one at a time, and stops the run on request to any rank."""

    def __init__(
        self,
        run: TrainingState,
        requests: StopRequests,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.requests, self.tell = run, requests, tell
        self.best: Best | None = None
        self._clock, self._saved_at = clock, clock()
        self._longest_step = self._longest_save = self._copying = self._expected_save = 0.0
        self._draft: CheckpointWriter | None = None
        self._held_out: float | None = None  # of the checkpoint being written
        self._waited = self._ran = False
        self._saved: list[int] = []
        self._failed: dict[int, float] = {}  # held-out loss by step, infinite if not measured
        self._out, self._is_first = Path(run.config.run.out), run.context.rank == 0
        if self._is_first:
            discard_unfinished(self._out)
            self.best = best_checkpoint(self._out, run.step) if goes_on_in(run.config) else None
            if requests.until is not None:
                self._expected_save = self._try_disk()
        self.best = run.context.collect(self.best)[0]

    def after_step(self, seconds: float) -> None:
        """Save if it is due, on every rank after every step; InterruptedRunError if a rank was asked to stop."""
        run, draft, self._ran = self.run, self._draft, True
        self._longest_step = max(self._longest_step, seconds)
        # Time to reserve before the deadline: a slow step, a slow save, and the save being written.
        save = self._longest_save or self._expected_save
        reserve = 1.5 * self._longest_step + (3 if draft else 2) * save + 1
        numbers = self.requests.pending(reserve), self._is_due(), draft is not None and draft.is_being_written
        stop, due, writing = run.context.greatest(*map(int, numbers))
        stopping = bool(stop) and run.step < run.config.run.steps
        if stopping:
            self.requests.end_at_once()
        if draft is not None and (stopping or due or not writing):
            self._tell_of_waiting(draft, bool(writing and not stopping))
            self._seal()
        if stopping:
            raise InterruptedRunError(reason_of(stop), run.step, self.save())
        if due:
            self._begin()
            if self._draft is not None:
                self._draft.write_during_training()

    def _try_disk(self) -> float:
        """Estimate the seconds of a first save from a small trial; 0 if the disk can't be written to."""
        weights = sum(p.numel() * p.element_size() for p in self.run.model.parameters())
        folder = self._out / FOLDER / f"step-trial{UNFINISHED}"
        try:
            return seconds_to_write(folder, weights * (1 + len(MOMENTS)))
        except OSError:
            return 0.0
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def save(self) -> Path | None:
        """Write a checkpoint while all ranks wait; return None, and report why, if it can't be written."""
        self._begin()
        if self._draft is None:
            return None
        self._draft.write(at_once=True)
        return self._seal()

    def finish(self) -> None:
        """Leave a checkpoint of the last step. Every rank must call it after the last step."""
        if self._draft is not None:
            self._seal()
        if self._ran and self.run.step not in (*self._saved, *self._failed):
            self.save()

    @property
    def missing(self) -> list[int]:
        """Steps of failed checkpoints that the run would still hold: one of the newest ``--keep``, or the best."""
        newest = sorted([*self._saved, *self._failed])[-self.run.config.run.keep :]
        best = min(self._failed, key=lambda step: (self._failed[step], step), default=None)
        if best is None or self._failed[best] >= (self.best.loss if self.best else math.inf):
            best = None
        return [step for step in self._failed if step in newest or step == best]

    def _begin(self) -> None:
        """Copy the run's state into a draft."""
        run, began = self.run, self._clock()
        tensors = tensors_of(run.model, run.optimizer)
        tensors[WAITING] = torch.from_numpy(run.sequences.cursor().waiting)
        state = state_of(run, run.context.collect(read_generators()))
        try:
            self._draft = CheckpointWriter(self._out, tensors, state, step=run.step, context=run.context)
            self._held_out = run.held_out
        except SaveError as error:
            self._note_failure(run.step, run.held_out, error)
        self._saved_at = self._clock()
        self._copying = self._saved_at - began

    def _seal(self) -> Path | None:
        """Finish the checkpoint being written and remove those that it replaces."""
        draft, held_out, self._draft, self._held_out = self._draft, self._held_out, None, None
        assert draft is not None
        try:
            folder = draft.seal()
        except SaveError as error:
            self._note_failure(draft.step, held_out, error)
            return None
        finally:
            self._longest_save = max(self._longest_save, self._copying + draft.seconds)
        self._saved.append(draft.step)
        best = None
        if self._is_first:
            best = best_checkpoint(self._out, draft.step)
            self._remove_superfluous(draft.step, best)
        self.best = self.run.context.collect(best)[0]
        return folder

    def _remove_superfluous(self, step: int, best: Best | None) -> None:
        """Remove all but the newest ``--keep`` up to ``step`` and the best; later ones are of an abandoned branch."""
        folders = list_checkpoints(self._out)
        kept = [folder for folder in folders if step_of(folder) <= step][: self.run.config.run.keep]
        for folder in folders:
            if folder not in kept and (best is None or step_of(folder) != best.step):
                discard(folder)

    def _is_due(self) -> bool:
        """Whether a checkpoint is due: by step, by clock, or by the best held-out loss."""
        held_out, every = self.run.held_out, self.run.config.run.save_every
        rivals = [self.best.loss if self.best else math.inf, math.inf if self._held_out is None else self._held_out]
        if held_out is not None and held_out < min(rivals):
            return True
        if every.endswith("m"):
            return self._clock() - self._saved_at >= 60 * int(every[:-1])
        return self.run.step % int(every) == 0

    def _tell_of_waiting(self, draft: CheckpointWriter, waiting: bool) -> None:
        if waiting and not self._waited and self._is_first:
            self._waited = True
            self.tell(
                f"the checkpoint after step {draft.step} is still being written, but the next one is due. Training "
                "waits for it, now and each time this happens; a longer --save-every avoids the wait"
            )

    def _note_failure(self, step: int, held_out: float | None, error: SaveError) -> None:
        self._failed[step] = held_out if held_out is not None and math.isfinite(held_out) else math.inf
        if self._is_first:
            self.tell(f"the checkpoint after step {step} could not be written: {error}; earlier checkpoints remain")


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to resume from, the same on all ranks."""

    folder: Path
    state: State
    rates: Rates | None  # by which the run was planned, if as many ranks measured them: others would round differently


def resumable(config: TrainConfig, context: RankContext, tell: Callable[[str], None]) -> Resumed | None:
    """Return the checkpoint that ``--resume`` of rank 0 names; on every rank; ValueError if it can't be used."""
    source = context.collect(config.run.resume)[0]
    if not source:
        return None
    try:
        folder = all_or_raise(context, lambda: _find(config, source, tell) if context.rank == 0 else Path())[0]
        state = all_or_raise(context, lambda: _read(config, folder))[context.rank]
    except SaveError as error:
        raise RefusedError(str(error).removeprefix("rank 0: ").removeprefix("ValueError: ")) from None
    rates = Rates.from_dict(state.rates) if state.rates else None
    fits = rates and rates.measured_on and rates.measured_on.ranks == context.context_mesh.size()
    return Resumed(folder, state, rates if fits else None)


def resume(run: TrainingState, resumed: Resumed, tell: Callable[[str], None]) -> None:
    """Resume from a checkpoint, on every rank."""
    folder, state = resumed.folder, resumed.state
    tensors = tensors_of(run.model, run.optimizer)
    waiting = tensors[WAITING] = torch.zeros(state.tensors[WAITING].shape, dtype=torch.int32)
    files.load(folder, tensors)
    put_moments(run.model, run.optimizer, tensors)
    restore(run, state, Cursor(**dict(state.cursor), waiting=waiting.numpy()))
    if (decay := run.config.decay_steps) != (steps := run.config.run.steps):
        rest = f" and then stays at its minimum, {run.config.peak_lr * run.config.optim.min_lr:.3g}"
        tell(
            f"--steps {steps}: the learning rate keeps the schedule of the run's start, which ends at step {decay}"
            + rest * (steps > decay)
        )


def _find(config: TrainConfig, resumed: str, tell: Callable[[str], None]) -> Path:
    if resumed == NEWEST:
        try:
            return files.newest_whole(Path(config.run.out), tell)
        except ValueError as error:
            raise files.not_resumed(error) from None
    try:
        files.check(Path(resumed))
    except ValueError as error:
        raise ValueError(f"--resume {error}; name another checkpoint, or give no name for the newest") from None
    return Path(resumed)


def _read(config: TrainConfig, folder: Path) -> State:
    state = read_state(folder)
    check_same_run(config, state.config)
    return state
