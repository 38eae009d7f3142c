"""Generate after a prompt whose keys and values are dealt over ranks; continue it later on another number of ranks.

    python examples/generate.py                          # two ranks of this machine, then three
    torchrun --nproc-per-node 2 examples/generate.py     # or those that torchrun starts

It fails if the tokens are not those of one process with transformers' own cache.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import run
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf

PROMPT, NEW = 3_000, 20


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=8_192, **sizes)
    return LlamaForCausalLM(config).eval()


def main(folder):
    """Generate 20 tokens and save the cache; if the folder holds one already, load it and generate 20 more."""
    dist.init_process_group("gloo")
    ids = torch.randint(1, 256, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    loads = (folder / "cache.json").exists()
    expected = tiny_llama().generate(ids, max_new_tokens=2 * NEW, **greedy)

    model = hf.parallelize(tiny_llama())
    cache = ShardedCache.load(folder, model.config) if loads else ShardedCache(model.config)
    ids = expected[:, : PROMPT + NEW] if loads else ids  # the whole text; the cache holds all but its last tokens
    out = model.generate(ids, cache=cache, max_new_tokens=NEW, **greedy)
    assert torch.equal(out, expected[:, : out.shape[1]]), "other tokens than one process generates"
    figures = cache.figures()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {'loaded' if loads else 'new'} cache: {out[0, -NEW:].tolist()}")
        print("bytes of the cache by rank:", [each["cache_bytes"] for each in figures])
    if not loads:
        cache.save(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / f"cache-{os.getppid()}")
    else:
        with tempfile.TemporaryDirectory() as parent:
            for ranks in ("2", "3"):
                run.main(["--standalone", "--nproc-per-node", ranks, __file__, str(Path(parent) / "cache")])
