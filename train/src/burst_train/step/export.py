"""Export the model of a finished run or a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from ..checkpoint import files
from ..checkpoint.manifest import STATE, UNFINISHED
from ..checkpoint.snapshot import WEIGHTS
from ..checkpoint.state import State
from ..config import checked_settings, with_settings
from ..data.tokenizer import Tokenizer, open_tokenizer
from ..run.errors import text_of
from .model import NextTokenModel

OURS = "model."  # prefix of transformers' parameter names in a NextTokenModel
KINDS = {name: dtype for dtype, name in files.DTYPES.items()}


def save_model(
    wrapper: NextTokenModel, tokenizer: Tokenizer, folder: Path, *, rank: int, dtype: torch.dtype | None = None
) -> None:
    """Save the model for ``AutoModelForCausalLM.from_pretrained(folder)``. Every rank must call it; rank 0 writes.

    The attention implementation is not saved, so the reader's default applies.

    Args:
        dtype: dtype of the saved weights; None: as trained, fp32 (fp64).
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = dict(get_model_state_dict(wrapper, options=options))
    if rank:
        return
    model = wrapper.model
    weights = {name.removeprefix(OURS): value.to(dtype or value.dtype) for name, value in weights.items()}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del weights["lm_head.weight"]  # after gathering, the two don't share memory and would be written twice
    _write(model, folder, state_dict=weights)
    if dtype is not None:  # config.json holds the dtype of the training weights
        file = folder / "config.json"
        values = json.loads(file.read_text("utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    tokenizer.save(folder)


def saved_dtype(config: PreTrainedConfig, asked: str = "auto") -> torch.dtype | None:
    """Return the dtype that ``--save-dtype`` asks for; None keeps the training dtype.

    ``auto`` is the dtype of the model's folder if that has 16 bits.
    """
    if asked != "auto":
        return getattr(torch, asked)
    return config.dtype if config.dtype in (torch.bfloat16, torch.float16) else None


def export(source: Path, folder: Path) -> None:
    """Write a checkpoint's model to a new folder, in this process only.

    Args:
        source: the checkpoint's folder; every file is checked against the manifest.
        folder: target that ``AutoModelForCausalLM.from_pretrained`` can load. It must be new or empty.

    Raises:
        ValueError: the checkpoint is damaged, its tokenizer can't be found, or the folder holds files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"DIR {str(folder)!r} already exists and is not empty; choose another folder")
    state = files.check(source)
    config = _config_of(state)
    saved = with_settings(checked_settings(state.config, str(source)))
    tokenizer = open_tokenizer(saved.data.tokenizer, saved.model.model)
    weights, dtype = _weights_of(source, state), saved_dtype(config, saved.model.save_dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    missing = model.load_state_dict(
        {name: value.to(dtype or value.dtype) for name, value in weights.items()}, strict=False, assign=True
    ).missing_keys
    model.tie_weights()
    if left := sorted({*missing} - {*getattr(model, "all_tied_weights_keys", {})}):
        raise ValueError(f"{source} has no weights for {', '.join(left)}")
    if state.generation is not None:
        model.generation_config = GenerationConfig.from_dict(dict(state.generation))
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
    """Save a transformers model; OSError if writing fails."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder, **options)
    except SafetensorError as error:  # safetensors raises it for the system's errors too
        raise OSError(str(error)) from error


def _config_of(state: State) -> PreTrainedConfig:
    """Return the model's configuration for transformers."""
    values = dict(state.model)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{STATE}: this transformers has no model {kind!r}")
    return AutoConfig.for_model(kind, **values)


def _weights_of(source: Path, state: State) -> dict[str, Tensor]:
    """Return every full weight by its name in transformers."""
    weights = {
        name: torch.empty(entry.shape, dtype=KINDS[entry.dtype])
        for name, entry in state.tensors.items()
        if name.startswith(WEIGHTS)
    }
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
    return {name.removeprefix(WEIGHTS + OURS): value for name, value in weights.items()}
