"""Fine-tune a transformers model from a folder on one long text, spread over the ranks at hand, and save it.

    python examples/finetune_hf.py --out runs/finetuned                                        # a tiny random Llama
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model FOLDER --text FILE --out runs/finetuned

It prints the loss of each step, which falls. Every rank holds all parameters; in fsdp2.py they are spread, too.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from burst_attention.integrations import hf


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="a folder with a causal language model; a tiny new one if not given")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on, this file if not given")
    parser.add_argument("--out", type=Path, required=True, help="the folder to save to")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def tiny_llama(folder):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


def token_ids(folder, text):
    """int64 [1, S]: by the model's tokenizer, or plain bytes where the folder holds none."""
    if (folder / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    return torch.tensor([list(text.encode())])


def main():
    given, scratch = options(), tempfile.TemporaryDirectory()  # one scratch folder per rank
    folder = given.model or tiny_llama(Path(scratch.name))
    ranked = "RANK" in os.environ  # under torchrun; else this process is a world of one
    if ranked:
        dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    hf.parallelize(model)  # the ranks are one to whoever calls it: the whole text in, the loss of all its tokens out
    ids = token_ids(folder, given.text.read_text("utf-8"))  # any length, it need not divide by the ranks
    called = DistributedDataParallel(model) if ranked else model  # means gradients, and the mean is one device's
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=given.lr), not ranked or dist.get_rank() == 0
    for step in range(given.steps):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if first:
        model.save_pretrained(given.out)
        print(f"saved to {given.out}", flush=True)


if __name__ == "__main__":
    main()
