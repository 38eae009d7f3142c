"""Write a checkpoint: all ranks copy it at one step, each writes its part during training, and all seal it.

Ranks communicate only when they copy and when they seal, in the training thread: two threads that use one process
group would mix up their messages. :meth:`CheckpointWriter.write`, in between, does not communicate.
"""

from __future__ import annotations

import json
import os
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

from burst_attention.launch.join import RankContext

from ..run.folder import FOLDER, SaveError, name_of, text_of
from .files import table_of
from .manifest import STATE, UNFINISHED, FileEntry, discard, fingerprint, seal, write_whole
from .shards import Pace, sync_file, write_tensors

T = TypeVar("T")
LOWEST = 19  # lowest priority of a thread on Linux


class CheckpointWriter:
    """One rank's part of an unfinished checkpoint: a copy in memory. Every rank must create it and :meth:`seal` it.

    Replicated tensors are written once. SaveError: a rank has no memory for the copy, or rank 0 can't write there.
    """

    def __init__(
        self, out: Path, tensors: Mapping[str, Tensor], state: dict[str, Any], *, step: int, context: RankContext
    ) -> None:
        self.step, self._context = step, context
        self._table = table_of(tensors)
        self._text = json.dumps(state | {"tensors": {name: entry.model_dump() for name, entry in self._table.items()}})
        self._folder = out / FOLDER / (name_of(step) + UNFINISHED)
        self._written: dict[str, FileEntry] = {}  # by file name
        self._failure, self.seconds = "", 0.0  # seconds: how long writing took, without rests
        self._pace = Pace()
        self._thread: threading.Thread | None = None
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=self._is_first)
        # Decide which rank writes replicated tensors, on all ranks alike; raise unless the pieces are whole tensors.
        plans, _ = planner.create_global_plan(context.collect(planner.create_local_plan()))
        items = plans[context.rank].items
        self._places = {item.index.fqn: list(item.tensor_data.chunk.offsets) for item in items if item.tensor_data}

        def copy() -> None:
            if self._is_first:
                discard(self._folder)  # may be left from a run that was killed
                self._folder.mkdir(parents=True)
            self._copies = {item.index.fqn: _copy_of(planner.lookup_object(item.index)) for item in items}
            if len(self._copies) < len(items):
                raise ValueError("a rank has several pieces of one tensor, and its file has room for one")

        self._or_discard(copy)

    def write_during_training(self) -> None:
        """Start writing in a background thread with the lowest priority and with rests."""
        self._thread = threading.Thread(target=self._write_behind, name=f"save {self.step}", daemon=True)
        self._thread.start()

    @property
    def is_being_written(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def write(self) -> None:
        """Write this rank's part to disk and read it back; :meth:`seal` reports failures."""
        began = time.monotonic()
        try:
            if self._copies:
                name = f"shard-{self._context.rank + 1:05d}-model-00001-of-00001.safetensors"
                self._write_shard(self._folder / name)
            if self._is_first:
                write_whole(self._folder / STATE, self._text)
                self._written[STATE] = fingerprint(self._folder / STATE)
        except Exception as error:  # any error: seal reports it, because this thread can't
            self._failure = text_of(error)
        finally:
            self._copies = {}
            self.seconds = time.monotonic() - began - self._pace.rested

    def write_at_once(self) -> None:
        """Write without rests, in the calling thread."""
        self._pace.hurry()
        self.write()

    def seal(self) -> Path:
        """Finish writing, rename the checkpoint and return its folder; SaveError on all ranks if one failed."""
        self._pace.hurry()
        if self._thread is not None:
            self._thread.join()

        def mine() -> dict[str, FileEntry]:
            if self._failure:
                raise SaveError(self._failure)
            return self._written

        written = self._or_discard(mine)

        files = {name: entry for each in written for name, entry in each.items()}
        self._or_discard(lambda: seal(self._folder, self.step, files) if self._is_first else None)
        return self._folder.with_name(name_of(self.step))

    @property
    def _is_first(self) -> bool:
        return self._context.rank == 0

    def _or_discard(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on all ranks and return every result; if one fails, remove the checkpoint."""
        try:
            return all_or_raise(self._context, action)
        except SaveError:
            self._copies = {}
            if self._is_first:
                discard(self._folder)
            raise

    def _write_behind(self) -> None:
        if sys.platform == "linux":  # only Linux has priorities per thread
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        self.write()

    def _write_shard(self, path: Path) -> None:
        """Write this rank's copies, and read them back from disk for the manifest."""
        written = self._put(path)
        sync_file(path)
        self._written[path.name] = fingerprint(path, self._pace.rest)
        if self._written[path.name].sha256 != written:
            raise OSError(f"{path.name}: the disk returned other bytes than were written")

    def _put(self, path: Path) -> str:
        places = {name: {"saved_offsets": place} for name, place in self._places.items()}
        # The format of torch.distributed.checkpoint's safetensors writer, whose reader loads it. That writer is not
        # used: it makes two more copies in memory and holds Python's lock, which would stop the training thread.
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        names = {name: self._table[name].dtype for name in self._copies}
        return write_tensors(path, self._copies, names, metadata, self._pace)


def all_or_raise(context: RankContext, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every rank; return all results, by rank. SaveError on all ranks if it failed on one."""
    try:
        mine: tuple[Any, str] = (action(), "")
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        mine = (None, f"rank {context.rank}: {text_of(error)}")
    results = context.collect(mine)
    if text := next((text for _, text in results if text), ""):
        raise SaveError(text)
    return [result for result, _ in results]


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
