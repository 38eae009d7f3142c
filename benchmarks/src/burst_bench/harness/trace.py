"""Trace a rank: the time it waits for messages, the time that messages are on the wire, and their bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from burst_attention.attention.plan import Plan
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.transport import Pending, Receive, Send, Transport

from .results import Span


@dataclass(eq=False)
class Trace:
    """Spans of one rank, in the order of their ends."""

    start: float = field(default_factory=time.perf_counter)  # time 0 of the spans, by ``time.perf_counter``
    spans: list[Span] = field(default_factory=list)  # the spans recorded so far

    def add(self, kind: str, start: float, end: float, label: str) -> None:
        self.spans.append(Span(kind, start - self.start, end - self.start, label))

    def clear(self) -> None:
        """Delete all spans and restart the clock."""
        self.start, self.spans = time.perf_counter(), []

    def finish(self) -> list[Span]:
        """Return all spans, sorted by start; the time between waits becomes ``compute`` spans."""
        now, end = 0.0, time.perf_counter() - self.start
        compute = []
        for span in sorted((s for s in self.spans if s.kind == "wait"), key=lambda s: s.start):
            if span.start > now:
                compute.append(Span("compute", now, span.start))
            now = max(now, span.end)
        compute.append(Span("compute", now, max(end, now)))
        return sorted([*self.spans, *compute], key=lambda s: s.start)


@dataclass(eq=False, kw_only=True)
class TracedTransport(Transport):
    """A transport that records its exchanges."""

    trace: Trace
    posted: dict[int, float] = field(default_factory=dict)

    def post(self, sends: Sequence[Send], receives: Sequence[Receive], *, label: str, call: int = 0) -> Pending:
        start = time.perf_counter()
        pending = super().post(sends, receives, label=label, call=call)
        self.posted[id(pending)] = start
        return pending

    def wait(self, pending: Pending) -> None:
        start = time.perf_counter()
        super().wait(pending)
        end = time.perf_counter()
        self.trace.add("wait", start, end, pending.label)
        self.trace.add("exchange", self.posted.pop(id(pending)), end, pending.label)


def traced(plan: Plan, trace: Trace) -> Plan:
    """Return the same plan with transports that record exchanges in ``trace``."""

    def remade(old: Transport) -> Transport:
        return TracedTransport(old.group, old.timeout, old.tag, old.health, old.sent, old.received, trace=trace)

    agreement = Agreement(remade(plan.agreement.transport))
    return Plan(plan.schedule, plan.planner, remade(plan.transport), agreement)


class Collectives(TorchDispatchMode):
    """Record the collectives of tensor parallelism, and count the bytes that the ring algorithm would send.

    ``activations``: for tensors with three dimensions or more; ``parameters``: with fewer, gradients of parameters.
    """

    # Payload sent by each of W ranks, divided by (W - 1) / W times the larger of the collective's input and output.
    FACTORS: ClassVar = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.activations = self.parameters = 0
        self._started: dict[int, tuple[float, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind in (DTensor, AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # these classes call this method again with their inner tensors
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if name == "wait_tensor":
            end = time.perf_counter()
            posted, label = self._started.pop(args[0].data_ptr(), (start, name))
            self.trace.add("wait", start, end, label)
            self.trace.add("exchange", posted, end, label)
        elif name in self.FACTORS:
            self._count(name, args[0], result, _resolve_process_group(args[-1]).size())
            self._started[result.data_ptr()] = (start, name)
        return result

    def _count(self, name: str, given: Tensor, result: Tensor, world: int) -> None:
        size = max(given.nbytes, result.nbytes) * (world - 1) // world * self.FACTORS[name]
        if given.ndim > 2:
            self.activations += size
        else:
            self.parameters += size
