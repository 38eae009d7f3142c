"""Exact attention, forward and backward, over one sequence that is spread over the ranks at hand.

    torchrun --nproc-per-node 3 examples/attention.py

Each rank prints its plan (which tokens it holds) and the bytes that this call sent and received, per direction.
"""

import os

import torch
import torch.distributed as dist

from burst_attention import Mask, burst_attention, make_plan

if "RANK" in os.environ:  # under torchrun; else this process is the only rank
    dist.init_process_group("gloo")
plan = make_plan(10_007, mask=Mask(causal=True, window=4096))
sizes = ((1, heads, plan.length, 64) for heads in (8, 2, 2))
q, k, v = (torch.randn(size, requires_grad=True) for size in sizes)
out = burst_attention(q, k, v, plan)  # [1, 8, plan.length, 64]: this rank's rows
out.sum().backward()
shape = {"batch": 1, "q_heads": 8, "kv_heads": 2, "head_dim": 64}
print(plan, plan.bytes(**shape, dtype=q.dtype))
if dist.is_initialized():
    dist.destroy_process_group()
