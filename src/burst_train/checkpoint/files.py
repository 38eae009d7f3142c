"""Checkpoints: tensors in safetensors files, one per rank, and everything else in a checked JSON file. No pickles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from burst_attention.launch.local import RefusedError

from ..run.folder import FOLDER, list_checkpoints, step_of
from .manifest import DamagedError, read_state, verify
from .state import Dtype, State, TensorEntry

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return dtype and shape of the tensors by name; TypeError names one that can't be saved."""
    for name, value in tensors.items():
        # The storage would accept the value, but write a file that can't be read.
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"tensors[{name!r}] is {what}; only tensors of {', '.join(DTYPES.values())} can be saved")
    return {name: TensorEntry(dtype=DTYPES[value.dtype], shape=tuple(value.shape)) for name, value in tensors.items()}


def check(folder: Path) -> State:
    """Check every file of a checkpoint and return its state; DamagedError names each file that differs."""
    verify(folder)
    return read_state(folder)


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run with the lowest held-out loss."""

    step: int
    loss: float


def best_checkpoint(out: Path, step: int | None = None) -> Best | None:
    """Return the checkpoint up to ``step`` with the lowest held-out loss (the earliest of equals), if there is one."""
    bests = []
    for folder in list_checkpoints(out):
        try:
            held_out = read_state(folder).losses.held_out
        except ValueError:  # damaged; loading it reports the error
            continue
        if held_out is not None and math.isfinite(held_out) and (step is None or step_of(folder) <= step):
            bests.append(Best(step_of(folder), held_out))
    return min(bests, key=lambda best: (best.loss, best.step), default=None)


def newest_whole(out: Path, tell: Callable[[str], object]) -> Path:
    """Return the newest whole checkpoint of a run; ``tell`` gets the errors of newer ones, ValueError those of all."""
    wrong = []
    for folder in list_checkpoints(out):
        try:
            check(folder)
        except DamagedError as error:
            wrong.append(str(error))
            continue
        for fault in wrong:
            tell(f"{fault}; trying the checkpoint before it")
        return folder
    raise none_whole(out, wrong)


def none_whole(out: Path, wrong: Sequence[str]) -> ValueError:
    """Return the error for a run without a whole checkpoint; ``wrong``: the errors of its checkpoints."""
    if not wrong:
        return ValueError(f"{str(out)!r} holds no checkpoint")
    return DamagedError(f"every checkpoint in {str(out / FOLDER)!r} is damaged: {'; '.join(wrong)}")


def not_resumed(error: ValueError) -> ValueError:
    """Add the remedy for ``--resume`` to an error of :func:`none_whole`."""
    if isinstance(error, DamagedError):
        return ValueError(f"--resume: {error}. Give --overwrite instead of --resume to start the run again")
    return ValueError(f"--resume: {error}; omit --resume to start a new run")


def load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards from a checked checkpoint, on every rank; RefusedError if it has other tensors."""
    saved, wanted = read_state(folder).tensors, table_of(tensors)
    for name in sorted({*saved, *wanted}):
        if saved.get(name) != wanted.get(name):
            raise RefusedError(
                f"--resume {str(folder)!r} is a checkpoint of another model: {name} is {_shown(saved.get(name))} "
                f"there, but {_shown(wanted.get(name))} here"
            )
    dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def _shown(entry: TensorEntry | None) -> str:
    return f"{entry.dtype} {list(entry.shape)}" if entry else "missing"
