#!/usr/bin/env bash
# ring-attention-pytorch over gloo on CPUs: out and the gradient of q are right. The gradients of k and of v both hold
# dk + dv: the last pass of (dk, dv) returns two buffers, which are then taken for dk and dv.
exec "$(dirname "$0")/in-venv" torch==2.13.0 ring-attention-pytorch==0.5.20 numpy==2.4.6 <<'EOF'
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

WORLD, LENGTH = 2, 64


def rank(number, folder):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=WORLD)
    torch.manual_seed(0)
    whole = [torch.randn(2, LENGTH, 4, 16, requires_grad=True) for _ in range(3)]  # q, k, v: [B, S, heads, D]
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
    dense.square().sum().backward()
    mine = slice(number * LENGTH // WORLD, (number + 1) * LENGTH // WORLD)
    parts = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
    out = ring_flash_attn(*parts, causal=True, bucket_size=16, ring_reduce_col=True, ring_size=WORLD)
    out.square().sum().backward()
    pairs = [(out, dense[:, mine]), *((part.grad, x.grad[:, mine]) for part, x in zip(parts, whole))]
    off = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    both = (parts[1].grad - whole[1].grad[:, mine] - whole[2].grad[:, mine]).abs().max().item()
    if number == 0:
        shown = zip(("out", "dq", "dk", "dv"), off)
        print("seen:", ", ".join(f"{name} {x:.1e}" for name, x in shown), "off; the gradient of k is dk + dv but for "
              f"{both:.0e}", flush=True)
    dist.destroy_process_group()
    if not (max(off[:2]) < 1e-5 < 0.1 < min(off[2:]) and both < 1e-4):
        sys.exit("changed")


if __name__ == "__main__":
    print("expected: out and all gradients are those of dense attention, within 1e-5")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder,), nprocs=WORLD)
EOF
