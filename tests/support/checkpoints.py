"""The state of a run that took no step, for tests that write checkpoints by hand."""

from typing import Any

import numpy as np

from burst_train.checkpoint.snapshot import settings_of
from burst_train.config import TrainConfig


def state_at(step: int, **entries: Any) -> dict[str, Any]:
    """Return what ``state.json`` must hold but the tensors; ``entries`` replace entries of it."""
    order = np.random.default_rng(0).bit_generator.state
    counts = dict.fromkeys(("taken", "epoch", "document", "used"), 0)
    return {
        "format": 1,
        "step": step,
        "config": settings_of(TrainConfig()),
        "model": {"model_type": "llama"},
        "optimizer": {"name": "AdamW", "steps": float(step), "groups": []},
        "schedule": {"last_epoch": step},
        "generators": [],
        "cursor": counts | {"digest": "", "order": order, "borders": []},
        "losses": {"first": 1.0, "last": 1.0, "held_out": None},
        **entries,
    }
