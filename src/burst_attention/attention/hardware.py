"""Check ``make_plan``'s arguments about the machine and the coming calls: rates, nodes, heads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.contract import DTYPES, accumulation_dtype, wire_dtype
from ..plan.cost import Shape
from ..planner.planner import Remat
from ..planner.presets import preset, usual
from ..planner.rates import MeasuredOn, Rates, read_rates, user_file

RatesGiven = Rates | Path | str | None


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """The attention calls to expect: the planner chooses for them.

    Attributes:
        q_heads, kv_heads, head_dim: sizes of q, k and v; ``kv_heads`` is ``q_heads`` if None.
        dtype: of q, k and v; bfloat16 if None.
        remat: what a layer's backward recomputes: ``none``, ``layer`` (the forward then runs twice a step), or
            ``keep-attention``. It changes predictions only.
        attention_chunks: how many such calls a layer makes in a row, one for each chunk of heads. The exchange of one
            overlaps the computation of the next. It changes predictions only.
        grad: whether the calls have a backward. False, as in inference: the planner weighs the forward alone. It
            changes predictions only.

    Raises:
        TypeError, ValueError: ``remat`` is unknown, ``attention_chunks`` is no positive number, or ``grad`` no bool.
    """

    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: torch.dtype | None = None
    remat: Remat = "none"
    attention_chunks: int = 1
    grad: bool = True

    def __post_init__(self) -> None:
        chunks = self.attention_chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int):
            raise TypeError(f"attention_chunks={chunks!r} must be an int")
        if not isinstance(self.grad, bool):
            raise TypeError(f"grad={self.grad!r} must be True or False")
        if chunks < 1:
            raise ValueError(f"attention_chunks={chunks} must be at least 1")
        if self.remat not in get_args(Remat):
            raise ValueError(f"remat={self.remat!r} is unknown; choose one of {', '.join(get_args(Remat))}")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machines, for predictions.

    Attributes:
        rates: how fast kernels and links are: :class:`~burst_attention.planner.rates.Rates`, the path of a TOML file,
            or a preset's name such as ``h100-hgx+infiniband-400g``. None: what ``burst calibrate`` measured for this
            user, if it fits this device, torch and number of ranks. Else the first plan of a group measures links and
            kernels, in about 0.1 to 0.7 seconds, and takes the rest from a preset for the device. Later groups use
            these figures if their links are alike. ``"preset"``: measure nothing. The choice then minimises the
            worst-case slowdown over networks as fast as the preset's, 1/8 and 1/64 of it. All ranks use rank 0's rates.
        nodes: the node number of each rank, or a 2-D DeviceMesh (node, rank in the node). None: by host name.
    """

    rates: RatesGiven = None
    nodes: Sequence[int] | DeviceMesh | None = None


def checked_kinds(call: Any, hardware: Any) -> tuple[CallShape, Hardware]:
    """Return ``make_plan``'s two arguments, empty ones for None; raise TypeError for anything else."""
    if not isinstance(call, CallShape | None):
        raise TypeError(f"call={call!r} must be a CallShape, such as CallShape(q_heads=32, kv_heads=8, head_dim=128)")
    if not isinstance(hardware, Hardware | None):
        raise TypeError(f"hardware={hardware!r} must be a Hardware, such as Hardware(rates='h100-hgx')")
    return call or CallShape(), hardware or Hardware()


