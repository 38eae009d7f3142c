"""transformers' Trainer over sequences that are spread over ranks: BurstMixin before it, all else as it was.

    python examples/trainer.py                             # two ranks of this machine
    torchrun --nproc-per-node 2 examples/trainer.py        # or those that torchrun starts

It prints each step's loss, and fails if one is not what the plain Trainer gets in a single process.
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed import run
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from burst_attention.integrations.trainers import BurstMixin

LENGTH = 301  # tokens of a sequence; it need not divide by the ranks


class BurstTrainer(BurstMixin, Trainer):
    """All processes hold each sequence together; with context_size=8, each eight of them."""


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights in every process
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def sequences():
    """This file's bytes, cut to the length."""
    tokens = list(Path(__file__).read_bytes())
    rows = [tokens[i : i + LENGTH] for i in range(0, len(tokens) - LENGTH, LENGTH)]
    return [{"input_ids": row, "labels": row} for row in rows]


def losses(kind):
    """The loss of each step of a trainer of this class."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=2,  # sequences that a context reads, not each of its processes
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        )
        trainer = kind(model=tiny_llama(), args=args, train_dataset=sequences())
        trainer.remove_callback(PrinterCallback)  # the losses are printed below
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    found = losses(BurstTrainer)
    if os.environ["RANK"] == "0":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a separate process is no rank
            del os.environ[name]
        with multiprocessing.get_context("spawn").Pool(1) as single:
            expected = single.apply(losses, (Trainer,))
        print(*(f"step {step}: loss {loss:.3f}" for step, loss in enumerate(found)), sep="\n", flush=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main() if "RANK" in os.environ else run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
