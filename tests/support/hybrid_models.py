"""Tiny hybrid models in fp64 throughout, and their loss, logits and gradients over ranks and in one process."""

import copy
import importlib
import itertools

import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from burst_attention import Strategy
from burst_attention.integrations import hf
from burst_attention.testing import local_world
from tests.tools import families

from .conditioning import certain, margin_of_choices, name_of_worst

VOCABULARY = 61
_BASE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_BASE |= {"head_dim": 8, "max_position_embeddings": 4096}
# These only where the configuration has them.
_SMALLER = (
    dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads", "mamba_d_head", "mamba_head_dim"), 8)
    | dict.fromkeys(("mamba_d_state", "ssm_state_size", "chunk_size", "mamba_chunk_size", "linear_key_head_dim"), 8)
    | {"mamba_d_ssm": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
)
_MIDDLE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = _MIDDLE | {"linear_value_head_dim": 12}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_TYPES = {"qwen3_5": "qwen3_5_text"}
# By package of transformers, settings that differ from those of families.tiny_config.
FAMILIES = {
    "qwen3_next": _DELTA,
    "qwen3_5": _DELTA,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": _MIDDLE | {"num_experts": 4, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "minimax": _MIDDLE | {"block_size": 8, "full_attn_alpha_factor": 1.5},
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 2},
    "granitemoehybrid": _MIDDLE | {"mamba_n_groups": 1, "shared_intermediate_size": 16},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_n_groups": 1},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    "mamba2": {"num_hidden_layers": 2, "head_dim": 8, "state_size": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 3, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba": {"num_hidden_layers": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "lfm2": _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    # Layers that keep keywords from their attention, which so gets the plan as mixers do.
    "stablelm": {},
    "nemotron": {},
} | ({"lara_mini": _DELTA} if "lara_mini" in CONFIG_MAPPING else {})  # of transformers 5.24


def make_hybrid(family, implementation="eager", *, double=True, **changes):
    """The same random weights for every implementation, with slow and fast decays. ``changes``: of the settings."""
    kind = _TYPES.get(family, family)
    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = _BASE | {name: size for name, size in _SMALLER.items() if name in known}
    config = families.tiny_config(kind, **sizes | FAMILIES[family] | changes)
    config._attn_implementation, config._experts_implementation, config.use_cache = implementation, "eager", False
    stock = f"transformers.models.{family}.modeling_{family}"
    module = families.double_module(family) if double else importlib.import_module(stock)
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


def tokens(seqlen, rows=2, *, seed=5):
    return torch.randint(1, VOCABULARY, (rows, seqlen), generator=torch.Generator().manual_seed(seed))


def certain_tokens(model, documents, rows=2):
    """Tokens of which rounding changes no choice of experts or keys, where each document runs separately."""

    def margin(ids):
        return margin_of_choices(model, lambda moved: logits_of(moved, ids, documents))

    return certain((tokens(documents[-1], rows, seed=seed) for seed in range(5, 13)), margin)


def logits_of(model, ids, documents):
    """The logits of one process that runs each document separately."""
    return torch.cat([model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in _pairs(documents)], 1)


def one_process(model, ids, documents):
    """(logits, loss, gradients) of one process that runs each document separately."""
    model.zero_grad()
    logits = logits_of(model, ids, documents)
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


def check_steps(model, world, documents, *, rows, layout, prepare, hidden, gradients):
    """Assert that a step over ranks is one process's, its hidden states and gradients within these bounds."""
    ids = certain_tokens(model, documents, rows)
    expected = one_process(model, ids, documents)
    model.zero_grad()
    with local_world(world) as ranks:
        found = ranks.run(lambda group: over_ranks(model, ids, documents, group, layout=layout, prepare=prepare))
    states, loss, (gradient, name) = apart(found, expected)
    assert states <= hidden and loss <= hidden and gradient <= gradients, (states, loss, gradient, name)


def _loss(logits, ids, documents):
    """The mean over all tokens but each document's first, in the logits' dtype (transformers' own is fp32)."""
    labels = ids.clone()
    labels[:, list(documents[:-1])] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def apart(ours, theirs):
    """(relative difference of logits, of loss, the worst of the gradients and its name)."""
    logits, loss, gradients = theirs
    assert all(result[2].keys() == gradients.keys() for result in ours)
    errors = {name: relative(sum(result[2][name] for result in ours), x) for name, x in gradients.items()}
    worst = name_of_worst(errors)
    return relative(ours[0][0], logits), abs(ours[0][1] / loss - 1), (errors[worst], worst)


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp_min(1e-300)).item()


def _pairs(documents):
    return list(itertools.pairwise(documents))