def known_rates(rates: RatesGiven, *, on_gpus: bool, world: int | None = None) -> Rates | None:
    """Return the rates that were given, or that ``burst calibrate`` wrote for this user, else None.

    The user's file is not used if it holds rates of another device, torch or number of ranks, and a warning names it.
    With ``world`` None, ranks are not compared, and a given file may hold rates of any machine. Raise TypeError or
    ValueError if ``rates`` is no such thing, or a given file can't be read or is of another machine.
    """
    if isinstance(rates, Rates):
        return rates
    if not isinstance(rates, (str, Path, NoneType)):
        raise TypeError(f"rates={rates!r} must be Rates, a preset's name, the path of a TOML file, 'preset', or None")
    if rates == "preset":
        return None
    if isinstance(rates, Path) or (rates or "").endswith(".toml"):
        own = read_rates(rates or "")
        if world and (why := _misfit(own, world, on_gpus)):
            raise ValueError(
                f"rates={str(rates)!r} holds {why}; run burst calibrate again, or pass read_rates({str(rates)!r}) to "
                "use them nevertheless"
            )
        return own
    if rates is not None:
        return preset(rates)
    try:
        if not (path := user_file()).is_file():
            return None
    except (OSError, RuntimeError) as error:  # this user may not look there, or has no home folder
        warnings.warn(f"no rates of burst calibrate are used: {error}; set XDG_CONFIG_HOME to a folder", stacklevel=2)
        return None
    saved = read_rates(path)
    if why := _misfit(saved, world, on_gpus):
        warnings.warn(f"{path} is not used: it holds {why}; run burst calibrate again", stacklevel=2)
        return None
    return saved


def _misfit(rates: Rates, world: int | None, on_gpus: bool) -> str | None:
    """Return why rates don't hold for this machine; None if they do, or if they don't say where they hold."""
    at = rates.measured_on
    return None if at is None else at.misfit(this_machine(world or at.ranks, on_gpus))


def this_machine(world: int, on_gpus: bool) -> MeasuredOn:
    """Return what rates measured here on ``world`` ranks hold for."""
    device = torch.cuda.get_device_name() if on_gpus else "cpu"
    return MeasuredOn(device=device, torch=torch.__version__.split("+")[0], ranks=world)


def usual_rates(*, on_gpus: bool) -> Rates:
    """Return the rates of the usual preset for the device."""
    return usual(torch.cuda.get_device_name() if on_gpus else "cpu")


def resolve_nodes(nodes: Any, group: Any, world: int) -> list[int] | None:
    """Return the node of each rank of the group, or None; TypeError or ValueError unless each rank has one."""
    if nodes is None:
        return None
    if isinstance(nodes, DeviceMesh):
        if nodes.ndim != 2:
            raise ValueError(f"nodes={nodes} has {nodes.ndim} axes; pass a mesh of two: (node, rank of the node)")
        own = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(range(world))
        at = {rank: node for node, ranks in enumerate(nodes.mesh.tolist()) for rank in ranks}
        if any(rank not in at for rank in own):
            raise ValueError(f"nodes={nodes} does not hold all ranks of the group; pass a mesh that holds {own}")
        return [at[rank] for rank in own]
    if isinstance(nodes, (str, bytes)) or not isinstance(nodes, Sequence):
        raise TypeError(f"nodes={nodes!r} must be the node of each rank, as a list of integers, or a 2-D DeviceMesh")
    if len(nodes) != world or any(isinstance(node, bool) or not isinstance(node, int) for node in nodes):
        raise ValueError(
            f"nodes={nodes!r} must be one integer for each of the group's {world} ranks: its node's number"
        )
    return list(nodes)


def carries_gpus(group: Any) -> bool:
    """Return whether the group exchanges GPU tensors (by NCCL)."""
    return isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend_config(group))


def known_shape(call: CallShape) -> Shape | None:
    """Return the shape of the calls to expect, one row of a batch; None if nothing is known of them.

    Raise TypeError or ValueError if no such call exists, or too little is known.
    """
    q_heads, kv_heads, head_dim = call.q_heads, call.kv_heads, call.head_dim
    if q_heads is None and kv_heads is None and head_dim is None:
        return None
    if q_heads is None or head_dim is None:
        raise ValueError(
            f"CallShape has q_heads={q_heads} and head_dim={head_dim}; give both, and kv_heads if it differs, or none"
        )
    sizes = {"q_heads": q_heads, "kv_heads": q_heads if kv_heads is None else kv_heads, "head_dim": head_dim}
    return checked_shape(torch.bfloat16 if call.dtype is None else call.dtype, batch=1, **sizes)


def checked_shape(dtype: Any, **sizes: int | None) -> Shape:
    """Return :func:`shape_of` these sizes. Raise TypeError or ValueError if a call would refuse such a shape."""
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
    """Return the sizes of a call with inputs of ``dtype``. ``v_head_dim`` defaults to ``head_dim``."""
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
