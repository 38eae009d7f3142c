#!/usr/bin/env bash
# use_bidirectional_attention=True of a GemmaConfig (transformers 5.24.0): the first token's logits should depend on the
# last token, whatever computes the attention. With "sdpa" they do; with "eager" the model stays causal, without a word.
"$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 <<'PY'
import sys

import torch
from transformers import GemmaConfig, GemmaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ids = torch.arange(1, 13)[None]
other = ids.clone()
other[0, -1] = 50
seen = {}
for implementation in ("eager", "sdpa"):
    torch.manual_seed(0)
    config = GemmaConfig(**sizes, use_bidirectional_attention=True, attn_implementation=implementation)
    model = GemmaForCausalLM(config).eval()
    with torch.no_grad():
        first, second = (model(input_ids=x, use_cache=False).logits[0, 0] for x in (ids, other))
    seen[implementation] = not torch.equal(first, second)
print("expected: the first token sees the last one, by eager and by sdpa")
print(f"seen: {seen}")
sys.exit(0 if seen == {"eager": False, "sdpa": True} else "changed")
PY
