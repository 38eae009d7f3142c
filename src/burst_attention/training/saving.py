"""When a run is saved, and from what it goes on."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..launch.local import RefusedError
from . import checkpoint
from .checked import Checked
from .checkpoint import Best, best_checkpoint
from .config import TrainConfig
from .cursor import Cursor
from .draft import Draft, SaveError, together
from .generators import read_generators
from .interrupt import InterruptedRunError, StopRequests, reason_of
from .manifest import FOLDER, UNFINISHED, discard, discard_unfinished, list_checkpoints, read_state, step_of
from .metrics import NEWEST, goes_on_in
from .shards import seconds_to_write
from .snapshot import MOMENTS, WAITING, Run, check_same_run, restore, state_of, tensors_of


class Saver:
    """Saves one rank's part of a run when it is time to, beside the training, and ends the run when that is asked for.

    One checkpoint is written at a time. If it still is when the next is due, that one waits, and so does the training:
    which checkpoints a run has must not hang on how fast a disk was, and more than one copy must not fill the memory.

    Args:
        requests: of this process; what one rank is asked, all hear of.
        tell: is given in words what went wrong, on rank 0.
        clock: gives seconds, and never goes back.
    """

    def __init__(
        self,
        run: Run,
        requests: StopRequests,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.requests, self.tell = run, requests, tell
        self.best: Best | None = None
        self._clock, self._saved_at = clock, clock()
        self._longest_step = self._longest_save = self._copying = self._expected_save = 0.0
        self._draft: Draft | None = None
        self._held_out: float | None = None  # of the checkpoint under way
        self._waited = False
        self._saved: list[int] = []
        self._failed: dict[int, float] = {}  # held-out loss by step, infinite without one
        self._out, self._is_first = Path(run.config.run.out), run.context.rank == 0
        if self._is_first:
            discard_unfinished(self._out)
            self.best = best_checkpoint(self._out, run.step) if goes_on_in(run.config) else None
            if requests.has_deadline:
                self._expected_save = self._try_disk()
        self.best = run.context.collect(self.best)[0]

    def after_step(self, seconds: float) -> None:
        """Save if it is time. Every rank must call it after every step, which took ``seconds``.

        Raises:
            InterruptedRunError: on all ranks, if one was asked to stop; what there is was saved.
        """
        run, draft = self.run, self._draft
        self._longest_step = max(self._longest_step, seconds)
        # What must fit between now and the deadline: a step that is slow, a save that is, and the one under way.
        save = self._longest_save or self._expected_save
        reserve = 1.5 * self._longest_step + (3 if draft else 2) * save + 1
        numbers = self.requests.asked(reserve), self._is_due(), draft is not None and draft.is_being_written
        asked, due, writing = run.context.greatest(*map(int, numbers))
        stopping = bool(asked) and run.step < run.config.run.steps
        if stopping:
            self.requests.end_at_once()
        if draft is not None and (stopping or due or not writing):
            self._tell_of_waiting(draft, bool(writing and not stopping))
            self._seal()
        if stopping:
            raise InterruptedRunError(reason_of(asked), run.step, self.save())
        if due:
            self._begin()
            if self._draft is not None:
                self._draft.write_beside()

    def _try_disk(self) -> float:
        """Seconds that a first save is likely to take: all ranks' bytes, at the rate at which the disk takes a few.

        A disk that can't be written to is told of by the save itself.
        """
        weights = sum(p.numel() * p.element_size() for p in self.run.model.parameters())
        folder = self._out / FOLDER / f"step-trial{UNFINISHED}"
        try:
            return seconds_to_write(folder, weights * (1 + len(MOMENTS)))
        except OSError:
            return 0.0
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def save(self) -> Path | None:
        """Write a checkpoint while all wait; None, and the reason told, if it can't be written."""
        self._begin()
        if self._draft is None:
            return None
        self._draft.write_at_once()
        return self._seal()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Every rank must call it after the last step."""
        if self._draft is not None:
            self._seal()

    @property
    def missing(self) -> list[int]:
        """Steps whose checkpoints could not be written, and which the run would still hold if they had been.

        A failed save is made good by ``--keep`` later ones, which would have replaced it; one that did best on the
        held-out documents, by a later one that did better.
        """
        newest = sorted([*self._saved, *self._failed])[-self.run.config.run.keep :]
        best = min(self._failed, key=lambda step: (self._failed[step], step), default=None)
        if best is None or self._failed[best] >= (self.best.loss if self.best else math.inf):
            best = None
        return [step for step in self._failed if step in newest or step == best]

    def _begin(self) -> None:
        """Copy what is saved."""
        run, began = self.run, self._clock()
        tensors = tensors_of(run.model, run.optimizer)
        tensors[WAITING] = torch.from_numpy(run.sequences.cursor().waiting)
        state = state_of(run, run.context.collect(read_generators()))
        try:
            self._draft = Draft(self._out, tensors, state, step=run.step, context=run.context)
            self._held_out = run.held_out
        except SaveError as error:
            self._note_failure(run.step, run.held_out, error)
        self._saved_at = self._clock()
        self._copying = self._saved_at - began

    def _seal(self) -> Path | None:
        """Give the checkpoint under way its name and remove those that it makes superfluous."""
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
        found = None
        if self._is_first:
            found = best_checkpoint(self._out, draft.step)
            self._remove_superfluous(draft.step, found)
        self.best = self.run.context.collect(found)[0]
        return folder

    def _remove_superfluous(self, step: int, best: Best | None) -> None:
        """All but the newest ``--keep`` up to ``step`` and the best; later ones are of a way that was given up."""
        found = list_checkpoints(self._out)
        kept = [folder for folder in found if step_of(folder) <= step][: self.run.config.run.keep]
        for folder in found:
            if folder not in kept and (best is None or step_of(folder) != best.step):
                discard(folder)

    def _is_due(self) -> bool:
        """By this rank's clock, where it is a matter of minutes; at once where no checkpoint did as well."""
        held_out, every = self.run.held_out, self.run.config.run.save_every
        rivals = [self.best.loss if self.best else math.inf, math.inf if self._held_out is None else self._held_out]
        if held_out is not None and held_out < min(rivals):
            return True
        if every.endswith("m"):
            return self._clock() - self._saved_at >= 60 * int(every[:-1])
        return self.run.step % int(every) == 0

    def _tell_of_waiting(self, draft: Draft, waiting: bool) -> None:
        if waiting and not self._waited and self._is_first:
            self._waited = True
            self.tell(
                f"the checkpoint after step {draft.step} is still being written when the next is due: training waits "
                "for it, now and whenever this comes again; a longer --save-every would not wait"
            )

    def _note_failure(self, step: int, held_out: float | None, error: SaveError) -> None:
        self._failed[step] = held_out if held_out is not None and math.isfinite(held_out) else math.inf
        if self._is_first:
            self.tell(f"the checkpoint after step {step} could not be written: {error}; the earlier ones stay")


