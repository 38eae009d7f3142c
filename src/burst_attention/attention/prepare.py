"""Check a call, and prepare its forward and backward for a sweep."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..comm.scalars import real
from ..kernels import KERNELS, choose
from ..kernels.contract import Kernel, finite_lse
from ..kernels.merge import row_dot
from ..kernels.precision import DTYPES, accumulation_dtype, converted, wire_dtype
from ..plan.assignment import CIRCULATIONS
from ..plan.cost import Shape
from ..plan.groups import Groups
from ..plan.mask import Mask
from ..plan.program import Program
from ..plan.rows import Side
from .hardware import shape_of
from .passes import Backward, Forward, Tensors
from .plan import Plan, plan_of, split_key

if TYPE_CHECKING:
    DtypeName: TypeAlias = str
else:  # what command lines take
    DtypeName = Literal[*(str(dtype).removeprefix("torch.") for dtype in DTYPES)]


@dataclass(frozen=True, eq=False)
class ResolvedCall:
    """A call without its tensors, with ``None`` and ``auto`` resolved."""

    plan: Plan
    scale: float
    circulate: str
    groups: Groups
    kernel: Kernel
    softcap: float | None


SETTLED = 8  # numbers of a packed :class:`Settled`


@dataclass(frozen=True)
class Settled:
    """The forward's decisions, as an output tensor: only tensors reach the backward of a compiled graph."""

    number: int
    scale: float
    circulate: str
    kernel: str
    chunks: int
    gather: bool
    softcap: float | None
    of_lse: bool  # whether the lse was returned, so that it may have a gradient

    def pack(self) -> Tensor:
        """Return a float64 [SETTLED] tensor on the CPU."""
        names = tuple(CIRCULATIONS).index(self.circulate), KERNELS.index(self.kernel)
        numbers = (self.number, self.scale, *names, self.chunks, self.gather, self.softcap or 0.0, self.of_lse)
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def of(cls, number: int, call: ResolvedCall, *, of_lse: bool) -> Settled:
        """Return what the forward of ``call`` decided."""
        groups = call.groups
        chosen = call.circulate, call.kernel.name, groups.chunks, groups.gather, call.softcap
        return cls(number, call.scale, *chosen, of_lse)

    @classmethod
    def unpack(cls, packed: Tensor) -> Settled:
        """Read a tensor of :meth:`pack`."""
        number, scale, circulate, kernel, chunks, gather, softcap, of_lse = packed.tolist()
        names = tuple(CIRCULATIONS)[int(circulate)], KERNELS[int(kernel)]
        return cls(int(number), scale, *names, int(chunks), bool(gather), softcap or None, bool(of_lse))


def is_dtensor(x: Any) -> bool:
    """Return whether ``x`` is a DTensor, without the half second of importing its module if nothing else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_types(
    q: Any, k: Any, v: Any, scale: Any, kernel: Any, *, softcap: Any = None, sinks: Any = None
) -> tuple[float | None, float | None]:
    """Return (scale, softcap) as floats; raise TypeError or ValueError for arguments that an operator can't take."""
    for name, x in (("q", q), ("k", k), ("v", v), *([] if sinks is None else [("sinks", sinks)])):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a tensor")
        if is_dtensor(x):
            raise TypeError(f"{name} is a DTensor; pass this rank's shard of the sequence as a plain tensor")
    number, cap = check_scale(scale, q.dtype), check_softcap(softcap, q.dtype)
    if not isinstance(kernel, str):
        raise ValueError(f"kernel={kernel!r} must be a kernel's name, or auto")
    if sinks is not None:
        check_sinks(sinks, q)
    return number, cap


def check_softcap(softcap: Any, dtype: torch.dtype) -> float | None:
    """Return the soft cap of a call with ``dtype`` inputs as a float, or None."""
    number = None if softcap is None else real(softcap)
    bounds = torch.finfo(accumulation_dtype(dtype))
    if softcap is not None and (number is None or not bounds.tiny <= number <= bounds.max / 2):
        raise ValueError(
            f"softcap={softcap!r} must be a number from {bounds.tiny:.3g} to {bounds.max / 2:.3g}, or None for none"
        )
    return None if number is None else float(number)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``sinks`` holds one logit for each head of ``q``."""
    if not sinks.dtype.is_floating_point or sinks.device != q.device:
        raise TypeError(f"sinks is {sinks.dtype} on {sinks.device}; it must be floating point on {q.device}, as q is")
    if q.ndim == 4 and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {list(sinks.shape)}; it must be [{q.shape[1]}], one logit a query head")


def check_scale(scale: Any, dtype: torch.dtype) -> float | None:
    """Return the scale of a call with ``dtype`` inputs as a float, or None."""
    if scale is None:
        return None
    number = real(scale)
    if number is None or not abs(number) <= sys.float_info.max:
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1 / sqrt(head dim)")
    wide = accumulation_dtype(dtype)
    # Kernels also use scale * log2(e), which must be finite too.
    least, most = torch.finfo(wide).tiny, torch.finfo(wide).max / 2
    if number and not least <= abs(number) <= most:
        raise ValueError(
            f"scale={scale!r} is too {'small' if abs(number) < least else 'large'} for {wide}, in which scores are "
            f"computed. Use 0, or a size from {least:.3g} to {most:.3g}"
        )
    return float(number)


def signless(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return (q, scale) with the same scores and a positive scale, which fused kernels need; the sign moves into q.

    So does a zero, which keeps NaN and inf in q visible.
    """
    return (q, scale) if scale > 0 else (q * sign_of(scale), abs(scale) or 1.0)


