"""Prepare a call's forward and backward for a sweep: check it, choose its program and its pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import KERNELS
from ..kernels.contract import finite_lse
from ..kernels.merge import row_dot
from ..kernels.precision import converted
from ..plan.assignment import CIRCULATIONS
from ..plan.groups import Groups
from ..plan.program import Program
from ..plan.rows import Side
from .checks import ResolvedCall, kernel_for, resolve, sign_of, signless
from .passes import Backward, Forward, Tensors
from .plan import Plan

SETTLED = 8  # numbers of a packed :class:`Settled`


@dataclass(frozen=True)
class Settled:
    """The forward's decisions, for its backward: the call's number, resolved arguments, and how shards move.

    It is an output tensor of the operator, because only tensors reach the backward of a compiled graph.
    """

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
    """Check a call, and return its program, its pass and its resolved arguments.

    Raises:
        TypeError, ValueError: an argument can't be used.
    """
    split = Groups.of(heads, q_heads=q.shape[1], kv_heads=k.shape[1], **kept(keeping))
    call = resolve(q, k, v, plan, split, scale=scale, softcap=softcap, kernel=kernel)
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
    """Return the program and the pass of a call's backward.

    ``stats``: lse and the result of :func:`row_delta`; None if out and lse are in ``keeping`` or are ``results``, which
    a rank without others can pass.

    Raises:
        ValueError: the group can't carry these tensors.
    """
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
    """Return (out, lse) of rows that also see a sink: a logit for each head, without a value (gpt-oss).

    L' = logaddexp(L, sink), O' = O e^(L - L'). A row that sees no key keeps out 0. With L' and O', the backward of the
    keys is the same: P = e^(S - L') includes the sink in its sum, and D = rowsum(dO * O').

    Args:
        out: [B, H, S_local, Dv] in the accumulation dtype; overwritten.
        lse: [B, H, S_local].
        sinks: [H]; None for none.
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
