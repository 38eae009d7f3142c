"""TRL's SFTTrainer over sequences that are spread over ranks: packed conversations, and LoRA by PEFT.

    python examples/sft_trl.py                             # two ranks of this machine
    torchrun --nproc-per-node 2 examples/sft_trl.py        # or those that torchrun starts

It prints each step's loss, and fails if one is not what the plain SFTTrainer gets in a single process.
"""

import multiprocessing
import os
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import run
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

from burst_attention.integrations.trainers import BurstMixin

CHAT = "{% for m in messages %}<s>{{ m.role }}: {% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"


class BurstSFTTrainer(BurstMixin, SFTTrainer):
    """All processes hold each sequence together; with context_size=8, each eight of them."""


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({sign: n for n, sign in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, chat_template=CHAT, **special)


def tiny_llama(vocabulary):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights in every process
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **sizes))


def conversations():
    talk = [(f"What is {n} times {n}?", f"It is {n * n}." + " Is it not?" * (n % 5)) for n in range(80)]
    roles = "user", "assistant"
    return [[{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)] for pair in talk]


def losses(kind):
    """The loss of each step of a trainer of this class."""
    tokenizer, data = byte_tokenizer(), Dataset.from_dict({"messages": conversations()})
    with tempfile.TemporaryDirectory() as folder:
        lengths = {"packing": True, "max_length": 301, "assistant_only_loss": True}
        steps = {"max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
        here = {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
        args = SFTConfig(folder, **lengths, **steps, **here)
        given = {"args": args, "train_dataset": data, "processing_class": tokenizer, "peft_config": LoraConfig()}
        trainer = kind(model=tiny_llama(len(tokenizer)), **given)
        trainer.remove_callback(PrinterCallback)  # the losses are printed below
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    found = losses(BurstSFTTrainer)
    if os.environ["RANK"] == "0":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a separate process is no rank
            del os.environ[name]
        with multiprocessing.get_context("spawn").Pool(1) as single:
            expected = single.apply(losses, (SFTTrainer,))
        print(*(f"step {step}: loss {loss:.3f}" for step, loss in enumerate(found)), sep="\n", flush=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main() if "RANK" in os.environ else run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
