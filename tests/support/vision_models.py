"""Tiny vision-language models with random weights, and batches with images at different places."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

IMAGE, VIDEO, BEGIN, END, VOCABULARY, LENGTH = 60, 61, 62, 63, 64, 37
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_PATCHES = {"patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3}
CONFIGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        TEXT | {"rope_parameters": _SECTIONS},
        _PATCHES | {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        TEXT | {"rope_parameters": _SECTIONS},
        _PATCHES
        | {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        TEXT | {"rope_parameters": _SECTIONS},
        _PATCHES
        | {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    "llava": (
        LlavaConfig,
        TEXT | {"model_type": "llama"},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
    ),
}


def make_model(name: str) -> PreTrainedModel:
    """The same random fp64 weights each time."""
    kind, text, vision = CONFIGS[name]
    own = TOKENS | {"image_token_index": IMAGE, "pad_token_id": 0} if name == "llava" else TOKENS
    config = kind(text_config=text | {"pad_token_id": 0}, vision_config=vision, **own)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").double().train()


def make_batch(name: str, *, images: bool = True, padded: bool = False) -> dict[str, torch.Tensor]:
    """Two rows; the first has an image at 5, the second one at 17, which lies across the borders of shards."""
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (2, LENGTH), generator=make)
    batch: dict[str, torch.Tensor] = {}
    if images:
        for row, at in enumerate((5, 17)):
            ids[row, at - 1], ids[row, at : at + 4], ids[row, at + 4] = BEGIN, IMAGE, END
        if name == "llava":
            batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=make, dtype=torch.float64)
        else:  # two images of 4 x 4 patches, which become 2 x 2 tokens
            batch["pixel_values"] = torch.randn(32, 3 * 2 * 2, generator=make, dtype=torch.float64)
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
            batch["mm_token_type_ids"] = (ids == IMAGE).int()
    labels = ids.clone()
    labels[(ids == IMAGE) | (ids == BEGIN) | (ids == END)] = -100
    batch |= {"input_ids": ids, "labels": labels}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 30:] = 0
        labels[1, 30:] = -100
    return batch
