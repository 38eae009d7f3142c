"""When a run is saved, and from what it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import checkpoint
from .checked import Checked
from .config import TrainConfig
from .cursor import Cursor
from .generators import read_generators
from .interrupt import InterruptedRunError, StopRequests, reason_of
from .manifest import discard, list_checkpoints, read_state
from .metrics import NEWEST
from .snapshot import WAITING, Run, check_same_run, restore, state_of, tensors_of


class Saver:
    """Saves one rank's part of a run when it is time to, and ends the run when that is asked for.

    Args:
        requests: of this process; what one rank is asked, all hear of.
        tell: is given in words what went wrong, on rank 0.
    """

    def __init__(self, run: Run, requests: StopRequests, tell: Callable[[str], None]) -> None:
        self.run, self.requests, self.tell = run, requests, tell
        self._saved_at = time.monotonic()
        self._longest_step = self._longest_save = 0.0

    def after_step(self, seconds: float) -> None:
        """Save if it is time. Every rank must call it after every step, which took ``seconds``.

        Raises:
            InterruptedRunError: on all ranks, if one was asked to stop; what there is was saved.
        """
        run, context = self.run, self.run.context
        self._longest_step = max(self._longest_step, seconds)
        # What must fit between now and the deadline: a step that is slow, a save that is.
        reserve = 1.5 * self._longest_step + 2 * self._longest_save + 1
        asked, due = context.greatest(self.requests.asked(reserve), int(self._is_due()))
        stopping = bool(asked) and run.step < run.config.run.steps
        if not stopping and not due:
            return
        if stopping:
            self.requests.end_at_once()
        saved = self.save()
        if stopping:
            raise InterruptedRunError(reason_of(asked), run.step, saved)

    def save(self) -> Path | None:
        """Write a checkpoint and remove those beyond ``--keep``; None, and the reason told, if it can't be written."""
        run, began = self.run, time.monotonic()
        out, first = Path(run.config.run.out), run.context.rank == 0
        tensors = tensors_of(run.model, run.optimizer)
        tensors[WAITING] = torch.from_numpy(run.sequences.cursor().waiting)
        state = state_of(run, run.context.collect(read_generators()))
        try:
            folder = checkpoint.save(out, tensors, state, step=run.step, context=run.context)
        except checkpoint.SaveError as error:
            if first:
                self.tell(f"the checkpoint after step {run.step} could not be written: {error}; the earlier ones stay")
            return None
        finally:
            self._saved_at = time.monotonic()
            self._longest_save = max(self._longest_save, self._saved_at - began)
        if first:
            for old in list_checkpoints(out)[run.config.run.keep :]:
                discard(old)
        return folder

    def _is_due(self) -> bool:
        """By this rank's clock, where it is a matter of minutes."""
        every = self.run.config.run.save_every
        if every.endswith("m"):
            return time.monotonic() - self._saved_at >= 60 * int(every[:-1])
        return self.run.step % int(every) == 0


def resume(run: Run, resumed: str, tell: Callable[[str], None]) -> None:
    """Go on from the checkpoint that ``--resume`` names. Every rank must call it.

    Raises:
        ValueError: there is no whole one, or it is of another run; the same on all ranks.
    """
    context = run.context
    try:
        found = checkpoint.together(context, lambda: _find(run.config, resumed, tell) if context.rank == 0 else Path())
        folder = found[0]
        state = checkpoint.together(context, lambda: _read(run.config, folder))[context.rank]
    except checkpoint.SaveError as error:
        raise ValueError(str(error).removeprefix("rank 0: ").removeprefix("ValueError: ")) from None
    load(run, folder, state)


def load(run: Run, folder: Path, state: Checked) -> None:
    """Take over tensors and state of a checkpoint that is whole."""
    shape = state.part("tensors").part(WAITING).value("shape", list)
    tensors = tensors_of(run.model, run.optimizer)
    waiting = tensors[WAITING] = torch.zeros(*shape, dtype=torch.int32)
    checkpoint.load(folder, tensors)
    restore(run, state, Cursor.from_json(state.part("cursor"), waiting.numpy()))


def _find(config: TrainConfig, resumed: str, tell: Callable[[str], None]) -> Path:
    if resumed == NEWEST:
        return checkpoint.newest_whole(Path(config.run.out), tell)
    try:
        checkpoint.check(Path(resumed))
    except ValueError as error:
        raise ValueError(f"--resume {error}; name another checkpoint, or leave its name out for the newest") from None
    return Path(resumed)


def _read(config: TrainConfig, folder: Path) -> Checked:
    state = read_state(folder)
    check_same_run(config, state)
    return state
