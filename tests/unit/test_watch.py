"""The watcher reports slow steps and the ranks that are behind, for any kind of wait."""

import threading

import pytest
import torch.distributed as dist

from burst_train.health import watch
from burst_train.health.watch import StepWatch, Where, who_is_behind

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
