"""Checks of a run's settings before any worker starts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from burst_attention.plan.layout import BALANCED
from burst_attention.plan.strategy import Strategy

from ..config import TrainConfig
from ..data.sequences import Cursor, SequenceReader, epochs_text, open_sequences
from ..data.tokenizer import BYTES
from ..memory import binary_text, check_fits, free_memory, parts_text
from ..presets import PRESETS
from ..run.folder import NEWEST, list_checkpoints
from ..step.evaluation import EvalConfig
from ..strategies import FOREIGN, MEGATRON, Heads, choose

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_HELD_OUT = 100  # tokens: the mean of fewer losses is off by more than 0.2 nats from chance alone


@dataclass(frozen=True)
class Start:
    """The first lines of a run, and a rank's tensors at their peak, or a part of them, in bytes by name."""

    lines: tuple[str, ...]
    memory: Mapping[str, int]


def check_run(config: TrainConfig, world: int, *, local_ranks: int | None = None) -> Start:
    """Check that ``world`` ranks can train ``config``, reading its first sequences; ValueError names the flag."""
    config.check()
    config.check_world(world)
    config.check_packages()
    resumed = _resumed(config)
    name, data, parallel = config.model.model, config.data, config.parallel
    shared = choose(**config.how)
    loaded = _load(name, layout=getattr(shared, "strategy", Strategy()).layout)
    reader, tokenizer = open_sequences(config)
    from ..step.model import model_config, ranks_of_heads

    positions = None if loaded is None else getattr(loaded, "max_position_embeddings", None)
    model = model_config(
        name,
        tokenizer,
        data.seq_len,
        loaded=loaded,
        max_positions=config.model.max_positions,
        rope_scaling=config.model.rope_scaling,
        named=data.tokenizer,
    )
    sharing = parallel.sharing(world)
    lengths, read = {data.seq_len}, reader.training()
    first = next(read)
    if resumed is not None:
        next(reader.training(resumed))  # the document where it stopped must be unchanged
    if data.held_out:
        lengths |= _held_out_lengths(config, reader, max(LEAST_HELD_OUT, sharing))
    heads = Heads.of(model).of_rank(ranks_of_heads(model, parallel.tensor_parallel))
    for length in lengths:
        shared.check(heads, length, sharing)
    _check_weights(name)
    parts = predict_memory(config, model, world)
    lines, counted = _first_lines(config, model, positions, parts), parts or least_memory(config, model, world)
    if parallel.device != "cuda":
        warned = check_fits(counted, free_memory(), config.memory, seq_len=data.seq_len, ranks=local_ranks or world)
        lines = (*lines, *[warned] * bool(warned))
    if first.valid_tokens and (first.tokens < 0).any():
        share = (first.tokens >= 0).mean()
        lines = (*lines, f"the loss is that of the assistant's turns: {share:.0%} of the first sequence's tokens")
    return Start((*lines, epochs_text(config, read.epoch_tokens)), counted)


def _resumed(config: TrainConfig) -> Cursor | None:
    """Return where in the data the run resumes, without its waiting sequences; ValueError if a setting must not differ.

    The ranks read the whole checkpoint; if the newest is damaged, one before it, which has the same settings.
    """
    resumed = config.run.resume
    if resumed is None:
        return None
    from ..checkpoint.manifest import read_state
    from ..checkpoint.snapshot import WAITING, check_same_run

    state = None
    for folder in list_checkpoints(Path(config.run.out)) if resumed == NEWEST else [Path(resumed)]:
        with suppress(ValueError):
            state = read_state(folder)
            break
    if state is None:
        return None
    check_same_run(config, state.config)
    return Cursor(**dict(state.cursor), waiting=np.zeros(state.tensors[WAITING].shape, np.int32))


def _held_out_lengths(config: TrainConfig, reader: SequenceReader, least: int) -> set[int]:
    """Return the lengths of the held-out sequences; ValueError if they predict fewer than ``least`` tokens."""
    lengths, tokens = set[int](), 0
    for sequence in itertools.islice(reader.held_out(), config.data.held_out_sequences):
        lengths.add(len(sequence.tokens))
        tokens += sequence.valid_tokens
        if tokens >= least:
            return lengths
    raise ValueError(
        f"--held-out {config.data.held_out} of --data {config.data.data!r} leaves {tokens} tokens to evaluate, too few "
        f"for a loss: it needs {least}. Raise --held-out or --held-out-sequences, give more text, or skip the "
        "evaluation by --held-out 0"
    )


