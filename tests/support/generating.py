"""Small models that generate, alone with transformers' own cache and over ranks as threads."""

import copy
import functools
import os
import signal
import time

import torch
import torch.distributed as dist
from burst_bench.pool import WorkerPool
from transformers import CONFIG_MAPPING

from burst_attention import ExchangeError
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.testing import local_world
from tests.support.conditioning import certain, margin_of_choices
from tests.support.hf_models import HEADS, MIXED, MODELS, SMALL, VOCABULARY, WHOLE_HEADS, WINDOW, make_model
from tests.support.hybrid_models import FAMILIES, make_hybrid
from tests.support.indexed_models import FAMILIES as INDEXED
from tests.support.indexed_models import make_indexed
from tests.support.vision_models import IMAGE, build
from tests.tools import families
from tests.tools.families import model_class

GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
POSITIONS = 32_768
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 16}
# Queries are scaled by a logarithm of their positions.
TEMPERED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
TEMPERED |= {"llama_4_scaling_beta": 0.5}
OTHERS = {  # whose sinks or experts transformers does not initialise
    "gpt_oss": {"num_local_experts": 4, "sliding_window": WINDOW},
    "deepseek_v2": LATENT | EXPERTS | {"first_k_dense_replace": 1},
    "deepseek_v3": LATENT | EXPERTS | {"first_k_dense_replace": 1},
    # Layers of unlike head dims, a second table of token ids.
    "gemma4_text": MIXED
    | {"global_head_dim": 16, "hidden_size_per_layer_input": 8}
    | {"vocab_size_per_layer_input": VOCABULARY},
    "ministral3": {"rope_parameters": TEMPERED},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe": EXPERTS | {"first_k_dense_replace": 1},
}
VISION = "-vision"  # of the name of a model that takes images, too
SHARED = "-shared"  # of the name of a model whose last layers attend to the keys of earlier ones; in fp64
_TWICE = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": WINDOW}
_TWICE |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
OTHERS |= {
    f"gemma4_text{SHARED}": OTHERS["gemma4_text"] | _TWICE,
    f"gemma4_unified_text{SHARED}": {"global_head_dim": 16} | _TWICE,
    f"gemma3n_text{SHARED}": _TWICE
    | {"activation_sparsity_pattern": [0.5, *[0.0] * 5], "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    | {"vocab_size_per_layer_input": VOCABULARY},
}


# Whose layers share keys; or latents of one that is not the last before them, with and without an indexer.
TEXTS = {
    "gemma4": {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": _TWICE["layer_types"]},
    "mistral_large4": {"num_hidden_layers": 6, "kv_source_layers": [0, 1, 0, 1, 4, 4]}
    | {"layer_types": ["indexed_attention"] * 6, "mlp_layer_types": ["dense", *["sparse"] * 5]}
    | {"no_rope_layers": [1, 0, 1, 0, 1, 1], "indexer_types": ["full", "full", "shared", "full", "shared", "full"]},
    # A layer takes the choice of the one before; another chooses after a recurrent layer.
    "glm5_next": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared", "full", "full"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
    },
}


def available(*names):
    """Return those of these vision-language models that the installed transformers has."""
    return tuple(name for name in names if name.removesuffix(VISION) in CONFIG_MAPPING)


@functools.cache
def model_of(name, implementation="burst"):
    """Return a model in fp32, the same under every attention; with an indexer, or of another type, in fp64."""
    if name in INDEXED:
        hf.register()
        indexed = make_indexed(name, stock=True, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS)
        indexed.set_attn_implementation(implementation)
        indexed.config.use_cache = indexed.generation_config.use_cache = True
        return indexed
    if name.endswith(VISION):
        kind = name.removesuffix(VISION)
        return vision_model(kind, implementation, **TEXTS.get(kind, {}))
    if name in FAMILIES:
        hf.register()
        hybrid = make_hybrid(
            name, implementation, double=False, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS
        )
        hybrid.config.use_cache = hybrid.generation_config.use_cache = True
        return hybrid
    if name not in OTHERS and name not in MODELS | HEADS:
        hf.register()
        config = families.tiny_config(name, max_position_embeddings=POSITIONS)
        return families.model_of(name, config, implementation)
    if name not in OTHERS:
        return make_model(name, implementation, torch.float32, max_position_embeddings=POSITIONS).eval()
    hf.register()
    torch.manual_seed(0)
    sizes = SMALL | {"max_position_embeddings": POSITIONS} | OTHERS[name]
    if sizes.get("kv_lora_rank"):
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
        del sizes["head_dim"]  # follows from the parts
    kind = name.removesuffix(SHARED)
    config = CONFIG_MAPPING[kind](**sizes, attn_implementation=implementation, pad_token_id=0)
    model = model_class(kind)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double() if name.endswith(SHARED) else model


def vision_model(kind, implementation="burst", **settings):
    """Return a vision-language model in fp64 that says no token of an image; ``settings``: of its language model."""
    hf.register()
    text = {"max_position_embeddings": POSITIONS} | settings
    model = build(kind, implementation=implementation, **text).eval()
    model.get_output_embeddings().weight.data[IMAGE:] = 0
    generator = torch.Generator().manual_seed(2)
    for own, parameter in model.named_parameters():
        if "softmax_scaling" in own:  # queries grow with their positions
            parameter.data.normal_(float(own.endswith("bias")), 0.3, generator=generator)
    return model


def ids_of(count, rows=1, *, draw=0):
    """Return token ids [rows, count], all but the pad token."""
    generator = torch.Generator().manual_seed(count + 1000 * draw)
    return torch.randint(1, VOCABULARY, (rows, count), generator=generator)


def certain_ids(name, count, rows=1, **options):
    """Return ids after which rounding changes no choice of keys, experts or tokens in one process."""

    def margin(ids):
        return margin_of_choices(model_of(name, "eager"), lambda model: model.generate(ids, **GREEDY | options))

    return certain((ids_of(count, rows, draw=draw) for draw in range(8)), margin)


def alone(name, inputs, implementation="eager", **options):
    """Generate in one process, with transformers' own cache."""
    return model_of(name, implementation).generate(inputs, **GREEDY | options)


def over_ranks(name, world, use, *, make=model_of, **how):
    """Return what ``use(model, cache)`` returns on each of ``world`` ranks. ``how``: options of ``hf.parallelize``."""
    models = [copy.deepcopy(make(name, "burst")) for _ in range(world)]

    def rank(group):
        model = hf.parallelize(models[group.rank()], group, **{"strategy": WHOLE_HEADS} | how)
        return use(model, ShardedCache(model.config, group))

    with local_world(world, timeout=20) as ranks:
        return ranks.run(rank)


def generate(model, cache, inputs, **options):
    return model.generate(inputs, past_key_values=cache, **GREEDY | options)


def check_equal(outs, expected, *, bound=1e-5):
    """Compare tokens, and the logits of each step, of every rank with those of one process."""
    for out in outs:
        assert torch.equal(out.sequences, expected.sequences)
        found, right = torch.stack(out.logits), torch.stack(expected.logits)
        assert (found - right).abs().max() <= bound
        assert torch.equal(found, torch.stack(outs[0].logits)), "ranks have other bits"


def labels_sent(monkeypatch, transport):
    """Return a list that gets (rank, label) of each message that a class of transports sends from now on."""
    labels, post = [], transport.post

    def noted(self, sends, *rest, **named):
        labels.extend((self.rank, named["label"]) for _ in sends)
        return post(self, sends, *rest, **named)

    monkeypatch.setattr(transport, "post", noted)
    return labels


class _Dies:
    """A streamer that ends its process after some tokens."""

    def __init__(self, tokens):
        self.left = tokens

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self):
        pass


def error_of_killing_rank_1(model, cache):
    """Rank 1 ends after 3 tokens; return the other ranks' error and its seconds."""
    started, streamer = time.monotonic(), _Dies(4) if dist.get_rank() == 1 else None
    try:
        generate(model, cache, ids_of(80), max_new_tokens=50, streamer=streamer)
    except ExchangeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def check_that_rank_1_is_named(generates):
    """Run ``generates``, which calls :func:`error_of_killing_rank_1`, over three processes."""
    with WorkerPool(3, timeout=30) as pool:
        results, errors, lost = pool.gather(generates, timeout=240)
    assert set(lost) == {1} and not errors
    for text, seconds in results.values():
        assert "rank" in text and "has stopped" in text and seconds < 20
    assert any("rank 1" in text for text, _ in results.values())