def sign_of(scale: float) -> float:
    """Return -1, 0 or 1."""
    return float((scale > 0) - (scale < 0))


def kernel_for(
    name: str,
    mask: Mask,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    softcap: float | None = None,
) -> Kernel:
    """Return the kernel that a call under ``mask`` uses."""
    how: dict[str, Any] = {"device": device, "dtype": dtype, "head_dims": head_dims, "softcap": softcap}
    return choose(name, documents=mask.parts, banded=mask.window is not None, **how)


def split_heads(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[int, int]:
    """Return a call's Ulysses degree, and how many rows of its sequence group this rank caches."""
    if plan.world == 1 or plan.schedule.strategy.ulysses_degree == 1:
        return 1, 0
    check_tensors(q, k, v, plan.length, plan.keys_apart)
    # index() makes a compiler treat these sizes as constants.
    heads = operator.index(q.shape[1]), operator.index(k.shape[1])
    dims = operator.index(q.shape[3]), operator.index(v.shape[3])
    known = plan.splits.get(split_key(*heads, *dims, q.dtype.itemsize, wire_dtype(q.dtype).itemsize))
    if known is not None:
        return operator.index(known[0]), known[1]
    return _split_heads(plan.handle_text, str(q.dtype), *heads, *dims)


def caches_results(heads: int, cached_rows: int, world: int, *, sinks: Tensor | None, return_lse: bool) -> bool:
    """Return whether a call caches out and lse too. A gradient of lse changes D; that of sinks needs D at home."""
    return cached_rows > 0 and heads == world and sinks is None and not return_lse


def _split_heads(
    handle: str, dtype: str, q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int
) -> tuple[int, int]:
    """Choose as :func:`split_heads` does, from what a compiler knows of a call; the batch does not matter."""
    plan, io = plan_of(int(handle)), getattr(torch, dtype.removeprefix("torch."))
    shape = shape_of(io, batch=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    return plan.split(shape)


# As torch.compiler.assume_constant_result does, whose import loads the compiler: tracing need not enter arrays.
setattr(_split_heads, "_dynamo_marked_constant", True)  # noqa: B010


def _shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    sizes = {"batch": q.shape[0], "q_heads": q.shape[1], "kv_heads": k.shape[1]}
    return shape_of(q.dtype, **sizes, head_dim=q.shape[3], v_head_dim=v.shape[3])


def shared_fields(
    q: Tensor, k: Tensor, v: Tensor, call: ResolvedCall, wanted: list[bool], sinks: Tensor | None = None
) -> dict[str, Any]:
    """What all ranks must pass equally. The values of ``sinks`` are a parameter's, which ranks keep equal."""
    return {
        **call.plan.schedule.description,
        "batch": q.shape[0],
        "query heads": q.shape[1],
        "key-value heads": k.shape[1],
        "head dim": q.shape[3],
        "value head dim": v.shape[3],
        "dtype": str(q.dtype),
        "device": q.device.type,
        "scale": call.scale,
        "circulate": call.circulate,
        "ulysses_degree": call.groups.query,
        "cache_qkv": call.groups.keep,
        "chunks": call.groups.chunks,
        "gather_kv": call.groups.gather,
        "kernel": call.kernel.name,
        "softcap": call.softcap,
        "sinks": None if sinks is None else str(sinks.dtype),
        "gradients wanted by q, k, v, sinks": wanted,
    }


def check_tensors(q: Tensor, k: Tensor, v: Tensor, length: int, keys: int | None = None) -> None:
    """Raise TypeError or ValueError unless these can be this rank's shards of ``length`` tokens."""
    of_keys = (length, "tokens", "plan.shard") if keys is None else (keys, "keys", "plan.shard_keys")
    for name, x in (("q", q), ("k", k), ("v", v)):
        rows, held, remedy = (length, "tokens", "plan.shard") if name == "q" else of_keys
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, heads, S_local, head dim]")
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise TypeError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must be equal")
        if x.shape[2] != rows and x.shape[1] == rows:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, with this rank's {rows} tokens in dim 1; it must be "
                f"[batch, heads, S_local, head dim]: pass {name}.transpose(1, 2)"
            )
        if x.shape[2] != rows:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, but this rank holds {rows} {held} (dim 2); cut it with {remedy}"
            )
        if 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise ValueError(f"{name} has shape {list(x.shape)}; only the number of tokens (dim 2) may be 0")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has shape {list(x.shape)}, q {list(q.shape)}; their batch (dim 0) must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]}, k has {k.shape[3]}; they must be equal")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads, v has {v.shape[1]}; they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} heads of k and v")


