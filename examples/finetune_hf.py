"""Fine-tune a transformers model from a folder on one long text, spread over the ranks at hand, and save it.

    python examples/finetune_hf.py --out runs/finetuned                                        # a tiny random Llama
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model FOLDER --text FILE --out runs/finetuned

It prints the loss of each step, which falls. Every rank holds all parameters: see train_loop.py for FSDP2.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from burst_attention import make_plan
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
    given, scratch = options(), tempfile.TemporaryDirectory()  # each rank has a scratch folder of its own
    folder = given.model or tiny_llama(Path(scratch.name))
    if "RANK" in os.environ:  # under torchrun; else this process is a world of one
        dist.init_process_group("gloo")
    hf.register()  # makes attn_implementation="burst" known
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="burst", dtype=torch.float32).train()
    ids = token_ids(folder, given.text.read_text("utf-8"))
    plan = make_plan(ids.shape[1])  # causal; any length, it need not divide by the ranks
    shard = hf.shard_batch({"input_ids": ids, "labels": ids}, plan)  # this rank's tokens, positions and shifted labels
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    for step in range(given.steps):
        hidden = model.model(shard["input_ids"], position_ids=shard["position_ids"], plan=plan, use_cache=False)[0]
        # Not model(labels=...): it would shift within the shard. The head's logits are computed in chunks.
        loss = hf.next_token_loss(model, hidden, shard["shift_labels"], plan)
        loss.backward()
        if plan.world > 1:  # each rank has its share of the gradient: the sum is what one device would have
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if plan.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if plan.rank == 0:
        model.save_pretrained(given.out)
        print(f"saved to {given.out}", flush=True)


if __name__ == "__main__":
    main()
