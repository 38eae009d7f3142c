"""Export the model of a finished run or a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import shutil
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from ..checkpoint import files
from ..checkpoint.manifest import STATE, UNFINISHED
from ..checkpoint.snapshot import OURS, WEIGHTS
from ..checkpoint.state import State
from ..config import TrainConfig, checked_settings, with_settings
from ..data.tokenizer import Tokenizer, open_tokenizer
from ..run.folder import first_line, text_of
from ..structure import build_empty
from .lora import merge, with_adapters

KINDS = {name: dtype for dtype, name in files.DTYPES.items()}


def save_model(
    trained: Any,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    rank: int,
    dtype: torch.dtype | None = None,
    lora: int | None = None,
    source: str = "",
) -> None:
    """Save a trained model of transformers in ``dtype`` (None: as trained). Every rank must call it.

    ``lora``: the rank of adapters, which are merged, and saved alone as adapters of the model ``source``.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered: dict[str, Any] = dict(get_model_state_dict(trained, options=options))
    if rank:
        return
    config = deepcopy(trained.config)  # has the attention over ranks, which is no attention of one process
    config._attn_implementation = None
    model = build_empty(config)
    if lora is None:
        _load(model, gathered, "the model")
    else:
        model = merge(with_adapters(model, gathered, lora), folder, source)
    model.generation_config = trained.generation_config
    _write(model, folder, dtype)
    tokenizer.save(folder)


def _load(model: Any, weights: dict[str, Tensor], source: object) -> None:
    """Put whole weights in place of a model's own."""
    missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    model.tie_weights()
    if left := sorted({*missing} - {*getattr(model, "all_tied_weights_keys", {})}):
        raise ValueError(f"{source} has no weights for {', '.join(left)}")


def saved_dtype(config: PreTrainedConfig, name: str = "auto") -> torch.dtype | None:
    """Return the dtype of ``--save-dtype``; ``auto`` is a loaded model's if it has 16 bits. None: as trained."""
    if name != "auto":
        return getattr(torch, name)
    return config.dtype if config.dtype in (torch.bfloat16, torch.float16) else None


def export(source: Path, folder: Path) -> None:
    """Write a checkpoint's model to a new or empty folder, in this process only; ValueError says what is wrong."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"DIR {str(folder)!r} already exists and is not empty; choose another folder")
    state = files.check(source)
    config = _config_of(state)
    saved = with_settings(checked_settings(state.config, str(source)))
    tokenizer = open_tokenizer(saved.data.tokenizer, saved.model.model)
    weights, dtype, lora = _weights_of(source, state), saved_dtype(config, saved.model.save_dtype), saved.model.lora
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        if lora is None:
            model: Any = build_empty(config)
            _load(model, weights, source)
        else:
            model = merge(with_adapters(_loaded(saved, config), weights, lora), unfinished, saved.model.model)
        if state.generation is not None:
            model.generation_config = GenerationConfig.from_dict(dict(state.generation))
        _write(model, unfinished, dtype)
        tokenizer.save(unfinished)
        unfinished.replace(folder)
    except OSError as error:
        raise ValueError(f"DIR {str(folder)!r} can't be written to: {text_of(error)}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _loaded(saved: TrainConfig, config: PreTrainedConfig) -> Any:
    """Return the model that a checkpoint's adapters were trained for, in the dtype in which it was trained."""
    wide = torch.float64 if saved.model.dtype == "float64" else torch.float32
    try:
        return AutoModelForCausalLM.from_pretrained(saved.model.model, config=config, dtype=wide)
    except OSError as error:
        raise ValueError(
            f"the checkpoint holds adapters of --model {saved.model.model!r}, which can't be loaded: "
            f"{first_line(error)}; put it back there"
        ) from None


def _write(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Save a transformers model, its weights in ``dtype`` (None: as they are); OSError if writing fails."""
    from safetensors import SafetensorError

    if dtype is not None:
        model.to(dtype)
    try:
        model.save_pretrained(folder)
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
    with warnings.catch_warnings(action="ignore"):  # torch warns that it loads in one process, as asked for
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(source)), no_dist=True)
    return {name.removeprefix(WEIGHTS + OURS): value for name, value in weights.items()}
