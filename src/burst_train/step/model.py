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
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from burst_attention.attention.batch import Plans
from burst_attention.comm.agreement import Agreement
from burst_attention.comm.link import connect, resolve_group
from burst_attention.integrations import hf
from burst_attention.integrations.hf import tensor_axis
from burst_attention.integrations.hf.checks import experts_for
from burst_attention.integrations.hf.reading import read
from burst_attention.integrations.hf.reading.attached import check_random
from burst_attention.integrations.hf.reading.known import ALONE
from burst_attention.integrations.hf.stub_forward import added_losses, body_of
from burst_attention.launch.join import CONTEXT, DATA, SHARDS
from burst_attention.loss import Head, next_token_loss, next_token_nll

from ..data.sequences import TokenSequence
from ..data.tokenizer import BYTES, Tokenizer
from ..memory import MemoryConfig
from ..parallel import Heads, Parallelism
from ..parallel.body import build_empty, run_on_shards, windows_of
from ..presets import POSITIONS, PRESETS
from ..run.folder import first_line
from .lora import add_adapters
from .positions import set_positions

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
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"--model {model!r}: the folder holds no config.json")
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:
        raise ValueError(
            f"--model {model!r} is not a preset ({', '.join(PRESETS)}) and can't be loaded: {first_line(error)}"
        ) from error
    try:
        hf.check_config(config, training=training, layout=layout)
        empty = build_empty(config)
        _check_parts(config, empty)
        if training:
            check_random(read(empty))
    except ValueError as error:
        # The commands run every model as on shards, also on one rank; hf.parallelize leaves it as it is there.
        why = str(error).replace(ALONE, ALONE.replace("run it", "run it by hf.parallelize"))
        raise ValueError(f"--model {model!r}: {why}") from error
    text = config.get_text_config(decoder=True)
    # The causal model of some whole models' configurations is their language model alone (Qwen3.5).
    return text if text is not config and type(empty.config) is type(text) else config


