"""What can be found wrong before a worker is started."""

from __future__ import annotations

import importlib.util

from .config import TrainConfig
from .data import open_sequences
from .metrics import check_out
from .presets import PRESETS
from .tokenizer import ByteTokenizer

NEEDED = ("transformers", "safetensors", "matplotlib", "tensorboard")


def check_run(config: TrainConfig, world: int) -> None:
    """Raise ValueError naming the first flag that keeps ``config`` from being trained by ``world`` ranks.

    Reads as much of the data as the first training sequence and the first held-out one need.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install 'burst-attention[train]'")
    config.check()
    config.check_world(world)
    check_out(config.run.out, overwrite=config.run.overwrite)
    if config.model.model not in PRESETS:
        from .model import load_config

        load_config(config.model.model)
    reader, tokenizer = open_sequences(config)
    if config.model.model not in PRESETS or not isinstance(tokenizer, ByteTokenizer):
        from .model import model_config

        model_config(config.model.model, tokenizer, config.data.seq_len)
    next(reader.training())
    if config.data.held_out:
        sharing = world // config.parallel.data_parallel
        length = len(first.tokens) if (first := next(reader.held_out(), None)) else 0
        if length < sharing:
            raise ValueError(
                f"--held-out {config.data.held_out} of --data {config.data.data!r} leaves {length} tokens to evaluate, "
                f"fewer than the {sharing} ranks that share them; raise it, or give 0 to skip the evaluation"
            )
