"""Fine-tune a transformers model on one long text over several ranks, and save it.

    python examples/finetune_hf.py --out runs/finetuned  # a tiny random Llama
    torchrun --nproc-per-node 2 examples/finetune_hf.py --out DIR --model FOLDER

It prints the loss of each step, which falls. Every rank holds all parameters; fsdp2.py
shards them.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from burst_attention.integrations import hf


def options():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--model", type=Path, help="folder of a language model; default: a new one")
    add("--text", type=Path, default=Path(__file__), help="default: this file")
    add("--out", type=Path, required=True, help="the folder to save to")
    add("--steps", type=int, default=8)
    add("--lr", type=float, default=1e-3)
    return parser.parse_args()


def tiny_llama(folder):
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)  # the same weights on every rank
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder)
    return folder


def tokenizer_of(folder):
    """Return the model's tokenizer; None if it has none, and its tokens are bytes."""
    kept = (folder / "tokenizer_config.json").exists()
    return AutoTokenizer.from_pretrained(folder) if kept else None


def token_ids(tokenizer, text):
    """Return int64 [1, S]."""
    ids = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
    return torch.tensor([ids])


def main():
    given, scratch = options(), tempfile.TemporaryDirectory()  # one folder per rank
    folder = given.model or tiny_llama(Path(scratch.name))
    ranked = "RANK" in os.environ  # under torchrun; else this process is the only rank
    if ranked:
        dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    hf.parallelize(model)  # takes the whole text, returns the loss over all its tokens
    tokenizer = tokenizer_of(folder)
    ids = token_ids(tokenizer, given.text.read_text("utf-8"))  # any length
    # DDP averages gradients; the mean is the gradient of one device
    called = DistributedDataParallel(model) if ranked else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    first = not ranked or dist.get_rank() == 0
    for step in range(given.steps):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if first:
        model.save_pretrained(given.out)
        if tokenizer is not None:  # the folder then works with pipelines and burst
            tokenizer.save_pretrained(given.out)
        print(f"saved to {given.out}", flush=True)


if __name__ == "__main__":
    main()
