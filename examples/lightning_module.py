"""A transformers model in a LightningModule, over sequences that are spread over ranks.

    python examples/lightning_module.py                        # two ranks of this machine
    torchrun --nproc-per-node 2 examples/lightning_module.py   # or those that torchrun starts

It prints each step's loss, and fails if one is not what one rank computes by itself.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from torch.distributed import run
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.integrations import hf

STEPS = 5


class LanguageModel(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def setup(self, stage):
        hf.parallelize(self.model)  # the process group is there now, and DDP or FSDP not yet

    def training_step(self, ids, _):
        loss = self.model(input_ids=ids, labels=ids).loss  # [B, S] on every rank; of all ranks' tokens
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def batches():
    """This file's bytes in batches of two sequences, int64 [2, 301]; 301 divides by nothing."""
    tokens = torch.tensor(list(Path(__file__).read_bytes()))
    return DataLoader(tokens[: len(tokens) // 301 * 301].view(-1, 301), batch_size=2)


def losses_alone(model):
    """What the same training gives on one rank, in plain torch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _, ids in zip(range(STEPS), 3 * list(batches()), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    expected, module = losses_alone(tiny_llama()), LanguageModel(tiny_llama())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    ranks = {"accelerator": "cpu", "devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": "ddp"}
    # To Lightning the ranks are replicas, and its sampler would give each other data: here all read the same.
    trainer = lightning.Trainer(max_steps=STEPS, gradient_clip_val=1.0, use_distributed_sampler=False, **ranks, **quiet)
    trainer.fit(module, batches())
    if trainer.global_rank == 0:
        print(*(f"step {step}: loss {loss:.3f}" for step, loss in enumerate(module.losses)), sep="\n", flush=True)
    torch.testing.assert_close(module.losses, expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main() if "RANK" in os.environ else run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
