"""Ray Train starts the ranks and restarts them after a failure: hf.parallelize, FSDP2, checkpoints.

    python examples/ray_train.py --out runs/ray             # two workers of this machine
    python examples/ray_train.py --out runs/ray2 --kill 3   # one is killed in step 3, and Ray restarts both

It needs Ray: pip install "ray[train]". It prints each step's loss; --kill changes no bit of it.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.integrations import hf

STEPS, SAVE_EVERY = 6, 2


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))


def save(model, optimizer, progress):
    """Write this rank's shards; Ray puts those of all ranks into one folder below --out."""
    weights, moments = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": weights, "optimizer": moments, "progress": progress}, checkpoint_id=folder)
        train.report({"losses": progress["losses"].tolist()}, checkpoint=train.Checkpoint.from_directory(folder))


def load(model, optimizer, progress, checkpoint):
    weights, moments = get_state_dict(model, optimizer)
    with checkpoint.as_directory() as folder:
        dcp.load({"model": weights, "optimizer": moments, "progress": progress}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def worker(config):
    """Run on every rank. Ray's prepare_model and prepare_data_loader would give each rank other sequences."""
    model, data = tiny_llama(), torch.tensor(list(config["text"]))
    data = data[: len(data) // 301 * 301].view(-1, 1, 301)  # the same on every rank; 301 divides by nothing
    alone = model(input_ids=data[0], labels=data[0]).loss.item()
    hf.parallelize(model, strategy="zigzag-ring")  # "auto" measures links, so it may choose another after a restart
    for module in (*model.model.layers, model):  # parts first, the root last
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = {"step": torch.tensor(0), "losses": torch.zeros(STEPS)}
    checkpoint = train.get_checkpoint()
    if checkpoint:
        load(model, optimizer, progress, checkpoint)
        print(f"resumes at step {progress['step']}", flush=True)
    for step in range(int(progress["step"]), STEPS):
        loss = model(input_ids=data[step], labels=data[step]).loss  # over all tokens, the same on every rank
        if step == 0:
            torch.testing.assert_close(loss.item(), alone, rtol=1e-5, atol=0)
        if step == config["kill"] and not checkpoint and train.get_context().get_world_rank() == 1:
            train.get_all_reported_checkpoints()  # Ray learns of a save only every 2 s
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["losses"][step] = loss.detach()
        progress["step"] += 1
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS:
            save(model, optimizer, progress)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="the run's folder; all nodes must see it")
    parser.add_argument(
        "--kill", type=int, choices=range(SAVE_EVERY, STEPS), help="the step in which rank 1 is killed, once"
    )
    given = parser.parse_args()
    out = given.out.resolve()
    result = TorchTrainer(
        worker,
        train_loop_config={"text": Path(__file__).read_bytes(), "kill": given.kill},
        scaling_config=train.ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=train.RunConfig(
            name=out.name, storage_path=str(out.parent), failure_config=train.FailureConfig(max_failures=2)
        ),
    ).fit()
    for step, loss in enumerate(result.metrics["losses"]):
        print(f"step {step}: loss {loss:.3f} ({loss.hex()})", flush=True)


if __name__ == "__main__":
    main()
