"""A device that is none: its tensors' values are on the CPU, and a host that would wait for the device is counted.

It stands for a GPU. Waits are copies between host and device that are not ``non_blocking``, values that are read
(``item``, ``tolist``, ``bool``), and results whose size depends on values.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # a type that PyTorch knows, and whose backward runs in the caller's thread
_READS = [getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "nonzero", "equal")]
_COPIES = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
_HERE = threading.local()  # ranks are threads


class FakeTensor(torch.Tensor):
    """A tensor on the device; ``values`` are on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> FakeTensor:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, values.size(), **layout, device=DEVICE)
        made.values = values
        return made

    @property
    def _local_tensor(self) -> torch.Tensor:
        """As a DTensor has it: the loss takes heads of plain weights alone."""
        return self.values

    def tolist(self) -> Any:
        """Read the values; PyTorch refuses it for subclasses."""
        _count(True)
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Waits(TorchDispatchMode):
    """Inside, a thread may use the device. ``counts``: how often its host would wait, by the module that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._single = torch.autograd.set_multithreading_enabled(False)

    def __enter__(self) -> Waits:
        _HERE.counts = self.counts
        self._single.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._single.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = _on_device(kwargs.get("device")) or _is_any_fake(args, kwargs)
        return _run(func, args, kwargs) if ours else func(*args, **kwargs)


@contextlib.contextmanager
def without_autocast() -> Any:
    """Let PyTorch answer for the device that autocast is off: it knows no autocast for it."""
    asks, enters = torch.is_autocast_enabled, torch.autocast

    def asked(*device: Any) -> bool:
        return not (device and _on_device(device[0])) and asks(*device)

    def entered(device: Any, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if _on_device(device) else enters(device, *args, **kwargs)

    with mock.patch.object(torch, "is_autocast_enabled", asked), mock.patch.object(torch, "autocast", entered):
        yield


def to_device(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device, without a wait."""
    return x.detach().to(DEVICE, non_blocking=True)


def move(model: nn.Module) -> nn.Module:
    """Move a model's weights and buffers to the device. Tied weights stay tied."""
    moved = {id(x): nn.Parameter(to_device(x), x.requires_grad) for x in model.parameters()}
    for part in model.modules():
        for name, x in part._parameters.items():
            part._parameters[name] = None if x is None else moved[id(x)]
        for name, x in part._buffers.items():
            part._buffers[name] = None if x is None else to_device(x)
    return model


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; its result is on the device if it is asked for there, or made of tensors there."""
    asked, fake = kwargs.get("device"), _is_any_fake(args, kwargs)
    to = fake if asked is None else _on_device(asked)
    values = {name: torch.device("cpu") if name == "device" else _values(x) for name, x in kwargs.items()}
    if func in _COPIES:
        between = to != isinstance(args[0], FakeTensor) if func is _COPIES[0] else not _are_all_fake(args[:2])
        _count(between and not (kwargs.get("non_blocking") or args[2:3] == (True,)))
    _count(func in _READS and fake)
    out = func(*tree_map(_values, args), **values)
    if not to:
        return out
    wrapped = tree_map(lambda x: FakeTensor(x.resolve_conj()) if type(x) is torch.Tensor else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _count(waits: bool) -> None:
    if waits:
        frame: Any = sys._getframe(1)
        while frame and not frame.f_globals.get("__name__", "").startswith(("burst_attention.", "transformers.")):
            frame = frame.f_back
        _HERE.counts[f"{frame.f_globals['__name__']}:{frame.f_lineno}" if frame else "the test"] += 1


def _values(x: Any) -> Any:
    return x.values if isinstance(x, FakeTensor) else x


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _is_any_fake(*trees: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in tree_leaves(trees))


def _are_all_fake(tensors: Any) -> bool:
    return len({isinstance(x, FakeTensor) for x in tensors}) == 1
