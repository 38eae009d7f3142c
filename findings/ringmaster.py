# The two ranks of the scripts ringmaster-*.sh, which append their cases: an eager model in one process is the judge.
import sys
import tempfile
from contextlib import contextmanager

import ringmaster as rm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ringmaster.adapters.raw import context_parallel_region
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

WORLD, LENGTH, VOCABULARY = 2, 64, 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.2}


def tokens():
    return torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def labels_of(ids, last):
    """Return labels of the last tokens alone."""
    labels = ids.clone()
    labels[:, :-last] = -100
    return labels


def build(kind, own):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES, **own)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


@contextmanager
def manager(batch, model, runtime):
    """Yield the keywords of a call under the manager for trainers, which count the targets of all ranks."""
    count = int((batch["labels"][:, 1:] != -100).sum())
    with rm.ContextParallelContextManager([model], runtime.cp_group, load_balance=runtime.shard_load_balance):
        yield {**batch, "num_items_in_batch": count}


def region(batch, model, runtime):
    """Return the README's context manager for a loop of one's own, whose gradients FSDP2 averages."""
    return context_parallel_region(batch)


def compared(batch, kind="llama", own=None, way=manager, backend="ulysses", balance="none"):
    """Return the loss over both ranks and of one process, and the greatest relative difference of a gradient."""
    plain, model = build(kind, own or {}), build(kind, own or {})
    wanted = plain(**batch, use_cache=False).loss
    wanted.backward()
    options = {"backend": rm.Backend(backend), "load_balance": rm.LoadBalance(balance)}
    config = rm.RingmasterConfig(size=WORLD, rotate_method=rm.RotateMethod.ALLTOALL, **options)
    runtime = rm.setup(config, num_kv_heads=4, device_type="cpu", inner_attn="sdpa")
    model.set_attn_implementation(runtime.attn_implementation)
    with way({name: x.clone() for name, x in batch.items()}, model, runtime) as given:
        loss = model(**given, use_cache=False).loss
        loss.backward()
    for x in (loss := loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)):
        dist.all_reduce(x)
        x /= WORLD
    off = 0.0
    for ours, right in zip(model.parameters(), plain.parameters(), strict=True):
        if right.grad is not None:
            found = torch.zeros_like(right) if ours.grad is None else ours.grad
            off = max(off, ((found - right.grad).norm() / right.grad.norm()).nan_to_num(torch.inf).item())
    return loss.item(), wanted.item(), off


def rank(number, folder, cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=WORLD)
    changed = []
    for name, arguments, right in cases():
        loss, wanted, off = compared(**arguments)
        if number == 0:
            print(f"seen: {name}: loss {loss:.5f}, one process {wanted:.5f}, a gradient is {off:.1e} off", flush=True)
        changed += [name] if right != (off < 1e-5) else []
    dist.destroy_process_group()
    if changed:
        sys.exit(f"changed: {changed}")


def main(cases):
    print("expected: loss and gradients are those of one process, within 1e-5")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder, cases), nprocs=WORLD)
