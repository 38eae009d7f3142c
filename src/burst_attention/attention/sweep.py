"""GAO, global attention optimisation (arXiv 2403.09347, section 3.1): the sweep over a rank's program.

Forward, equations 2 to 4: each rank keeps its queries and a running (out, lse); shards of K and V travel; what each
pair of shards gives is merged by online softmax: no S x S matrix and no partial result per hop is ever kept.

    for each key shard j:   o_j, l_j = attention(Q, K_j, V_j)
                            (O, L) = merge((O, L), (o_j, l_j))

Backward, algorithm 2: K, V, dK and dV stay at home; the query side travels: Q, dO, L and D = rowsum(dO * O), and dQ
comes home. Three large tensors on the wire where RingAttention moves four (K, V, dK, dV).

    for each query shard i: dq_i, dK, dV += gradients(dO_i, Q_i, L_i, D_i, K, V)
                            dQ of rank i += dq_i, at rank i

Neither is written out below. Which pairs a rank computes, what it needs for them and where its partial results go is
the program (:mod:`burst_attention.plan.program`): the sweep posts the next exchange, visits a pair while it is on the
wire, waits, combines, and passes on. Forward and backward, the paper's order and RingAttention's, a ring and direct
messages differ in the program and in the
:class:`~burst_attention.attention.passes.Pass`, never in the loop.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..comm.transport import Pending, Receive, Send, Transport
from ..kernels.contract import capturing
from ..plan.program import Drop, Message, Post, Program, Visit, Wait
from ..plan.route import Edge
from ..plan.rows import Side, Where
from .passes import Pass, Tensors


def sweep(
    program: Program, transport: Transport, work: Pass, indices: DeviceIndices | None = None
) -> dict[Side, Tensors]:
    """Execute one rank's program and return its own results, by side, unrounded.

    Nothing that the caller owns is written to. A partial result is folded in when its turn comes in the program, never
    when it arrives: two runs give the same bits.

    Args:
        indices: what keeps the program's index arrays on devices from call to call; None to copy them anew.
    """
    run = _Run(program, transport, work, DeviceIndices() if indices is None else indices)
    try:
        for op in program.ops:
            match op:
                case Visit():
                    run.visit(op)
                case Post():
                    run.post(op)
                case Wait():
                    run.wait(op)
                case Drop():
                    del run.held[op.key]
    except BaseException as error:
        # What this rank no longer sends the others wait for: the group is of no use, here too.
        transport.health.failure = (
            transport.health.failure or f"{work.direction.value}: {type(error).__name__} on this rank"
        )
        raise
    return {side: run.sums.pop(side, program.rank) for side, owner in program.sum_rows if owner == program.rank}


class _Run:
    """A sweep under way. A method for each operation, so that no buffer outlives its use as a loop's variable."""

    def __init__(self, program: Program, transport: Transport, work: Pass, indices: DeviceIndices) -> None:
        self.held = {(side, program.rank): tensors for side, tensors in work.own.items()}
        self._indices = indices
        self.sums = _Sums(program, work, indices)
        self._transport, self._work = transport, work
        self._on_wire: dict[int, tuple[Pending, list[tuple[Message, Tensors]]]] = {}

    def visit(self, op: Visit) -> None:
        """Compute a pair and fold in what it gives."""
        query, key = (self._indices.take(self.held[side, op.owner(side)], op.held[side]) for side in Side)
        running = partial(self.sums.running, Side.QUERY, op.query_owner, op.into[Side.QUERY])
        parts = dict(self._work.visit(query, key, op.tiles, running))
        del query, key  # rows that were gathered are free, and so is each part once it is folded in
        for side in tuple(parts):
            self.sums.add(side, op.owner(side), op.into[side], parts.pop(side))

    def post(self, op: Post) -> None:
        """Start an exchange: shards, own or to be passed on, and partial results on their way home."""
        arriving = [(message, _empty(message.edge, self._work)) for message in op.receives]
        sends = [Send(message.edge.target, x) for message in op.sends for x in self._outgoing(message)]
        receives = [Receive(message.edge.source, x) for message, tensors in arriving for x in tensors]
        label = f"hop {op.step} of the {self._work.direction.value}"
        self._on_wire[op.step] = self._transport.post(sends, receives, label=label), arriving

    def wait(self, op: Wait) -> None:
        """Finish an exchange: hold the shards, fold in the partial results."""
        pending, arriving = self._on_wire.pop(op.step)
        self._transport.wait(pending)
        while arriving:  # each is free once it is folded in
            message, tensors = arriving.pop(0)
            edge = message.edge
            if message.where is None:
                self.held[edge.side, edge.owner] = tensors
            else:
                self.sums.add(edge.side, edge.owner, message.where, tensors)

    def _outgoing(self, message: Message) -> Tensors:
        edge = message.edge
        if message.where is None:
            tensors = self.sums.pop(edge.side, edge.owner, self._work.wire_dtypes(edge.side, exact=edge.exact))
        else:
            tensors = self._indices.take(self.held[edge.side, edge.owner], message.where)
        return tuple(x.contiguous() for x in tensors)


