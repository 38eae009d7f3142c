"""BurstAttention (arXiv 2403.09347, Algorithms 1 and 2) in plain torch.distributed, causal, one shard per rank.

    torchrun --nproc-per-node 4 examples/burst_attention_in_80_lines.py

Each rank prints how far out, dq, dk and dv are from dense attention on one device: about 1e-15.
Rank 0 computes one tile and the last rank computes all of them: balanced layouts (zigzag) mend that.
"""

import torch
import torch.distributed as dist

HEADS, LENGTH, DIM = 2, 64, 16  # LENGTH: tokens of each rank
SCALE = DIM**-0.5


def post(tensors):
    """Start sending tensors to the next rank; return the buffers that receive from the previous rank, and the works."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensors, []
    arriving = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


def wait(works):
    for work in works:
        work.wait()


def scores(q, k, diagonal):
    s = SCALE * q @ k.mT
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if diagonal else s


def forward(q, k, v):
    """Algorithm 1: K and V circulate; out and lse stay and are merged by online softmax."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for hop in range(world):
        owner = (rank - hop) % world  # whose keys and values are here
        # Double buffering: the next shard is on the wire while this one is computed.
        following, works = post([k, v]) if hop < world - 1 else ([k, v], [])
        if owner <= rank:  # a causal mask hides later keys
            s = scores(q, k, owner == rank)
            part = s.logsumexp(-1, keepdim=True)
            total = torch.logaddexp(lse, part)
            out = out * (lse - total).exp() + (part - total).exp() * ((s - part).exp() @ v)
            lse = total
        wait(works)
        k, v = following
    return out, lse


def backward(q, k, v, out, lse, dout):
    """Algorithm 2: the query side circulates, dQ follows it and comes home; K, V, dK and dV stay."""
    rank, world = dist.get_rank(), dist.get_world_size()
    delta = (dout * out).sum(-1, keepdim=True)  # D: one number per query replaces out on the wire
    side, dq, dk, dv = [q, dout, lse, delta], [torch.zeros_like(q)], torch.zeros_like(k), torch.zeros_like(v)
    coming = []
    for hop in range(world):
        owner = (rank - hop) % world  # whose queries are here
        following, works = post(side) if hop < world - 1 else (side, [])  # double buffering again
        (q, dout, lse, delta), part = side, 0
        if owner >= rank:
            p = (scores(q, k, owner == rank) - lse).exp()
            ds = SCALE * p * (dout @ v.mT - delta)
            dv, dk, part = dv + p.mT @ dout, dk + ds.mT @ q, ds @ k
        wait(coming)
        dq, coming = post([dq[0] + part])  # after the last hop it arrives at its owner
        wait(works)
        side = following
    wait(coming)
    return dq[0], dk, dv


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same sequence on every rank
    q, k, v, dout = torch.randn(4, HEADS, world * LENGTH, DIM, dtype=torch.float64)
    *shards, dout_shard = (x.chunk(world, 1)[rank].contiguous() for x in (q, k, v, dout))
    out, lse = forward(*shards)
    found = (out, *backward(*shards, out, lse, dout_shard))
    dense = [x.requires_grad_() for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True)
    right.backward(dout)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, (right, q.grad, k.grad, v.grad), strict=True):
        error = (ours - theirs.chunk(world, 1)[rank]).abs().max().item()
        print(f"rank {rank} of {world}: {name} differs from dense attention by {error:.1e}", flush=True)
        assert error <= 1e-12
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
