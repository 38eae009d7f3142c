"""Processors of vision-language models made offline: a family's own image processor and a tiny tokenizer."""

from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3Processor, PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor

from tests.support.vision_models import BEGIN, END, IMAGE, VIDEO

WORDS = [f"w{n}" for n in range(60)]
SPECIAL = {"<pad>": 0, "<unk>": 1, "<end>": 2, "<image>": IMAGE, "<video>": VIDEO, "<begin>": BEGIN, "<stop>": END}
MARKS = {"qwen2_5_vl": "<begin><image><stop>", "gemma3": "<begin>"}


def tokenizer() -> Any:
    """One token for each word."""
    vocabulary = {**SPECIAL, **{word: 3 + n for n, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        padding_side="right",
        extra_special_tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "boi_token": "<begin>",
            "eoi_token": "<stop>",
        },
    )
    made.add_special_tokens({"additional_special_tokens": ["<image>", "<video>", "<begin>", "<stop>"]})
    return made


class _NoVideos(BaseVideoProcessor):
    """In place of a video processor, which needs torchvision."""

    merge_size = 2

    def __init__(self) -> None: ...


class _Processor(Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        """Accept our stand-in. The check itself needs torchvision."""


def processor(family: str) -> Any:
    """The family's processor for the models of ``vision_models``."""
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, tokenizer(), image_seq_length=4)
    images = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=1, merge_size=2, min_pixels=64, max_pixels=16 * 24
    )
    return _Processor(images, tokenizer(), _NoVideos())


def samples(count: int, family: str, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of different length; every third one has two images, every third one none."""
    dice = np.random.default_rng(seed)
    made = []
    for n in range(count):
        images = [
            Image.fromarray(dice.integers(0, 256, (16, 16 + 8 * int(dice.integers(2)), 3), dtype=np.uint8))
            for _ in range((1, 2, 0)[n % 3])
        ]
        words = [str(each) for each in dice.choice(WORDS, int(dice.integers(14, 24)))]
        for k in range(len(images)):
            words.insert(3 + 7 * k, MARKS[family])
        made.append({"text": " ".join(words), "images": images})
    return made


def collator(family: str) -> Any:
    """Make a batch of samples, with labels for words alone."""
    made = processor(family)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        images = [row["images"] for row in rows]
        given = {"images": images} if any(images) else {}
        batch = dict(made(text=[row["text"] for row in rows], padding=True, return_tensors="pt", **given))
        labels = batch["input_ids"].clone()
        labels[(labels >= IMAGE) | (batch["attention_mask"] == 0)] = -100
        return {**batch, "labels": labels}

    return collate
