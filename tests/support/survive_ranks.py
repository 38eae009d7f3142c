"""What the ranks of ``tests/tools/survive.py`` run. A fork server imports it once, so that no rank has to.

A run reports its progress by files in the folder ``marks`` next to its output folder.
"""

import importlib
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch

from burst_attention.launch.processes import end_with
from burst_train.checkpoint.writer import CheckpointWriter
from burst_train.config import TrainConfig
from burst_train.run.curve import draw_losses
from burst_train.run.interrupt import InterruptedRunError
from burst_train.step.loop import Trainer, train
from burst_train.step.model import quieten_transformers

# What a run would import when it needs it.
for _name in (
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(_name)
with tempfile.TemporaryDirectory() as _folder:  # the first picture looks for its fonts
    draw_losses({1: 1.0, 2: 2.0}, None, Path(_folder) / "loss.png")
WRITING = 0.05  # seconds longer than it takes: steps go on meanwhile


def serve(rank: int, world: int, meeting: str, config: TrainConfig) -> None:
    """One rank of a run; its exit status is 0, 75 if it saved and stopped, or 1."""
    end_with(os.getppid())  # the fork server, which ends with this program
    torch.set_num_threads(1)
    quieten_transformers()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    marks = Path(config.run.out).with_suffix(".marks")
    marks.mkdir(parents=True, exist_ok=True)
    _mark(Trainer, "backward", marks / "step")
    _mark(Trainer, "evaluate", marks / "evaluation")
    _mark(CheckpointWriter, "__init__", marks / "copy")
    _mark(CheckpointWriter, "write", marks / "write", pause=WRITING)
    _mark(CheckpointWriter, "seal", marks / "seal")
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=config.parallel.timeout),
        )
        train(config)
        status = 0
    except InterruptedRunError as interrupted:
        status = interrupted.status
    except BaseException:
        (Path(meeting).parent / f"trace-{os.getpid()}").write_text(traceback.format_exc(), "utf-8")
        status = 1
    os._exit(status)


def _mark(owner: type, name: str, path: Path, pause: float = 0.0) -> None:
    """Have a method leave a file each time it begins."""
    method, calls = getattr(owner, name), 0

    def marked(self, *args, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        path.with_name(f"{path.name}-{os.getpid()}-{calls}").touch()
        time.sleep(pause)
        return method(self, *args, **options)

    setattr(owner, name, marked)
