"""Attention in chunks of heads: q, k and v of one chunk are made, exchanged, used and freed before the next chunk.

The caller's function projects hidden states to q, k, v for one chunk. The forward saves hidden states, out and lse. The
backward projects each chunk again, so that no pass holds q, k, v or their gradients for all heads. It does not repeat
the attention. The exchange of a chunk overlaps the computation of its neighbours
(:func:`~burst_attention.attention.sweep.sweeps`).

Source: UPipe (arXiv 2602.21196) computes the heads of Ulysses in such chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..kernels.contract import accumulation_dtype
from ..plan.program import Program
from ..plan.rows import Side
from .call import check_types, prepare_backward, prepare_forward, shared_fields, split_heads
from .passes import (
    Pass,
    Settled,
    Tensors,
    differentiable_once,
    lost_rows,
    rounded_gradients,
    row_delta,
    sink_gradient,
    with_lost_rows,
    with_sinks,
)
from .plan import Plan
from .sweep import sweeps

Stretches = tuple[tuple[int, int], ...]  # (first row, row behind the last) of a weight; empty: all rows


@dataclass(frozen=True, eq=False)
class HeadCall:
    """One chunk's attention call: q [B, h, S_local, D], k and v [B, h_kv, S_local, ...], and the other arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    scale: float | None = None
    kernel: str = "auto"
    softcap: float | None = None
    sinks: Tensor | None = None  # [h]


@dataclass(frozen=True, eq=False)
class Projection:
    """How one chunk's q, k and v are made. All chunks must have equal shapes, one plan and one scale."""

    chunks: int
    rows: Callable[[int, int], Stretches]  # of (index of a weight, chunk): the rows that the chunk needs
    # A chunk's call, from (hidden states of a range of tokens, chunk, those rows of each weight, the tokens).
    run: Callable[[Tensor, int, Sequence[Tensor], slice], HeadCall]
    sweeps: Callable[..., Iterator[dict[Side, Tensors]]] = sweeps


def attend_by_heads(
    hidden: Tensor, weights: Sequence[Tensor], projection: Projection, *, output: Sequence[Tensor] = ()
) -> Tensor:
    """Project hidden states [B, S_local, E] and compute their attention, one chunk of heads at a time, on every rank.

    Returns [B, S_local, H, Dv]; with ``output``, the output projection's weight [E, H Dv] and maybe its bias [E], its
    product [B, S_local, E]. Differentiable once.
    """
    call = _Call(projection, hidden.device.type, len(output))
    return _HeadChunks.apply(call, hidden, *output, *weights)


class _HeadChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *tensors: Tensor) -> Tensor:
        output, weights = tensors[: call.outputs], tensors[call.outputs :]
        with torch.autocast(hidden.device.type, enabled=False):  # projections enable it again
            out, lse = call.forward(hidden, weights, wanted=any(ctx.needs_input_grad))
        ctx.call = call
        ctx.save_for_backward(hidden, out, lse, *tensors)
        return linear(out.flatten(2), *output) if output else out

    @staticmethod
    @differentiable_once("attention in chunks of heads")
    def backward(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Any, ...]:
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        hidden, lse, out = saved[0], saved[2], [saved.pop(1)]
        output, weights = saved[2 : 2 + call.outputs], saved[2 + call.outputs :]
        saved.clear()
        gradients = _Gradients(hidden, weights, [wanted[0], *wanted[1 + call.outputs :]])
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _of_output(grad, out[0], output)
            of_output = [x if want else None for x, want in zip(grads, wanted[1:], strict=False)]
            call.backward(grad, out, lse, output, gradients)
        of_hidden, *others = gradients.results()
        return None, of_hidden, *of_output, *others


