"""Measure strategies on a rank: they take turns, all ranks start each call together, and each call is timed."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from burst_train.strategies import Sharing

from ..cluster.namespaces import interface_bytes
from .judge import sampled_error
from .memory import give_back, peak_during, resident
from .results import Span
from .subjects import Fingerprint, Subject, make_subject, refusal, shared
from .trace import Collectives, Trace
from .turns import seconds_of, take_turns
from .workload import Workload


@dataclass
class Measurement:
    """One strategy's figures on one rank. Bytes are this rank's (``wire``: its node's, one number per round)."""

    strategy: str
    refused: str | None = None
    seconds: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    counted: int | None = None
    predicted: int | None = None
    chosen: str | None = None
    peak: int | None = None
    resident: int | None = None
    sampled: float | None = None
    fingerprints: list[Fingerprint] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def measure(workload: Workload) -> list[Measurement]:
    """Measure every strategy of ``workload`` on this rank; all ranks must call it."""
    measured = [Measurement(spec, refused=refusal(workload, shared(spec))) for spec in workload.strategies]
    able = [(own, shared(own.strategy)) for own in measured if own.refused is None]
    if workload.resources:
        # Libraries allocate memory on first use. A short call of each strategy keeps it out of the figures.
        short = workload.at(min(workload.seq_len, 32 * dist.get_world_size()))
        for at in (short, workload):
            for own, sharing in able:
                _measure_resources(at, own, sharing)
    if workload.rounds:
        _measure_time(workload, able)
    return measured


def _measure_resources(workload: Workload, own: Measurement, sharing: Sharing) -> None:
    """Run one strategy alone, and record its peak memory, its bytes, its fingerprints and its error against fp64."""
    give_back()
    before, trace = resident(), Trace()
    collectives = Collectives(trace)
    dist.barrier()
    start = time.perf_counter()
    subject, peak = peak_during(lambda: _run_once(workload, sharing, trace, collectives))
    if not workload.rounds:  # such calls take too long to run twice
        own.seconds = [time.perf_counter() - start]
    own.peak, own.resident = peak - before, peak
    own.predicted = subject.predicted  # None if not all of a call's sums are counted
    own.counted = None if own.predicted is None else subject.sent + collectives.activations
    own.fingerprints, own.sampled = subject.fingerprints(), sampled_error(workload, subject)
    own.chosen = subject.chosen
    del subject
    gc.collect()  # a sharded model contains reference cycles


def _run_once(workload: Workload, sharing: Sharing, trace: Trace, collectives: Collectives) -> Subject:
    subject = make_subject(workload, sharing, trace)
    with collectives:
        subject.run()
    return subject


def _measure_time(workload: Workload, able: list[tuple[Measurement, Sharing]]) -> None:
    """Time all strategies in turns, round by round; then record a timeline of one more call, if requested."""
    trace = Trace()
    subjects = [(own, make_subject(workload, sharing, trace)) for own, sharing in able]
    for _, subject in subjects:
        subject.warm_up()
    turns = take_turns([partial(_one_round, workload, subject) for _, subject in subjects], workload.rounds)
    for (own, _), taken in zip(subjects, turns, strict=True):
        own.seconds, own.wire = ([*each] for each in zip(*taken, strict=True))
    for own, subject in subjects if workload.timeline else []:
        dist.barrier()
        trace.clear()
        with Collectives(trace):
            subject.run()
        own.spans = trace.finish()
    for own, subject in subjects:
        own.fingerprints = subject.fingerprints()
        own.predicted, own.chosen = subject.predicted, subject.chosen


def _one_round(workload: Workload, subject: Subject) -> tuple[float, int]:
    """Return a call's seconds, and the bytes that left this rank's node until all ranks finished."""
    before = _sent_by_interface(workload.interface)
    seconds = seconds_of(subject.run)
    dist.barrier()
    return seconds, _sent_by_interface(workload.interface) - before


def _sent_by_interface(interface: str | None) -> int:
    """Return all bytes sent so far by an interface of this process's network namespace; 0 for None."""
    return 0 if interface is None else interface_bytes(Path("/proc/thread-self/net/dev").read_text())[interface][1]
