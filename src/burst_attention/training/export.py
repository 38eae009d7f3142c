"""The trained model as a Hugging Face folder: of a run that ends, or of any checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from . import checkpoint
from .checked import Checked
from .draft import text_of
from .manifest import UNFINISHED
from .model import ARCHITECTURES, NextTokenModel
from .snapshot import WEIGHTS
from .tokenizer import Tokenizer, open_tokenizer

OURS = "model."  # before a parameter's name in transformers, where it is one of a NextTokenModel
KINDS = {name: dtype for dtype, name in checkpoint.DTYPES.items()}


def save_model(
    wrapper: NextTokenModel, tokenizer: Tokenizer, folder: Path, *, rank: int, dtype: torch.dtype | None = None
) -> None:
    """Write what ``AutoModelForCausalLM.from_pretrained(folder)`` loads. Every rank must call it; rank 0 writes.

    Which attention computed the weights is not written down: the reader's own is as good.

    Args:
        dtype: of what is written; None: that of the weights as they were trained, fp32 (fp64).
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(wrapper, options=options))
    if rank:
        return
    model = wrapper.model
    weights = {name.removeprefix(OURS): value.to(dtype or value.dtype) for name, value in weights.items()}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del weights["lm_head.weight"]  # gathered, the two no longer share memory and would be written twice
    _write(model, folder, state_dict=weights)
    if dtype is not None:  # the model that was saved says that of its own weights
        file = folder / "config.json"
        told = json.loads(file.read_text("utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    tokenizer.save(folder)


def saved_dtype(config: PreTrainedConfig, asked: str = "auto") -> torch.dtype | None:
    """What ``--save-dtype`` asks for; of ``auto`` that of the model's folder, if it is a short one.

    None: as the weights are trained.
    """
    if asked != "auto":
        return getattr(torch, asked)
    return config.dtype if config.dtype in (torch.bfloat16, torch.float16) else None


def export(source: Path, folder: Path) -> None:
    """Write the model of a checkpoint to a new folder, in this process alone.

    Args:
        source: the checkpoint's folder; every file of it is held against its manifest.
        folder: what ``AutoModelForCausalLM.from_pretrained`` then loads. It must be new or empty.

    Raises:
        ValueError: the checkpoint is damaged, its tokenizer can't be found, or the folder holds files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"DIR {str(folder)!r} is there already and is not empty; choose another folder")
    state = checkpoint.check(source)
    config = _config_of(state)
    settings = state.part("config")
    tokenizer = open_tokenizer(
        settings.part("data").content.get("tokenizer"), settings.part("model").value("model", str)
    )
    asked = settings.part("model").content.get("save_dtype", "auto")
    weights, dtype = _weights_of(source, state), saved_dtype(config, asked)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    missing = model.load_state_dict(
        {name: value.to(dtype or value.dtype) for name, value in weights.items()}, strict=False, assign=True
    ).missing_keys
    model.tie_weights()
    if left := sorted({*missing} - {*getattr(model, "all_tied_weights_keys", {})}):
        raise ValueError(f"{source} has no weights for {', '.join(left)}")
    if state.content.get("generation") is not None:
        model.generation_config = GenerationConfig.from_dict(dict(state.value("generation", dict)))
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        _write(model, unfinished)
        tokenizer.save(unfinished)
        unfinished.replace(folder)
    except OSError as error:
        raise ValueError(f"DIR {str(folder)!r} can't be written to: {text_of(error)}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(model: Any, folder: Path, **options: Any) -> None:
    """Save a model of transformers; OSError if the disk does not take it."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder, **options)
    except SafetensorError as error:  # no OSError, even where the system refused
        raise OSError(str(error)) from error


def _config_of(state: Checked) -> PreTrainedConfig:
    """The model's configuration as transformers has it."""
    told: dict[str, Any] = dict(state.value("model", dict))
    kind = told.pop("model_type", None)
    if kind not in ARCHITECTURES:
        raise ValueError(f"{state.where}: the model is a {kind}; supported are {', '.join(ARCHITECTURES)}")
    return AutoConfig.for_model(kind, **told)


def _weights_of(source: Path, state: Checked) -> dict[str, Tensor]:
    """Every weight whole, by its name in transformers."""
    table = state.part("tensors").content
    weights = {
        name: torch.empty(entry["shape"], dtype=KINDS[entry["dtype"]])
        for name, entry in table.items()
        if name.startswith(WEIGHTS)
    }
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
    return {name.removeprefix(WEIGHTS + OURS): value for name, value in weights.items()}
