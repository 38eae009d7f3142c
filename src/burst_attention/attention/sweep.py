"""Global attention optimisation, GAO (arXiv 2403.09347, section 3.1): the loop over one rank's program.

Forward, equations 2 to 4: each rank keeps its queries and a running (out, lse). Shards of K and V circulate, and online
softmax merges the result of each pair of shards. Nothing of size S x S and no partial result per hop is kept.

    for each key shard j:   o_j, l_j = attention(Q, K_j, V_j)
                            (O, L) = merge((O, L), (o_j, l_j))

Backward, algorithm 2: K, V, dK and dV stay at home. The query side circulates: Q, dO, L and D = rowsum(dO * O). The
paper's dQ follows its queries round the ring; here each part goes straight to its owner by default. Three large tensors
are on the wire (Q, dO, dQ), where RingAttention moves four (K, V, dK, dV).

    for each query shard i: dq_i, dK, dV += gradients(dO_i, Q_i, L_i, D_i, K, V)
                            dQ of rank i += dq_i, at rank i

Neither loop is spelled out below. A rank's program (:mod:`burst_attention.plan.program`) lists what to post, visit and
wait for. Its order is the double buffering (:mod:`burst_attention.plan.build`): an exchange is posted before the visits
that run while it is on the wire. Forward, backward and RingAttention run through it, with other programs and passes.
"""

from __future__ import annotations

from functools import partial

import torch

from ..comm.transport import Pending, Receive, Send, Transport
from ..plan.program import Drop, Message, Move, Op, Post, Program, Visit, Wait
from ..plan.route import Edge
from ..plan.rows import Side
from .buffers import DeviceIndices, Shards, Sums
from .passes import Pass, Tensors, part_of


def sweep(
    program: Program, transport: Transport, work: Pass, indices: DeviceIndices | None = None
) -> dict[Side, Tensors]:
    """Execute one rank's program and return this rank's results, by side; rounded only if head groups are joined.

    Of the caller's tensors it writes only to the cache of q, k and v. It folds in partial results in the program's
    order, so two runs give the same bits. ``indices`` keeps index arrays on devices between calls.
    """
    run = _Run(program, transport, work, DeviceIndices() if indices is None else indices)
    try:
        for op in program.ops:
            run.execute(op)
    except BaseException as error:
        # The other ranks now wait for messages that this rank will never send, so mark the group as failed.
        failure = f"{work.direction.value}: {type(error).__name__} on this rank"
        transport.health.failure = transport.health.failure or failure
        raise
    return {side: run.results(side) for side in work.direction.returns}


class _Run:
    """A running sweep. Each operation is a method, so that no loop variable keeps a buffer alive."""

    def __init__(self, program: Program, transport: Transport, work: Pass, indices: DeviceIndices) -> None:
        self._program, self._transport, self._work, self._indices = program, transport, work, indices
        self._held = Shards(program, work)
        self._sums = Sums(program, work, indices)
        self._on_wire: dict[int, tuple[Pending, list[tuple[Message, Tensors]]]] = {}

    def execute(self, op: Op) -> None:
        """Execute one operation."""
        match op:
            case Visit():
                self._visit(op)
            case Post():
                self._post(op)
            case Wait():
                self._wait(op)
            case Move():
                self._arrived(op.target, self._outgoing(op.source))
            case Drop():
                (self._sums if op.partial else self._held).drop(op.place)

    def results(self, side: Side) -> Tensors:
        """Return this rank's results; join the parts of several head groups, each rounded."""
        places = self._program.home(side)
        if len(places) == 1:
            return self._sums.pop(places[0])
        parts = [self._sums.pop(place, self._work.final_dtypes(side)) for place in places]
        return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))

    def _visit(self, op: Visit) -> None:
        """Compute cells and fold in their results."""
        query, key = (self._indices.take(self._held.at(op.places[side]), op.held[side]) for side in Side)
        running = partial(self._sums.running, op.places[Side.QUERY], op.into.get(Side.QUERY))
        parts = dict(self._work.visit(query, key, op.tiles, running))
        del query, key  # frees gathered rows; each part is freed once it is folded in
        # Online softmax in a forward, addition in a backward; in the kernel, if it extended the running result.
        for side in tuple(parts):
            self._sums.add(op.places[side], op.into[side], parts.pop(side))

    def _post(self, op: Post) -> None:
        """Start an exchange of shards and of partial results that go home."""
        arriving = [(message, self._empty(message.edge)) for message in op.receives]
        sends = [Send(m.edge.target, x.contiguous()) for m in op.sends for x in self._outgoing(m)]
        receives = [Receive(message.edge.source, x) for message, tensors in arriving for x in tensors]
        label = f"hop {op.step} of the {self._work.direction.value}"
        self._on_wire[op.step] = self._transport.post(sends, receives, label=label), arriving

    def _wait(self, op: Wait) -> None:
        """Finish an exchange."""
        pending, arriving = self._on_wire.pop(op.step)
        self._transport.wait(pending)
        while arriving:  # frees each once it is folded in
            self._arrived(*arriving.pop(0))

    def _arrived(self, message: Message, tensors: Tensors) -> None:
        """Store what arrived: add a partial result, keep a shard, or write it into its sequence group's buffer."""
        if message.edge.partial:
            assert message.where is not None
            self._sums.add(message.place, message.where, tensors)
        elif message.where is None:
            self._held.tensors[message.place] = tensors
        else:
            buffers = self._held.at(message.place)
            for n, x in zip(self._work.payload(message.edge.side, message.edge.key.payload), tensors, strict=True):
                self._indices.put(buffers[n], message.where, x)

    def _outgoing(self, message: Message) -> Tensors:
        edge = message.edge
        if edge.partial:
            return self._sums.leave(message.place, message.where, self._wire_dtypes(edge))
        tensors = self._held.at(message.place)
        wanted = tuple(tensors[n] for n in self._work.payload(edge.side, edge.key.payload))
        assert message.where is not None
        return self._indices.take(wanted, message.where)

    def _wire_dtypes(self, edge: Edge) -> tuple[torch.dtype, ...]:
        work, side = self._work, edge.side
        return work.final_dtypes(side) if edge.finished else work.wire_dtypes(side, exact=edge.exact)

    def _empty(self, edge: Edge) -> Tensors:
        """Allocate buffers for an edge's tensors."""
        rows, side = edge.rows.count, edge.side
        if edge.partial:
            like: Tensors = self._work.blank(side, 0)
            dtypes = self._wire_dtypes(edge)
        else:
            own = part_of(self._work.own[side], self._program.groups.count(side), 0)
            like = tuple(own[n] for n in self._work.payload(side, edge.key.payload))
            dtypes = tuple(x.dtype for x in like)
        return tuple(
            x.new_empty(*x.shape[:2], rows, *x.shape[3:], dtype=dtype) for x, dtype in zip(like, dtypes, strict=True)
        )
