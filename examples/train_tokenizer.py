"""Train a byte-level BPE tokenizer on Python's standard library, for `burst train --tokenizer FOLDER`.

python examples/train_tokenizer.py FOLDER
"""

import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024


def main(folder):
    """Train on the library's modules, without its packages: that takes seconds."""
    files = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that any text has ids
    sizes = {"vocab_size": VOCABULARY, "special_tokens": ["<s>", "</s>"], "initial_alphabet": alphabet}
    tokenizer.train(files, trainers.BpeTrainer(**sizes))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
