"""What ``make_plan`` is told of the machine, and of the calls to come: rates, nodes, heads; checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.precision import DTYPES, accumulation_dtype, wire_dtype
from ..plan.cost import Shape
from ..planner.presets import preset, usual
from ..planner.rates import Rates, read_rates, user_file

RatesGiven = Rates | Path | str | None


def resolve_rates(rates: RatesGiven, *, on_gpus: bool) -> Rates:
    """What was given, by a preset's name or as a file; if nothing was, what ``burst calibrate`` wrote for this user,
    or else the preset that is usual for the device.

    Raises:
        TypeError, ValueError: it is none, or the file can't be read.
    """
    if rates is None:
        if user_file().is_file():
            return read_rates(user_file())
        return usual_rates(on_gpus=on_gpus)
    if isinstance(rates, Rates):
        return rates
    if not isinstance(rates, (str, Path)):
        raise TypeError(f"rates={rates!r} must be Rates, a preset's name, the path of a TOML file, or None")
    if isinstance(rates, Path) or rates.endswith(".toml"):
        return read_rates(rates)
    return preset(rates)


def guessed(rates: RatesGiven) -> bool:
    """Are these rates nobody's: not given, nor measured for this user?"""
    return rates is None and not user_file().is_file()


def usual_rates(*, on_gpus: bool) -> Rates:
    """Of the preset for the device."""
    return usual(torch.cuda.get_device_name() if on_gpus else "cpu")


def resolve_nodes(nodes: Any, group: Any, world: int) -> list[int] | None:
    """The node of each rank of the group; None if it was not said.

    Raises:
        TypeError, ValueError: it does not say where each rank is.
    """
    if nodes is None:
        return None
    if isinstance(nodes, DeviceMesh):
        if nodes.ndim != 2:
            raise ValueError(f"nodes={nodes} has {nodes.ndim} axes; pass a mesh of two: (node, rank of the node)")
        own = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(range(world))
        at = {rank: node for node, ranks in enumerate(nodes.mesh.tolist()) for rank in ranks}
        if any(rank not in at for rank in own):
            raise ValueError(f"nodes={nodes} does not hold all ranks of the group, {own}")
        return [at[rank] for rank in own]
    if isinstance(nodes, (str, bytes)) or not isinstance(nodes, Sequence):
        raise TypeError(f"nodes={nodes!r} must be the node of each rank, as a list of integers, or a 2-D DeviceMesh")
    if len(nodes) != world or any(isinstance(node, bool) or not isinstance(node, int) for node in nodes):
        raise ValueError(
            f"nodes={nodes!r} must be one integer for each of the group's {world} ranks: its node's number"
        )
    return list(nodes)


def carries_gpus(group: Any) -> bool:
    """Are tensors of GPUs what a group exchanges?"""
    return isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend_config(group))


def digest_of_numbers(numbers: Sequence[int]) -> str:
    """Short, and equal on two ranks iff they are."""
    return hashlib.blake2b(repr(list(numbers)).encode(), digest_size=8).hexdigest()


def known_shape(
    q_heads: int | None, kv_heads: int | None, head_dim: int | None, dtype: torch.dtype | None
) -> Shape | None:
    """Of the calls to come; None if nothing was said of them. Key-value heads are as many as query heads, and inputs
    bf16, if not told.

    Raises:
        TypeError, ValueError: there are no such calls, or more must be known.
    """
    if q_heads is None and kv_heads is None and head_dim is None:
        return None
    if q_heads is None or head_dim is None:
        raise ValueError(
            f"q_heads={q_heads}, head_dim={head_dim}: pass both, and kv_heads where it is another, or none of them"
        )
    return checked_shape(
        torch.bfloat16 if dtype is None else dtype,
        batch=1,
        q_heads=q_heads,
        kv_heads=q_heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
    )


def checked_shape(dtype: Any, **sizes: int | None) -> Shape:
    """As :func:`shape_of`.

    Raises:
        TypeError, ValueError: for shapes that a call would refuse.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r} must be an integer of at least 1")
    if sizes["q_heads"] % sizes["kv_heads"]:  # type: ignore[operator]
        raise ValueError(f"q_heads={sizes['q_heads']} must be a multiple of kv_heads={sizes['kv_heads']}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype={dtype} can't be used; choose one of {', '.join(map(str, DTYPES))}")
    return shape_of(dtype, **sizes)  # type: ignore[arg-type]


def shape_of(
    dtype: torch.dtype, *, batch: int, q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None
) -> Shape:
    """What a call with inputs of ``dtype`` moves per row; ``v_head_dim``: ``head_dim`` if None."""
    return Shape(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        io=dtype.itemsize,
        partial=wire_dtype(dtype).itemsize,
        accumulate=accumulation_dtype(dtype).itemsize,
    )
