"""Tiny vision-language models of any family with random weights, and batches with images at different places."""

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from burst_attention.integrations.hf.reading.forwards import body_of
from burst_attention.integrations.hf.reading.parts import text_of
from tests.tools import families

# Numbers of special tokens, all below families.VOCABULARY; ordinary tokens are smaller than the first.
IMAGE, VIDEO, AUDIO, BEGIN, END = 90, 91, 92, 93, 94
_IMAGES = ("image_token_id", "image_token_index", "img_context_token_id", "media_placeholder_token_id")
_TOKENS = (
    dict.fromkeys(_IMAGES, IMAGE)
    | dict.fromkeys(("video_token_id", "video_token_index"), VIDEO)
    | dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO)
    | dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_index", "boi_token_id"), BEGIN)
    | dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_index", "eoi_token_id"), END)
)
# Settings that make a vision tower and its projector small, each taken where the configuration has it.
_VISION = (
    dict.fromkeys(("hidden_size", "embed_dim", "position_embedding_size"), 32)
    | dict.fromkeys(("mlp_ratio", "num_hidden_layers", "depth", "num_layers", "layers", "spatial_merge_size"), 2)
    | dict.fromkeys(("num_attention_heads", "attention_heads", "num_key_value_heads", "num_heads"), 2)
    | dict.fromkeys(("head_dim", "image_size", "window_size", "num_position_embeddings"), 16)
    | dict.fromkeys(("max_num_patches", "num_patches"), 16)
    | dict.fromkeys(("patch_size", "spatial_patch_size"), 4)
    | dict.fromkeys(("out_hidden_size", "projection_dim"), 64)
    | {"intermediate_size": 48, "temporal_patch_size": 1}
    | {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1]}
)
_WHOLE = {"image_seq_length": 4, "mm_tokens_per_image": 4, "projection_dim": 64, "projector_hidden_size": 64}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_HALF = {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
_TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "text_config": {"vocab_size": 160},
        "vision_config": {"codebook_size": 16, "latent_channels": 32, "base_channels": 32, "resolution": 16}
        | {"channel_multiplier": [1, 1, 2], "attn_resolutions": [4], "num_res_blocks": 1},
        "audio_config": {"codebook_dim": 32, "codebook_size": 16},
        "image_token_offset": 100,
        "audio_token_offset": 116,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model"}},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 32}},
    "glm46v": {"text_config": _ROPE},
    "glm4v": {"text_config": _ROPE},
    "glm4v_moe": {"text_config": _HALF},
    "glm5_next": {
        "text_config": {"num_key_value_heads": 4, "index_kpool": 4, "qk_rope_head_dim": 0, "pad_token_id": 0}
        | {"linear_num_heads": 4, "linear_head_dim": 16}
    },
    "glm_ocr": {"text_config": _ROPE},
    "glmga": {"text_config": _ROPE},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "llama4": {
        "text_config": families.LLAMA4,
        "vision_config": {
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "intermediate_size": 128,
        },
    },
    "llava_next": _TILES,
    "mistral_large4": {
        "text_config": {"kv_source_layers": [0, 0, 2, 2], "indexer_types": ["full", "shared", "full", "full"]}
        | {"no_rope_layers": [1, 1, 1, 1]}
    },
    "paddleocr_vl": {"text_config": _ROPE},
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "qwen2_5_vl": {"text_config": _ROPE},
    "qwen2_vl": {"text_config": _ROPE, "vision_config": {"hidden_size": 64}},
}
PARTS = ("vision_config", "audio_config", "vq_config", "qformer_config", "perceiver_config", "image_config")


def build(
    model_type: str, dtype: torch.dtype = torch.float64, implementation: str = "eager", **text: Any
) -> PreTrainedModel:
    """The same random weights each time; larger than at a first step, so that every part shows.

    ``text``: other settings of the language model.
    """
    config = tiny_config(model_type, **text)
    kind: Any = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    config._attn_implementation = implementation
    for each in [config, *(getattr(config, name, None) for name in ("text_config", *PARTS))]:
        if each is not None:
            each._experts_implementation = "eager"  # the fused one knows no fp64
    torch.manual_seed(0)
    model = kind(config).train()
    turns = {name: each for name, each in model.named_buffers() if each.is_complex()}
    model.to(dtype)
    for name, each in turns.items():  # the cast made them real
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, each)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    if families.mixers_of(model):  # their decays and sums over the sequence magnify the fp32 in modeling files
        families.make_exact(text_of(model))
    return model if next(model.parameters()).device.type == "meta" else families.moved(model)


