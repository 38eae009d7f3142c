"""BurstAttention (arXiv 2403.09347, Algorithms 1 and 2) in plain torch.distributed.

    torchrun --nproc-per-node 4 examples/burst_attention_in_80_lines.py

Causal, one shard per rank. Each rank prints how far out, dq, dk and dv are from dense
attention on one device: about 1e-15. Rank 0 computes 1 tile in the forward and W in the
backward, the last rank the reverse. Zigzag layouts balance both.
"""

import torch
import torch.distributed as dist

HEADS, LENGTH, DIM = 2, 64, 16  # LENGTH: tokens of each rank
SCALE = DIM**-0.5


def post(tensors):
    """Send to the next rank; return buffers for the previous rank's, and handles."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensors, []  # what I send is what I receive
    arriving = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


def wait(handles):
    for handle in handles:
        handle.wait()


def scores(q, k, diagonal):  # diagonal: the only tile that the mask cuts
    s = SCALE * q @ k.mT
    later = torch.ones_like(s, dtype=torch.bool).triu(1)
    return s.masked_fill(later, -torch.inf) if diagonal else s


def forward(q, k, v):
    """Algorithm 1: K and V circulate; online softmax merges out and lse, which stay."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for hop in range(world):
        owner = (rank - hop) % world  # whose keys and values are here
        # Double buffering: the next shard is on the wire while this one is computed.
        next_kv, handles = post([k, v]) if hop < world - 1 else ([k, v], [])
        if owner <= rank:  # a causal mask hides later keys
            s = scores(q, k, owner == rank)
            part_lse = s.logsumexp(-1, keepdim=True)
            part_out = (s - part_lse).exp() @ v
            old_lse, lse = lse, torch.logaddexp(lse, part_lse)
            out = (old_lse - lse).exp() * out + (part_lse - lse).exp() * part_out
        wait(handles)
        k, v = next_kv
    return out, lse


def backward(q, k, v, out, lse, dout):
    """Algorithm 2: the query side circulates, dQ follows; K, V, dK and dV stay."""
    rank, world = dist.get_rank(), dist.get_world_size()
    delta = (dout * out).sum(-1, keepdim=True)  # D: one number per query replaces out
    side = [q, dout, lse, delta]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq_handles = []  # of the dQ under way
    for hop in range(world):
        owner = (rank - hop) % world  # whose queries are here
        next_side, handles = post(side) if hop < world - 1 else (side, [])
        q, dout, lse, delta = side
        dq_part = torch.zeros_like(q)
        if owner >= rank:  # only these queries see my keys
            p = (scores(q, k, owner == rank) - lse).exp()
            ds = SCALE * p * (dout @ v.mT - delta)
            dv, dk, dq_part = dv + p.mT @ dout, dk + ds.mT @ q, ds @ k
        wait(dq_handles)
        # dQ arrives one hop behind its queries: add my part, pass it on. It comes home.
        (dq,), dq_handles = post([dq + dq_part])
        wait(handles)
        side = next_side
    wait(dq_handles)
    return dq, dk, dv


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same sequence on every rank
    q, k, v, dout = torch.randn(4, HEADS, world * LENGTH, DIM, dtype=torch.float64)
    whole = q, k, v, dout  # each [heads, tokens, dim]
    *shards, dout_shard = (x.chunk(world, 1)[rank].contiguous() for x in whole)
    out, lse = forward(*shards)
    results = (out, *backward(*shards, out, lse, dout_shard))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    dense.backward(dout)
    truth, names = (dense, q.grad, k.grad, v.grad), ("out", "dq", "dk", "dv")
    for name, ours, expected in zip(names, results, truth, strict=True):
        error = (ours - expected.chunk(world, 1)[rank]).abs().max().item()
        print(f"rank {rank} of {world}: {name} differs by {error:.1e}", flush=True)
        assert error <= 1e-12
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
