"""Tiny random models of several families, the same under every attention, with plans and batches for them."""

from __future__ import annotations

import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from burst_attention import Mask, make_plan
from burst_attention.integrations import hf

SEQLEN, VOCABULARY, WINDOW = 40, 64, 7
DOCUMENTS = (0, 11, 12, 30, 40)
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, MIXED | {"use_sliding_window": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, MIXED | {"use_sliding_window": True}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, MIXED),
}


def make_model(name, implementation="burst", dtype=torch.float64, **changes):
    """The same random weights for every implementation."""
    hf.register()
    model_class, config_class, own = MODELS[name]
    config = config_class(**SMALL | own | changes, attn_implementation=implementation, pad_token_id=0)
    torch.manual_seed(0)
    return model_class(config).to(dtype)


def make_plans(name, seqlen=SEQLEN, cu_seqlens=None, **options):
    """What the model takes as its plan: one for all layers, or a mapping."""
    full = make_plan(seqlen, mask=Mask(cu_seqlens=cu_seqlens), **options)
    windowed = full.with_mask(Mask(window=WINDOW, cu_seqlens=cu_seqlens))
    return {"llama": full, "mistral": windowed}.get(name, {None: full, WINDOW: windowed})


def make_batch(seqlen=SEQLEN, rows=2):
    ids = torch.randint(VOCABULARY, (rows, seqlen), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def cache_with_earlier_tokens():
    cache = DynamicCache()
    for layer in range(SMALL["num_hidden_layers"]):
        earlier = torch.zeros(2, SMALL["num_key_value_heads"], 5, SMALL["head_dim"], dtype=torch.float64)
        cache.update(earlier, earlier, layer)
    return cache
