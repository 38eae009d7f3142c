"""TRL's DPOTrainer over sequences that are spread over ranks, the reference model too.

    python examples/dpo_trl.py                             # two ranks of this machine
    torchrun --nproc-per-node 2 examples/dpo_trl.py        # or those that torchrun starts

It prints each step's loss, and fails if one is not what the plain DPOTrainer gets in a single process.
"""

import multiprocessing
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import run
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer

from burst_attention.integrations.trainers import BurstMixin


class BurstDPOTrainer(BurstMixin, DPOTrainer):
    """All processes hold each sequence together; with context_size=8, each eight of them."""


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({sign: n for n, sign in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="</s>", pad_token="<pad>")


def tiny_llama(vocabulary):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights in every process
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **sizes))


def preferences():
    """Pairs of odd lengths: they are padded to the longest of a batch, as always."""
    numbers = range(40)
    return Dataset.from_dict(
        {
            "prompt": [f"What is {n} times {n}?" for n in numbers],
            "chosen": [f" It is {n * n}." + " I am sure of it." * (n % 5) for n in numbers],
            "rejected": [f" It is {n + n}, or something like that." for n in numbers],
        }
    )


def losses(kind):
    """The loss of each step of a trainer of this class."""
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        steps = {"max_steps": 5, "per_device_train_batch_size": 3, "learning_rate": 1e-4, "logging_steps": 1}
        here = {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
        given = {"args": DPOConfig(folder, beta=0.5, **steps, **here), "processing_class": tokenizer}
        policy, reference = tiny_llama(len(tokenizer)), tiny_llama(len(tokenizer))
        trainer = kind(model=policy, ref_model=reference, train_dataset=preferences(), **given)
        trainer.remove_callback(PrinterCallback)  # the losses are printed below
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    found = losses(BurstDPOTrainer)
    if os.environ["RANK"] == "0":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a separate process is no rank
            del os.environ[name]
        with multiprocessing.get_context("spawn").Pool(1) as single:
            expected = single.apply(losses, (DPOTrainer,))
        print(*(f"step {step}: loss {loss:.3f}" for step, loss in enumerate(found)), sep="\n", flush=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main() if "RANK" in os.environ else run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