def resume(run: Run, resumed: str, tell: Callable[[str], None]) -> None:
    """Go on from the checkpoint that ``--resume`` names. Every rank must call it.

    Raises:
        ValueError: there is no whole one, or it is of another run; the same on all ranks.
    """
    context = run.context
    try:
        found = together(context, lambda: _find(run.config, resumed, tell) if context.rank == 0 else Path())
        folder = found[0]
        state = together(context, lambda: _read(run.config, folder))[context.rank]
    except SaveError as error:
        raise RefusedError(str(error).removeprefix("rank 0: ").removeprefix("ValueError: ")) from None
    load(run, folder, state)
    if (decay := run.config.decay_steps) != (steps := run.config.run.steps):
        rest = f", and is at its least, {run.config.peak_lr * run.config.optim.min_lr:.3g}, from there on"
        tell(
            f"--steps {steps}: the learning rate keeps the run's schedule, which falls over {decay} steps"
            + rest * (steps > decay)
        )


def load(run: Run, folder: Path, state: Checked) -> None:
    """Take over tensors and state of a checkpoint that is whole."""
    shape = state.part("tensors").part(WAITING).value("shape", list)
    tensors = tensors_of(run.model, run.optimizer)
    waiting = tensors[WAITING] = torch.zeros(*shape, dtype=torch.int32)
    checkpoint.load(folder, tensors)
    restore(run, state, Cursor.from_json(state.part("cursor"), waiting.numpy()))


def _find(config: TrainConfig, resumed: str, tell: Callable[[str], None]) -> Path:
    if resumed == NEWEST:
        try:
            return checkpoint.newest_whole(Path(config.run.out), tell)
        except ValueError as error:
            raise checkpoint.not_resumed(error) from None
    try:
        checkpoint.check(Path(resumed))
    except ValueError as error:
        raise ValueError(f"--resume {error}; name another checkpoint, or leave its name out for the newest") from None
    return Path(resumed)


def _read(config: TrainConfig, folder: Path) -> Checked:
    state = read_state(folder)
    check_same_run(config, state)
    return state
