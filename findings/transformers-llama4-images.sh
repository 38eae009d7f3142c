#!/usr/bin/env bash
# Llama4ForConditionalGeneration of transformers 5.24.0 can't be called, with or without images: its forward reads
# image_outputs of its language model's output, which has no such field. 5.23.0 runs the same call.
for version in 5.23.0 5.24.0; do
    "$(dirname "$0")/in-venv" torch==2.13.0 transformers==$version <<'PY' || exit
import sys

import torch
import transformers
from transformers import Llama4Config, Llama4ForConditionalGeneration

text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8}
text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
config = Llama4Config(text_config=text | {"pad_token_id": 0}, vision_config=vision)
model = Llama4ForConditionalGeneration(config).eval()
print("expected: logits of 8 tokens")
try:
    with torch.no_grad():
        seen = str(list(model(input_ids=torch.randint(1, 64, (1, 8))).logits.shape))
except AttributeError as error:
    seen = f"AttributeError: {error}"
print(f"seen: {seen}")
broken = transformers.__version__ == "5.24.0"
sys.exit("changed" if seen.startswith("AttributeError") != broken else 0)
PY
done
