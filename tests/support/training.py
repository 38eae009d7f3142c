"""Small training runs, and what they wrote down."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from burst_train.config import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig, flag_names

PARALLEL = ParallelConfig(device="cpu", timeout=60)


def write_corpus(folder):
    """A folder of 40 documents of 20 to 600 bytes."""
    for index in range(40):
        lines = [
            f"{(index * 7919 + line * line) % 97} times {line} makes no sense.\n" for line in range(1 + index % 23)
        ]
        (folder / f"{index:02d}.txt").write_text("".join(lines))
    return str(folder)


def saved_model(config, folder, seed):
    """Save a configuration's causal language model with random weights; return its folder."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def config_of(corpus, out, **changes):
    """A config for a test of seconds; ``changes`` are settings by their flags' names."""
    config = TrainConfig(
        run=RunConfig(steps=4, out=str(out)),
        data=DataConfig(data=corpus, seq_len=97, held_out=0.2, held_out_sequences=3),
        optim=OptimConfig(warmup=2),
        parallel=PARALLEL,
    )
    for name, value in changes.items():
        section = flag_names()[name]
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def records(folder):
    """What a run wrote of each step."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def metrics(folder, name):
    return [record[name] for record in records(folder)]


def losses(folder):
    return metrics(folder, "loss")


def norms(folder):
    return metrics(folder, "grad_norm")


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def events(folder, name):
    """The values of a run's TensorBoard scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(Path(folder) / "tensorboard")).Reload().Scalars(name)


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")