def _check_parts(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Raise ValueError if FSDP2 can't shard the model's layers, or its forward adds a loss."""
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True of the configuration adds the router's loss, which this command does not "
            "compute; set it to false, or train by hf.parallelize, which does"
        )
    for name, factor in added_losses(model).items():
        raise ValueError(
            f"{name}={factor} of the configuration adds a loss, which this command does not compute; set it to 0, or "
            "train by hf.parallelize, which does"
        )
    if idle := getattr(config, "zero_expert_num", None):
        raise ValueError(
            f"zero_expert_num={idle} of the configuration: a rank whose tokens all go to such experts has no gradient "
            "for the others, and FSDP2 needs one on every rank; train it by hf.parallelize and DDP"
        )
    try:
        heads = Heads.of(config)
    except (AttributeError, RuntimeError) as error:  # transformers raises RuntimeError for sizes that vary
        raise ValueError(
            f"the configuration does not state one size of the heads for all layers ({first_line(error)}); train it by "
            "hf.parallelize and a trainer"
        ) from error
    if windows_of(config) and not heads.q_heads:
        raise ValueError("the configuration has no num_attention_heads; train it by hf.parallelize and a trainer")


def ranks_of_heads(config: PreTrainedConfig, ranks: int) -> int:
    """Return over how many of ``ranks`` tensor-parallel ranks a model's heads are cut; ValueError if it can't be."""
    if ranks == 1:
        return 1
    try:
        return tensor_axis.plan_of(build_empty(config), ranks)[1]
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {ranks}: {error}") from error


def batch_of(sequences: Sequence[TokenSequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the global batch for a strategy's ``shard``: ``input_ids`` and unshifted ``labels``, int64 [B, S]."""
    parts = {"input_ids": [each.ids for each in sequences], "labels": [each.labels for each in sequences]}
    return {name: torch.from_numpy(np.stack(rows).astype(np.int64)).to(device) for name, rows in parts.items()}


class NextTokenModel(nn.Module):
    """A causal language model whose forward is its loss, so that the head's weight is used inside FSDP's root."""

    def __init__(self, model: PreTrainedModel, parallelism: Parallelism) -> None:
        super().__init__()
        self.model = model
        self.parallelism = parallelism
        self.form = hf.find_form(model)

    def forward(
        self,
        shard: dict[str, torch.Tensor],
        plans: Plans,
        num_valid: int | None = None,
        *,
        per_token: bool = False,
    ) -> torch.Tensor:
        """Return the mean loss of a shard over ``num_valid`` tokens, or the losses ``per_token`` [B, S_local]."""
        hidden, head = self.parallelism.hidden(self.model, shard, plans), self._head()
        plan, labels = Plans.of(plans).one, shard["shift_labels"]
        if per_token:
            return next_token_nll(hidden, head.weight, labels, plan, **head.options)
        return next_token_loss(hidden, head.weight, labels, plan, **head.options, num_valid=num_valid)

    def _head(self) -> Head:
        return self.parallelism.head(hf.find_head(self.model, self.form))

    def last_logits(self, shard: dict[str, torch.Tensor], plans: Plans) -> torch.Tensor | None:
        """Return the next token's logits [B, V] on the last token's rank; None elsewhere."""
        hidden = self.parallelism.hidden(self.model, shard, plans)
        plan = Plans.of(plans).one
        here = (plan.positions == plan.seqlen - 1).nonzero()
        return self._head().local().logits(hidden[:, here[0, 0]]) if len(here) else None


def build_model(
    name: str,
    config: PreTrainedConfig,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    everyone: DeviceMesh,
    seed: int,
    memory: MemoryConfig | None = None,
    lora: int | None = None,
    tensor: DeviceMesh | None = None,
) -> NextTokenModel:
    """Build the model and shard its parameters. Weights do not depend on the strategy or the number of ranks.

    Only rank 0 creates or loads the weights, and sends the others their shards. ``dtype``: of the computation; weights
    and gradient sums are fp32, or fp64 if it is. ``mesh``: (data, context, ...); ``everyone``: its ranks as one axis.
    ``tensor``: the axis of ``mesh`` over which layers are cut.
    """
    hf.register()
    master = torch.float64 if dtype == torch.float64 else torch.float32
    how = {"attn_implementation": hf.NAME, **experts_for(dtype)}
    first = everyone.get_rank() == 0
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
    if not first:
        # Unwritten memory needs no physical pages, and sharding keeps only this rank's part.
        model.to_empty(device="cpu")
        model.tie_weights()
    memory = memory or MemoryConfig()
    _, agreement = connect(resolve_group(mesh[CONTEXT]), None)
    _save_memory(body_of(model), memory, agreement)
    run_on_shards(model)
    wrapper = NextTokenModel(model.train(), parallelism)
    weights = dict(wrapper.state_dict()) if first else {}
    if tensor is not None:
        tensor_axis.cut(model, tensor, connect(resolve_group(tensor), None)[1])
        everyone = mesh[DATA, CONTEXT]._flatten(SHARDS)
    parallelism.spread(wrapper, mesh=mesh, everyone=everyone, dtype=dtype, offload=memory.optimizer_offload)
    register_fsdp_forward_method(wrapper, "last_logits")
    set_model_state_dict(wrapper, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    buffers = [*wrapper.buffers()]  # such as rotary frequencies, which are in no state dict
    dtypes = [[buffer.dtype for buffer in buffers]]  # of a loaded model they follow the weights' dtype
    dist.broadcast_object_list(dtypes, 0)
    for buffer, kind in zip(buffers, dtypes[0], strict=True):
        buffer.data = buffer.data.to(kind)
        dist.broadcast(buffer, 0)
    return wrapper


def _save_memory(body: nn.Module, memory: MemoryConfig, agreement: Agreement) -> None:
    """Apply ``memory`` to a model without its head, before FSDP2; ValueError on every rank if one can't."""
    with agreement.entering("the model"):
        hf.Memory(
            recompute=memory.remat,
            attention_chunks=memory.attention_chunks,
            mlp_chunks=memory.mlp_chunks,
            offload=None if memory.offload == "none" else memory.offload,
        ).apply(body)
    agreement.agree("the model", {"memory": repr(memory)})
    if memory.compile:
        for layer in body.modules():
            for name in COMPILED if isinstance(layer, GradientCheckpointingLayer) else ():
                if name in layer._modules:
                    layer.get_submodule(name).compile()


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
