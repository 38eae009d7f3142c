"""Make the transports and the agreement of a process group."""

from __future__ import annotations

import os
import threading
import weakref
from datetime import timedelta
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agreement import Agreement
from .local import LocalGroup, LocalTransport
from .transport import Health, Transport, backend_of


def real(value: Any) -> int | float | None:
    """Return a real number (also numpy's, or a 0-d tensor without gradient) as Python's; None for others and bools."""
    if isinstance(value, float):  # first, because a compiler can't ask a variable number for other attributes
        return float(value)
    if getattr(value, "ndim", None) == 0 and not getattr(value, "requires_grad", False):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, int):
        return value
    return float(value)


DATA_TAG, CONTROL_TAG = 0xB0, 0xB1

# One entry per process group, shared by its plans. Weak keys: the entry of a destroyed group disappears.
_HEALTH: weakref.WeakKeyDictionary[dist.ProcessGroup, Health] = weakref.WeakKeyDictionary()


def resolve_group(group: Any) -> dist.ProcessGroup | LocalGroup | None:
    """Return the group of a group, a 1-D DeviceMesh or None (the default group); None for a world of one."""
    if group is None:
        if dist.is_initialized():
            return dist.group.WORLD
        world = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        if world.isdigit() and int(world) > 1:
            raise ValueError(
                f"group=None, but torch.distributed is not initialised in this rank of WORLD_SIZE={world}; call "
                "torch.distributed.init_process_group() first, or unset RANK and WORLD_SIZE to run on one rank"
            )
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group={group} has {group.ndim} axes; pass one axis of it, such as mesh['context']")
        return group.get_group()
    if not isinstance(group, (dist.ProcessGroup, LocalGroup)):
        raise TypeError(f"group={group!r} must be None, a ProcessGroup that this rank is in, or a 1-D DeviceMesh")
    return group


def resolve_timeout(timeout: float | timedelta | None) -> float | None:
    """Return the timeout in seconds; None for the group's own timeout."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = real(seconds)
    if number is None or not 0 < number <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds, a timedelta or None")
    return float(number)


def connect(group: dist.ProcessGroup | LocalGroup | None, timeout: float | None) -> tuple[Transport, Agreement]:
    """Return the data transport of a group and its agreement. All ranks must make the first call for a group."""
    if group is None or group.size() == 1:
        return Transport(None), Agreement(Transport(None))
    if isinstance(group, LocalGroup):
        data, control = (LocalTransport(group, timeout, tag, group.health) for tag in (DATA_TAG, CONTROL_TAG))
        return data, Agreement(control)
    if backend_of(group, torch.device("cpu")) != "gloo":
        raise ValueError(
            f"group has the backend {dist.get_backend_config(group)}, but agreements need gloo too; "
            f"make it with init_process_group('cpu:gloo,cuda:nccl')"
        )
    if group not in _HEALTH:
        _HEALTH[group] = Health()
        if "nccl" in str(dist.get_backend_config(group)):
            Transport(group, timeout).warm_up(torch.device("cuda", torch.cuda.current_device()))
    health = _HEALTH[group]
    return Transport(group, timeout, DATA_TAG, health), Agreement(Transport(group, timeout, CONTROL_TAG, health))


def transport_of(group: dist.ProcessGroup) -> Transport:
    """Return a transport for collectives of torch over any group; its errors count for all that use the group."""
    return Transport(group, health=_HEALTH.get(group) or Health())
