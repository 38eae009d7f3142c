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

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..comm.transport import Pending, Receive, Send, Transport
from ..kernels.contract import capturing
from ..plan.program import Drop, Message, Move, Op, Place, Post, Program, Visit, Wait
from ..plan.route import Edge
from ..plan.rows import Side, Where
from .passes import Pass, Tensors, part_of


def sweep(
    program: Program, transport: Transport, work: Pass, indices: DeviceIndices | None = None
) -> dict[Side, Tensors]:
    """Execute one rank's program and return its own results, by side: unrounded, unless parts of the heads are joined.

    Nothing that the caller owns is written to, but for what is to be kept. A partial result is folded in when its turn
    comes in the program, never when it arrives: two runs give the same bits.

    Args:
        indices: what keeps the program's index arrays on devices from call to call; None to copy them anew.
    """
    run = _Run(program, transport, work, DeviceIndices() if indices is None else indices)
    try:
        for op in program.ops:
            run.execute(op)
    except BaseException as error:
        # What this rank no longer sends the others wait for: the group is of no use, here too.
        transport.health.failure = (
            transport.health.failure or f"{work.direction.value}: {type(error).__name__} on this rank"
        )
        raise
    return {side: run.results(side) for side in work.direction.returns}


class _Run:
    """A sweep under way. A method for each operation, so that no buffer outlives its use as a loop's variable."""

    def __init__(self, program: Program, transport: Transport, work: Pass, indices: DeviceIndices) -> None:
        self._program, self._transport, self._work, self._indices = program, transport, work, indices
        self._held = _Shards(program, work)
        self._sums = _Sums(program, work, indices)
        self._on_wire: dict[int, tuple[Pending, list[tuple[Message, Tensors]]]] = {}

    def execute(self, op: Op) -> None:
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
        """This rank's own; several parts of the heads are joined, each rounded."""
        places = self._program.home(side)
        if len(places) == 1:
            return self._sums.pop(places[0])
        parts = [self._sums.pop(place, self._work.final_dtypes(side)) for place in places]
        return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))

    def _visit(self, op: Visit) -> None:
        """Compute cells and fold in what they give."""
        query, key = (self._indices.take(self._held.at(op.places[side]), op.held[side]) for side in Side)
        running = partial(self._sums.running, op.places[Side.QUERY], op.into.get(Side.QUERY))
        parts = dict(self._work.visit(query, key, op.tiles, running))
        del query, key  # rows that were gathered are free, and so is each part once it is folded in
        for side in tuple(parts):
            self._sums.add(op.places[side], op.into[side], parts.pop(side))

    def _post(self, op: Post) -> None:
        """Start an exchange: shards, own or to be passed on, and partial results on their way home."""
        arriving = [(message, self._empty(message.edge)) for message in op.receives]
        sends = [Send(m.edge.target, x.contiguous()) for m in op.sends for x in self._outgoing(m)]
        receives = [Receive(message.edge.source, x) for message, tensors in arriving for x in tensors]
        label = f"hop {op.step} of the {self._work.direction.value}"
        self._on_wire[op.step] = self._transport.post(sends, receives, label=label), arriving

    def _wait(self, op: Wait) -> None:
        """Finish an exchange."""
        pending, arriving = self._on_wire.pop(op.step)
        self._transport.wait(pending)
        while arriving:  # each is free once it is folded in
            self._arrived(*arriving.pop(0))

    def _arrived(self, message: Message, tensors: Tensors) -> None:
        """Hold a shard, or put it beside the others of its slice; fold in a partial result."""
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
        """Buffers for what an edge brings."""
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


class _Shards:
    """What is held: own shards part by part of their heads, others' as they came, several side by side."""

    def __init__(self, program: Program, work: Pass) -> None:
        self._program, self._work = program, work
        self.tensors: dict[Place, Tensors] = {
            place: part_of(tensors, program.groups.count(side), place[2])
            for side, tensors in work.own.items()
            for place in program.home(side)
        }

    def at(self, place: Place) -> Tensors:
        """A buffer's tensors; those of a slice are made when they are first asked for, but for what was kept."""
        if place not in self.tensors:
            side = place[0]
            like = part_of(self._work.own[side], self._program.groups.count(side), 0)
            known = self._work.own_slice[side] if place in self._program.kept.values() else (None,) * len(like)
            rows = self._program.held_rows[place].count
            self.tensors[place] = tuple(
                x.new_empty(*x.shape[:2], rows, *x.shape[3:]) if kept is None else kept
                for x, kept in zip(like, known, strict=True)
            )
        return self.tensors[place]

    def drop(self, place: Place) -> None:
        del self.tensors[place]


@dataclass(eq=False)
class _Piece:
    """Consecutive rows of a buffer of results, and those of them that have left."""

    rows: range
    tensors: Tensors
    left: list[range] = field(default_factory=list)

    def has(self, where: slice) -> bool:
        return self.rows.start <= where.start and where.stop <= self.rows.stop

    def at(self, where: slice) -> Tensors:
        """Views of some of its rows."""
        return tuple(x.narrow(2, where.start - self.rows.start, where.stop - where.start) for x in self.tensors)

    def part(self, start: int, stop: int) -> _Piece:
        """Some of its rows, in the same memory."""
        inside = [rows for rows in self.left if start <= rows.start and rows.stop <= stop]
        return _Piece(range(start, stop), self.at(slice(start, stop)), inside)

    @property
    def gone(self) -> bool:
        """Has every row left?"""
        return sum(map(len, self.left)) >= len(self.rows)