def tiny_config(model_type: str, **settings: Any) -> Any:
    """The family's default configuration with a small language model and small towers."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    own = copy.deepcopy(_OWN.get(model_type, {}))
    given: dict[str, Any] = {}
    text = default.get_text_config(decoder=True)
    if text is not default:
        name = next(each for each in ("text_config", "llm_config", "decoder") if getattr(default, each, None) is text)
        given[name] = _tiny_text(text) | own.pop(name, {}) | settings
    for name in PARTS:
        part = getattr(default, name, None)
        if part is None and name == "vision_config":
            made = getattr(kind, "sub_configs", {}).get(name)
            part = made and made()
        if part is not None:
            given[name] = _small(part, _VISION) | own.pop(name, {})
    names = {*inspect.signature(kind.__init__).parameters, *vars(default), *getattr(kind, "attribute_map", {})}
    given |= {name: value for name, value in (_TOKENS | _WHOLE).items() if name in names}
    given |= {"pad_token_id": 0} if "pad_token_id" in names else {}
    return kind(**given | own)


def _tiny_text(text: Any) -> dict[str, Any]:
    """A small language model's settings; of its rotary sections as many as its heads have."""
    try:
        made = families.tiny_config(text.model_type).to_dict()
    except Exception:  # some settings are lists
        made = _small(text, families.SIZES | families.SMALL)
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        whole = int(made["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        sections = [whole * each // sum(rope["mrope_section"]) for each in rope["mrope_section"]]
        sections[0] += whole - sum(sections)
        made["rope_parameters"] = {**rope, "mrope_section": sections}
    made |= {name: 0.0 for name in made if "dropout" in name and isinstance(made[name], float)}
    return made


def _small(part: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The settings of a part that differ from its defaults."""
    known = part.to_dict()
    made = {"model_type": part.model_type} if getattr(part, "model_type", "") else {}
    made |= {name: _like(known[name], value) for name, value in sizes.items() if known.get(name) is not None}
    made |= {name: 0.0 for name in known if "drop" in name and isinstance(known[name], float)}
    return made


def _like(known: Any, value: Any) -> Any:
    if isinstance(known, (list, tuple)) and not isinstance(value, list):
        return type(known)([value] * len(known))
    return float(value) if isinstance(known, float) else value


def image_token(config: Any) -> int:
    """The token in place of which features of images stand."""
    return next((getattr(config, name) for name in _IMAGES if hasattr(config, name)), IMAGE)


def text(model: Any, length: int = 37, rows: int = 2) -> dict[str, torch.Tensor]:
    """A batch of ordinary tokens. The padding of the last row is shorter than a window: in fp64 else it is all NaN."""
    ids = torch.randint(3, 80, (rows, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][-1, length - 4 :] = 0
    batch["labels"][-1, length - 4 :] = -100
    return batch


def images_and_text(model: Any, count: int = 3, **options: Any) -> dict[str, Any]:
    """Two rows, the first with all images but one, the last image across the borders of shards."""
    pixels = pixels_of(model, count)
    features = _features(model, pixels)
    each = [len(x) for x in features]
    batch: dict[str, Any] = {**text(model, **{"length": 37 + max(sum(each[:-1]), each[-1])} | options), **pixels}
    ids, at = batch["input_ids"], 3
    token = image_token(model.config)
    for n, size in enumerate(each):
        row, at = (0, at) if n < count - 1 else (len(ids) - 1, 15)
        ids[row, at], ids[row, at + 1 : at + 1 + size], ids[row, at + 1 + size] = BEGIN, token, END
        at += size + 4
    batch["labels"][ids >= IMAGE] = -100
    named = _names(model)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in named:
            batch[name] = (ids == token).int()
    return batch


def packed(model: Any) -> dict[str, Any]:
    """Images and text of four documents: each row has two, and the second one's begins elsewhere."""
    batch = images_and_text(model)
    del batch["attention_mask"]
    length = batch["input_ids"].shape[1]
    borders = (length - 9, 12)
    rows = [torch.cat([torch.arange(border), torch.arange(length - border)]) for border in borders]
    return batch | {"position_ids": torch.stack(rows)}


def pixels_of(model: Any, count: int) -> dict[str, Any]:
    """What the family's image processor would make of images of its size."""
    make, named = torch.Generator().manual_seed(2), inspect.signature(_owner(model).get_image_features).parameters
    tower, kind = model.config.vision_config, model.config.model_type

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(model.dtype)

    patch = getattr(tower, "patch_size", getattr(tower, "spatial_patch_size", 4))
    width = getattr(tower, "in_channels", 3) * getattr(tower, "temporal_patch_size", 1)
    if "image_grid_thw" in named:
        grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2]] * count)[:count]
        patches = int(grid.prod(1).sum())
        convolved = kind in ("kimi_k25", "paddleocr_vl")
        pixels = random(patches, 3, patch, patch) if convolved else random(patches, width * patch**2)
        made = {"pixel_values": pixels, "image_grid_thw": grid}
        return made | ({"image_merge_sizes": torch.full((count,), 2)} if "image_merge_sizes" in named else {})
    if "spatial_shapes" in named:
        made = {"pixel_values": random(count, 16, width * patch**2), "spatial_shapes": torch.tensor([[4, 4]] * count)}
        return made | {"pixel_attention_mask": torch.ones(count, 16, dtype=torch.long)}
    if "image_position_ids" in named:
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        return {"pixel_values": random(count, 16, 3 * patch**2), "image_position_ids": places.repeat(count, 1, 1)}
    size = getattr(tower, "image_size", 16)  # Apertus's tokenizer takes any
    size = size if isinstance(size, int) else size[0]
    if kind in ("llava_next", "llava_next_video", "llava_onevision"):
        return {
            "pixel_values": random(count, 3, 3, size, size),
            "image_sizes": torch.tensor([[size, 2 * size]] * count),
        }
    if kind in ("idefics2", "idefics3", "smolvlm"):
        return {"pixel_values": random(1, count, 3, size, size)}
    made = {"pixel_values": random(count, 3, size, size)}
    return made | ({"image_sizes": torch.tensor([[size, size]] * count)} if "image_sizes" in named else {})


