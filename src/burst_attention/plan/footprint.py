"""The memory of a pass, foretold: a rank's program is walked, and every buffer that the sweep would hold is counted."""

from __future__ import annotations

from dataclasses import replace

from .cost import Shape
from .program import Drop, Key, Message, Post, Program, Visit, Wait
from .rows import Direction, Side, Where


def peak_bytes(
    program: Program,
    shape: Shape,
    direction: Direction,
    *,
    tokens: int,
    exact_parts: bool = False,
) -> int:
    """Bytes at the peak of a pass on a rank that holds ``tokens``.

    Counted: inputs, results, sums, foreign shards, what is under way, copies of what is sent (own shards are laid out
    as models have them, [B, S, H, D]), what a kernel gives for a pair, and the surrogate of out by which a stock
    kernel is given the global lse and D. Not counted: a kernel's own workspace.

    Args:
        exact_parts: the kernel gives partial results in the accumulation dtype, and needs no surrogate.
    """
    walk = _Walk(program, shape, direction, tokens, exact_parts)
    for op in program.ops:
        match op:
            case Visit():
                walk.visit(op)
            case Post():
                walk.post(op)
            case Wait():
                walk.wait(op)
            case Drop():
                walk.drop(op.key)
    walk.round()
    return walk.most


class _Walk:
    """What is live: the sweep's own steps, in bytes."""

    def __init__(self, program: Program, shape: Shape, direction: Direction, tokens: int, exact_parts: bool) -> None:
        self._exact_parts = exact_parts
        self._rank, self._sum_rows = program.rank, program.sum_rows
        self._shape, self._direction = shape, direction
        self._held: dict[Key, tuple[int, int]] = {(side, program.rank): (tokens, 0) for side in Side}  # rows, bytes
        self._sums: dict[Key, int] = {}
        self._on_wire: dict[int, tuple[tuple[Message, ...], int]] = {}  # what arrives, and bytes of what is sent
        self.now = self.most = tokens * self._inputs()

    def _inputs(self) -> int:
        """Bytes of a row of q, k, v; in a backward of out, dout, lse, D and both of these packed, too."""
        shape = self._shape
        query = shape.head_dim * shape.io
        if self._direction is Direction.BACKWARD:
            query += 2 * shape.v_head_dim * shape.io + 4 * shape.accumulate
        return shape.batch * shape.q_heads * query + self._row(Side.KEY, partial=False)

    def _row(self, side: Side, *, partial: bool = True, exact: bool = False) -> int:
        return self._shape.side_bytes(side, self._direction, partial=partial, exact=exact)

    def _given(self, side: Side) -> int:
        """Bytes of a row that a kernel gives."""
        return self._row(side, exact=True) if self._exact_parts else self._rounded(side)

    def _rounded(self, side: Side) -> int:
        """Bytes of a row of a result in the io dtype."""
        shape = replace(self._shape, partial=self._shape.io)
        return shape.side_bytes(side, self._direction, partial=True)

    def _take(self, size: int) -> int:
        self.now += size
        self.most = max(self.most, self.now)
        return size

    def visit(self, op: Visit) -> None:
        scratch = sum(
            self._take(_count(where) * self._row(side, partial=False))
            for side, where in op.held.items()
            if not isinstance(where, slice)  # rows apart are gathered
        )
        if self._direction is Direction.BACKWARD and not self._exact_parts:
            shape = self._shape
            surrogate = shape.batch * shape.q_heads * shape.v_head_dim * shape.io
            scratch += self._take(_count(op.held[Side.QUERY]) * surrogate)
        parts = {side: self._take(_count(where) * self._given(side)) for side, where in op.into.items()}
        self.now -= scratch
        for side, size in parts.items():
            self._add((side, op.owner(side)), op.into[side], size)

    def post(self, op: Post) -> None:
        for message in op.receives:
            self._take(self._size(message))
        sent = 0
        for message in op.sends:
            edge, key = message.edge, (message.edge.side, message.edge.owner)
            if edge.partial:
                total = self._sums.pop(key, 0)
                if total == self._size(message):  # is sent as it is
                    sent += total
                    continue
                sent += self._take(self._size(message))
                self.now -= total
            elif edge.owner == self._rank or not _is_all(message.where, self._held[key][0]):
                sent += self._take(self._size(message))
        self._on_wire[op.step] = op.receives, sent

    def wait(self, op: Wait) -> None:
        arrived, sent = self._on_wire.pop(op.step)
        self.now -= sent
        for message in arrived:
            key = message.edge.side, message.edge.owner
            if message.where is None:
                self._held[key] = message.edge.rows.count, self._size(message)
            else:
                self._add(key, message.where, self._size(message))

    def drop(self, key: Key) -> None:
        self.now -= self._held.pop(key)[1]

    def round(self) -> None:
        """This rank's own results, one side after the other, to the io dtype."""
        for (side, owner), rows in self._sum_rows.items():
            if owner != self._rank:
                continue
            total = self._sums.pop((side, owner), 0)
            result = rows.count * self._rounded(side)
            if total != result:
                self._take(result)
                self.now -= total

    def _add(self, key: Key, where: Where, size: int) -> None:
        """A part, counted already, becomes the total, or is folded into it, which is wide from then on."""
        rows = self._sum_rows[key].count
        if key not in self._sums and _is_all(where, rows):
            self._sums[key] = size
            return
        wide, before = rows * self._row(key[0], exact=True), self._sums.get(key, 0)
        if before != wide:
            self._take(wide)
            self.now -= before
        self._sums[key] = wide
        if not isinstance(where, slice):  # the total's rows, gathered and put back
            self.now -= self._take(_count(where) * self._row(key[0], exact=True))
        self.now -= size

    def _size(self, message: Message) -> int:
        edge = message.edge
        return edge.rows.count * self._shape.row_bytes(edge, self._direction)


def _is_all(where: Where | None, rows: int) -> bool:
    return isinstance(where, slice) and (where.start, where.stop) == (0, rows)


def _count(where: Where) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)
