"""Plot of a run's loss curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH = 0.05  # averaging width, as a share of the run


def smooth(losses: Sequence[float]) -> list[float]:
    """Return an exponential moving average over WIDTH of the run without non-finite losses; empty for short runs."""
    if len(losses) * WIDTH < 2:
        return []
    kept = 1 - 1 / (len(losses) * WIDTH)
    total = weight = 0.0
    means = []
    for loss in losses:
        if math.isfinite(loss):
            total, weight = kept * total + loss, kept * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def draw_losses(
    losses: Mapping[int, float], held_out: float | None, path: Path, *, measured: Mapping[int, float] | None = None
) -> None:
    """Draw a PNG of losses by step with their moving average, the final held-out loss, and those during the run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    smoothed = smooth(list(losses.values()))
    marker, alpha = "." if len(losses) < 3 else "", 0.35 if smoothed else 1.0
    axes.plot(list(losses), list(losses.values()), label="training", color="tab:blue", marker=marker, alpha=alpha)
    if smoothed:
        label = f"training, mean over about {round(len(losses) * WIDTH)} steps"
        axes.plot(list(losses), smoothed, color="tab:blue", label=label)
    if measured:
        axes.plot(list(measured), list(measured.values()), color="tab:orange", marker="o", label="held out, by step")
    if held_out is not None:
        axes.axhline(held_out, color="tab:orange", linestyle="--", label=f"held out: {held_out:.3f}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
