"""What can be found wrong before a worker is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .config import TrainConfig
from .data import open_sequences
from .evaluation import EvalConfig
from .presets import PRESETS
from .tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_run(config: TrainConfig, world: int) -> None:
    """Raise ValueError naming the first flag that keeps ``config`` from being trained by ``world`` ranks.

    Reads as much of the data as the first training sequence and the first held-out one need.
    """
    config.check()
    config.check_world(world)
    name, data, parallel = config.model.model, config.data, config.parallel
    loaded = _load(name)
    reader, tokenizer = open_sequences(config)
    model = None
    asked = parallel.engine != "burst" or parallel.heads is not None
    if loaded is not None or asked or not isinstance(tokenizer, ByteTokenizer):
        from .model import model_config

        model = model_config(name, tokenizer, data.seq_len, loaded=loaded)
    sharing = world // parallel.data_parallel
    lengths = {data.seq_len}
    next(reader.training())
    if data.held_out:
        length = len(first.tokens) if (first := next(reader.held_out(), None)) else 0
        lengths.add(length)
        if length < sharing:
            raise ValueError(
                f"--held-out {data.held_out} of --data {data.data!r} leaves {length} tokens to evaluate, "
                f"fewer than the {sharing} ranks that share them; raise it, or give 0 to skip the evaluation"
            )
    if model is not None:
        from burst_attention.engines import Heads, choose

        engine = choose(**parallel.how)
        for length in lengths:
            engine.check(Heads.of(model), length, sharing)
    _check_weights(name)


def check_evaluation(config: EvalConfig, world: int) -> None:
    """Raise ValueError naming the first flag that keeps ``config`` from being evaluated by ``world`` ranks.

    One engine that can run is enough. Reads as much of the data as the first sequence needs.
    """
    config.check()
    from burst_attention.engines import Heads

    from .evaluate import nothing_to_evaluate, refusal
    from .model import model_config

    loaded = _load(config.model, training=False)
    reader, tokenizer = open_sequences(config.as_training)
    heads = Heads.of(model_config(config.model, tokenizer, config.seq_len, training=False, loaded=loaded))
    first = next(reader.held_out(), None)
    if first is None or not first.valid_tokens:
        raise nothing_to_evaluate(config)
    refused = [refusal(name, heads, len(first.tokens), world) for name in config.engines]
    if all(refused):
        raise ValueError(f"none of --engines {' '.join(config.engines)} can run: {'; '.join(map(str, refused))}")
    _check_weights(config.model)


def _load(model: str, *, training: bool = True) -> PreTrainedConfig | None:
    """A loaded model's configuration, before its tokenizer is looked for; None for a preset."""
    if model in PRESETS:
        return None
    from .model import load_config  # here, for a preset is checked without transformers

    return load_config(model, training=training)


def _check_weights(model: str) -> None:
    """Raise ValueError for a model's folder that holds none; those of the hub are told of by the hub."""
    folder = Path(model)
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--model {model!r}: the folder holds no weights (*.safetensors or *.bin)")