class _Sums:
    """Partial results under accumulation, buffer by buffer.

    Rows that got one part so far are that part, in its own memory and dtype: what a wave completes is neither added to
    zeros nor widened, and is free once all of it has left.
    """

    def __init__(self, program: Program, work: Pass, indices: DeviceIndices) -> None:
        self._rows = program.sum_rows
        self._work, self._indices = work, indices
        self._pieces: dict[Place, list[_Piece]] = {}

    def add(self, place: Place, where: Where, part: Tensors) -> None:
        """Fold ``part`` into the rows at ``where``."""
        work, side = self._work, place[0]
        if isinstance(where, slice):
            total = self._rows_at(place, where)
            if total is None:
                self._pieces.setdefault(place, []).append(_Piece(range(where.start, where.stop), part))
            else:
                work.combine(side, total, part)
            return
        whole = self._widened(place, self._joined(place)).tensors
        index = self._indices.on_device(where, whole[0].device)
        gathered = tuple(x.index_select(2, index) for x in whole)
        work.combine(side, gathered, part)
        for x, y in zip(whole, gathered, strict=True):
            x.index_copy_(2, index, y)

    def running(self, place: Place, where: Where | None) -> Tensors | None:
        """The total's rows at ``where``, to be written to; None if there is none yet, or no view of these rows."""
        return self._rows_at(place, where) if isinstance(where, slice) else None

    def _rows_at(self, place: Place, where: slice) -> Tensors | None:
        """The total's rows at ``where`` in the accumulation dtype, to be written to; None: there are none yet."""
        pieces = self._pieces.get(place, [])
        touched = [piece for piece in pieces if piece.rows.start < where.stop and where.start < piece.rows.stop]
        if not touched:
            return None
        piece = touched[0] if touched[0].has(where) else self._joined(place)
        if piece.left:  # those are not widened, and not held any longer than the rest needs
            piece = self._apart(place, piece, where)
        return self._widened(place, piece).at(where)

    def _apart(self, place: Place, piece: _Piece, where: slice) -> _Piece:
        """The rows at ``where`` as a piece of their own."""
        first, last = piece.rows.start, piece.rows.stop
        ends = (first, where.start), (where.start, where.stop), (where.stop, last)
        before, inside, after = (piece.part(*each) for each in ends)
        pieces = self._pieces[place]
        pieces.remove(piece)
        pieces += [inside, *(each for each in (before, after) if not each.gone)]
        return inside

    def _widened(self, place: Place, piece: _Piece) -> _Piece:
        """In the accumulation dtype from now on."""
        wide = self._work.wire_dtypes(place[0], exact=True)
        piece.tensors = tuple(x.to(dtype) for x, dtype in zip(piece.tensors, wide, strict=True))
        return piece

    def _joined(self, place: Place) -> _Piece:
        """All rows as one piece; blank where nothing was added."""
        rows, pieces = self._rows[place].count, self._pieces.get(place, [])
        if len(pieces) == 1 and len(pieces[0].rows) == rows:
            return pieces[0]
        whole = _Piece(range(rows), self._work.blank(place[0], rows))
        for piece in pieces:
            for x, y in zip(whole.at(slice(piece.rows.start, piece.rows.stop)), piece.tensors, strict=True):
                x.copy_(y)
        self._pieces[place] = [whole]
        return whole

    def leave(self, place: Place, where: Where | None, dtypes: tuple[torch.dtype, ...]) -> Tensors:
        """Rows of the total, rounded, for good: memory of their own; None for all of it, which is forgotten."""
        if where is None:
            return self.pop(place, dtypes)
        pieces = self._pieces.get(place, [])
        piece = next((each for each in pieces if isinstance(where, slice) and each.has(where)), None)
        if piece is None or not isinstance(where, slice):
            rows = self._indices.take(self._joined(place).tensors, where)
        else:
            rows = piece.at(where)
            piece.left.append(range(where.start, where.stop))
            if piece.gone:
                pieces.remove(piece)
        return tuple(x.to(dtype, copy=True) for x, dtype in zip(rows, dtypes, strict=True))

    def pop(self, place: Place, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensors:
        """The total, rounded if asked; blank if nothing was added."""
        total = self._joined(place).tensors
        self.drop(place)
        return total if dtypes is None else tuple(x.to(dtype) for x, dtype in zip(total, dtypes, strict=True))

    def drop(self, place: Place) -> None:
        self._pieces.pop(place, None)


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

    def put(self, buffer: Tensor, where: Where, x: Tensor) -> None:
        """Write rows into a buffer."""
        if isinstance(where, slice):
            buffer.narrow(2, where.start, where.stop - where.start).copy_(x)
        else:
            buffer.index_copy_(2, self.on_device(where, x.device), x)

    def on_device(self, where: np.ndarray, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.from_numpy(where)
        key = id(where), device  # the array is kept beside its copy, so its id stays its own
        if key not in self._copies:
            if capturing():
                raise RuntimeError("this plan must be used once before a CUDA graph's capture: its indices are copied")
            self._copies[key] = where, torch.from_numpy(where).to(device)
        return self._copies[key][1]
