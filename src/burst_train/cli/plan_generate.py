"""What ``burst plan --generate`` prints: a row of figures for whole and for sharded weights, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..figures import bytes_text, digits, seconds_text
from ..forecast.request import USABLE, ForecastRequest
from ..forecast.serving import MOST_RANKS, WHOLE, Served
from ..presets import PRESETS


def served_rows(served: list[Served]) -> Iterator[dict[str, str]]:
    """Yield a row of figures for each way to hold the weights."""
    for each in served:
        parts = {name: bytes_text(each.memory[name]) for name in ("weights", "cache", "work")}
        yield {
            "weights": f"{each.weights}, {parts['weights']}",
            "cache": parts["cache"],
            "work": parts["work"],
            "first": seconds_text(each.first),
            "later": seconds_text(each.token),
            "sent": bytes_text(each.sent),
            "verdict": {None: "unknown", True: "fits", False: "too large"}[each.fits],
        }


def served_legend(request: ForecastRequest) -> Mapping[str, str]:
    """Return what the columns of :func:`served_rows` mean."""
    memory = request.cluster.device.memory
    of = f", of {bytes_text(memory)}" if memory else "; unknown without --device-memory"
    return {
        "weights": "as burst generate holds them without and with --shard-weights, of the rank with the most",
        "cache": "keys and values, the same way",
        "work": "what the prompt needs beside them; --prefill-chunk of burst generate bounds it",
        "first": "time from the prompt to the first token",
        "later": "time of each further token" + (f", {request.batch} at once" if request.batch > 1 else ""),
        "sent": "by a rank for each further token",
        "verdict": f"fits if all three take at most {USABLE:.0%} of the memory{of}",
    }


def served_verdict(request: ForecastRequest, served: list[Served]) -> str:
    """Return which weights give tokens fastest, or how many ranks would hold the sequence."""
    able = [each for each in served if each.fits is not False]
    if not able:
        least, memory = min(served, key=lambda each: each.bytes), request.cluster.device.memory or 0
        needs = f"{least.weights} weights need {bytes_text(least.bytes)} of {bytes_text(memory)} per rank"
        return f"It does not fit: {needs}. {' '.join(map(_enough, served))}"
    best = min(able, key=lambda each: each.token)
    rate = digits(request.batch / best.token)
    text = f"Recommended: {best.weights} weights, first token in {seconds_text(best.first)}, then {rate} tokens/s"
    if best.fits is None:
        return f"{text}. Give --device-memory to check whether it fits."
    others = [_enough(each) for each in served if not each.fits]
    return " ".join([f"{text}. It fits: {bytes_text(best.bytes)} per rank.", *others])


def _enough(each: Served) -> str:
    if each.ranks is None:
        return f"With {each.weights} weights, no number of ranks up to {MOST_RANKS:,} holds it."
    return f"With {each.weights} weights, {each.ranks:,} ranks hold it."


def served_notes(served: list[Served]) -> Iterator[str]:
    """Yield what the times of tokens rest on."""
    host = served[0].step["host"]
    if any(each.token == host for each in served):
        yield (
            f"A GPU waits for the host, which needs {seconds_text(host)} to launch the operators of a later token; an "
            "estimate from one CPU."
        )


def served_dict(request: ForecastRequest, served: list[Served], asked: str) -> Mapping[str, Any]:
    """Return all figures as plain values in seconds and bytes."""
    return {
        "asked": asked,
        "seq_len": request.seq_len,
        "ranks": request.cluster.ranks,
        "ranks_of_a_node": request.cluster.per_node,
        "rates": request.cluster.rates.as_dict(),
        "model": {"name": request.model.name, "parameters": request.model.size},
        "generation": [asdict(each) | {"first": each.first} for each in served],
    }


def generate_flags(request: ForecastRequest, served: list[Served]) -> str | None:
    """Return the flags of ``burst generate`` for the fastest weights that may fit; None if none does."""
    able = [each for each in served if each.fits is not False]
    if not able:
        return None
    best, name = min(able, key=lambda each: each.token), request.model.name
    model = "FOLDER" if name in PRESETS else name
    return f"--model {model} --prompt FILE" + " --shard-weights" * (best.weights != WHOLE)
