"""Tokenizers: UTF-8 bytes by default, or any Hugging Face tokenizer by path or name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..presets import PRESETS
from ..run.folder import first_line
from .chat import encode_chat

BYTES = "bytes"
OPENS, CLOSES = 256, 257
Encoded = tuple[np.ndarray, np.ndarray]  # int32 ids; bool: whether each is a target


class ByteTokenizer:
    """UTF-8 bytes 0 to 255; 256 starts a document and 257 ends it. Special tokens' names in a text stay text."""

    def __init__(self) -> None:
        self.vocab_size: int = 258
        self.bos_id: int | None = OPENS
        self.eos_id: int | None = CLOSES

    def encode(self, text: str) -> np.ndarray:
        """Return the text's UTF-8 bytes as int32 ids, with the special tokens."""
        tokens = np.empty(len(data := text.encode()) + 2, np.int32)
        tokens[0], tokens[1:-1], tokens[-1] = OPENS, np.frombuffer(data, np.uint8), CLOSES
        return tokens

    def encode_chat(self, chat: Mapping[str, Any], *, assistant_only: bool) -> Encoded:
        """Refuse: bytes have no chat template."""
        raise ValueError(f"the tokenizer {BYTES} has no chat template for 'messages'; name another by --tokenizer")

    def save(self, folder: Path) -> None:
        """Save the same ids for ``AutoTokenizer``: a byte-level BPE without merges, which adds no end token."""
        import tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        vocab = {character: byte for byte, character in bytes_to_unicode().items()} | {"<s>": OPENS, "</s>": CLOSES}
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
        raw.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", OPENS), ("</s>", CLOSES)]
        )
        _save(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>"), folder)


class HubTokenizer:
    """A Hugging Face tokenizer, with its start and end token. Special tokens written in a document stay text."""

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer

            self.inner: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            raise ValueError(f"--tokenizer {name!r} can't be loaded: {first_line(error)}") from error
        self.inner.split_special_tokens = True
        self.vocab_size: int = len(self.inner)
        self.bos_id, self.eos_id = self.inner.bos_token_id, self.inner.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        """Return the text's int32 ids, with the special tokens."""
        body = self.inner(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        opened = [] if self.bos_id is None else [self.bos_id]
        closed = [] if self.eos_id is None else [self.eos_id]
        return np.array([*opened, *body, *closed], np.int32)

    def encode_chat(self, chat: Mapping[str, Any], *, assistant_only: bool) -> Encoded:
        """Return a conversation's ids and targets, as :func:`~burst_train.data.chat.encode_chat`."""
        if not self.inner.chat_template:
            raise ValueError("the tokenizer has no chat template for 'messages'; name one that has by --tokenizer")
        return encode_chat(self.inner, chat["messages"], chat["tools"], assistant_only=assistant_only)

    def save(self, folder: Path) -> None:
        """Save it. Special tokens in text stay split, unless a chat template writes them out."""
        _save(self.inner, folder)


Tokenizer = ByteTokenizer | HubTokenizer
CONFIG, MODULE = "tokenizer_config.json", "as_saved.py"
AUTO_MAP = {"AutoTokenizer": [None, "as_saved.AsSaved"]}
AS_SAVED = '''"""The tokenizer in tokenizer.json, unchanged for every model architecture."""

from transformers import PreTrainedTokenizerFast


class AsSaved(PreTrainedTokenizerFast):
    """The tokenizer of tokenizer.json, without changes."""
'''


def _save(tokenizer: Any, folder: Path) -> None:
    """Save a transformers tokenizer so that loading it gives the same ids."""
    tokenizer.save_pretrained(folder)
    if not (folder / CONFIG).is_file():  # a tokenizer of mistral-common, which never parses special tokens in text
        return
    settings = json.loads((folder / CONFIG).read_text("utf-8"))
    settings["split_special_tokens"] = not tokenizer.chat_template
    if settings.get("auto_map") == AUTO_MAP or not _reads_the_same(tokenizer, folder):
        # For some models (Qwen2), AutoTokenizer replaces the saved class, unless its code is outside transformers.
        # With this class it reads tokenizer.json as it is. It loads the module only if remote code is trusted.
        (folder / MODULE).write_text(AS_SAVED, "utf-8")
        settings |= {"tokenizer_class": "TokenizersBackend", "auto_map": AUTO_MAP}
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _reads_the_same(tokenizer: Any, folder: Path) -> bool:
    """Whether AutoTokenizer loads the same pipeline from ``folder``; True for slow tokenizers, which have none."""
    from transformers import AutoTokenizer

    if (own := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return True
    read = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    return read is not None and bool(read.to_str() == own.to_str())


def open_tokenizer(tokenizer: str | None, model: str) -> Tokenizer:
    """Open a tokenizer (``bytes``, a path or hub name); None: the model's own, or bytes for presets."""
    if tokenizer is None:
        files = [Path(model) / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
        if model not in PRESETS and Path(model).is_dir() and not any(file.is_file() for file in files):
            # Bytes would be read as ids of other tokens, and the only symptom would be a high loss.
            raise ValueError(
                f"--model {model!r}: the folder holds no tokenizer; "
                f"name the model's tokenizer with --tokenizer, or give --tokenizer {BYTES} if the model reads bytes"
            )
        tokenizer = BYTES if model in PRESETS else model
    return ByteTokenizer() if tokenizer == BYTES else HubTokenizer(tokenizer)