def prepare_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None,
    kernel: str,
    heads: int,
    softcap: float | None = None,
    keeping: Tensors | None = None,
) -> tuple[Program, Forward, ResolvedCall]:
    """Check a call, and return its program, its pass and its resolved arguments."""
    groups = Groups.of(heads, q_heads=q.shape[1], kv_heads=k.shape[1], **kept(keeping))
    if groups.query == 1:  # split_heads has checked the others
        check_tensors(q, k, v, plan.length, plan.keys_apart)
    plan.transport.check_device(q.device)
    head_dims = q.shape[3], v.shape[3]
    chosen = kernel_for(kernel, plan.mask, device=q.device, dtype=q.dtype, head_dims=head_dims, softcap=softcap)
    groups, circulate = plan.settle(_shape(q, k, v), groups)
    call = ResolvedCall(plan, 1 / math.sqrt(q.shape[3]) if scale is None else scale, circulate, groups, chosen, softcap)
    q, k, v = map(dense_rows, (q, k, v))
    q, positive = signless(q, call.scale)
    work = Forward(q, k, v, positive, call.kernel, call.groups, keeping)
    return plan.schedule.program(call.circulate, work.direction, call.groups), work, call


def prepare_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: tuple[Tensor, Tensor] | None,
    plan: Plan,
    forward: Settled,
    *,
    heads: int,
    kv_heads: int,
    keeping: Tensors | None = None,
    results: Tensors | None = None,
) -> tuple[Program, Backward]:
    """Return the program and the pass of a call's backward."""
    plan.transport.check_device(q.device)
    name, cap, head_dims = forward.kernel, forward.softcap, (q.shape[3], v.shape[3])
    kernel = kernel_for(name, plan.mask, device=q.device, dtype=q.dtype, head_dims=head_dims, softcap=cap)
    groups = Groups.of(heads, q_heads=q.shape[1], kv_heads=kv_heads, chunks=forward.chunks, **kept(keeping))
    groups = replace(groups, gather=forward.gather)
    dout, q, k, v = map(dense_rows, (dout, q, k, v))
    q, scale = signless(q, forward.scale)  # the cached q has its sign already
    packed = None if stats is None else torch.stack((finite_lse(stats[0]), stats[1]), -1)
    if keeping is not None and len(keeping) > 3:
        keeping = *keeping[:4], finite_lse(keeping[4])
    if results is not None:
        results = results[0], finite_lse(results[1])
    work = Backward(dout, q, k, v, packed, scale, kernel, plan.world == 1, groups, keeping, results, forward.of_lse)
    return plan.schedule.program(forward.circulate, work.direction, groups), work


def kept(keeping: Tensors | None) -> dict[str, bool]:
    """Return what a call caches, as arguments of :meth:`Groups.of`."""
    return {"keep": keeping is not None, "results": len(keeping or ()) > 3}


def lost_rows(q: Tensor) -> Tensor | None:
    """Return [B, H, S_local]: NaN for rows whose query holds a NaN or an infinity, else 0; None on a GPU.

    PyTorch's operator for CPUs takes a row whose scores are all NaN for one that sees nothing, and gives 0.
    """
    return None if q.is_cuda else (q - q).sum(-1)


def with_lost_rows(out: Tensor, lse: Tensor, lost: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the result of :func:`lost_rows` to a call's results, in place."""
    if lost is None:
        return out, lse
    return out.add_(converted(lost, out.dtype).unsqueeze(-1)), lse.add_(converted(lost, lse.dtype))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of rows that also see a sink, a logit per head without a value (gpt-oss). Overwrites ``out``.

    L' = logaddexp(L, sink), O' = O e^(L - L'). A row that sees no key keeps out 0. With L' and O', the backward of the
    keys is the same: P = e^(S - L') includes the sink in its sum, and D = rowsum(dO * O').
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # Without a key and with a sink of -inf, both are -inf and their difference is NaN.
    out *= torch.exp(lse - total).masked_fill_(lse == -torch.inf, 0).unsqueeze(-1)
    return out, total


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Return this rank's part of the gradient of the sinks, [H]: the sum over its rows of -e^(sink - L') D.

    The sink's value is zero, so dP is zero, and dS = P (dP - D).
    """
    part = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0) * delta
    return -part.sum((0, 2)).to(sinks.dtype)


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return D = rowsum(dO * O) - dL, [B, H, S_local], in ``dtype``; ``dlse`` is dL, the gradient of lse, or None."""
    delta = row_dot(dout, out, dtype)
    return delta if dlse is None else delta - dlse


def rounded_gradients(sums: dict[Side, Tensors], scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Return dq, dk, dv from a backward's sums, which it takes; frees each sum once it is rounded."""
    grads = [*sums.pop(Side.QUERY), *sums.pop(Side.KEY)]
    if scale <= 0:
        grads[0] = grads[0] * sign_of(scale)
    for n, grad in enumerate(grads):
        grads[n] = converted(grad, dtype).contiguous()
    return grads


def dense_rows(x: Tensor) -> Tensor:
    """Make the last dim dense, as kernels need; an expanded gradient's is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
