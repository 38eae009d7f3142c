"""Tiny hybrid models in fp64 throughout, and their loss, logits and gradients over ranks and in one process."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from burst_attention import Strategy
from burst_attention.integrations import hf

VOCABULARY = 61
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
_MIDDLE = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": _MIDDLE,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
# (package of transformers, type of its configuration, settings)
FAMILIES = {
    "qwen3_next": ("qwen3_next", "qwen3_next", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", _DELTA),
    "olmo_hybrid": ("olmo_hybrid", "olmo_hybrid", _DELTA | {"linear_num_key_heads": 4}),
    "kimi_linear": (
        "kimi_linear",
        "kimi_linear",
        _EXPERTS
        | _LATENT
        | {
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "layer_types": _MIDDLE,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "q_lora_rank": None,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_expert_group": 1,
        },
    ),
    "minimax": (
        "minimax",
        "minimax",
        {
            "layer_types": _MIDDLE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
            "head_dim": 8,
            "full_attn_alpha_factor": 1.5,
        },
    ),
    "bamba": ("bamba", "bamba", _MAMBA | {"mamba_expand": 2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        "granitemoehybrid",
        _MAMBA
        | {
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "layer_types": _MIDDLE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon_h1": ("falcon_h1", "falcon_h1", _MAMBA | {"num_hidden_layers": 2, "mamba_n_groups": 1, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "nemotron_h",
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "expand": 2,
        },
    ),
    "mamba2": (
        "mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 2},
    ),
    "jamba": (
        "jamba",
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 3,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba": ("mamba", "mamba", {"state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}),
    "falcon_mamba": ("falcon_mamba", "falcon_mamba", {"state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}),
    "lfm2": ("lfm2", "lfm2", _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", "lfm2_moe", _CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1}),
    "lfm3": ("lfm3", "lfm3", {"layer_types": ["conv", "full_attention", "conv"]}),
    # Layers that keep keywords from their attention, which so gets the plan as mixers do.
    "stablelm": ("stablelm", "stablelm", {}),
    "nemotron": ("nemotron", "nemotron", {}),
}


@functools.cache
def double_module(name):
    """transformers' modeling file of a package with its fp32 islands in fp64, so that rounding hides nothing."""
    kind = f"transformers.models.{name}.modeling_{name}"
    source = Path(importlib.util.find_spec(kind).origin).read_text()
    source = re.sub(r"from \.\.\.(\w)", r"from transformers.\1", source)
    source = re.sub(r"from \.\.\. import", "from transformers import", source)
    source = re.sub(r"from \.\.(\w)", r"from transformers.models.\1", source)
    source = re.sub(r"from \.(\w)", rf"from transformers.models.{name}.\1", source)
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = re.sub(r"dtype=torch\.float\b(?!\d)", "dtype=torch.float64", source)
    source = source.replace("@auto_docstring", "@_undocumented")
    plain = "def _undocumented(f=None, **_):\n    return f if f is not None else (lambda g: g)\n"
    source = source.replace("\nimport torch\n", f"\nimport torch\n\n{plain}\n", 1)
    own = f"transformers_modules.modeling_{name}_64"
    module = sys.modules[own] = importlib.util.module_from_spec(importlib.util.spec_from_loader(own, loader=None))
    exec(compile(source, f"<{own}>", "exec"), module.__dict__)
    return module


def make_hybrid(family, implementation="eager", *, double=True, **changes):
    """The same random weights for every implementation, with slow and fast decays. ``changes``: of the settings."""
    package, config_type, own = FAMILIES[family]
    config = CONFIG_MAPPING[config_type](**_BASE | own | changes)
    config._attn_implementation, config._experts_implementation, config.use_cache = implementation, "eager", False
    module = (
        double_module(package)
        if double
        else importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    )
    kind = next(each for name, each in vars(module).items() if name.endswith("ForCausalLM"))
    torch.manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    torch.set_default_dtype(dtype)  # MiniMax computes the decays that it stores
    try:
        model = kind(config).to(dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
    return model.eval()


def _fill(name, parameter, generator):
    if "A_log" in name:
        parameter.uniform_(-3.0, 0.5, generator=generator)
    elif name.endswith(("dt_bias", "dt_proj.bias")):  # of Mamba: with its first values a wrong decay hardly shows
        parameter.uniform_(-5.0, -1.0, generator=generator)
    elif parameter.dim() >= 2:
        parameter.normal_(0, 0.4 if "conv" in name else 0.15, generator=generator)
    elif "bias" in name:
        parameter.normal_(0, 0.1, generator=generator)


def tokens(seqlen, rows=2):
    return torch.randint(1, VOCABULARY, (rows, seqlen), generator=torch.Generator().manual_seed(5))


def one_process(model, ids, documents):
    """(logits, loss, gradients) of one process that runs each document separately."""
    model.zero_grad()
    logits = torch.cat([model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in _pairs(documents)], 1)
    loss = _loss(logits, ids, documents)
    loss.backward()
    return logits.detach(), loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def over_ranks(model, ids, documents, group, *, layout="auto", prepare=None):
    """The same of one rank of a parallelized copy of the model; gradients are this rank's share of a sum."""
    model = copy.deepcopy(model)
    hf.parallelize(model, group, strategy=Strategy(layout=layout), gradients="sum")
    if prepare is not None:
        prepare(model)
    positions = torch.cat([torch.arange(b - a) for a, b in _pairs(documents)])[None].expand(len(ids), -1)
    logits = model(input_ids=ids, position_ids=positions).logits
    loss = _loss(logits, ids, documents)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.item(), gradients


def _loss(logits, ids, documents):
    """The mean over all tokens but each document's first, in the logits' dtype (transformers' own is fp32)."""
    labels = ids.clone()
    labels[:, list(documents[:-1])] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def apart(ours, theirs):
    """(relative difference of logits, of loss, the worst of the gradients and its name)."""
    logits, loss, gradients = theirs
    assert all(result[2].keys() == gradients.keys() for result in ours)
    worst = max(
        (relative(sum(result[2][name] for result in ours), gradient), name) for name, gradient in gradients.items()
    )
    return relative(ours[0][0], logits), abs(ours[0][1] / loss - 1), worst


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp_min(1e-300)).item()


def _pairs(documents):
    return list(itertools.pairwise(documents))
