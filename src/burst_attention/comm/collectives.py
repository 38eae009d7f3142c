"""Torch's collectives over a tensor-parallel axis, with the deadline and the errors of :mod:`.transport`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from .link import transport_of


@contextmanager
def naming(group: dist.ProcessGroup, label: str) -> Iterator[None]:
    """As :meth:`.transport.Transport.naming`, for collectives over ``group``. A compiler sees none of it."""
    if torch.compiler.is_compiling():
        yield
        return
    with transport_of(group).naming(label):
        yield


def sum_(x: Tensor, group: dist.ProcessGroup, label: str) -> Tensor:
    """Return the sum over the ranks of ``group``, in place. ``label`` names it and its call in an error."""
    if torch.compiler.is_compiling():
        dist.all_reduce(x, group=group)
        return x
    transport = transport_of(group)
    with transport.naming(label):
        if transport.deadline is None or not x.is_cpu or x.is_complex():
            dist.all_reduce(x, group=group)
        else:
            group.allreduce([x], _within(AllreduceOptions(), transport.deadline)).wait()
    return x


def gather(own: Tensor, group: dist.ProcessGroup, label: str) -> Tensor:
    """Return every rank's tensor of one shape, by rank: [ranks, ...]. ``label`` as for :func:`sum_`."""
    every = own.new_empty(group.size(), *own.shape)
    parts, own = [*every.unbind(0)], own.contiguous()
    transport = transport_of(group)
    with transport.naming(label):
        if transport.deadline is None or not own.is_cpu:
            dist.all_gather(parts, own, group=group)
        else:
            group.allgather([parts], [own], _within(AllgatherOptions(), transport.deadline)).wait()
    return every


def first(x: Tensor, group: dist.ProcessGroup, label: str) -> Tensor:
    """Return the first rank's tensor of one shape, in place of this rank's. ``label`` as for :func:`sum_`."""
    x, transport = x.contiguous(), transport_of(group)
    with transport.naming(label):
        if transport.deadline is None or not x.is_cpu:
            dist.broadcast(x, group=group, group_src=0)
        else:
            group.broadcast([x], _within(BroadcastOptions(), transport.deadline)).wait()
    return x


def _within(options: Any, seconds: float) -> Any:
    """Return the options of a collective with a deadline; gloo's threads give up then, too."""
    options.timeout = timedelta(seconds=seconds)
    return options
