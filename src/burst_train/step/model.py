"""The model: built from a preset or loaded, with sharded parameters, and a forward that returns the loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from burst_attention import Plan
from burst_attention.integrations import hf
from burst_attention.launch.join import CONTEXT, DATA, SHARDS

from ..data.sequences import TokenSequence
from ..data.tokenizer import BYTES, Tokenizer
from ..memory import MemoryConfig
from ..presets import POSITIONS, PRESETS
from ..run.folder import first_line
from ..strategies import Heads, Sharing
from ..structure import build_empty, check_text_alone, decoder_layers
from .compare import NAME as WHOLE_SEQUENCE
from .compare import Compared, register
from .lora import add_adapters
from .positions import set_positions
from .sharding import shard_parameters

# A model may have this many more embeddings than its tokenizer has ids: vocabularies are padded for faster products.
PADDED = 1024
COMPILED = ("input_layernorm", "post_attention_layernorm", "mlp")  # parts of a layer, where it has them


def model_config(
    model: str,
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    training: bool = True,
    loaded: PreTrainedConfig | None = None,
    max_positions: int | None = None,
    rope_scaling: str | None = None,
    named: str | None = None,
) -> PreTrainedConfig:
    """Return the configuration of the model that ``--model`` names; ValueError if tokenizer or positions don't fit.

    ``loaded``: from :func:`load_config`, if it was called. ``named``: the value of ``--tokenizer``.
    """
    if max_positions is not None and max_positions < seq_len:
        raise ValueError(f"--max-positions {max_positions} is less than --seq-len {seq_len}; raise it to at least that")
    if model in PRESETS:
        kind, preset = PRESETS[model]
        own = {
            "vocab_size": preset.get("vocab_size", tokenizer.vocab_size),
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
        }
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**({POSITIONS: seq_len} | preset | own))
    else:
        config = loaded or load_config(model, training=training)
        _check_vocabulary(model, config, tokenizer, named)
    set_positions(config, model, seq_len, training=training, max_positions=max_positions, rope_scaling=rope_scaling)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"--tokenizer has {tokenizer.vocab_size} ids, but --model {model!r} has only {config.vocab_size} embeddings"
        )
    return config


def _check_vocabulary(model: str, config: PreTrainedConfig, tokenizer: Tokenizer, named: str | None) -> None:
    """Raise ValueError if the vocabulary sizes show another model's tokenizer; bytes are always allowed."""
    if named in (None, BYTES, model) or tokenizer.vocab_size + PADDED >= config.vocab_size:
        return
    raise ValueError(
        f"--tokenizer {named!r} has {tokenizer.vocab_size} ids, but --model {model!r} has {config.vocab_size} "
        f"embeddings, so its ids mean other tokens. Omit it to use the model's own, or give --tokenizer {BYTES}"
    )


def quieten_transformers() -> None:
    """Hide the progress bars and warnings of transformers in this process."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # DTensor warns that norms over (data, context) need two reductions; each reduces only one number.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def load_config(model: str, *, training: bool = True, layout: str = "auto") -> PreTrainedConfig:
    """Load the configuration of a model in a folder or on the hub; ValueError if ranks can't train it.

    ``training`` False allows dropout, which evaluation turns off. ``layout``: of the tokens, as in ``Strategy``.
    """
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise ValueError(f"--model {model!r}: there is no such folder")
    if Path(model).is_file():
        raise ValueError(f"--model {model!r} is a file; give the folder that holds the model")
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"--model {model!r}: the folder holds no config.json")
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:
        raise ValueError(
            f"--model {model!r} is not a preset ({', '.join(PRESETS)}) and can't be loaded: {first_line(error)}"
        ) from error
    try:
        empty = build_empty(config)
        check_text_alone(empty)
        hf.check_config(config, training=training, layout=layout)
        _check_parts(config, empty)
    except ValueError as error:
        # The commands run every model as on shards, also on one rank; hf.parallelize leaves it as it is there.
        why = str(error).replace("run it on one rank", "run it by hf.parallelize on one rank")
        raise ValueError(f"--model {model!r}: {why}") from error
    text = config.get_text_config(decoder=True)
    # The causal model of some whole models' configurations is their language model alone (Qwen3.5).
    return text if text is not config and type(empty.config) is type(text) else config


def _check_parts(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Raise ValueError if FSDP2 can't shard the model's layers, or the sizes of its heads are not known."""
    decoder_layers(model)
    for name, factor in hf.added_losses(model).items():
        raise ValueError(
            f"{name}={factor} of the configuration adds a loss, which this command does not compute; set it to 0, or "
            "train by hf.parallelize, which does"
        )
    try:
        heads = Heads.of(config)
    except (AttributeError, RuntimeError) as error:  # transformers raises RuntimeError for sizes that vary
        raise ValueError(
            f"the configuration does not state one size of the heads for all layers ({first_line(error)}); train it by "
            "hf.parallelize and a trainer"
        ) from error
    if hf.attention_windows(model) and not heads.q_heads:
        raise ValueError("the configuration has no num_attention_heads; train it by hf.parallelize and a trainer")


def ranks_of_heads(config: PreTrainedConfig, ranks: int) -> int:
    """Return over how many of ``ranks`` tensor-parallel ranks a model's heads are cut; ValueError if it can't be."""
    if ranks == 1:
        return 1
    try:
        return hf.ranks_of_heads(build_empty(config), ranks)
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {ranks}: {error}") from error


