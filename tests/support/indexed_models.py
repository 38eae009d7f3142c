"""Tiny models whose indexers choose keys, in fp64 throughout, and the choices that they make."""

import functools
import importlib

import torch
from torch import nn
from transformers import CONFIG_MAPPING, GenerationMixin, GlmMoeDsaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from burst_attention.attention.plan import Plan
from burst_attention.integrations.hf.layers import indexed
from burst_attention.kernels import chosen as kernel
from tests.support.hybrid_models import VOCABULARY
from tests.tools import families

SHARING = "mistral_large4"  # of transformers 5.24, whose layers share latents
COUNT = 8  # keys of a query, of up to a hundred that it sees
# With many heads no key of a query has the score 0 exactly, so that stock's order of equal scores does not matter.
_SIZES = {"vocab_size": VOCABULARY, "index_topk": COUNT, "index_n_heads": 16, "index_head_dim": 8, "kv_lora_rank": 16}
_SIZES |= {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": 24}
_SIZES |= {"num_hidden_layers": 3, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4}
_SHARED = {"indexer_types": ["full", "shared", "full"]}
_SLIDING = {"layer_types": ["indexed_attention", "sliding_attention"] * 2}
_BLOCKS = {"index_n_heads": 2, "index_block_size": 5, "index_topk_blocks": 3, "index_local_blocks": 2, "head_dim": 8}
_BLOCKS |= {"layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]}
# Latents of two kinds (rotated or not), shared by layers with and without an indexer: a layer's are replaced later on.
_SOURCES = {"num_hidden_layers": 6, "kv_source_layers": [0, 0, 2, 2, 4, 4], "no_rope_layers": [1, 1, 1, 1, 0, 0]}
_SOURCES |= {"indexer_types": ["full", "shared", "full", "full", "shared", "full"]}
_SOURCES |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "attention_factor": 1.0}}
_SOURCES["rope_parameters"] |= {"original_max_position_embeddings": 1024}
# By package of transformers: the type of the configuration, and settings.
FAMILIES = {
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", _SHARED),
    "axk2": ("axk2", {}),
    "dots3_note": ("dots3_note_text", {"num_hidden_layers": 4, "sliding_window": 7} | _SLIDING),
    "hy_v4": ("hy_v4", _SHARED),
    "minimax_m3_vl": ("minimax_m3_vl_text", _BLOCKS),
} | ({SHARING: (f"{SHARING}_text", _SOURCES)} if SHARING in CONFIG_MAPPING else {})
# Whose attention projects keys and values from latents, and those that a cache over ranks takes.
LATENTS = [family for family in FAMILIES if family != "minimax_m3_vl"]
CACHED = [family for family in FAMILIES if family != SHARING]
# Of these the indexer pools keys.
POOL = 4  # tokens; with COUNT keys a query chooses among up to 24 pools
_POOLED = {"num_hidden_layers": 5, "index_kpool": POOL, "qk_rope_head_dim": 0, "head_dim": 0, "num_key_value_heads": 4}
_POOLED |= {"layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention", "indexed_attention"]}
_POOLED |= {"indexer_types": ["full", "full", "shared", "full", "full"], "linear_num_heads": 2, "linear_head_dim": 8}
_POOLED |= {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"], "hc_mult": 2, "hc_sinkhorn_iters": 3}
POOLED = {"glm5_next": ("glm5_next_text", _POOLED)}


HEADS = "-heads"  # of a family's name: with a latent that is larger than all heads, which are sent instead


def make_indexed(family, *, stock=False, **changes):
    """The same random weights each time. ``stock``: in transformers' module, whose norms and angles are in fp32."""
    if family.endswith(HEADS):
        family, changes = family.removesuffix(HEADS), {"kv_lora_rank": 96} | changes
    kind, own = (FAMILIES | POOLED)[family]
    config = families.tiny_config(kind, **_SIZES | {"max_position_embeddings": 4096} | own | changes)
    config._attn_implementation, config._experts_implementation, config.use_cache = "eager", "eager", False
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}") if stock else None
    module = families.double_module(family) if module is None else module
    made = next((each for name, each in vars(module).items() if name.endswith("ForCausalLM")), None)
    if made is None and family in POOLED:
        made = text_model(module)
    made = _with_head(module.MistralLarge4PreTrainedModel, module.MistralLarge4TextModel) if made is None else made
    torch.manual_seed(0)
    model = made(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-5.0, -1.0, generator=generator)  # slow and fast decays
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.15, generator=generator)
            elif name.endswith("softmax_scaling.bias"):
                parameter.normal_(1, 0.3, generator=generator)
            elif name.endswith(("softmax_scaling.scale", "alpha")):
                parameter.normal_(0, 0.3, generator=generator)
            elif "norm" not in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model.eval()


def _with_head(base, text):
    """The class of a language model, for a text model that transformers has inside of a vision-language model alone."""

    class MistralLarge4ForCausalLM(base, GenerationMixin):
        def __init__(self, config):
            super().__init__(config)
            self.model = text(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
            out = self.model(input_ids=input_ids, **kwargs)
            hidden = out.last_hidden_state
            logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
            logits = torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    return MistralLarge4ForCausalLM


@functools.cache
def text_model(module):
    """The causal language model of GLM-5.3's text: transformers has it inside of a vision-language model alone."""

    class Glm5NextTextForCausalLM(module.Glm5NextPreTrainedModel, GenerationMixin):
        config: module.Glm5NextTextConfig

        def __init__(self, config):
            super().__init__(config)
            self.model, self.vocab_size = module.Glm5NextTextModel(config), config.vocab_size
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        forward = GlmMoeDsaForCausalLM.forward

    Glm5NextTextForCausalLM.__module__ = module.__name__
    return Glm5NextTextForCausalLM


def noting_choices(model):
    """A list that gets each indexer's choice, [B, S, count], as a model of one process runs."""
    found = []
    for part in model.modules():
        if type(part).__name__.endswith("Indexer"):
            part.register_forward_hook(lambda _, __, chosen: found.append(chosen.long()))
    return found


class Sent:
    """Notes what the kernel gets: (key heads, numbers of a key, those that are its value or 0)."""

    def __init__(self, monkeypatch):
        self.found = set()
        monkeypatch.setattr(kernel, "forward", functools.partial(self._noted, kernel.forward))

    def _noted(self, forward, q, k, v, *given):
        self.found.add((k.shape[1], k.shape[3], v if isinstance(v, int) else 0))
        return forward(q, k, v, *given)


class Choices:
    """Notes what indexers get as their choice over all ranks, in the order of calls on shards."""

    def __init__(self, monkeypatch):
        self.found, choose = [], indexed._IndexerCall.choose
        monkeypatch.setattr(indexed._IndexerCall, "choose", lambda *given, **how: self._noted(choose, *given, **how))

    def _noted(self, choose, call, *given, **how):
        chosen, plan = choose(call, *given, **how), call.plan
        whole = plan.unshard(chosen, chosen.dim() - 2) if isinstance(plan, Plan) else None
        if whole is not None and plan.rank == 0:
            self.found.append(whole)
        return chosen
