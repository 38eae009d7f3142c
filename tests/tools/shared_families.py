"""Every causal language model that generates over ranks, tiny and random, with weights that 1 to 4 ranks share.

    python tests/tools/shared_families.py [MODEL_TYPE ...]

Its tokens are compared with those of one process: of a prompt, whole and in pieces, of later turns, of a cache that two
ranks saved, and of a seed. Each rank's share of the matrices is counted, and what is gathered for each token.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from burst_bench.pool import WorkerPool
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from burst_attention.inference import ShardedCache, shard_weights
from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading import known
from burst_attention.testing import WorkerError
from tests.support.conditioning import certain, margin_of_choices
from tests.tools.families import DRAWS, PAGE, PROMPT, VOCABULARY, built, model_of

GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 5, "temperature": 1.3}
TURNS = (20, 3)  # further tokens of the later turns; the last one continues a saved cache


def made(model_type: str, seed: int) -> Any:
    """The model, which every process makes alike."""
    transformers_logging.set_verbosity_error()
    return model_of(model_type, built(model_type)[0], "eager", seed=seed)


def ids_of(count: int, seed: int) -> torch.Tensor:
    """Random token ids [1, count]."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The text after ``ids``, which may hold the token of padding: a model may have written it."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | options)


def sampled(model: Any, **options: Any) -> torch.Tensor:
    """The text of a seed."""
    torch.manual_seed(3)
    return generate(model, ids_of(PROMPT, 2), **SAMPLED, **options)


def one_process(model: Any) -> list[torch.Tensor]:
    """The tokens after each turn, and those of a seed. No turn reuses keys."""
    # transformers' cache drops keys beyond a window that such a model's layers don't use.
    options = {"use_cache": model.config.model_type not in known.WITHOUT_WINDOW}
    texts = [generate(model, ids_of(PROMPT, 2), **options)]
    for count in TURNS:
        texts.append(generate(model, torch.cat([texts[-1], ids_of(count, count)], 1), **options))
    return [*texts, sampled(model, **options)]


def over_ranks(model_type: str, seed: int, texts: list[torch.Tensor], folder: str) -> tuple[list[Any], float, float]:
    """A rank's tokens, its share of the matrices' bytes, and the share that is gathered for each token."""
    world = dist.get_world_size()
    whole = made(model_type, seed)
    sizes = {name: x.nbytes for name, x in whole.named_parameters() if x.dim() > 1}
    model = hf.parallelize(whole, timeout=60)
    shard_weights(model, init_device_mesh("cpu", (world,)))
    now = dict(model.named_parameters())
    held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for name, x in now.items() if name in sizes)
    shared = {id(x) for module in model._burst.shared.modules for x in module._parameters.values()}
    gathered = sum(sizes[n] for n, x in now.items() if n in sizes and isinstance(x, DTensor) and id(x) not in shared)
    cache = ShardedCache(model.config, timeout=60, prefill_chunk=64 if world % 2 == 0 else None)
    found = [generate(model, text[:, :-4], past_key_values=cache) for text in texts[:2]]
    if world == 2:
        cache.save(folder)
    else:
        cache = ShardedCache.load(folder, model.config, timeout=60)
    found.append(generate(model, texts[2][:, :-4], past_key_values=cache))
    found.append(sampled(model, past_key_values=ShardedCache(model.config, timeout=60)))
    return found, held / sum(sizes.values()), gathered / sum(sizes.values())


class Pools:
    """Processes of each number of ranks; after an error new ones are started. Use as a context manager."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(self, world: int, function: Any, *arguments: Any, **limits: float) -> list[Any]:
        """Call a function on every rank, as ``WorkerPool.run``."""
        pool = self._pools.get(world)
        if pool is not None and pool.broken:
            pool.close()
        if pool is None or pool.broken:
            pool = self._pools[world] = WorkerPool(world)
        return pool.run(function, *arguments, **limits)


def judge(model_type: str, pools: Pools) -> str:
    """Return "equal" and what was counted, or what was wrong."""
    draws = ((seed, made(model_type, seed)) for seed in range(DRAWS))
    seed, alone = certain(draws, lambda draw: margin_of_choices(draw[1], one_process))
    texts, shares = one_process(alone), []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 1, 3, 4):
            try:
                done = pools.run(world, over_ranks, model_type, seed, texts, str(Path(folder) / "cache"))
            except WorkerError as error:
                return f"{world} ranks: error: {str(error)[:300]}"
            for found, held, gathered in done:
                if wrong := [n for n, pair in enumerate(zip(found, texts, strict=True)) if not torch.equal(*pair)]:
                    return f"{world} ranks: different: texts {wrong}"
                shares.append(f"{held * world:.2f}/{world} {gathered:.2f}")
    return "equal; bytes held, gathered: " + ", ".join(dict.fromkeys(shares))


def generating() -> list[str]:
    """The model types of the page that generate over ranks."""
    found = re.search(r"\*\*Generate over ranks\*\*[^\n]*\n\n([^\n]*)\.\n", PAGE.read_text("utf-8"))
    assert found is not None
    return found[1].split(", ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="*")
    torch.set_num_threads(1)
    wrong = 0
    with Pools() as pools:
        for model_type in parser.parse_args().model_type or generating():
            try:
                verdict = judge(model_type, pools)
            except Exception as error:
                verdict = f"error: {type(error).__name__}: {str(error)[:300]}"
            wrong += not verdict.startswith("equal")
            print(f"{model_type:26} {verdict}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
