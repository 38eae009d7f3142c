"""The idea in plain torch: keys and values go round a ring of ranks, partial results are merged by online softmax.

    python examples/ring_in_60_lines.py                            # four ranks of this machine
    torchrun --nproc-per-node 3 examples/ring_in_60_lines.py       # or those that torchrun starts

No rank ever holds more than two shards of K and V, and the result is exact. Each rank prints how far its rows are from
dense attention on one device: about 1e-15. Rank 0 computes one tile and the last rank all of them: what layouts mend.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, HEADS, LENGTH, DIM = 4, 2, 64, 16  # LENGTH: tokens of each rank


def tile(q, k, v, causal):
    """Attention of some queries to some keys: (out [H, L, D], lse [H, L, 1]), lse the log of the row's sum of exps."""
    scores = q @ k.mT / DIM**0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def merge(out, lse, more, more_lse):
    """Two partial results over different keys are one result over all of them: each is weighted by its share."""
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp() + more * (more_lse - total).exp(), total


def ring_forward(q, k, v):
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(v), torch.full_like(v[..., :1], -torch.inf)  # what changes nothing in a merge
    for hop in range(world):
        owner = (rank - hop) % world  # whose keys and values are here now
        arriving, exchange = [torch.empty_like(x) for x in (k, v)], []
        if hop < world - 1:  # start the next exchange first: it runs while this tile is computed
            sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in (k, v)]
            receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in arriving]
            exchange = dist.batch_isend_irecv(sends + receives)
        if owner <= rank:  # later keys are seen by none of our queries
            out, lse = merge(out, lse, *tile(q, k, v, causal=owner == rank))
        for work in exchange:
            work.wait()
        k, v = arriving
    return out


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same sequence on every rank
    q, k, v = torch.randn(3, HEADS, world * LENGTH, DIM, dtype=torch.float64)
    mine = slice(rank * LENGTH, (rank + 1) * LENGTH)
    out = ring_forward(*(x[:, mine].contiguous() for x in (q, k, v)))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, mine]
    print(f"rank {rank} of {world}: {(out - dense).abs().max():.1e} from dense attention", flush=True)
    torch.testing.assert_close(out, dense)


def start(rank, meeting_point):
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    main()


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(start, (f"file://{folder}/ranks",), nprocs=RANKS, start_method="fork")
