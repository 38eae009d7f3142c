"""Kill training runs at random points, have them go on, and compare the final weights with an undisturbed run's.

    python tests/survive.py [--points 50] [--seed 0]

Ranks are processes of a fork server that has everything imported already, so that a point takes seconds. Each point
draws how many ranks there are, what is done to which of them, and when: at a time after the start, or when something
appears on the disk (a checkpoint begun, its manifest, the checkpoint by its name, the trained model). A run is ended
as often as it was drawn, then goes on undisturbed. It must end with the very bits of the undisturbed run.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from burst_attention.launch.processes import end_with  # noqa: E402
from burst_attention.training.config import TrainConfig  # noqa: E402
from burst_attention.training.interrupt import InterruptedRunError  # noqa: E402
from burst_attention.training.loop import train  # noqa: E402
from burst_attention.training.manifest import FOLDER, list_checkpoints  # noqa: E402
from burst_attention.training.metrics import NEWEST  # noqa: E402
from tests.training import config_of, write_corpus  # noqa: E402

# What a run imports when it needs it: here for the fork server, or each rank would import it anew.
for _name in ("torch.utils.tensorboard", "matplotlib.figure", "transformers.models.llama.modeling_llama"):
    importlib.import_module(_name)

STEPS, TIMEOUT, PATIENCE = 6, 10.0, 120.0
MEANS = ("SIGKILL to one", "SIGKILL to all", "SIGTERM to one", "SIGTERM to all", "SIGSTOP to one")
# What on the disk a point waits for, by glob in the run's folder; None: a share of the undisturbed run's time.
MOMENTS = {
    "a random time": None,
    "a save begins": f"{FOLDER}/*.unfinished",
    "a shard is written": f"{FOLDER}/*.unfinished/*.safetensors",
    "before a rename": f"{FOLDER}/*.unfinished/manifest.json",
    "after a rename": f"{FOLDER}/step-????????",
    "evaluation": "model.unfinished/*",
}


@dataclass(frozen=True)
class Point:
    """One disturbance: over how many ranks, what, when, and how long after that."""

    world: int
    means: str
    moment: str
    delay: float
    victim: int
    nth: int

    @classmethod
    def draw(cls, drawn: random.Random) -> Point:
        """At random; ``nth`` tells which of several such files is waited for."""
        moment, world = drawn.choice(list(MOMENTS)), drawn.choice((2, 3))
        delay = drawn.random() if MOMENTS[moment] is None else drawn.random() * 0.03
        return cls(world, drawn.choice(MEANS), moment, delay, drawn.randrange(world), drawn.randint(1, 3))


def serve(rank: int, world: int, meeting: str, config: TrainConfig) -> None:
    """One rank of a run; its exit status is 0, 75 if it saved and stopped, or 1."""
    end_with(os.getppid())  # the fork server, which ends with this program
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    from datetime import timedelta

    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
        )
        train(config)
        status = 0
    except InterruptedRunError as interrupted:
        status = interrupted.status
    except BaseException:
        (Path(meeting).parent / f"trace-{os.getpid()}").write_text(traceback.format_exc(), "utf-8")
        status = 1
    os._exit(status)


class Job:
    """The ranks of one start of a run."""

    def __init__(self, config: TrainConfig, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.survive"])
        meeting = tempfile.mktemp(dir=folder)
        given = ((rank, world, meeting, config) for rank in range(world))
        from tests.survive import serve as target

        self.ranks = [context.Process(target=target, args=each) for each in given]
        self.began = time.monotonic()
        for rank in self.ranks:
            rank.start()

    @property
    def running(self) -> bool:
        return any(rank.exitcode is None for rank in self.ranks)

    def disturb(self, point: Point) -> None:
        """What a point does to one rank, or to all."""
        number = getattr(signal, point.means.split()[0])
        victims = self.ranks if point.means.endswith("all") else [self.ranks[point.victim]]
        for rank in victims:
            if rank.exitcode is None and rank.pid:
                os.kill(rank.pid, number)

    def end(self, *, soon: bool) -> list[int | None]:
        """Wait for the ranks; as a launcher does, kill what is left some time after the first that failed."""
        deadline = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < deadline:
            if soon and any(rank.exitcode not in (None, 0, 75) for rank in self.ranks):
                deadline = min(deadline, time.monotonic() + TIMEOUT + 2)
                soon = False
            time.sleep(0.01)
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return codes


def run_to_end(config: TrainConfig, world: int, folder: Path) -> float:
    """Start a run and have it end undisturbed; returns its seconds."""
    job = Job(config, world, folder)
    codes = job.end(soon=True)
    if any(codes):
        traces = "".join(path.read_text("utf-8") for path in folder.glob("trace-*"))
        raise RuntimeError(f"an undisturbed run ended with {codes}: {traces}")
    return time.monotonic() - job.began


def again(config: TrainConfig) -> TrainConfig:
    """How the run is started next: from its newest checkpoint, or anew where there is none."""
    if list_checkpoints(Path(config.run.out)):
        return replace(config, run=replace(config.run, resume=NEWEST))
    return replace(config, run=replace(config.run, overwrite=True))


def try_point(point: Point, config: TrainConfig, seconds: float, folder: Path) -> str:
    """Disturb a run at one point and have it go on; returns how it ended the first time."""
    job = Job(config, point.world, folder)
    pattern, deadline = MOMENTS[point.moment], time.monotonic() + 3 * seconds + 10
    if pattern is None:
        time.sleep(point.delay * seconds)
    else:
        seen: set[str] = set()
        while job.running and len(seen) < point.nth and time.monotonic() < deadline:
            seen |= {str(path) for path in Path(config.run.out).glob(pattern)}
            time.sleep(0.0005)
            if point.moment == "evaluation" and seen:
                break
        time.sleep(point.delay)
    job.disturb(point)
    codes = job.end(soon=True)
    run_to_end(again(config), point.world, folder)
    return " ".join("-" if code is None else str(code) for code in codes)


def survive(points: int, seed: int, tell: bool = True) -> int:
    """Try points; prints a row for each and returns how many ended with other weights."""
    drawn, wrong = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="burst-survive-") as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        corpus = write_corpus(folder / "corpus")
        changes = {"steps": STEPS, "save_every": "2", "timeout": TIMEOUT, "global_batch": 2, "tokenizer": "bytes"}
        expected, seconds = {}, {}
        for world in (2, 3):
            config = config_of(corpus, folder / f"whole-{world}", **changes)
            seconds[world] = run_to_end(config, world, folder)
            expected[world] = load_file(folder / f"whole-{world}" / "model" / "model.safetensors")
        for number in range(points):
            point, out = Point.draw(drawn), folder / f"point-{number}"
            began = time.monotonic()
            ended = try_point(point, config_of(corpus, out, **changes), seconds[point.world], folder)
            got = load_file(out / "model" / "model.safetensors")
            whole = expected[point.world]
            same = got.keys() == whole.keys() and all(torch.equal(got[key], whole[key]) for key in whole)
            wrong += not same
            if tell:
                print(
                    f"{number + 1:3} {'same bits' if same else 'OTHER WEIGHTS':13} {point.world} ranks  "
                    f"{point.means:15} {point.moment:18} ended {ended:10} {time.monotonic() - began:5.1f} s",
                    flush=True,
                )
    print(f"{points - wrong} of {points} runs went on to the weights of a run that nothing disturbed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="how many runs are disturbed")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to them, and when")
    given = parser.parse_args()
    return 1 if survive(given.points, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
