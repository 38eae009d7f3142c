"""Checkpoints: tensors in safetensors files, each rank's own shard, and all else in a checked JSON.

A checkpoint is written by all ranks and read by all ranks, as many as there are then. Nothing in it is a pickle, and
nothing that is read is executed. :mod:`burst_attention.training.manifest` says what makes one whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ..launch.join import RankContext
from .checked import Checked
from .manifest import (
    FOLDER,
    STATE,
    UNFINISHED,
    DamagedError,
    discard,
    fingerprint,
    list_checkpoints,
    name_of,
    read_header,
    read_state,
    seal,
    verify,
    write_whole,
)

T = TypeVar("T")
Pieces = Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


class SaveError(RuntimeError):
    """A checkpoint could not be written, on all ranks alike; what was written of it is gone, the earlier ones stay."""


def save(out: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], *, step: int, context: RankContext) -> Path:
    """Write the checkpoint after ``step``, each rank its own shard. Every rank must call it.

    Args:
        out: the run's folder, one that all ranks see.
        tensors: by name; what lies on every rank alike is written once.
        state: what JSON can hold. Rank 0's is written.

    Returns:
        Its folder, on all ranks, once the disk has it.

    Raises:
        TypeError: a value of ``tensors`` is no tensor, or of a dtype that is not saved; nothing was written.
        SaveError: writing failed on some rank.
    """
    table = table_of(tensors)
    folder = out / FOLDER / (name_of(step) + UNFINISHED)
    first = context.rank == 0
    try:
        together(context, lambda: _make(folder) if first else None)
        try:
            writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise SaveError(f"rank {rank}: {_text_of(cause)}") from None
        written = together(context, lambda: _read_back(folder, context.rank))

        def finish() -> None:
            check_pieces(table, [pieces for files in written for pieces, _ in files.values()])
            write_whole(folder / STATE, json.dumps(state | {"tensors": table}))
            entries = {name: entry for files in written for name, (_, entry) in files.items()}
            seal(folder, step, entries | {STATE: fingerprint(folder / STATE)})

        together(context, lambda: finish() if first else None)
        return folder.with_name(name_of(step))
    except SaveError:
        if first:
            discard(folder)
        raise


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


def newest_whole(out: Path, tell: Callable[[str], None]) -> Path:
    """The newest checkpoint of a run that is what was saved; ``tell`` is called with what is wrong with newer ones.

    Raises:
        ValueError: there is none.
    """
    found = list_checkpoints(out)
    for folder in found:
        try:
            check(folder)
        except DamagedError as error:
            tell(f"{error}; the one before it is tried")
            continue
        return folder
    what = f"none of the {len(found)} checkpoints in {out / FOLDER} is whole" if found else f"{out} holds no checkpoint"
    raise ValueError(f"--resume: {what}; leave --resume out to start anew")


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


def together(context: RankContext, action: Callable[[], T]) -> list[T]:
    """Every rank's result of ``action``, by rank.

    Raises:
        SaveError: on all ranks, if it failed on one.
    """
    try:
        mine: tuple[Any, str] = (action(), "")
    except (OSError, ValueError) as error:
        mine = (None, f"rank {context.rank}: {_text_of(error)}")
    results = context.collect(mine)
    if text := next((text for _, text in results if text), ""):
        raise SaveError(text)
    return [result for result, _ in results]


def _make(folder: Path) -> None:
    """An empty folder, whatever a run that was killed left there."""
    discard(folder)
    folder.mkdir(parents=True)


def _read_back(folder: Path, rank: int) -> dict[str, tuple[Pieces, dict[str, Any]]]:
    """What this rank wrote, by file: what its header says, and its entry in the manifest."""
    files = sorted(folder.glob(f"shard-{rank + 1:05d}-*"))
    return {path.name: (read_header(path), fingerprint(path)) for path in files}


def _text_of(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def _shown(entry: Mapping[str, Any] | None) -> str:
    return f"{entry['dtype']} {entry['shape']}" if entry else "missing"