class _Call:
    """One call: its forward, and later its backward, with the forward's decisions and autocast mode."""

    def __init__(self, projection: Projection, device: str, outputs: int) -> None:
        self.outputs = outputs
        self._projection = projection
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._plan: Plan | None = None
        self._number = 0  # marks the messages of the pass that runs
        self._settled = Settled(0, 0, 0.0, of_lse=False)  # of all chunks

    def _entering(self, chunk: int) -> AbstractContextManager[None]:
        """Guard what precedes the agreement, which is the first chunk's. Sweeps run later ones, and mark the group."""
        assert self._plan is not None
        return nullcontext() if chunk else self._plan.agreement.entering("burst_attention", once=True)

    def _run(self, hidden: Tensor, chunk: int, parts: Sequence[Tensor], tokens: slice | None = None) -> HeadCall:
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype, enabled=enabled):
            return self._projection.run(hidden, chunk, parts, tokens or slice(0, hidden.shape[1]))

    def _parts(self, weights: Sequence[Tensor], chunk: int) -> list[Tensor]:
        return [_rows(weight, self._projection.rows(n, chunk)) for n, weight in enumerate(weights)]

    def forward(self, hidden: Tensor, weights: Sequence[Tensor], *, wanted: bool) -> Tensors:
        """Return out [B, S_local, H, Dv] and lse [B, H, S_local]."""
        first = [self._run(hidden, 0, self._parts(weights, 0))]
        q, value_dim, chunks = first[0].q, first[0].v.shape[3], self._projection.chunks
        self._plan = first[0].plan
        batch, heads, rows, _ = q.shape
        out = q.new_empty(batch, rows, chunks * heads, value_dim)
        lse = q.new_empty(batch, chunks * heads, rows, dtype=accumulation_dtype(q.dtype))
        del q
        sinks: list[Tensor | None] = []  # of the chunks so far
        lost: list[Tensor | None] = []

        def prepared(n: int) -> tuple[Program, Pass]:
            call = first.pop() if first else self._run(hidden, n, self._parts(weights, n))
            sinks.append(call.sinks)
            lost.append(lost_rows(call.q))
            return self._prepared(call, wanted, n)

        passes = (prepared(n) for n in range(chunks))  # holds no chunk's q, k and v
        for chunk, sums in enumerate(self._swept(passes)):
            at = slice(chunk * heads, (chunk + 1) * heads)
            part, log_sum = sums.pop(Side.QUERY)
            part, log_sum = with_sinks(*with_lost_rows(part, log_sum, lost[chunk]), sinks[chunk])
            out[:, :, at].copy_(part.transpose(1, 2))
            lse[:, at].copy_(log_sum)
            del part, log_sum
        return out, lse

    def _swept(self, passes: Iterator[tuple[Program, Pass]]) -> Iterator[dict[Side, Tensors]]:
        assert self._plan is not None
        transport, indices = self._plan.transport, self._plan.indices
        return self._projection.sweeps(passes, transport, indices, call=lambda: self._number)

    def _prepared(self, call: HeadCall, wanted: bool, chunk: int) -> tuple[Program, Pass]:
        """Check a chunk's call. The first one agrees with the other ranks on all chunks."""
        q, k, v, plan = call.q, call.k, call.v, call.plan
        with self._entering(chunk):
            scale, cap = check_types(q, k, v, call.scale, call.kernel, softcap=call.softcap, sinks=call.sinks)
            degree, _ = split_heads(q, k, v, plan)
            program, work, settled = prepare_forward(
                q, k, v, plan, scale=scale, softcap=cap, kernel=call.kernel, heads=degree
            )
            fields = shared_fields(q, k, v, plan, settled, [wanted] * 4, call.sinks)
            fields["chunks of heads"] = self._projection.chunks
        if chunk == 0:
            plan.agreement.agree("burst_attention", fields, once=True)
            plan.usage.note_call()
            self._number = plan.transport.health.next_call()
            self._settled = replace(settled, number=self._number)
        return program, work

    def backward(
        self, grad: Tensor, held: list[Tensor], lse: Tensor, output: Sequence[Tensor], gradients: _Gradients
    ) -> None:
        """Add the gradients of all chunks to ``gradients``; free the out in ``held`` before the sweeps."""
        hidden, *weights = gradients.inputs
        chunks, out = self._projection.chunks, held.pop()
        heads, dtype = out.shape[2] // chunks, out.dtype

        def dout(chunk: int) -> Tensor:
            if not output:
                return grad[:, :, chunk * heads : (chunk + 1) * heads].transpose(1, 2)
            width = output[0].shape[1] // chunks
            part = grad @ output[0][:, chunk * width : (chunk + 1) * width].to(grad.dtype)
            return part.unflatten(-1, (heads, -1)).transpose(1, 2).to(dtype)

        of_chunks = (out[:, :, n * heads : (n + 1) * heads].transpose(1, 2) for n in range(chunks))
        delta = torch.cat([row_delta(dout(n), part, None, lse.dtype) for n, part in enumerate(of_chunks)], 1)
        del out, of_chunks
        assert self._plan is not None
        self._number = self._plan.transport.health.note_backward(self._settled.number)

        def passes() -> Iterator[tuple[Program, Pass]]:
            for n in range(chunks):
                at = slice(n * heads, (n + 1) * heads)
                call = self._run(hidden, n, self._parts(weights, n))
                tensors, stats = (dout(n), call.q, call.k, call.v), (lse[:, at], delta[:, at])
                prepared = prepare_backward(*tensors, stats, call.plan, self._settled)
                of_sinks.append(None if call.sinks is None else sink_gradient(*stats, call.sinks))
                del call, tensors, stats
                yield prepared

        of_sinks: list[Tensor | None] = []  # gradients of the chunks so far
        for chunk, sums in enumerate(self._swept(passes())):
            of_chunk = of_sinks[chunk]  # the gradients get no name here, or they would outlive their chunk
            self._differentiate(chunk, rounded_gradients(sums, self._settled.scale, dtype), of_chunk, gradients)

    def _differentiate(
        self, chunk: int, grads: Sequence[Tensor], of_sinks: Tensor | None, gradients: _Gradients
    ) -> None:
        """Differentiate one chunk's projection, a few tokens at a time, and its sinks once."""
        hidden, *weights = gradients.inputs
        rows = [self._projection.rows(n, chunk) for n in range(len(weights))]
        step = -(-hidden.shape[1] // self._projection.chunks)
        for first in range(0, hidden.shape[1], max(1, step)):
            tokens = slice(first, min(first + step, hidden.shape[1]))
            parts = [hidden[:, tokens], *(_rows(x, at) for x, at in zip(weights, rows, strict=True))]
            leaves = [x.detach().requires_grad_(want) for x, want in zip(parts, gradients.wanted, strict=True)]
            with torch.enable_grad():
                call = self._run(leaves[0], chunk, leaves[1:], tokens)
            made = [x for x in zip((call.q, call.k, call.v), grads, strict=True) if x[0].requires_grad]
            sources = [x for x in leaves if x.requires_grad]
            outputs, received = [x for x, _ in made], [grad[:, :, tokens] for _, grad in made]
            if of_sinks is not None and call.sinks is not None and call.sinks.requires_grad and first == 0:
                outputs, received = [*outputs, call.sinks], [*received, of_sinks]
            results = torch.autograd.grad(outputs, sources, received, allow_unused=True)
            by_leaf = dict(zip(map(id, sources), results, strict=True))
            gradients.add(tokens, rows, [by_leaf.get(id(leaf)) for leaf in leaves])


def _of_output(grad: Tensor, out: Tensor, output: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the output projection's weight and bias."""
    if not output:
        return []
    rows = grad.flatten(0, 1)
    grads = [(rows.mT @ out.flatten(2).flatten(0, 1).to(rows.dtype)).to(output[0].dtype)]
    return grads + [rows.sum(0, dtype=accumulation_dtype(rows.dtype)).to(bias.dtype) for bias in output[1:]]


class _Gradients:
    """Sums of the chunks' gradients, in the accumulation dtype, rounded once."""

    def __init__(self, hidden: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self.inputs, self.wanted = (hidden, *weights), wanted
        self._hidden: Tensor | None = None
        self._rows: list[dict[tuple[int, int] | None, Tensor]] = [{} for _ in weights]  # by stretch; None: all rows

    def add(self, tokens: slice, rows: Sequence[Stretches], grads: Sequence[Tensor | None]) -> None:
        """Add gradients of some tokens' hidden states, and of some rows of each weight."""
        hidden, *weights = grads
        if hidden is not None:
            if self._hidden is None:
                self._hidden = torch.zeros_like(self.inputs[0], dtype=accumulation_dtype(hidden.dtype))
            self._hidden[:, tokens] += hidden
        for sums, grad, stretches in zip(self._rows, weights, rows, strict=True):
            if grad is not None:  # chunks may share some stretches of rows and not others
                pieces = grad.split([stop - start for start, stop in stretches]) if stretches else [grad]
                for at, piece in zip(stretches or [None], pieces, strict=True):
                    sums[at] = added(sums.get(at), piece)

    def results(self) -> list[Tensor | None]:
        """Return the gradients of the hidden states and of each weight; None for those not wanted, or not used."""
        hidden, *weights = self.inputs
        results: list[Tensor | None] = [None if self._hidden is None else self._hidden.to(hidden.dtype)]
        for weight, grads, wanted in zip(weights, self._rows, self.wanted[1:], strict=True):
            if not wanted or not (grads or hidden.numel() == 0):
                results.append(None)
            elif None in grads:
                results.append(grads.pop(None).to(weight.dtype))
            else:
                results.append(whole := torch.zeros_like(weight))
                for at, grad in grads.items():
                    assert at is not None
                    whole[slice(*at)].copy_(grad)
        return results


def added(total: Tensor | None, grad: Tensor) -> Tensor:
    """Add a gradient to its sum in the accumulation dtype, in place; without a sum, return a new one."""
    return grad.to(accumulation_dtype(grad.dtype), copy=True) if total is None else total.add_(grad)


def _rows(weight: Tensor, stretches: Stretches) -> Tensor:
    parts = [weight[start:stop] for start, stop in stretches]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else weight
