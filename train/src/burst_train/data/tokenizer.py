"""Text to token ids: bytes by default, or any Hugging Face tokenizer by path or name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..presets import PRESETS

BYTES = "bytes"
OPENS, CLOSES = 256, 257


class Tokenizer(Protocol):
    """Encodes one document; ids are below ``vocab_size``."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]: the document's tokens, opened by ``bos_id`` and closed by ``eos_id`` where there is one.

        A special token's name written out in the text is text, never that token.

        Raises:
            ValueError: the text holds a lone surrogate, which UTF-8 can't spell.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what ``transformers.AutoTokenizer.from_pretrained(folder)`` reads, whatever model lies in ``folder``.

        What that reads gives the same ids. Called on a text it closes nothing: the text is a prompt to go on from.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes: id 0 to 255 is the byte itself, 256 opens a document and 257 closes it."""

    def __init__(self) -> None:
        self.vocab_size: int = 258
        self.bos_id: int | None = OPENS
        self.eos_id: int | None = CLOSES

    def encode(self, text: str) -> np.ndarray:
        tokens = np.empty(len(data := as_utf8(text)) + 2, np.int32)
        tokens[0], tokens[1:-1], tokens[-1] = OPENS, np.frombuffer(data, np.uint8), CLOSES
        return tokens

    def save(self, folder: Path) -> None:
        """The same ids as a byte-level BPE without merges, which is what the library calls this tokenizer.

        Read again and called on a text it opens it, as training does, and leaves its end open.
        """
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
    """A Hugging Face tokenizer; its own beginning and end tokens are added, once each, where it has them.

    Special tokens written out in a document stay text, which its own default would turn into those tokens.
    """

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
        as_utf8(text)
        body = self.inner(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        opened = [] if self.bos_id is None else [self.bos_id]
        closed = [] if self.eos_id is None else [self.eos_id]
        return np.array([*opened, *body, *closed], np.int32)

    def save(self, folder: Path) -> None:
        """As it is, special tokens split in text included, but where a chat template relies on writing them out."""
        _save(self.inner, folder)


CONFIG, MODULE = "tokenizer_config.json", "as_saved.py"
AUTO_MAP = {"AutoTokenizer": [None, "as_saved.AsSaved"]}
AS_SAVED = '''"""The tokenizer in tokenizer.json as it is, whatever the architecture of the model beside it."""

from transformers import PreTrainedTokenizerFast


class AsSaved(PreTrainedTokenizerFast):
    """Nothing of its own."""
'''


def _save(tokenizer: Any, folder: Path) -> None:
    """Write a transformers tokenizer so that what is read again gives the same ids."""
    tokenizer.save_pretrained(folder)
    if not (folder / CONFIG).is_file():  # mistral-common's, which never finds special tokens in a text
        return
    settings = json.loads((folder / CONFIG).read_text("utf-8"))
    settings["split_special_tokens"] = not tokenizer.chat_template
    if settings.get("auto_map") == AUTO_MAP or not _reads_the_same(tokenizer, folder):
        # Beside a Qwen2, AutoTokenizer overrules the class that was saved unless it is one from outside transformers.
        # With that it reads tokenizer.json as it is, and needs the module only where it is told to trust such code.
        (folder / MODULE).write_text(AS_SAVED, "utf-8")
        settings |= {"tokenizer_class": "TokenizersBackend", "auto_map": AUTO_MAP}
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _reads_the_same(tokenizer: Any, folder: Path) -> bool:
    """Whether AutoTokenizer makes the same pipeline of what is in ``folder``; slow tokenizers have none to compare."""
    from transformers import AutoTokenizer

    if (own := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return True
    read = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    return read is not None and bool(read.to_str() == own.to_str())


def as_utf8(text: str) -> bytes:
    """The bytes of a text.

    Raises:
        ValueError: it holds a lone surrogate, which UTF-8 can't spell.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        odd = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"the text can't be encoded: character {error.start} is the lone surrogate {odd}, which UTF-8 can't spell; "
            "replace it, as text.encode('utf-8', 'replace').decode() does"
        ) from None


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def open_tokenizer(tokenizer: str | None, model: str) -> Tokenizer:
    """The tokenizer that was asked for; by default the model's own, and bytes for presets.

    Args:
        tokenizer: ``bytes``, a path or hub name, or None.
        model: the preset, folder or hub name of the model.

    Raises:
        ValueError: the tokenizer can't be loaded, or the model's folder has none and no other was asked for.
    """
    if tokenizer is None:
        files = [Path(model) / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
        if model not in PRESETS and Path(model).is_dir() and not any(file.is_file() for file in files):
            # Bytes would be taken for the ids of quite other tokens, and the loss only look high.
            raise ValueError(
                f"--model {model!r}: the folder holds no tokenizer; "
                f"name the model's by --tokenizer, or say --tokenizer {BYTES} if it reads bytes"
            )
        tokenizer = BYTES if model in PRESETS else model
    return ByteTokenizer() if tokenizer == BYTES else HubTokenizer(tokenizer)
