#!/usr/bin/env bash
# Two documents share a row, and position_ids restart at 0 where the second begins. transformers keeps such documents
# apart, but not in a call with default arguments: use_cache=True makes an empty cache, and with a cache it doesn't look
# at the positions. In gpt-oss documents see each other even with use_cache=False.
exec "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 <<'EOF'
import sys

import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
torch.manual_seed(0)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**sizes)).eval(),
    "gpt-oss": GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)).eval(),
}
ids = torch.randint(64, (1, 24))
other = ids.clone()
other[:, :11] = (ids[:, :11] + 1) % 64  # another first document
positions = torch.cat([torch.arange(11), torch.arange(13)])[None]
print("expected: logits of the second document don't depend on the first one: they differ by 0")
seen = {}
for name, model in models.items():
    for options in ({}, {"use_cache": False}):
        with torch.no_grad():
            one, two = (model(x, position_ids=positions, **options).logits[:, 11:] for x in (ids, other))
        difference = (one - two).abs().max().item()
        seen[name, *options] = difference > 1e-3
        print(f"seen: {name}, {options or 'default arguments'}: they differ by {difference:.1e}")
known = {("Llama",): True, ("Llama", "use_cache"): False, ("gpt-oss",): True, ("gpt-oss", "use_cache"): True}
sys.exit("changed" if seen != known else 0)
EOF