def _owner(model: Any) -> Any:
    lacks = model.config.model_type == "video_llama_3"  # the whole model's method lacks an argument
    return body_of(model) if lacks or not hasattr(model, "get_image_features") else model


def _features(model: Any, pixels: dict[str, Any]) -> list[torch.Tensor]:
    """The features of each image, [tokens, E]."""
    with torch.no_grad():
        out = _owner(model).get_image_features(**pixels)
    made = getattr(out, "pooler_output", None)
    made = getattr(out, "last_hidden_state", out) if made is None else made
    if isinstance(made, torch.Tensor) and made.dim() == 2:
        made = made.chunk(len(next(reversed(pixels.values()))))
    return [each.flatten(0, -2) for each in made]


def videos_and_text(model: Any) -> dict[str, Any]:
    """Two rows of a Qwen model, each with a video of two frames."""
    pixels = pixels_of(model, 2)
    grid = torch.tensor([[2, 4, 4], [2, 4, 4]])
    patches = pixels["pixel_values"].repeat(4, 1)[: int(grid.prod(1).sum())].roll(1, 1)
    batch: dict[str, Any] = {**text(model, 41), "pixel_values_videos": patches, "video_grid_thw": grid}
    for row in batch["input_ids"]:
        row[12], row[13:21], row[21] = BEGIN, VIDEO, END
    batch["labels"][batch["input_ids"] >= IMAGE] = -100
    batch["mm_token_type_ids"] = 2 * (batch["input_ids"] == VIDEO).int()
    return batch | ({"second_per_grid_ts": torch.ones(2)} if "second_per_grid_ts" in _names(model) else {})


def _names(model: Any) -> Any:
    return inspect.signature(model.forward).parameters
