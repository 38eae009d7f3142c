"""What can be found wrong before a worker is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import TrainConfig
from .data import open_data, open_sequences
from .evaluation import EvalConfig
from .presets import PRESETS
from .tokenizer import ByteTokenizer


def check_run(config: TrainConfig, world: int) -> None:
    """Raise ValueError naming the first flag that keeps ``config`` from being trained by ``world`` ranks.

    Reads as much of the data as the first training sequence and the first held-out one need.
    """
    config.check()
    config.check_world(world)
    if config.model.model not in PRESETS:
        from .model import load_config

        load_config(config.model.model)
    reader, tokenizer = open_sequences(config)
    compared = config.parallel.engine != "burst"
    if compared or config.model.model not in PRESETS or not isinstance(tokenizer, ByteTokenizer):
        from .model import model_config

        model = model_config(config.model.model, tokenizer, config.data.seq_len)
    sharing = world // config.parallel.data_parallel
    lengths = {config.data.seq_len}
    next(reader.training())
    if config.data.held_out:
        length = len(first.tokens) if (first := next(reader.held_out(), None)) else 0
        lengths.add(length)
        if length < sharing:
            raise ValueError(
                f"--held-out {config.data.held_out} of --data {config.data.data!r} leaves {length} tokens to evaluate, "
                f"fewer than the {sharing} ranks that share them; raise it, or give 0 to skip the evaluation"
            )
    if compared:
        _check_engine(config, model, lengths, sharing)
    _check_weights(config.model.model)


def _check_engine(config: TrainConfig, model: Any, lengths: set[int], sharing: int) -> None:
    """Raise ValueError if the engine can't share every sequence of a model, by its configuration, among the ranks."""
    from burst_attention.engines import Heads, choose

    parallel = config.parallel
    engine = choose(parallel.engine, layout=parallel.layout, route=parallel.route)
    heads = Heads.of(model)
    for length in lengths:
        engine.check(heads, length, sharing)


def check_evaluation(config: EvalConfig, world: int) -> None:
    """Raise ValueError naming the first flag that keeps ``config`` from being evaluated by ``world`` ranks.

    One engine that can run is enough. Reads as much of the data as the first sequence needs.
    """
    config.check()
    from burst_attention.engines import Heads

    from .evaluate import nothing_to_evaluate, refusal
    from .model import load_config, model_config

    if config.model not in PRESETS:
        load_config(config.model, training=False)
    reader, tokenizer = open_data(config.reading, config.model, seed=config.seed)
    heads = Heads.of(model_config(config.model, tokenizer, config.seq_len, training=False))
    first = next(reader.held_out(), None)
    if first is None or not first.valid_tokens:
        raise nothing_to_evaluate(config)
    refused = [refusal(name, heads, len(first.tokens), world) for name in config.engines]
    if all(refused):
        raise ValueError(f"none of --engines {' '.join(config.engines)} can run: {'; '.join(map(str, refused))}")
    _check_weights(config.model)


def _check_weights(model: str) -> None:
    """Raise ValueError for a model's folder that holds none; those of the hub are told of by the hub."""
    folder = Path(model)
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--model {model!r}: the folder holds no weights (*.safetensors or *.bin)")
