#!/usr/bin/env bash
# Tensor parallelism of transformers (tp_plan="auto") and gradient accumulation: the gradients of q_norm and k_norm are
# summed over the ranks after each backward, what earlier backwards left included. Two backwards count the first twice.
exec "$(dirname "$0")/in-venv" torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 <<'EOF'
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}


def gradients(model, backwards):
    torch.manual_seed(1)
    for _ in range(backwards):
        ids = torch.randint(64, (1, 12))
        model(ids, labels=ids).loss.backward()
    found = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def rank(number, folder):
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong = {}
    for backwards in (1, 2):
        cut = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh)
        ours, right = gradients(cut, backwards), gradients(AutoModelForCausalLM.from_pretrained(folder), backwards)
        off = {name: ((ours[name] - x).norm() / x.norm()).item() for name, x in right.items()}
        wrong[backwards] = sorted({name.split(".")[-2] for name, x in off.items() if x > 1e-4})
        if number == 0:
            print(f"seen: after {backwards} backwards, gradients of {wrong[backwards] or 'nothing'} are off "
                  f"(by up to {max(off.values()):.1e})", flush=True)
    dist.destroy_process_group()
    if wrong != {1: [], 2: ["k_norm", "q_norm"]}:
        sys.exit("changed")


if __name__ == "__main__":
    logging.disable_progress_bar()
    print("expected: gradients on two ranks are those of one process, after any number of backwards")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folder)
        mp.spawn(rank, (folder,), nprocs=2)
EOF
