"""Checkpoints: tensors in safetensors files, each rank's own shard, and all else in a checked JSON.

A checkpoint is written by all ranks (:mod:`burst_attention.training.draft`) and read by all ranks, as many as there are
then. Nothing in it is a pickle, and nothing that is read is executed. What makes one whole says
:mod:`burst_attention.training.manifest`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .checked import Checked
from .manifest import FOLDER, DamagedError, Pieces, list_checkpoints, read_header, read_state, step_of, verify

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What is told of tensors beside them: dtype and shape by name.

    Raises:
        TypeError: a value is no tensor, or of a dtype that is not saved.
    """
    for name, value in tensors.items():
        # Storage would take it, and leave a file that nothing can read.
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"tensors[{name!r}] is {what}; only tensors of {', '.join(DTYPES.values())} can be saved")
    return {name: {"dtype": DTYPES[value.dtype], "shape": list(value.shape)} for name, value in tensors.items()}


def check_pieces(table: Mapping[str, Any], files: Iterable[Pieces]) -> None:
    """Raise ValueError unless the pieces in the files make up every tensor of the table, and nothing else."""
    counts = dict.fromkeys(table, 0)
    places = set()
    for pieces in files:
        for name, (dtype, shape, offsets) in pieces.items():
            if name not in table:
                raise ValueError(f"the tensor {name!r} is foreign")
            whole = table[name]["shape"]
            inside = len(shape) == len(whole)
            inside = inside and all(o + n <= w for o, n, w in zip(offsets, shape, whole, strict=True))
            count = math.prod(shape)
            if not inside or dtype != table[name]["dtype"] or (count and (name, offsets) in places):
                raise ValueError(f"a piece of the tensor {name!r}, {shape} at {offsets}, does not belong to it")
            counts[name] += count
            places.add((name, offsets))
    for name, count in counts.items():
        if count != math.prod(table[name]["shape"]):
            raise ValueError(f"of the tensor {name!r} {count} of {math.prod(table[name]['shape'])} elements are there")


def check(folder: Path) -> Checked:
    """What a whole checkpoint's state says; every file of it is read.

    Raises:
        DamagedError: it is not what was saved.
    """
    files = verify(folder)
    state = read_state(folder)
    try:
        table = state.part("tensors")
        for name in table.content:
            entry = table.part(name)
            if not all(type(each) is int and each >= 0 for each in entry.value("shape", list)):
                raise entry.wrong("shape", "must be whole numbers")
            if entry.value("dtype", str) not in DTYPES.values():
                raise entry.wrong("dtype", f"must be one of {', '.join(DTYPES.values())}")
        check_pieces(table.content, [read_header(folder / name) for name in files])
    except ValueError as error:
        raise DamagedError(f"{folder}: {error}") from None
    return state


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run that did best on the held-out documents."""

    step: int
    loss: float


def best_checkpoint(out: Path, step: int | None = None) -> Best | None:
    """Of the checkpoints of a run at whose step it was evaluated the best, the earliest of equal ones; None: of none.

    Args:
        step: the last one that counts; None: all do.
    """
    found = []
    for folder in list_checkpoints(out):
        try:
            held_out = read_state(folder).part("losses").content.get("held_out")
        except ValueError:  # damaged: whoever loads one is told
            continue
        if isinstance(held_out, float) and math.isfinite(held_out) and (step is None or step_of(folder) <= step):
            found.append(Best(step_of(folder), held_out))
    return min(found, key=lambda best: (best.loss, best.step), default=None)


def newest_whole(out: Path, tell: Callable[[str], object]) -> Path:
    """The newest checkpoint of a run that is what was saved; ``tell`` is called with what is wrong with newer ones.

    Raises:
        DamagedError: none is whole; says what is wrong with each.
        ValueError: there is none at all.
    """
    wrong = []
    for folder in list_checkpoints(out):
        try:
            check(folder)
        except DamagedError as error:
            wrong.append(str(error))
            continue
        for each in wrong:
            tell(f"{each}; the one before it is tried")
        return folder
    raise none_whole(out, wrong)


def none_whole(out: Path, wrong: Sequence[str]) -> ValueError:
    """The error of a run's folder without a whole checkpoint.

    Args:
        wrong: the error of each checkpoint that there is.
    """
    if not wrong:
        return ValueError(f"{str(out)!r} holds no checkpoint")
    return DamagedError(f"no checkpoint in {str(out / FOLDER)!r} is whole: {'; '.join(wrong)}")


def not_resumed(error: ValueError) -> ValueError:
    """The refusal of ``--resume`` after an error of :func:`none_whole`, with the one way out."""
    if isinstance(error, DamagedError):
        return ValueError(f"--resume: {error}. Give --overwrite in place of --resume to start the run again")
    return ValueError(f"--resume: {error}; leave --resume out to start a new run")


def load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` from a checkpoint that :func:`check` took; every rank must call it, with its own shards.

    Raises:
        ValueError: they are not the tensors of the checkpoint.
    """
    saved, wanted = read_state(folder).part("tensors").content, table_of(tensors)
    for name in sorted({*saved, *wanted}):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"--resume {str(folder)!r} is of another model: {name} is {_shown(saved.get(name))} there, "
                f"{_shown(wanted.get(name))} here"
            )
    dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def _shown(entry: Mapping[str, Any] | None) -> str:
    return f"{entry['dtype']} {entry['shape']}" if entry else "missing"
