"""The progress display of a run, and the drawing of its losses."""

import io
import math

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from burst_train.cli.eval import QUIET, EvaluationScreen
from burst_train.run.curve import WIDTH, draw_losses, smooth
from burst_train.step.evaluation import StrategyResult


def test_progress_inside_a_strategy_is_shown_now_and_then():
    now, text = [0.0], io.StringIO()
    screen = EvaluationScreen(Console(file=text, width=80), clock=lambda: now[0])
    for done in range(1, 9):
        now[0] += QUIET / 2
        screen.progress("burst", done, 8)
    screen.result(StrategyResult(strategy="burst", sequences=8, seconds=1.25))
    lines = [
        "burst: 2 of 8 sequences",
        "burst: 4 of 8 sequences",
        "burst: 6 of 8 sequences",
        "burst: 8 sequences in 1.2 s",
    ]
    assert text.getvalue().splitlines() == lines


def test_on_a_terminal_a_bar_shows_it():
    text = io.StringIO()
    with EvaluationScreen(Console(file=text, width=80, force_terminal=True, highlight=False)) as screen:
        screen.progress("ring", 3, 4)
        screen.result(StrategyResult(strategy="ring", sequences=4, seconds=2.0))
    assert "75%" in text.getvalue() and "ring: 4 sequences in 2.0 s" in text.getvalue()


def test_losses_are_smoothed_by_weights_that_fade():
    assert smooth([2.0] * 39) == [], "too few"
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    losses = [float(n % 2) for n in range(200)]
    assert smooth(losses)[0] == 0.0 and smooth(losses)[-1] == pytest.approx(0.5, abs=0.06)
    steps = [0.0] * 100 + [1.0] * 100
    assert smooth(steps)[99] == 0.0
    assert smooth(steps)[99 + round(200 * WIDTH)] == pytest.approx(1 - 1 / math.e, abs=0.03)


def test_losses_of_a_resumed_run_stand_at_their_steps(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *lines, **how: drawn.append(lines[0]) or plot(self, *lines, **how))
    draw_losses({501 + n: 1.0 for n in range(60)}, None, tmp_path / "loss.png", measured={550: 1.0})
    assert drawn == [list(range(501, 561))] * 2 + [[550]]


def test_steps_without_a_loss_are_passed_over(tmp_path):
    losses = [math.nan] * 3 + [2.0] * 40 + [math.nan] * 7 + [2.0] * 10
    assert smooth(losses)[3:] == pytest.approx([2.0] * 57)
    draw_losses(dict(enumerate(losses, 1)), None, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
