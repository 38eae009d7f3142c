"""What each rank does of a measurement: engines taking turns, each call begun together and timed by itself."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from burst_attention.engines import Engine

from .job import Job, engine_of
from .judge import sampled_error
from .memory import give_back, peak_during, resident
from .results import Span
from .subjects import Print, Subject, make_subject, refusal
from .trace import Collectives, Trace

T = TypeVar("T")


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
    resident: int | None = None
    sampled: float | None = None
    prints: list[Print] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def measure(job: Job) -> list[Figures]:
    """The figures of every engine of ``job`` on this rank. Every rank must call it."""
    told = [Figures(spec, refused=refusal(job, engine_of(spec))) for spec in job.engines]
    able = [(figures, engine_of(figures.engine)) for figures in told if figures.refused is None]
    if job.weigh:
        # What libraries allocate on first use is nobody's memory: a short call of each goes before.
        short = job.at(min(job.seq_len, 32 * dist.get_world_size()))
        for at in (short, job):
            for figures, engine in able:
                _weigh(at, figures, engine)
    if job.rounds:
        _time(job, able)
    return told


def _weigh(job: Job, figures: Figures, engine: Engine) -> None:
    """One engine by itself: the peak of its memory, its bytes, and its results against the others' and fp64."""
    give_back()
    before, trace = resident(), Trace()
    collectives = Collectives(trace, dist.get_world_size())
    dist.barrier()
    start = time.perf_counter()
    subject, peak = peak_during(lambda: _run_once(job, engine, trace, collectives))
    if not job.rounds:  # too long to run twice
        figures.seconds = [time.perf_counter() - start]
    figures.peak, figures.resident = peak - before, peak
    figures.predicted, figures.counted = subject.predicted, subject.sent + collectives.activations
    figures.prints, figures.sampled = subject.prints(), sampled_error(job, subject)
    del subject
    gc.collect()  # a spread model is in cycles


def _run_once(job: Job, engine: Engine, trace: Trace, collectives: Collectives) -> Subject:
    subject = make_subject(job, engine, trace)
    with collectives:
        subject.run()
    return subject


def _time(job: Job, able: list[tuple[Figures, Engine]]) -> None:
    """All engines in turn, round by round; then, if asked, once more with what each rank does written down."""
    trace = Trace()
    subjects = [(figures, make_subject(job, engine, trace)) for figures, engine in able]
    for _, subject in subjects:
        subject.warm_up()
    for n in range(job.rounds):
        for figures, subject in rotated(subjects, n):
            before = _sent_by_interface(job.interface)
            dist.barrier()
            start = time.perf_counter()
            subject.run()
            figures.seconds.append(time.perf_counter() - start)
            dist.barrier()
            figures.wire.append(_sent_by_interface(job.interface) - before)
    for figures, subject in subjects if job.timeline else []:
        dist.barrier()
        trace.clear()
        with Collectives(trace, dist.get_world_size()):
            subject.run()
        figures.spans = trace.finish()
    for figures, subject in subjects:
        figures.prints = subject.prints()
        figures.predicted = subject.predicted


def rotated(items: list[T], n: int) -> list[T]:
    """For round ``n``: each begins with another than the last, so none is always the one that runs after a pause."""
    first = n % max(1, len(items))
    return items[first:] + items[:first]


def _sent_by_interface(interface: str | None) -> int:
    """Bytes that ever left by an interface of this process's network namespace; 0 for None."""
    if interface is None:
        return 0
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {interface!r} in this namespace")