def batch_of(sequences: Sequence[TokenSequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a whole batch: ``input_ids`` and ``shift_labels``, int64 [B, S]; the borders of packed documents."""
    parts = {"input_ids": [each.ids for each in sequences], "shift_labels": [each.targets for each in sequences]}
    batch = {name: torch.from_numpy(np.stack(rows).astype(np.int64)).to(device) for name, rows in parts.items()}
    if (borders := sequences[0].cu_seqlens) is not None:
        batch["cu_seq_lens_q"] = torch.tensor(borders, dtype=torch.int32)
    return batch


def build_model(
    name: str,
    config: PreTrainedConfig,
    sharing: Sharing,
    plan: Plan,
    *,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    everyone: DeviceMesh,
    seed: int,
    memory: MemoryConfig | None = None,
    lora: int | None = None,
    tensor: DeviceMesh | None = None,
) -> nn.Module:
    """Build the model over the ranks of ``plan``, and shard its parameters; a call takes :func:`batch_of`'s entries.

    Weights do not depend on the strategy or the number of ranks. Only rank 0 creates or loads them, and sends the
    others their shards. ``dtype``: of the computation; weights and gradient sums are fp32, or fp64 if it is. ``mesh``:
    (data, context, ...); ``everyone``: its ranks as one axis. ``tensor``: the axis of ``mesh`` over which layers are
    cut.
    """
    root: nn.Module
    memory, first = memory or MemoryConfig(), everyone.get_rank() == 0
    model = _with_weights(name, config, sharing, dtype=dtype, seed=seed, lora=lora, first=first)
    weights = dict(model.state_dict()) if first else {}
    if sharing.cuts_layers:
        compared = root = Compared(model.train(), plan, sequence=sharing.name == "tensor-sequence")
        if memory.optimizer_offload:
            raise ValueError(f"--optimizer-offload is not for --strategy {sharing.name}; leave it out")
        memory.of_layers.apply(model.model)
        compared.cut(mesh[CONTEXT])
        everyone = mesh[DATA]  # FSDP2 shards over the data-parallel groups. It also keeps fp32 weights for bf16
    else:
        if tensor is not None:
            for parameter in model.parameters():  # which ranks compare; the weights follow
                parameter.data = torch.zeros_like(parameter)
            hf.tensor_parallel(model, tensor)
            everyone = mesh[DATA, CONTEXT]._flatten(SHARDS)
        root = hf.parallelize(model.train(), plan=plan, gradients="sum", memory=memory.of_layers)
    if memory.compile:
        for layer in decoder_layers(model):
            for part in COMPILED:
                if part in layer._modules:
                    layer.get_submodule(part).compile()
    shard_parameters(root, model, everyone, dtype, offload=memory.optimizer_offload)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    buffers = [*model.buffers()]  # such as rotary frequencies, which are in no state dict
    dtypes = [[buffer.dtype for buffer in buffers]]  # of a loaded model they follow the weights' dtype
    dist.broadcast_object_list(dtypes, 0)
    for buffer, kind in zip(buffers, dtypes[0], strict=True):
        buffer.data = buffer.data.to(kind)
        dist.broadcast(buffer, 0)
    return root


def _with_weights(
    name: str,
    config: PreTrainedConfig,
    sharing: Sharing,
    *,
    dtype: torch.dtype,
    seed: int,
    lora: int | None,
    first: bool,
) -> PreTrainedModel:
    """Return the whole model on the CPU, in fp32 or fp64; ``first``: whether this rank holds its weights."""
    master = torch.float64 if dtype == torch.float64 else torch.float32
    how = {}
    if sharing.cuts_layers:
        register()
        how["attn_implementation"] = WHOLE_SEQUENCE
    if master == torch.float64:
        how["experts_implementation"] = "eager"  # torch has no grouped products in fp64
    torch.manual_seed(seed)
    with torch.device("cpu" if first else "meta"):
        if first and name not in PRESETS:
            model = _load_weights(name, config, how, master)
        else:
            # Initialized in fp32 for every dtype, so that an fp64 run starts from the same weights.
            model = AutoModelForCausalLM.from_config(config, **how, dtype=torch.float32)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(master)
        if lora is not None:
            torch.manual_seed(seed)
            add_adapters(model, lora)
            for parameter in model.parameters():  # PEFT casts adapters to their layer's dtype, but not on "meta"
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(master)
    if not first:
        # Unwritten memory needs no physical pages, and sharding keeps only this rank's part.
        model.to_empty(device="cpu")
        model.tie_weights()
    whole: PreTrainedModel = model
    return whole


def model_in(root: nn.Module) -> Any:
    """Return the transformers model of :func:`build_model`'s result."""
    return root.model if isinstance(root, Compared) else root


def _load_weights(name: str, config: PreTrainedConfig, how: Mapping[str, str], dtype: torch.dtype) -> PreTrainedModel:
    # --max-positions or --rope-scaling may have changed the configuration; loading changes its dtype.
    options: dict[str, Any] = {**how, "config": deepcopy(config), "dtype": dtype}
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options, output_loading_info=True)
    model, report = loaded
    if report["missing_keys"]:
        raise ValueError(
            f"--model {name!r} has no weights for {', '.join(sorted(report['missing_keys']))}; they would be random"
        )
    loaded_model: PreTrainedModel = model
    return loaded_model
