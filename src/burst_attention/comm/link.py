"""From a process group to the transports over it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agreement import Agreement
from .transport import Health, Transport

DATA_TAG, CONTROL_TAG = 0xB0, 0xB1


@dataclass(frozen=True, eq=False)
class _Control:
    """What is made once per process group: the group for agreements (None: the group itself), its failures."""

    group: dist.ProcessGroup | None
    health: Health


# Making a process group is a collective call: it must happen once per group, not once per plan. Kept weakly, so that
# destroying a group leaves nothing behind.
_CONTROLS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Control] = weakref.WeakKeyDictionary()


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """None (the default group, or no group if torch.distributed is not initialised), a group, or a 1-D DeviceMesh."""
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group={group} has {group.ndim} axes; pass one axis of it, such as mesh['context']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r} must be None, a ProcessGroup that this rank is in, or a 1-D DeviceMesh")
    return group


def resolve_timeout(timeout: float | timedelta | None) -> float | None:
    """Seconds, or None for the group's own."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds, a timedelta or None")
    return float(seconds)


def connect(group: dist.ProcessGroup | None, timeout: float | None) -> tuple[Transport, Agreement]:
    """The data transport of a group and its agreement. The first call for a group must be made by all its ranks."""
    if group is None or group.size() == 1:
        return Transport(None), Agreement(Transport(None))
    control = _CONTROLS.get(group)
    if control is None:
        control = _CONTROLS[group] = _Control(_control_group(group), Health())
        if control.group is not None:
            weakref.finalize(group, _destroy, control.group).atexit = False
        device = _data_device(group)
        if device.type != "cpu":
            Transport(group, timeout).warm_up(device)
    data = Transport(group, timeout, DATA_TAG, control.health)
    return data, Agreement(Transport(control.group or group, timeout, CONTROL_TAG, control.health))


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    try:
        if group._get_backend(torch.device("cpu")).name() == "gloo":
            return None
    except RuntimeError:
        pass  # a group of NCCL alone has no backend for CPU tensors
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _destroy(control: dist.ProcessGroup) -> None:
    """End a control group with the group that it served, or its name could not be given again."""
    if dist.is_initialized() and control in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(control)


def _data_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