def predict_memory(config: TrainConfig, model: PreTrainedConfig, world: int) -> Mapping[str, int] | None:
    """Predict the bytes of a rank's tensors at the peak of a step; None if no formula gives them."""
    from burst_attention.attention import known_rates, usual_rates

    from ..forecast.forecast import predicted_step
    from ..forecast.models import FORMULA, Model
    from ..forecast.request import CUT, Cluster, Device, ForecastRequest

    if config.model.lora is not None or model.model_type not in FORMULA or config.parallel.strategy in FOREIGN:
        return None
    (rows, tokens), groups, cut = config.micro_batch, config.parallel.data_parallel, config.parallel.tensor_parallel
    if cut > 1 and model.model_type not in CUT:
        return None
    try:
        counted = Model.read(model, config.model.model)
    except ValueError:  # a part of it is not predicted
        return None
    rates = known_rates(None, on_gpus=False, world=world // groups) or usual_rates(on_gpus=False)
    uneven = getattr(choose(**config.how), "strategy", Strategy()).layout == BALANCED
    request = ForecastRequest(
        seq_len=tokens,
        cluster=Cluster(ranks=world, per_node=world, rates=rates, device=Device()),
        model=counted,
        groups=groups,
        batch=rows,
        dtype=config.model.compute_dtype(config.parallel.device),
        borders=(0, tokens) if uneven else None,  # a rank may then be as full as the layout allows
        joined=config.optim.batch if config.joins else 1,
        accumulates=config.sequences_per_step > groups * config.optim.batch,
        remat=config.memory.remat,
        saving=config.memory,
        strategy=config.parallel.strategy,
    )
    request = request.cut(cut) if cut > 1 else request
    try:
        step = predicted_step(request.strategy, request, timed=False)
    except ValueError:  # this number of ranks is not simulated
        return None
    return step.memory(step.remat) or None


def least_memory(config: TrainConfig, model: PreTrainedConfig, world: int) -> Mapping[str, int]:
    """Return bytes of what a rank holds of any model at the end of a step; the rest is not predicted."""
    from ..step.lora import count_adapters
    from ..structure import build_empty

    if config.memory.optimizer_offload:
        return {}
    numbers = sum(parameter.numel() for parameter in build_empty(model).parameters()) // world
    size = 8 if config.model.dtype == "float64" else 4
    moments, trained = 2 if config.memory.optimizer == "adamw-8bit" else 2 * size, numbers
    if config.model.lora is not None:  # gradients and moments are of the adapters alone
        trained = count_adapters(build_empty(model), config.model.lora) // world
        numbers += trained
    return {"weights": size * numbers, "gradients": size * trained, "AdamW": moments * trained}


def _first_lines(
    config: TrainConfig, model: PreTrainedConfig, positions: int | None, parts: Mapping[str, int] | None
) -> tuple[str, ...]:
    name, data, parallel = config.model.model, config.data, config.parallel
    ours = parallel.strategy not in MEGATRON
    kernel = "PyTorch's own" if not ours else "aten" if parallel.device == "cpu" else "auto (one proven on the GPU)"
    own = BYTES if name in PRESETS else f"{name}'s own"
    random = " with random weights" * (name in PRESETS)
    lines = [
        f"model {name}{random}, tokenizer {data.tokenizer or own}, data {data.data}, strategy {parallel.strategy}, "
        f"kernel {kernel}"
    ]
    if config.model.max_positions is not None or config.model.rope_scaling is not None:
        before = "" if positions is None else f", in place of {positions:,}"
        rope = model.rope_parameters if config.model.rope_scaling else "as in the model's configuration"
        lines.append(f"max_position_embeddings {model.max_position_embeddings:,}{before}; RoPE {rope}")
    if parts is None:
        least = parts_text(least_memory(config, model, parallel.ranks or 1))
        held = f"; a rank holds at least {least}" if least else ""
        return (f"memory is not predicted for this model and these flags{held}", *lines)
    process = "PyTorch and Python themselves, about 500 MiB" if parallel.device == "cpu" else "the CUDA context"
    counted = f"tensors of a rank: {binary_text(sum(parts.values()))} ({parts_text(parts)})"
    return (f"predicted peak memory of the {counted}; not included: {process}", *lines)


def check_evaluation(config: EvalConfig, world: int) -> None:
    """Check that ``world`` ranks can evaluate ``config`` with a strategy or more; ValueError names the flag."""
    config.check()
    from ..step.evaluate import nothing_to_evaluate, refusal
    from ..step.model import model_config

    loaded = _load(config.model, training=False)
    reader, tokenizer = open_sequences(config.as_training)
    named = config.as_training.data.tokenizer
    hf_config = model_config(
        config.model,
        tokenizer,
        config.seq_len,
        training=False,
        loaded=loaded,
        rope_scaling=config.rope_scaling,
        named=named,
    )
    heads = Heads.of(hf_config)
    first = next(reader.held_out(), None)
    if first is None or not first.valid_tokens:
        raise nothing_to_evaluate(config)
    refused = [refusal(name, heads, len(first.tokens), world) for name in config.strategies]
    if all(refused):
        raise ValueError(f"none of --strategies {' '.join(config.strategies)} can run: {'; '.join(map(str, refused))}")
    _check_weights(config.model)


def _load(model: str, *, training: bool = True, layout: str = "auto") -> PreTrainedConfig | None:
    """Return a model's configuration, or None for a preset; the tokenizer is loaded later."""
    if model in PRESETS:
        return None
    from ..step.model import load_config  # imported here because a preset needs no transformers

    return load_config(model, training=training, layout=layout)


def _check_weights(model: str) -> None:
    """Raise ValueError if a local model folder holds no weights; the hub reports its own missing files."""
    folder = Path(model)
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--model {model!r}: the folder holds no weights (*.safetensors or *.bin)")
