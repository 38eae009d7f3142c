"""Write a checkpoint: all ranks copy it at one step, each writes its part during training, and all seal it.

Ranks communicate only when they copy and when they seal, in the training thread: two threads that use one process
group would mix up their messages. :meth:`CheckpointWriter.write`, in between, does not communicate. A file is written
and hashed in pieces, with pauses: ``save_file`` of safetensors copies all data and slows training.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from burst_attention.launch.join import RankContext

from ..run.folder import FOLDER, SaveError, name_of, text_of
from .files import table_of
from .manifest import PART, STATE, UNFINISHED, FileEntry, discard, fingerprint, seal, write_whole

T = TypeVar("T")
LOWEST = 19  # lowest priority of a thread on Linux
REST = 8.0  # seconds of rest per second of processor time
LONGEST_REST = 1.0
AT_ONCE = 16  # pieces before the first rest: small files need none
TRIAL = 1 << 23  # bytes of the trial that measures a disk


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

    def write(self, *, at_once: bool = False) -> None:
        """Write this rank's part to disk and read it back, ``at_once`` without rests; :meth:`seal` reports failures."""
        began = time.monotonic()
        if at_once:
            self._pace.hurry()
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


class Pace:
    """Pauses after pieces of work, in proportion to their processor time; ``rested`` counts their seconds."""

    def __init__(self) -> None:
        self.rested = 0.0
        self._hurry = threading.Event()
        self._pieces, self._used = 0, 0.0

    def hurry(self) -> None:
        """End the current rest and skip all later ones."""
        self._hurry.set()

    def rest(self) -> None:
        """Rest after a piece of work. Call it from one thread only."""
        if self._hurry.is_set():
            return
        used, began = time.thread_time(), time.monotonic()
        self._pieces += 1
        if self._pieces > AT_ONCE:
            self._hurry.wait(min(REST * (used - self._used), LONGEST_REST))
        self.rested += time.monotonic() - began
        self._used = time.thread_time()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str], metadata: Mapping[str, str], pace: Pace
) -> str:
    """Write contiguous CPU tensors, with safetensors' dtype ``names``; return the SHA-256 that the file must have."""
    # Same order as safetensors, widest dtype first, so that each tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (_header(ordered, tensors, names, metadata), *_parts(ordered, tensors)):
            digest.update(part)
            file.write(part)
            pace.rest()
    return digest.hexdigest()


def _header(
    ordered: list[str], tensors: Mapping[str, Tensor], names: Mapping[str, str], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": names[name], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(ordered: list[str], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in ordered:
        data: Any = tensors[name].view(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + PART] for start in range(0, len(data), PART))


def sync_file(path: Path) -> None:
    """Sync a file to disk; later reads come from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_write(folder: Path, size: int) -> float:
    """Estimate the seconds to write and read back ``size`` bytes in a new ``folder``, by two trial files."""
    folder.mkdir(parents=True)
    few, many = (_seconds_of_trial(folder / f"trial-{n}.safetensors", n) for n in (TRIAL // 8, TRIAL))
    per_byte = max(many - few, many / 8) / (TRIAL - TRIAL // 8)
    return max(0.0, few - per_byte * (TRIAL // 8)) + per_byte * size


def _seconds_of_trial(path: Path, size: int) -> float:
    pace = Pace()
    pace.hurry()
    trial = torch.zeros(size, dtype=torch.uint8)
    began = time.monotonic()
    write_tensors(path, {"trial": trial}, {"trial": "U8"}, {}, pace)
    sync_file(path)
    fingerprint(path)
    return time.monotonic() - began
