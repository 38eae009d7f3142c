"""Global attention optimisation, GAO (arXiv 2403.09347, section 3.1): the loop over one rank's program.

Forward, equations 2 to 4: each rank keeps its queries and a running (out, lse). Shards of K and V circulate, and online
softmax merges the result of each pair of shards. Nothing of size S x S and no partial result per hop is kept.

    for each key shard j:   o_j, l_j = attention(Q, K_j, V_j)
                            (O, L) = merge((O, L), (o_j, l_j))

Backward, algorithm 2: K, V, dK and dV stay at home. The query side circulates: Q, dO, L and D = rowsum(dO * O). The
paper's dQ follows its queries round the ring; here each part goes straight to its owner by default. Three large tensors
are on the wire (Q, dO, dQ), where RingAttention moves four (K, V, dK, dV).

    for each query shard i: dq_i, dK, dV += gradients(dO_i, Q_i, L_i, D_i, K, V);  dQ of rank i += dq_i, at rank i

Both run through one loop. A rank's program (:mod:`burst_attention.plan.program`) lists what to post, visit and wait
for; its order is the double buffering: an exchange is posted before the visits that run while it is on the wire. What a
visit computes, and how results are combined, is a ``Pass`` (:mod:`.passes`), here ``work``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..comm.transport import Pending, Receive, Send, Transport
from ..kernels.contract import capturing, converted
from ..plan.program import Drop, Message, Move, Op, Place, Post, Program, Visit, Wait
from ..plan.route import Edge
from ..plan.rows import Side, Where
from .passes import Pass, Tensors, part_of

MOST_RUNS = 4  # up to this many stretches of rows are copied as slices, more by index

Results = dict[Side, Tensors]


def sweep(
    program: Program, transport: Transport, work: Pass, indices: DeviceIndices | None = None, *, call: int = 0
) -> Results:
    """Execute one rank's program; return this rank's results, rounded only if head groups are joined.

    It folds in partial results in order: two runs give the same bits. ``call`` marks the call's messages.
    """
    (results,) = sweeps([(program, work)], transport, indices, call=lambda: call)
    return results


def sweeps(
    parts: Iterable[tuple[Program, Pass]],
    transport: Transport,
    indices: DeviceIndices | None = None,
    *,
    call: Callable[[], int] = lambda: 0,
) -> Iterator[Results]:
    """Execute programs and yield their results; a first exchange overlaps the visits before, a last one those after."""
    indices, label, runs = DeviceIndices() if indices is None else indices, "the sweep", deque[_Run]()
    try:
        for program, work in parts:
            label = work.direction.value
            runs.append(_Run(program, transport, work, indices, call()))
            runs[-1].begin()
            if len(runs) > 1:
                runs[-2].compute()
            if len(runs) > 2:
                yield runs.popleft().finish()
        if runs:
            runs[-1].compute()
        while runs:
            yield runs.popleft().finish()
    except BaseException as error:
        transport.health.fail(label, error)
        raise


class _Run:
    """A running sweep. Each operation is a method, so that no loop variable keeps a buffer alive."""

    def __init__(self, program: Program, transport: Transport, work: Pass, indices: DeviceIndices, call: int) -> None:
        self._program, self._transport, self._work, self._indices = program, transport, work, indices
        self._call = call
        self._held = Shards(program, work)
        self._sums = Sums(program, work, indices)
        self._on_wire: dict[int, tuple[Pending, list[tuple[Message, Tensors]]]] = {}
        self._remaining = deque(program.ops)

    def begin(self) -> None:
        """Post the first step's exchange. Later steps must not overtake another program's, on any rank."""
        if self._remaining and isinstance(op := self._remaining[0], Post) and op.step == 1:
            self.execute(self._remaining.popleft())

    def compute(self) -> None:
        """Execute everything up to the last waits."""
        while any(not isinstance(op, Wait) for op in self._remaining):
            self.execute(self._remaining.popleft())

    def finish(self) -> Results:
        while self._remaining:
            self.execute(self._remaining.popleft())
        return {side: self._sums.results(self._program.home[side]) for side in self._work.returns}

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
                self._arrived(op.target, self._outgoing(op.source, self._sums.landing(op.target)))
            case Drop():
                (self._sums if op.partial else self._held).drop(op.place)

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
        coming = [(message, self._sums.landing(message) or self._arriving(message.edge)) for message in op.receives]
        sends = [Send(m.edge.target, x.contiguous()) for m in op.sends for x in self._outgoing(m)]
        receives = [Receive(message.edge.source, x) for message, tensors in coming for x in tensors]
        label = f"hop {op.step} of the {self._work.direction.value}"
        self._on_wire[op.step] = self._transport.post(sends, receives, label=label, call=self._call), coming

    def _arriving(self, edge: Edge) -> Tensors:
        """Allocate buffers for the tensors that an edge brings."""
        work, rows, side = self._work, edge.rows.count, edge.key.side
        if edge.partial:
            return work.empty(side, rows, sent_dtypes(work, edge))
        own = part_of(work.own[side], len(self._program.home[side]), 0)
        like = (own[n] for n in work.payload(side, edge.key.payload))
        return tuple(x.new_empty(*x.shape[:2], rows, *x.shape[3:]) for x in like)

    def _wait(self, op: Wait) -> None:
        """Finish an exchange."""
        pending, coming = self._on_wire.pop(op.step)
        self._transport.wait(pending)
        while coming:  # frees each once it is folded in
            self._arrived(*coming.pop(0))

    def _arrived(self, message: Message, tensors: Tensors) -> None:
        """Store what arrived: add a partial result, keep a shard, or write it into its sequence group's buffer."""
        if message.edge.partial:
            assert message.where is not None
            self._sums.add(message.place, message.where, tensors)
        elif message.where is None:
            self._held.tensors[message.place] = tensors
        else:
            buffers = self._held.at(message.place)
            for n, x in zip(self._work.payload(message.edge.key.side, message.edge.key.payload), tensors, strict=True):
                self._indices.put(buffers[n], message.where, x)

    def _outgoing(self, message: Message, landing: Tensors | None = None) -> Tensors:
        """Return what a message carries: a shard's rows, or results, which leave their sum; ``landing``: for those."""
        edge = message.edge
        if edge.partial:
            rows = self._sums.leave(message.place, message.where, sent_dtypes(self._work, edge), landing)
            if kept := self._work.own_results:
                assert message.where is not None
                for n, x in enumerate(rows):
                    self._indices.put(kept[n], message.where, x)
            return rows
        tensors = self._held.at(message.place)
        wanted = tuple(tensors[n] for n in self._work.payload(edge.key.side, edge.key.payload))
        assert message.where is not None
        return self._indices.take(wanted, message.where)