class _Sums:
    """Partial results under accumulation, per side and owner."""

    def __init__(self, program: Program, work: Pass, indices: DeviceIndices) -> None:
        self._rows = program.sum_rows
        self._work, self._indices = work, indices
        self._totals: dict[tuple[Side, int], Tensors] = {}

    def add(self, side: Side, owner: int, where: Where, part: Tensors) -> None:
        """Fold ``part`` into the rows at ``where``. A first part that covers all rows is the total, as it is."""
        work, key, rows = self._work, (side, owner), self._rows[side, owner].count
        if key not in self._totals:
            if isinstance(where, slice) and where == slice(0, rows):
                self._totals[key] = part
                return
            self._totals[key] = work.blank(side, rows)
        total = self._widened(side, owner)
        if isinstance(where, slice):
            work.combine(side, self._indices.take(total, where), part)
            return
        index = self._indices.on_device(where, total[0].device)
        gathered = tuple(x.index_select(2, index) for x in total)
        work.combine(side, gathered, part)
        for x, y in zip(total, gathered, strict=True):
            x.index_copy_(2, index, y)

    def _widened(self, side: Side, owner: int) -> Tensors:
        """The total, in the accumulation dtype from now on."""
        wide = self._work.wire_dtypes(side, exact=True)
        total = tuple(x.to(dtype) for x, dtype in zip(self._totals[side, owner], wide, strict=True))
        self._totals[side, owner] = total
        return total

    def running(self, side: Side, owner: int, where: Where) -> Tensors | None:
        """The total's rows at ``where``, to be written to; None if there is none yet, or no view of these rows."""
        if not isinstance(where, slice) or (side, owner) not in self._totals:
            return None
        return self._indices.take(self._widened(side, owner), where)

    def pop(self, side: Side, owner: int, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensors:
        """The total, rounded if asked; blank if nothing was added."""
        total = self._totals.pop((side, owner), None) or self._work.blank(side, self._rows[side, owner].count)
        return total if dtypes is None else tuple(x.to(dtype) for x, dtype in zip(total, dtypes, strict=True))


class DeviceIndices:
    """Programs' index arrays on devices, each copied once: a copy there makes the host wait."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], tuple[np.ndarray, Tensor]] = {}

    def take(self, tensors: Tensors, where: Where) -> Tensors:
        """Rows of a shard: a view where they are consecutive."""
        if isinstance(where, slice):
            return tuple(x.narrow(2, where.start, where.stop - where.start) for x in tensors)
        index = self.on_device(where, tensors[0].device)
        return tuple(x.index_select(2, index) for x in tensors)

    def on_device(self, where: np.ndarray, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.from_numpy(where)
        key = id(where), device  # the array is kept beside its copy, so its id stays its own
        if key not in self._copies:
            if capturing():
                raise RuntimeError("this plan must be used once before a CUDA graph's capture: its indices are copied")
            self._copies[key] = where, torch.from_numpy(where).to(device)
        return self._copies[key][1]


def _empty(edge: Edge, work: Pass) -> Tensors:
    """Buffers for what an edge brings."""
    rows = edge.rows.count
    if edge.partial:
        like: Tensors = work.blank(edge.side, 0)
        dtypes = work.wire_dtypes(edge.side, exact=edge.exact)
    else:
        like = work.own[edge.side]
        dtypes = tuple(x.dtype for x in like)
    return tuple(
        x.new_empty(*x.shape[:2], rows, *x.shape[3:], dtype=dtype) for x, dtype in zip(like, dtypes, strict=True)
    )
