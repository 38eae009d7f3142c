"""Memory that the ranks of one host read in place: each rank has a file without a name, which holds its tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from burst_attention.comm.agreement import Agreement
from burst_attention.comm.lines import host

_SECRET = 32  # bytes at the start, by which a peer knows that it opened the right file
_ALIGNED = 64  # bytes, as torch's own memory


class Room:
    """Memory from which tensors are taken one after the other. All ranks take the same ones in the same order."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._used = memory, _SECRET

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor; it keeps the memory."""
        start = _after(self._used)
        self._used = start + prod(shape) * dtype.itemsize
        if not prod(shape):
            return torch.empty(*shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=start).view(*shape)


def open_rooms(agreement: Agreement, sizes: Sequence[int]) -> list[Room] | None:
    """Return every rank's memory for tensors of these bytes, by rank; None unless all ranks are on one host.

    Every rank must call it. Peers read what this rank writes into its own memory. A write into a peer's memory stays in
    this process.
    """
    with agreement.entering("shard_weights"):
        count = _SECRET
        for size in sizes:
            count = _after(count) + size
        file, secret, own = None, os.urandom(_SECRET), None
        with suppress(OSError, AttributeError):
            file = os.memfd_create("burst-attention", os.MFD_CLOEXEC)
            os.ftruncate(file, count)
            own = mmap.mmap(file, count)
            own[:_SECRET] = secret
    try:
        named = [host(), os.getpid(), file, count, secret.hex()] if own is not None else [""]
        every = agreement.agree("memory of shared weights", {}, named)
        maps = dict[int, mmap.mmap]()
        if own is not None and {each[0] for each in every} == {named[0]}:
            with suppress(OSError, ValueError):
                for rank, (_, process, number, size, text) in enumerate(every):
                    maps[rank] = own if rank == agreement.transport.rank else _opened(process, number, size, text)
        done = agreement.agree("the memory of shared weights", {}, len(maps) == len(every))
    finally:
        if file is not None:
            os.close(file)
    return [Room(maps[rank]) for rank in range(len(every))] if all(done) else None


def _opened(process: int, number: int, size: int, secret: str) -> mmap.mmap:
    """Map the memory of a peer, which has the same user; OSError where that can't be."""
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != size:
            raise FileNotFoundError(f"process {process} is another")
        found = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    if found[:_SECRET].hex() != secret:
        raise FileNotFoundError(f"process {process} is another")
    return found


def _after(used: int) -> int:
    return -(-used // _ALIGNED) * _ALIGNED