class Shards:
    """The shards that a rank holds: its own, split by head groups, and those that arrived."""

    def __init__(self, program: Program, work: Pass) -> None:
        self._program, self._work = program, work
        self.tensors: dict[Place, Tensors] = {
            place: part_of(tensors, len(program.home[side]), place[2])
            for side, tensors in work.own.items()
            for place in program.home[side]
        }

    def at(self, place: Place) -> Tensors:
        """Return a buffer's tensors. Buffers of a sequence group are allocated at first use, unless they are cached."""
        if place not in self.tensors:
            side = place[0]
            like = part_of(self._work.own[side], len(self._program.home[side]), 0)
            own = self._work.own_slice[side] if place in self._program.kept.values() else (None,) * len(like)
            rows = self._program.held_rows[place].count
            self.tensors[place] = tuple(
                x.new_empty(*x.shape[:2], rows, *x.shape[3:]) if kept is None else kept
                for x, kept in zip(like, own, strict=True)
            )
        return self.tensors[place]

    def drop(self, place: Place) -> None:
        """Free the buffers of ``place``."""
        del self.tensors[place]


@dataclass(eq=False)
class _Piece:
    """Consecutive rows of a result buffer, with a record of the rows that have left."""

    rows: range
    tensors: Tensors
    left: list[range] = field(default_factory=list)

    def has(self, where: slice) -> bool:
        return self.rows.start <= where.start and where.stop <= self.rows.stop

    def at(self, where: slice) -> Tensors:
        """Return views of some of its rows."""
        return tuple(x.narrow(2, where.start - self.rows.start, where.stop - where.start) for x in self.tensors)

    def part(self, start: int, stop: int) -> _Piece:
        """Return some of its rows, in the same memory."""
        inside = [rows for rows in self.left if start <= rows.start and rows.stop <= stop]
        return _Piece(range(start, stop), self.at(slice(start, stop)), inside)

    @property
    def gone(self) -> bool:
        """Return whether every row has left."""
        return sum(map(len, self.left)) >= len(self.rows)


