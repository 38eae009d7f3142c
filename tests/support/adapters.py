"""Adapters of PEFT as users attach them: over ranks each must equal one process, or be refused by name."""

import copy

import peft
import torch
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from torch import nn

LINEARS = ["q_proj", "v_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]
PREFIX = r"model is tuned by PEFT's (prefix tuning|cartridges), which passes keys and values"

# By the type of each tuner: what its configuration takes, and None if it must equal one process, else the refusal.
TUNERS = {
    "ADALORA": ({"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": LINEARS}, None),
    "ADAMSS": ({"r": 8, "num_subspaces": 2, "subspace_rank": 1, "target_modules": LINEARS}, None),
    "ADAPTION_PROMPT": (
        {"adapter_len": 3, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
        r"AdaptedAttention, which is not among",
    ),
    "BEFT": ({"target_modules": LINEARS}, None),
    "BOFT": ({"boft_block_size": 4, "target_modules": LINEARS}, None),
    "C3A": ({"block_size": 8, "target_modules": LINEARS}, None),
    "CARTRIDGE": ({"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}, PREFIX),
    "CPT": (
        {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2], "task_type": "CAUSAL_LM"},
        r"model is tuned by PEFT's CPT",
    ),
    "DEFT": ({"r": 4, "target_modules": LINEARS}, None),
    "DELORA": ({"r": 4, "target_modules": LINEARS}, None),
    "FOURIERFT": ({"n_frequency": 20, "target_modules": LINEARS}, None),
    "FROD": ({"target_modules": SQUARE}, None),
    "GLORA": ({"r": 4, "target_modules": LINEARS}, None),
    "GRALORA": ({"r": 4, "gralora_k": 2, "target_modules": LINEARS}, None),
    "HIRA": ({"r": 4, "target_modules": LINEARS}, None),
    "HRA": ({"r": 4, "target_modules": LINEARS}, None),
    "IA3": ({"target_modules": LINEARS, "feedforward_modules": ["down_proj"]}, None),
    "LILY": (
        {"r": 4, "stride_A": 1, "num_B": 2, "target_modules": ["q_proj", "v_proj"]},
        r"lily.layer.Linear, which mixes",
    ),
    "LN_TUNING": ({"target_modules": ["input_layernorm", "norm"]}, None),
    "LOHA": ({"r": 4, "target_modules": LINEARS}, None),
    "LOKR": ({"r": 4, "target_modules": LINEARS}, None),
    "LORA": ({"r": 4, "target_modules": LINEARS}, None),
    "MISS": ({"r": 4, "target_modules": LINEARS}, None),
    "MULTITASK_PROMPT_TUNING": (
        {"num_virtual_tokens": 4, "num_tasks": 2, "prompt_tuning_init": "RANDOM", "task_type": "CAUSAL_LM"},
        r"task_ids",
    ),
    "OFT": ({"oft_block_size": 4, "r": 0, "target_modules": LINEARS}, None),
    "OSF": ({"target_modules": LINEARS, "effective_rank": 4}, None),
    "PEANUT": ({"r": 4, "target_modules": LINEARS}, None),
    "POLY": ({"r": 4, "n_tasks": 2, "target_modules": LINEARS}, r"draws random values"),
    "PREFIX_TUNING": ({"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}, PREFIX),
    "PROMPT_TUNING": ({"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}, None),
    "PSOFT": ({"r": 4, "target_modules": LINEARS}, None),
    "PVERA": ({"r": 4, "target_modules": LINEARS}, r"draws random values"),
    "P_TUNING": ({"num_virtual_tokens": 4, "encoder_hidden_size": 16, "task_type": "CAUSAL_LM"}, None),
    "RANDLORA": ({"r": 4, "target_modules": LINEARS}, None),
    "ROAD": ({"group_size": 4, "target_modules": LINEARS}, None),
    "SHADOW": ({"target_modules": LINEARS}, r"shadow"),
    "SHIRA": ({"r": 4, "target_modules": LINEARS}, None),
    "SUPERTUNING": ({"target_modules": LINEARS}, None),
    "TINYLORA": ({"r": 2, "target_modules": LINEARS}, None),
    "TRAINABLE_TOKENS": ({"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3, 9]}, None),
    "UNILORA": ({"r": 4, "theta_d_length": 64, "target_modules": LINEARS}, None),
    "VBLORA": ({"r": 4, "num_vectors": 8, "vector_length": 8, "target_modules": LINEARS}, None),
    "VERA": ({"r": 4, "target_modules": LINEARS}, None),
    "WAVEFT": ({"n_frequency": 20, "target_modules": LINEARS}, None),
    "XLORA": ({"hidden_size": 32, "task_type": "CAUSAL_LM"}, r"XLoraLinearLayer|output_hidden_states"),
}

# What LoRA alone can be asked for, by the name of the case.
LORA = {
    "dora": ({"use_dora": True}, None),
    "dora of embeddings": ({"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}, None),
    "rslora": ({"use_rslora": True}, None),
    "bias": ({"lora_bias": True}, None),
    "embeddings": ({"target_modules": ["embed_tokens", "v_proj"]}, None),
    "all linear": ({"target_modules": "all-linear"}, None),
    "saved embeddings": ({"modules_to_save": ["embed_tokens"]}, None),
    "saved head": ({"modules_to_save": ["lm_head"]}, None),
    "saved head and embeddings": ({"modules_to_save": ["lm_head", "embed_tokens"]}, None),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, r"lm_head has an adapter \(peft.tuners.lora.layer.Linear\)"),
    "saved norms": ({"modules_to_save": ["input_layernorm"]}, None),
    "trainable tokens": ({"trainable_token_indices": [1, 2, 9]}, None),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 2]]}, None),
    "qalora": ({"use_qalora": True, "qalora_group_size": 8}, None),
    "mica": ({"init_lora_weights": "mica"}, None),
    "activated": (
        {"alora_invocation_tokens": [5, 9], "task_type": "CAUSAL_LM"},
        r"alora_offsets",
    ),
    "velora": ({"velora_config": {"num_groups": 4}}, r"Velora"),
    "montecarlo": ({"monteclora_config": {}}, r"Monteclora"),
    "kasa": ({"kasa_config": KasaConfig(), "init_lora_weights": True}, None),
    "blocks": ({"use_bdlora": BdLoraConfig(target_modules_bd_a=LINEARS, nblocks=2)}, None),
}


def saved_adapter(folder: str, model: nn.Module) -> dict[str, str]:
    """What X-LoRA mixes: a LoRA in a folder."""
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEARS)).save_pretrained(folder)
    return {"one": folder}


def adapted(model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    """``model`` with the adapter, all of whose parameters that learn are away from what they begin with."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, copy.deepcopy(config)).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
