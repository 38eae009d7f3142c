"""Tiny random models of several families, the same under every attention, with plans and batches for them."""

import zlib

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, DynamicCache

from burst_attention import Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import next_token_loss
from tests.support.equal import equal
from tests.tools.families import model_class

SEQLEN, VOCABULARY, WINDOW = 40, 64, 7
DOCUMENTS = (0, 11, 12, 30, 40)
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
SMALL |= {"attention_dropout": 0.0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# (type of the configuration, settings)
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", MIXED | {"use_sliding_window": True}),
    "qwen3": ("qwen3", MIXED | {"use_sliding_window": True}),
    "gemma3": ("gemma3_text", MIXED),
}
# Models whose logits are more than a product.
HEADS = {
    "granite": ("granite", {"logits_scaling": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", MIXED | {"logit_scale": 0.375}),
    "gemma2": ("gemma2", MIXED | {"attn_logit_softcapping": None, "final_logit_softcapping": 2.5}),
    "gemma3 capped": ("gemma3_text", MIXED | {"final_logit_softcapping": 2.0}),
    "phi": ("phi", {}),
}


# In place of "auto", which simulates candidates for most of a test's time.
WHOLE_HEADS = Strategy(layout="zigzag", ulysses_degree=1)
CUT_HEADS = Strategy(layout="zigzag", ulysses_degree=2, cache_qkv=True)


def fixed_strategy(*case):
    """Heads are whole, or cut in two where ranks are even: by the case, so that both occur."""
    cut = dist.get_world_size() % 2 == 0 and zlib.crc32(repr(case).encode()) % 2
    return CUT_HEADS if cut else WHOLE_HEADS


def make_model(name, implementation="burst", dtype=torch.float64, **changes):
    """The same random weights for every implementation."""
    hf.register()
    kind, own = (MODELS | HEADS)[name]
    config = CONFIG_MAPPING[kind](**SMALL | own | changes, attn_implementation=implementation, pad_token_id=0)
    torch.manual_seed(0)
    model = model_class(kind)(config).to(dtype)
    if name in HEADS:  # logits so large that what is made of them changes the loss
        model.lm_head.weight.data *= 20
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def make_plans(name, seqlen=SEQLEN, cu_seqlens=None, layout="auto", **options):
    """What the model takes as its plan: one for all layers, or a mapping."""
    full = make_plan(seqlen, mask=Mask(cu_seqlens=cu_seqlens), strategy=Strategy(layout=layout), **options)
    windowed = full.with_mask(Mask(window=WINDOW, cu_seqlens=cu_seqlens))
    alone = dict.fromkeys(("llama", "granite", "cohere", "phi"), full) | {"mistral": windowed}
    return alone.get(name, {None: full, WINDOW: windowed})


def make_batch(seqlen=SEQLEN, rows=2):
    ids = torch.randint(VOCABULARY, (rows, seqlen), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def cache_with_earlier_tokens():
    cache = DynamicCache()
    for layer in range(SMALL["num_hidden_layers"]):
        earlier = torch.zeros(2, SMALL["num_key_value_heads"], 5, SMALL["head_dim"], dtype=torch.float64)
        cache.update(earlier, earlier, layer)
    return cache


def on_shards(name, seqlen=SEQLEN, **how):
    """Compare the loss of a rank's own states with the model's own; ``how``: of :func:`equal`.

    Return also how far the loss is from that of the head's product alone.
    """
    from_plain = []

    def call(model, batch):
        with hf.shards(model, batch) as shard:
            hidden = model.model(**shard)[0]
        loss = hf.next_token_loss(model, hidden, shard.labels, shard.plan)
        with torch.no_grad():
            plain = next_token_loss(hidden, model.lm_head.weight, shard.labels, shard.plan)
        from_plain.append((abs(loss - plain) / plain).item())
        return loss

    return equal(make_model(name, "eager"), make_batch(seqlen), call=call, gradients="sum", **how), min(from_plain)
