"""A transformers model over sequences that are spread over ranks, its parameters too: parallelize, then fully_shard.

    python examples/fsdp2.py                             # two ranks of this machine
    torchrun --nproc-per-node 2 examples/fsdp2.py        # or those that torchrun starts

It prints each step's loss and gradient norm, and fails if the first are not what one rank computes by itself.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.integrations import hf

STEPS, ACCUMULATE = 5, 2  # a step has two sequences, one after the other


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def sequences():
    """This file's bytes, int64 [sequence, 1, tokens]: the same on every rank, of a length that divides by nothing."""
    tokens = torch.tensor(list(Path(__file__).read_bytes()))
    return tokens[: len(tokens) // 301 * 301].view(-1, 1, 301)


def step(model, batches):
    """The loss of an optimizer step and the norm of its gradient, which is clipped."""
    tokens, total = sum(ids.numel() - 1 for ids in batches), 0.0  # all that have a next one: one mean over the step
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss
        loss.backward()
        total += loss.item()  # of all ranks' tokens already
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def main():
    dist.init_process_group("gloo")
    model, data = tiny_llama(), sequences()
    alone = copy.deepcopy(model).to(torch.bfloat16)
    expected = step(alone, data[:ACCUMULATE])

    hf.parallelize(model)  # the ranks are one to whoever calls the model: whole batch in, whole loss out
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):  # parts first, the root last
        fully_shard(module, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for n in range(STEPS):
        loss, norm = step(model, data[ACCUMULATE * n :][:ACCUMULATE])
        if n == 0:
            torch.testing.assert_close((loss, float(norm)), tuple(map(float, expected)), rtol=2e-2, atol=0)  # bf16
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {n}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if "RANK" in os.environ else run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
