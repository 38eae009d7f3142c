"""Kill training runs at random points, have them go on, and compare the final weights with an undisturbed run's.

    python tests/tools/survive.py [--points 50] [--seed 0] [--worlds 2 3]

A run is started and disturbed, goes on from its newest checkpoint and is disturbed again, until it comes to its end:
then it must have the very bits of a run over as many ranks that nothing disturbed. Each point draws what is done to
which of the ranks, and when: at a time after the start, or when the run has come to something for the nth time (a step,
a copy for a checkpoint, its writing, its sealing, its manifest, its name, an evaluation, the trained model), and a
little later. One that comes when the run has ended already does not count.

What takes time is to begin: ranks are forked from a process that has everything imported already, and a point is one
start, not two, for the next point's start is what goes on from it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from burst_train.config import TrainConfig  # noqa: E402
from burst_train.run.folder import FOLDER  # noqa: E402
from burst_train.run.metrics import AUTO, SUMMARY  # noqa: E402
from tests.support.training import config_of, write_corpus  # noqa: E402

STEPS, TIMEOUT, PATIENCE, GRACE = 8, 60.0, 120.0, 1.5
MEMORY = Path("/dev/shm")  # where it is, a disk that is slow at syncing is not what takes the time
STOPPED = 3.0  # seconds that a rank waits for one that is stopped
MEANS = ("SIGKILL to one", "SIGKILL to all", "SIGTERM to one", "SIGTERM to all", "SIGSTOP to one")
# What a point waits for, by glob: {} is the run's folder; None: a time after the start.
MOMENTS = {
    "a random time": None,
    "a step": "{}.marks/step-*",
    "an evaluation": "{}.marks/evaluation-*",
    "a copy": "{}.marks/copy-*",
    "writing": "{}.marks/write-*",
    "a shard is written": "{}/" + FOLDER + "/*.unfinished/*.safetensors",
    "sealing": "{}.marks/seal-*",
    "before a rename": "{}/" + FOLDER + "/*.unfinished/manifest.json",
    "after a rename": "{}/" + FOLDER + "/step-????????",
    "the model": "{}/model.unfinished/*",
}


@dataclass(frozen=True)
class Point:
    """One disturbance: what, when, how long after that, and to which rank."""

    means: str
    moment: str
    delay: float
    victim: int
    nth: int

    @classmethod
    def draw(cls, drawn: random.Random, world: int) -> Point:
        """At random; ``nth`` tells which of several such files is waited for."""
        moment = drawn.choice(list(MOMENTS))
        delay = drawn.random() * (0.9 if MOMENTS[moment] is None else 0.03)
        nth = 1 if moment == "the model" else drawn.randint(1, 2)
        return cls(drawn.choice(MEANS), moment, delay, drawn.randrange(world), nth)

    def wait(self, job: Job, out: Path, seconds: float) -> None:
        """Until it is time, or the ranks have ended; ``seconds``: what a whole run takes."""
        pattern = MOMENTS[self.moment]
        if pattern is None:
            time.sleep(self.delay * seconds)
            return
        glob, before = pattern.format(out.name), set(out.parent.glob(pattern.format(out.name)))
        deadline = time.monotonic() + 3 * seconds + 10
        while job.running and time.monotonic() < deadline:
            if len(set(out.parent.glob(glob)) - before) >= self.nth:
                break
            time.sleep(0.0005)
        time.sleep(self.delay)


class Job:
    """The ranks of one start of a run."""

    def __init__(self, config: TrainConfig, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.survive_ranks"])
        self.folder, self.config = Path(config.run.out).parent, config
        meeting = tempfile.mktemp(dir=self.folder)
        self.ranks = [context.Process(target=_serve, args=(rank, world, meeting, config)) for rank in range(world)]
        self.began = time.monotonic()
        for rank in self.ranks:
            rank.start()

    @property
    def running(self) -> bool:
        return any(rank.exitcode is None for rank in self.ranks)

    def disturb(self, point: Point) -> bool:
        """What a point does to one rank, or to all; whether there was still one to do it to."""
        number = getattr(signal, point.means.split()[0])
        victims = self.ranks if point.means.endswith("all") else [self.ranks[point.victim]]
        running = [rank.pid for rank in victims if rank.exitcode is None and rank.pid]
        for pid in running:
            os.kill(pid, number)
        return bool(running)

    def end(self) -> str:
        """Wait for the ranks; as a launcher does, kill what is left some time after the first that failed."""
        deadline = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < deadline:
            if any(rank.exitcode not in (None, 0, 75) for rank in self.ranks):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.005)
        codes = ["-" if rank.exitcode is None else str(rank.exitcode) for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return " ".join(codes)


def _serve(*arguments: object) -> None:
    from tests.support.survive_ranks import serve  # imported already, where this runs

    serve(*arguments)  # type: ignore[arg-type]


class Run:
    """A run over ``world`` ranks that is started as often as it takes; each start goes on by itself."""

    def __init__(self, config: TrainConfig, world: int) -> None:
        self.config = replace(config, run=replace(config.run, resume=AUTO))
        self.world, self.out = world, Path(config.run.out)
        self.points: list[Point] = []

    @property
    def finished(self) -> bool:
        return (self.out / SUMMARY).exists()

    def disturb(self, point: Point, seconds: float) -> str:
        """One start that is disturbed; returns how it ended, or nothing if it had ended by then."""
        timeout = STOPPED if point.means.startswith("SIGSTOP") else TIMEOUT
        job = Job(replace(self.config, parallel=replace(self.config.parallel, timeout=timeout)), self.world)
        point.wait(job, self.out, seconds)
        hit = job.disturb(point)
        ended = job.end()
        if not hit:
            return ""
        self.points.append(point)
        return ended

    def finish(self) -> float:
        """Start it, unless it has finished, and have it end undisturbed; returns the seconds."""
        began = time.monotonic()
        if not self.finished:
            codes = Job(self.config, self.world).end()
            if not self.finished or set(codes) - {"0", " "}:
                traces = "".join(path.read_text("utf-8") for path in self.out.parent.glob("trace-*"))
                raise RuntimeError(f"an undisturbed start after {self.points} ended with {codes}: {traces}")
        return time.monotonic() - began

    def weights(self) -> dict:
        from safetensors.torch import load_file

        return load_file(self.out / "model" / "model.safetensors")


def same(one: dict, other: dict) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        one[key].numpy().tobytes() == other[key].numpy().tobytes() and one[key].shape == other[key].shape for key in one
    )


def survive(points: int, seed: int, worlds: Sequence[int]) -> int:
    """Try points; prints a row for each and returns how many were part of a run that ended with other weights."""
    drawn, wrong, done, began = random.Random(seed), 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="burst-survive-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        corpus = write_corpus(folder / "corpus")
        changes = {"steps": STEPS, "save_every": "2", "eval_every": 3, "timeout": TIMEOUT, "global_batch": 2}
        changes |= {"strategy": "layout=zigzag,ulysses_degree=1"}  # rates that each run measures may choose otherwise
        whole = {world: Run(config_of(corpus, folder / f"whole-{world}", **changes), world) for world in worlds}
        seconds = {world: run.finish() for world, run in whole.items()}
        for number in itertools.count():
            if done == points:
                break
            world = worlds[number % len(worlds)]
            run = Run(config_of(corpus, folder / f"run-{number}", **changes), world)
            while done < points and not run.finished:
                point, started = Point.draw(drawn, world), time.monotonic()
                if not (ended := run.disturb(point, seconds[world])):
                    continue
                done += 1
                print(
                    f"{done:3} run {number:2}, {world} ranks  {point.means:15} {point.moment:18} "
                    f"ended {ended:8} {time.monotonic() - started:5.1f} s",
                    flush=True,
                )
            run.finish()
            if not same(run.weights(), whole[world].weights()):
                wrong += len(run.points)
                print(f"run {number} ended with OTHER WEIGHTS after {run.points}")
            shutil.rmtree(run.out)
    print(
        f"{points - wrong} of {points} disturbances left the weights of a run that nothing disturbed; "
        f"{time.monotonic() - began:.0f} s"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="how often a run is disturbed")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to them, and when")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3], help="over how many ranks, in turn")
    given = parser.parse_args()
    return 1 if survive(given.points, given.seed, given.worlds) else 0


if __name__ == "__main__":
    sys.exit(main())
