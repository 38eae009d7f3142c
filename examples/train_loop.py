"""A training loop over four local ranks: FSDP2, packed documents, gradient accumulation and clipping.

`python examples/train_loop.py` prints each step's loss, which falls, and fails if the first is not one rank's own.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.loss import next_token_loss

RANKS, STEPS, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 10, 203, 32, 64, 4
DOCUMENTS = [0, 50, 203], [0, 7, 90, 91, 203]  # borders, for each of the sequences of one optimizer step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, plan):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, S_local, D]
        return x + self.out(burst_attention(q, k, v, plan).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, plan, num_valid):  # the loss itself: the head is whole only inside FSDP's root module
        x = self.tokens(plan.shard(ids, 1)) + self.places(plan.document_positions)  # counted from each document's start
        for block in self.blocks:
            x = block(x, plan)
        # Labels are shifted over the whole sequence, then cut: cut first, every shard's last token would lose its own.
        return next_token_loss(x, self.head.weight, plan.shard_labels(ids), plan, num_valid=num_valid)


def backward(model, plan, step):
    """The gradient of a step's loss, and that loss: one mean over its sequences' tokens, not a mean of means."""
    model.zero_grad()
    num_valid, loss = sum(LENGTH - (len(borders) - 1) for borders in DOCUMENTS), 0.0  # a document's last has no target
    for borders in DOCUMENTS:
        ids = (5 * step + torch.arange(LENGTH)).unsqueeze(0) % VOCABULARY  # [1, LENGTH], the same on every rank
        part = model(ids, plan.with_mask(Mask(cu_seqlens=borders)), num_valid)  # a new mask exchanges nothing
        part.backward()
        loss += part.item()  # the sum over all ranks already
    return loss


def main(rank, ranks):
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo", init_method=ranks, rank=rank, world_size=RANKS)  # torchrun: just "gloo"
    torch.manual_seed(0)  # the same first weights on every rank
    model, alone = Model(), dist.new_subgroups(1)[0]
    expected = backward(model, make_plan(LENGTH, group=alone), 0), nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for module in (*model.blocks, model):  # parts first, the root last
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)  # ranks' gradients are shares of one loss: their sum, not their mean
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum that divides as it goes
    plan, optimizer = make_plan(LENGTH), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = backward(model, plan, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # of all ranks' parts
        if step == 0:
            torch.testing.assert_close((loss, norm), expected, rtol=1e-4, atol=0)
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (f"file://{folder}/ranks",), nprocs=RANKS, start_method="fork")
