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
for; its order is the double buffering: an exchange is posted before the visits that run while it is on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..comm.transport import Pending, Receive, Send, Transport
from ..plan.program import Drop, Message, Move, Op, Post, Program, Visit, Wait
from ..plan.rows import Side
from .buffers import DeviceIndices, Shards, Sums, arriving, sent_dtypes
from .passes import Pass, Tensors

Results = dict[Side, Tensors]


def sweep(
    program: Program, transport: Transport, work: Pass, indices: DeviceIndices | None = None, *, call: int = 0
) -> Results:
    """Execute one rank's program and return this rank's results, by side; rounded only if head groups are joined.

    It writes only to the cache of q, k and v. It folds in partial results in order: two runs give the same bits.
    ``call``: the call's number, which marks its messages.
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
    """Execute programs and yield their results; a first exchange overlaps the visits before, a last one those after.

    ``call`` is asked for the call's number once the first part is made.
    """
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
        self._left = deque(program.ops)

    def begin(self) -> None:
        """Post the first step's exchange. Later steps must not overtake another program's, on any rank."""
        if self._left and isinstance(op := self._left[0], Post) and op.step == 1:
            self.execute(self._left.popleft())

    def compute(self) -> None:
        """Execute everything up to the last waits."""
        while any(not isinstance(op, Wait) for op in self._left):
            self.execute(self._left.popleft())

    def finish(self) -> Results:
        while self._left:
            self.execute(self._left.popleft())
        return {side: self._sums.results(self._program.home(side)) for side in self._work.direction.returns}

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
        coming = [(message, self._landing(message)) for message in op.receives]
        sends = [Send(m.edge.target, x.contiguous()) for m in op.sends for x in self._outgoing(m)]
        receives = [Receive(message.edge.source, x) for message, tensors in coming for x in tensors]
        label = f"hop {op.step} of the {self._work.direction.value}"
        self._on_wire[op.step] = self._transport.post(sends, receives, label=label, call=self._call), coming

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
            for n, x in zip(self._work.payload(message.edge.side, message.edge.key.payload), tensors, strict=True):
                self._indices.put(buffers[n], message.where, x)

    def _landing(self, message: Message) -> Tensors:
        """Return the tensors that a message is received into."""
        return self._sums.landing(message) or arriving(self._work, self._program.groups, message.edge)

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
        wanted = tuple(tensors[n] for n in self._work.payload(edge.side, edge.key.payload))
        assert message.where is not None
        return self._indices.take(wanted, message.where)
