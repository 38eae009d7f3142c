"""What a run shows: its progress, its losses, slow steps and the ranks that are behind."""

import io
import math
import threading

import pytest
import torch.distributed as dist
from matplotlib.axes import Axes
from rich.console import Console

from burst_train.cli.eval import QUIET, EvaluationScreen
from burst_train.health import watch
from burst_train.health.watch import StepWatch, Where, who_is_behind
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


LONG = 30


class Lines(list):
    """A list of reported lines that tests can wait for."""

    def __init__(self):
        super().__init__()
        self.there = threading.Condition()

    def __call__(self, text):
        with self.there:
            self.append(text)
            self.there.notify_all()

    def wait_for(self, count):
        with self.there:
            assert self.there.wait_for(lambda: len(self) >= count, LONG), list(self)


def watches(world, timeout=0.05):
    store = dist.HashStore()
    lines = [Lines() for _ in range(world)]
    return lines, [StepWatch(timeout, rank=r, world=world, tell=lines[r], store=store) for r in range(world)]


def test_each_rank_tells_its_phase_and_rank_0_who_is_behind():
    lines, three = watches(3, timeout=1.0)
    for each in three:
        each.begin(7)
    for each in (three[0], three[2]):
        each.enter("forward")
        each.enter("backward")
    lines[0].wait_for(2)
    for rank in (1, 2):
        lines[rank].wait_for(1)
    assert (
        lines[1][0].startswith("rank 1: step 7 has taken ")
        and "--step-timeout 1; it has been in its data phase" in lines[1][0]
    )
    assert "it has been in its backward phase for " in lines[2][0]
    assert lines[0][1] == "step 7: behind: rank 1, in the data phase; others are in the backward phase"
    for each in three:
        each.close()


def test_a_step_is_reported_once_and_the_next_one_again():
    lines, (one,) = watches(1)
    one.begin(1)
    lines[0].wait_for(1)
    one.begin(2)
    lines[0].wait_for(2)
    one.close()
    one._thread.join(LONG)
    assert [line.split(" has taken")[0] for line in lines[0]] == ["rank 0: step 1", "rank 0: step 2"]


def test_steps_in_time_are_not_reported_and_nothing_is_watched_unasked():
    lines, (one,) = watches(1, timeout=LONG)
    for step in range(100):
        one.begin(step)
        one.enter("saving")
    one.close()
    one._thread.join(LONG)
    assert not one._thread.is_alive() and not lines[0]
    _, (unasked,) = watches(1, timeout=None)
    unasked.begin(1)
    unasked.enter("forward")
    assert unasked._thread is None


def test_a_rank_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    lines, (one, _) = watches(2)
    one.begin(3)
    lines[0].wait_for(2)
    assert lines[0][1] == "step 3: no report from rank 1; all reporting ranks are in their data phase"
    one.close()


@pytest.mark.parametrize(
    ("heard", "reported"),
    [
        ({0: (4, 2, "forward"), 1: (4, 2, "forward")}, "all ranks are in their forward"),
        ({0: (4, 4, "forward"), 1: (4, 2, "forward")}, "behind: rank 1, in the forward phase; others are in the for"),
        ({0: (4, 9, "saving"), 1: (4, 1, "data"), 2: (4, 1, "data")}, "behind: ranks 1, 2, in the data phase; oth"),
    ],
)
@pytest.mark.long
def test_behind_is_who_has_come_least_far(heard, reported):
    assert reported in who_is_behind(4, {rank: Where(*where) for rank, where in heard.items()}, len(heard))


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 40, 4321])
def test_ticks_of_a_curve_are_steps(tmp_path, monkeypatch, steps):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: drawn.append(figure))
    draw_losses(dict.fromkeys(range(1, steps + 1), 1.0), 1.5, tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    ticks = axes.get_xticks()
    assert len(ticks) and all(float(tick).is_integer() for tick in ticks)
