#!/usr/bin/env bash
# Layers of Mistral Large 4 share latent keys and values: layer 1 reads what layer 0 stored, layer 3 what layer 2 stored.
# All are stored in one place. With gradient checkpointing, layer 1 runs again in the backward, after layer 2 stored its
# own. It reads those, and its gradients are wrong, without an error.
exec "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 <<'EOF'
import copy
import sys

import torch
from transformers import MistralLarge4TextConfig, MistralLarge4TextModel

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "v_head_dim": 8}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
sizes |= {"qk_nope_head_dim": 8, "index_topk": 8, "index_head_dim": 8, "index_n_heads": 8, "initializer_range": 0.2}
sizes |= {"mlp_layer_types": ["dense"] * 4, "no_rope_layers": [1] * 4}
ids = torch.randint(64, (1, 48), generator=torch.Generator().manual_seed(1))


def gradients(model, checkpointing):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(input_ids=ids, use_cache=False).last_hidden_state[..., :8].sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


print("expected: gradient checkpointing changes no gradient: they differ by 0")
seen = {}
for sources in ([0, 0, 2, 2], [0, 0, 0, 0]):
    torch.manual_seed(0)
    model = MistralLarge4TextModel(MistralLarge4TextConfig(**sizes, kv_source_layers=sources))
    plain, again = gradients(model, False), gradients(model, True)
    apart = max(((again[name] - x).norm() / x.norm()).item() for name, x in plain.items())
    seen[tuple(sources)] = apart > 1e-3
    print(f"seen: kv_source_layers={sources}: they differ by {apart:.1e}, relative to the gradient's norm")
sys.exit("changed" if seen != {(0, 0, 2, 2): True, (0, 0, 0, 0): False} else 0)
EOF
