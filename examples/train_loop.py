"""A loop over four local ranks: FSDP2, packed documents, accumulation, clipping.

`python examples/train_loop.py` prints each step's loss, which falls. It fails if the
first loss or gradient norm differs from that of one rank.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.loss import next_token_loss

RANKS, STEPS, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 10, 203, 32, 64, 4
# borders of the documents in each sequence of an optimizer step
DOCUMENTS = [0, 50, 203], [0, 7, 90, 91, 203]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, plan):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, S_local, D]
        return x + self.out(burst_attention(q, k, v, plan).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    # The forward returns the loss: FSDP gathers the head only inside its root module.
    def forward(self, ids, plan, num_valid):
        x = self.tokens(plan.shard(ids, 1))
        x = x + self.places(plan.document_positions)  # from each document's start
        for block in self.blocks:
            x = block(x, plan)
        labels = plan.shard_labels(ids)  # shifted over the whole sequence, then sharded
        return next_token_loss(x, self.head.weight, labels, plan, num_valid=num_valid)


def backward(model, plan, step):
    """Return a step's loss, one mean over all its tokens; accumulate its gradient."""
    model.zero_grad()
    loss = 0.0
    # a document's last token has no target
    num_valid = sum(LENGTH - (len(borders) - 1) for borders in DOCUMENTS)
    for borders in DOCUMENTS:
        ids = (5 * step + torch.arange(LENGTH)) % VOCABULARY  # the same on every rank
        masked = plan.with_mask(Mask(cu_seqlens=borders))  # exchanges nothing
        part = model(ids.unsqueeze(0), masked, num_valid)
        part.backward()
        loss += part.item()  # already the sum over all ranks
    return loss


def main(rank, ranks):
    torch.set_num_threads(1)  # the ranks share the cores
    job = {"init_method": ranks, "rank": rank, "world_size": RANKS}
    dist.init_process_group("gloo", **job)  # under torchrun: "gloo" alone
    torch.manual_seed(0)  # the same first weights on every rank
    model, alone = Model(), dist.new_subgroups(1)[0]
    first = backward(model, make_plan(LENGTH, group=alone), 0)
    expected = first, nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for module in (*model.blocks, model):  # parts first, the root last
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)  # sum the ranks' shares: no mean
        module.set_force_sum_reduction_for_comms(True)  # gloo's sum can't divide
    plan = make_plan(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = backward(model, plan, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        if step == 0:
            torch.testing.assert_close((loss, norm), expected, rtol=1e-4, atol=0)
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes = {"nprocs": RANKS, "start_method": "fork"}
        start_processes(main, (f"file://{folder}/ranks",), **processes)
