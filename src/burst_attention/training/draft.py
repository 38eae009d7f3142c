"""A checkpoint on its way to the disk: copied by all ranks at a step, written by each while it trains, sealed by all.

Ranks exchange words when it is copied and when it is sealed, both in the thread that trains: two threads of one process
group would mix up each other's messages. What lies between, :meth:`Draft.write`, is each rank's own and says nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..launch.join import RankContext
from .checkpoint import check_pieces, table_of
from .manifest import (
    FOLDER,
    SHARDING,
    STATE,
    UNFINISHED,
    Pieces,
    discard,
    fingerprint,
    name_of,
    read_header,
    seal,
    write_whole,
)
from .shards import Pace, sync_file, write_tensors

T = TypeVar("T")
LOWEST = 19  # priority of a thread on Linux


class SaveError(RuntimeError):
    """A checkpoint could not be written, on all ranks alike; what was written of it is gone, the earlier ones stay."""


class Draft:
    """One rank's part of a checkpoint that has no name yet. Every rank must make it, and call :meth:`seal`.

    It holds copies in this process's memory, of the very step: what is done to the tensors afterwards does not reach
    the disk.

    Args:
        out: the run's folder, one that all ranks see.
        tensors: by name; what lies on every rank alike is written once.
        state: what JSON can hold. Rank 0's is written.

    Raises:
        TypeError: a value of ``tensors`` is no tensor, or of a dtype that is not saved; nothing was written.
        SaveError: some rank has no room for the copy, or rank 0 none for the folder.
    """

    def __init__(
        self, out: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], *, step: int, context: RankContext
    ) -> None:
        self.step, self._context = step, context
        self._table = table_of(tensors)
        self._text = json.dumps(state | {"tensors": self._table})
        self._folder = out / FOLDER / (name_of(step) + UNFINISHED)
        self._written: dict[str, tuple[Pieces, dict[str, Any]]] = {}
        self._failure, self.seconds = "", 0.0  # seconds: how long writing took, without rests
        self._pace = Pace()
        self._thread: threading.Thread | None = None
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self._is_first)
        # Who writes what of that which several ranks have: the same plan on all of them, for it follows from the same.
        plans, _ = planner.create_global_plan(context.collect(planner.create_local_plan()))
        items = plans[context.rank].items
        self._places = {item.index.fqn: list(item.tensor_data.chunk.offsets) for item in items if item.tensor_data}

        def copy() -> None:
            if self._is_first:
                discard(self._folder)  # whatever a run that was killed left there
                self._folder.mkdir(parents=True)
            self._copies = {item.index.fqn: _copy_of(planner.lookup_object(item.index)) for item in items}

        self._or_discard(copy)

    def write_beside(self) -> None:
        """Begin to write in a thread, with rests, behind everything else that the processor has to do."""
        self._thread = threading.Thread(target=self._write_behind, name=f"save {self.step}", daemon=True)
        self._thread.start()

    @property
    def is_being_written(self) -> bool:
        """By this rank."""
        return self._thread is not None and self._thread.is_alive()

    def write(self) -> None:
        """Write this rank's part, once the disk has it read it back; a failure is told by :meth:`seal`."""
        began = time.monotonic()
        try:
            if self._copies:
                name = f"shard-{self._context.rank + 1:05d}-model-00001-of-00001.safetensors"
                self._written[name] = self._write_shard(self._folder / name)
            if self._is_first:
                write_whole(self._folder / STATE, self._text)
                self._written[STATE] = ({}, fingerprint(self._folder / STATE))
        except Exception as error:  # of any kind: nobody else hears of it in this thread
            self._failure = text_of(error)
        finally:
            self._copies = {}
            self.seconds = time.monotonic() - began - self._pace.rested

    def write_at_once(self) -> None:
        """The same while nothing else goes on."""
        self._pace.hurry()
        self.write()

    def seal(self) -> Path:
        """Wait until this rank's part is written, now without rests, agree with the others, and give it its name.

        Returns:
            The checkpoint's folder, on all ranks, once the disk has it.

        Raises:
            SaveError: on all ranks, if writing failed on one; nothing of it is left.
        """
        self._pace.hurry()
        if self._thread is not None:
            self._thread.join()

        def mine() -> dict[str, tuple[Pieces, dict[str, Any]]]:
            if self._failure:
                raise SaveError(self._failure)
            return self._written

        written = self._or_discard(mine)

        def finish() -> None:
            check_pieces(self._table, [pieces for files in written for pieces, _ in files.values()])
            seal(self._folder, self.step, {name: entry for files in written for name, (_, entry) in files.items()})

        self._or_discard(lambda: finish() if self._is_first else None)
        return self._folder.with_name(name_of(self.step))

    @property
    def _is_first(self) -> bool:
        return self._context.rank == 0

    def _or_discard(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result; where one fails, what was written is removed."""
        try:
            return together(self._context, action)
        except SaveError:
            self._copies = {}
            if self._is_first:
                discard(self._folder)
            raise

    def _write_behind(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        self.write()

    def _write_shard(self, path: Path) -> tuple[Pieces, dict[str, Any]]:
        """What the file's header says, and its entry in the manifest, both as the disk gives them."""
        written = self._put(path)
        sync_file(path)
        pieces, entry = read_header(path), fingerprint(path, self._pace.rest)
        if entry["sha256"] != written:
            raise OSError(f"{path.name} could not be read back as it was written")
        return pieces, entry

    def _put(self, path: Path) -> str:
        """Write this rank's copies; the SHA-256 that their file must have."""
        places = {name: {"saved_offsets": place} for name, place in self._places.items()}
        # As torch.distributed.checkpoint's own writer for safetensors has it, whose reader reads it. That one makes two
        # more copies in memory, and holds Python's lock meanwhile, so that no other thread would go on.
        metadata = {SHARDING: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        names = {name: self._table[name]["dtype"] for name in self._copies}
        return write_tensors(path, self._copies, names, metadata, self._pace)


def save(out: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], *, step: int, context: RankContext) -> Path:
    """Copy, write and seal, all at once; see :class:`Draft`. Every rank must call it."""
    draft = Draft(out, tensors, state, step=step, context=context)
    draft.write_at_once()
    return draft.seal()


def together(context: RankContext, action: Callable[[], T]) -> list[T]:
    """Every rank's result of ``action``, by rank.

    Raises:
        SaveError: on all ranks, if it failed on one.
    """
    try:
        mine: tuple[Any, str] = (action(), "")
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        mine = (None, f"rank {context.rank}: {text_of(error)}")
    results = context.collect(mine)
    if text := next((text for _, text in results if text), ""):
        raise SaveError(text)
    return [result for result, _ in results]


def text_of(error: BaseException) -> str:
    """Return a short error message; prefer the operating system's text."""
    if isinstance(error, SaveError):
        return str(error)
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # as safetensors tells what the system told it
        return os.strerror(int(found[1]))
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"


def _copy_of(tensor: Tensor) -> Tensor:
    """In memory of its own, on the CPU, its elements in a row."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
