#!/usr/bin/env bash
# Two conversations with one Qwen2.5-VL in transformers, each with a cache of its own. A call keeps in the model how far
# its positions differ from its columns, and a later turn adds that, whosever it is. So the second turn of a conversation
# without images gets other positions, and other logits, if one with an image was continued in between.
exec "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 <<'EOF'
import sys

import torch
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

IMAGE, BEGIN, END = 60, 61, 62
text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
text |= {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
tokens = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
torch.manual_seed(0)
config = Qwen2_5_VLConfig(text_config=text, vision_config=seen, **tokens)
model = Qwen2_5_VLForConditionalGeneration(config).eval()
for x in model.parameters():
    torch.nn.init.normal_(x, std=0.2)

words, more = torch.arange(1, 21)[None], torch.tensor([[5, 7, 9]])
picture = torch.tensor([[3, BEGIN, *[IMAGE] * 16, END, 4, 5]])
pixels = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
pixels["mm_token_type_ids"] = (picture == IMAGE).int()
how = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def second_turn(other_between):
    cache = DynamicCache(config=model.config)
    said = model.generate(words, cache=cache, **how).sequences
    if other_between:
        model.generate(picture, cache=DynamicCache(config=model.config), **pixels, **how)
    return model.generate(torch.cat([said, more], 1), cache=cache, **how).logits[0]


print("expected: a conversation with a cache of its own goes on the same, whatever else the model was asked in between")
alone, between = second_turn(False), second_turn(True)
print(f"seen: the logits of its second turn differ by {(alone - between).abs().max():.1e} (their largest is "
      f"{alone.abs().max():.1e}); asked alone again, by {(second_turn(False) - alone).abs().max():.1e}")
changed = (alone - between).abs().max() < 1e-3 or not torch.equal(second_turn(False), alone)
sys.exit("changed" if changed else 0)
EOF