class Sums:
    """Partial results under accumulation. Rows with a single part are that part: neither added to zeros nor widened."""

    def __init__(self, program: Program, work: Pass, indices: DeviceIndices) -> None:
        self._rows, self._home = program.sum_rows, {side: program.home[side] for side in work.returns}
        self._work, self._indices = work, indices
        self._pieces: dict[Place, list[_Piece]] = {}
        self._wholes: dict[Side, Tensors] = {}  # this rank's results, of all heads

    def landing(self, message: Message) -> Tensors | None:
        """Return where finished results of this rank's rows belong: in a part of the heads of all results."""
        edge, place = message.edge, message.place
        side, homes = place[0], self._home.get(place[0], [])
        if not edge.partial or not edge.finished or place not in homes or len(homes) == 1:
            return None
        rows = self._rows[place].count
        if edge.rows.count < rows or self._work.own[side][0].shape[0] != 1:
            return None
        if side not in self._wholes:
            like = self._work.empty(side, rows, self._work.final_dtypes(side))
            self._wholes[side] = tuple(x.new_empty(1, x.shape[1] * len(homes), *x.shape[2:]) for x in like)
        return part_of(self._wholes[side], len(homes), homes.index(place))

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
        """Return a writable view of the total at ``where``; None if it has no rows there, or no view of them."""
        return self._rows_at(place, where) if isinstance(where, slice) else None

    def _rows_at(self, place: Place, where: slice) -> Tensors | None:
        """Return a writable view of the total at ``where``, in the accumulation dtype; None if it has no rows there."""
        pieces = self._pieces.get(place, [])
        touched = [piece for piece in pieces if piece.rows.start < where.stop and where.start < piece.rows.stop]
        if not touched:
            return None
        piece = touched[0] if touched[0].has(where) else self._joined(place)
        if piece.left:  # rows that left are not widened, nor held longer than the rest needs
            piece = self._apart(place, piece, where)
        return self._widened(place, piece).at(where)

    def _apart(self, place: Place, piece: _Piece, where: slice) -> _Piece:
        """Split off the rows at ``where`` as a separate piece."""
        first, last = piece.rows.start, piece.rows.stop
        ends = (first, where.start), (where.start, where.stop), (where.stop, last)
        before, inside, after = (piece.part(*each) for each in ends)
        pieces = self._pieces[place]
        pieces.remove(piece)
        pieces += [inside, *(each for each in (before, after) if not each.gone)]
        return inside

    def _widened(self, place: Place, piece: _Piece) -> _Piece:
        """Convert a piece to the accumulation dtype."""
        wide = self._work.wire_dtypes(place[0], exact=True)
        piece.tensors = tuple(converted(x, dtype) for x, dtype in zip(piece.tensors, wide, strict=True))
        return piece

    def _joined(self, place: Place) -> _Piece:
        """Join all rows in one piece; blank where nothing was added."""
        rows, pieces = self._rows[place].count, self._pieces.get(place, [])
        if len(pieces) == 1 and len(pieces[0].rows) == rows:
            return pieces[0]
        whole = _Piece(range(rows), self._work.blank(place[0], rows))
        for piece in pieces:
            for x, y in zip(whole.at(slice(piece.rows.start, piece.rows.stop)), piece.tensors, strict=True):
                x.copy_(y)
        self._pieces[place] = [whole]
        return whole

    def leave(
        self, place: Place, where: Where | None, dtypes: tuple[torch.dtype, ...], landing: Tensors | None = None
    ) -> Tensors:
        """Remove rows from the total and return them as rounded copies; ``where`` None: all rows."""
        if where is None:
            return self.pop(place, dtypes)
        pieces = self._pieces.get(place, [])
        piece = next((each for each in pieces if isinstance(where, slice) and each.has(where)), None)
        if piece is None or not isinstance(where, slice):
            held = self._joined(place).tensors
        else:
            held = piece.at(where)
            piece.left.append(range(where.start, where.stop))
            if piece.gone:
                pieces.remove(piece)
            where = slice(0, where.stop - where.start)
        if landing is not None and self._indices.copy(held, where, landing):
            return landing
        rows = self._indices.take(held, where)
        views = isinstance(where, slice)
        return tuple(converted(x, to, copy=views) for x, to in zip(rows, dtypes, strict=True))

    def pop(self, place: Place, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensors:
        """Remove and return the total, rounded if asked; blank if nothing was added."""
        pieces = sorted(self._pieces.get(place, []), key=lambda piece: piece.rows.start)
        if dtypes is not None and len(pieces) > 1 and sum(len(each.rows) for each in pieces) == self._rows[place].count:
            self.drop(place)  # pieces don't overlap: joined as they are, they are not widened first
            columns = zip(*(piece.tensors for piece in pieces), strict=True)
            return tuple(
                torch.cat([converted(x, to) for x in parts], 2) for parts, to in zip(columns, dtypes, strict=True)
            )
        total = self._joined(place).tensors
        self.drop(place)
        return total if dtypes is None else tuple(converted(x, dtype) for x, dtype in zip(total, dtypes, strict=True))

    def results(self, places: Sequence[Place]) -> Tensors:
        """Remove and return this rank's results; join the parts of several head groups, each rounded."""
        if len(places) == 1:
            return self.pop(places[0])
        parts = [self.pop(place, self._work.final_dtypes(place[0])) for place in places]
        whole = self._wholes.pop(places[0][0], None)
        if whole is None:
            return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        for n, part in enumerate(parts):
            for x, y in zip(part, part_of(whole, len(parts), n), strict=True):
                if x.data_ptr() != y.data_ptr():
                    y.copy_(x)
        return whole

    def drop(self, place: Place) -> None:
        """Free the sums of ``place``."""
        self._pieces.pop(place, None)


def sent_dtypes(work: Pass, edge: Edge) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the partial results on an edge."""
    return work.final_dtypes(edge.key.side) if edge.finished else work.wire_dtypes(edge.key.side, exact=edge.exact)


class DeviceIndices:
    """Index arrays on devices, each copied once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], tuple[np.ndarray, Tensor]] = {}
        self._slices: dict[int, tuple[np.ndarray, list[tuple[slice, slice]]]] = {}

    def take(self, tensors: Tensors, where: Where) -> Tensors:
        """Return rows of a shard; a view if they are consecutive."""
        if isinstance(where, slice):
            return tuple(x.narrow(2, where.start, where.stop - where.start) for x in tensors)
        if runs := self._runs(where):
            return tuple(torch.cat([x[:, :, run] for run, _ in runs], 2) for x in tensors)
        index = self.on_device(where, tensors[0].device)
        return tuple(x.index_select(2, index) for x in tensors)

    def copy(self, tensors: Tensors, where: Where, target: Tensors) -> bool:
        """Copy rows of a shard to ``target`` by stretches; return whether they are few enough."""
        runs = self._runs(where)
        for x, y in zip(tensors, target, strict=True):
            for run, packed in runs:
                y[:, :, packed].copy_(x[:, :, run])
        return bool(runs)

    def put(self, buffer: Tensor, where: Where, x: Tensor) -> None:
        """Write rows into a buffer."""
        runs = self._runs(where)
        for run, packed in runs:
            buffer[:, :, run].copy_(x[:, :, packed])
        if not runs:
            assert not isinstance(where, slice)
            buffer.index_copy_(2, self.on_device(where, x.device), x)

    def _runs(self, where: Where) -> list[tuple[slice, slice]]:
        """Return stretches as slices, of the buffer and packed, which are copied faster; [] if there are many."""
        if isinstance(where, slice):
            return [(where, slice(0, where.stop - where.start))]
        if id(where) not in self._slices:
            ends = np.flatnonzero(np.diff(where) != 1) + 1
            few = len(where) > 0 and len(ends) < MOST_RUNS
            borders = [0, *ends.tolist(), len(where)] if few else []
            runs = [(slice(int(where[i]), int(where[j - 1]) + 1), slice(i, j)) for i, j in pairwise(borders)]
            self._slices[id(where)] = where, runs
        return self._slices[id(where)][1]

    def on_device(self, where: np.ndarray, device: torch.device) -> Tensor:
        """Return the index array on ``device``, copied once per device."""
        if device.type == "cpu":
            return torch.from_numpy(where)
        key = id(where), device  # kept with its copy, so that no other array gets its id
        if key not in self._copies:
            if capturing():
                raise RuntimeError("this plan must be used once before a CUDA graph's capture: its indices are copied")
            self._copies[key] = where, torch.from_numpy(where).to(device, non_blocking=True)
        return self._copies[key][1]
