"""What each rank does of a measurement: engines taking turns, each call begun together and timed by itself."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from .job import Job, engine_of
from .judge import sampled_error
from .memory import peak_during
from .results import Span
from .subjects import Subject, make_subject
from .trace import Collectives, Trace


@dataclass
class Figures:
    """Of one engine on one rank. Bytes are this rank's (``wire``: its node's, one number for each round)."""

    engine: str
    refused: str | None = None
    seconds: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    counted: int | None = None
    predicted: int | None = None
    peak: int | None = None
    sampled: float | None = None
    fingerprint: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def measure(job: Job) -> list[Figures]:
    """The figures of every engine of ``job`` on this rank. Every rank must call it."""
    trace = Trace()
    told, subjects = [], []
    for spec in job.engines:
        figures = Figures(spec)
        told.append(figures)
        try:
            subject = make_subject(job, engine_of(spec), trace)
        except ValueError as error:
            figures.refused = str(error)
            continue
        figures.predicted = subject.predicted
        subjects.append((figures, subject))
    if job.warm:
        for figures, subject in subjects:
            _warm(job, figures, subject, trace)
    for number in range(job.rounds):
        for figures, subject in subjects:
            _timed(job, figures, subject, trace, last=number == job.rounds - 1)
    return told


def _warm(job: Job, figures: Figures, subject: Subject, trace: Trace) -> None:
    """One call to count bytes, see the peak of memory and look at the results; it also makes all caches."""
    sent, collectives = subject.sent, Collectives(trace, dist.get_world_size())
    before = _sent_by_interface(job.interface)
    dist.barrier()
    start = time.perf_counter()
    with collectives:
        figures.peak = peak_during(subject.run)
    if not job.rounds:  # too long to run twice
        figures.seconds = [time.perf_counter() - start]
        figures.wire = [_sent_by_interface(job.interface) - before]
    figures.counted = subject.sent - sent + collectives.activations
    figures.fingerprint = subject.fingerprint()
    figures.sampled = sampled_error(job, subject)


def _timed(job: Job, figures: Figures, subject: Subject, trace: Trace, *, last: bool) -> None:
    recorded = last and job.timeline
    before = _sent_by_interface(job.interface)
    dist.barrier()
    trace.clear()
    start = time.perf_counter()
    with Collectives(trace, dist.get_world_size()) if recorded else nullcontext():
        subject.run()
    figures.seconds.append(time.perf_counter() - start)
    if recorded:
        figures.spans = trace.finish()
    dist.barrier()
    figures.wire.append(_sent_by_interface(job.interface) - before)


def _sent_by_interface(interface: str | None) -> int:
    """Bytes that ever left by an interface of this process's network namespace; 0 for None."""
    if interface is None:
        return 0
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {interface!r} in this namespace")
