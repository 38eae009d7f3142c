"""What ``burst plan --generate`` predicts of bytes is what ranks hold and send."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from burst_attention.attention.footprint import LiveBytes
from burst_attention.inference import ShardedCache, shard_weights
from burst_attention.integrations import hf
from burst_attention.planner.presets import preset
from burst_train.forecast.models import Model
from burst_train.forecast.request import Cluster, Device, ForecastRequest
from burst_train.forecast.serving import served
from tests.support.generating import generate, over_ranks

SIZES = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=100),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
ZIGZAG, CONTIGUOUS = "layout=zigzag,ulysses_degree=1,circulate=key-value", "layout=contiguous,ulysses_degree=1"


def made(name, _, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation="sdpa").eval()


def predicted(name, world, tokens, rows, strategy, dtype=torch.float32):
    cluster = Cluster(ranks=world, per_node=8, rates=preset("cpu"), device=Device())
    model = Model.read(CONFIGS[name], name)
    request = ForecastRequest(seq_len=tokens, cluster=cluster, model=model, batch=rows, dtype=dtype, strategy=strategy)
    return served(request)[0]


@pytest.mark.parametrize(
    ("name", "world", "tokens", "rows", "strategy"),
    [
        ("llama", 2, 1_001, 1, ZIGZAG),
        ("mistral", 2, 1_000, 2, ZIGZAG),
        ("mistral", 3, 700, 1, CONTIGUOUS),
        ("qwen2", 3, 500, 1, "ulysses_degree=1,layout=zigzag-by-halves"),
        ("qwen3", 2, 129, 1, "ulysses"),
    ],
)
def test_bytes_held_and_sent_are_those_predicted(name, world, tokens, rows, strategy):
    """After the first token; what it sends does not depend on the length."""

    def use(model, cache):
        ids = torch.randint(1, 250, (rows, tokens), generator=torch.Generator().manual_seed(1))
        generate(model, cache, ids, max_new_tokens=1)
        return cache.figures(), cache.prefill_sent, sum(x.nbytes for x in model.parameters())

    of_ranks = over_ranks(name, world, use, make=made, strategy=strategy)
    found, expected = of_ranks[0][0], predicted(name, world, tokens, rows, strategy)
    assert max(each["cache_bytes"] for each in found) == expected.memory["cache"]
    for rank, (_, prefill, weights) in enumerate(of_ranks):
        assert found[rank]["sent_bytes"] - prefill == expected.sent
        assert weights == expected.memory["weights"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [ZIGZAG, "ulysses"])
def test_memory_of_a_prompt_is_at_most_what_is_predicted(strategy, dtype):
    """All tensors of a prompt's forward and of a step count, without weights and cache."""

    def use(model, cache):
        ids = torch.randint(1, 250, (1, 2_048), generator=torch.Generator().manual_seed(1))
        weights = sum(x.nbytes for x in model.parameters())
        with LiveBytes(*model.parameters()) as live:
            generate(model, cache, ids, max_new_tokens=1)
        return live.most - cache.nbytes() - weights

    found = max(over_ranks("llama", 2, use, make=lambda *both: made(*both, dtype), strategy=strategy))
    work = predicted("llama", 2, 2_048, 1, strategy, dtype).memory["work"]
    assert 0.9 * work <= found <= 1.05 * work


def shared(name, tokens):
    """Return a rank's bytes of weights, those sent in the first step, and the highest of a prompt's tensors."""
    model = hf.parallelize(made(name, None), strategy=ZIGZAG)
    shard_weights(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    cache = ShardedCache(model.config)
    ids = torch.randint(1, 250, (1, tokens), generator=torch.Generator().manual_seed(1))
    local = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    rows = [each for module in model._burst.shared.modules for each in module.burst_part.in_place]
    theirs = [x for each in rows for x in each.values()]
    with LiveBytes(*local, *theirs) as live:
        model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    sent, weights = cache.sent, sum(x.nbytes for x in local)
    mapped = {x.data_ptr(): x.nbytes for x in (*local, *theirs)}  # a tied weight once
    model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=cache, max_new_tokens=1, do_sample=False)
    return weights, cache.sent - sent, live.most - sum(mapped.values()), cache.nbytes()


@pytest.mark.parametrize(("name", "world"), [("llama", 2), ("qwen2", 3), ("qwen3", 2)])
def test_shared_weights_are_those_predicted(pools, name, world):
    cluster = Cluster(ranks=world, per_node=8, rates=preset("cpu"), device=Device())
    model = Model.read(CONFIGS[name], name)
    request = ForecastRequest(seq_len=600, cluster=cluster, model=model, dtype=torch.float32, strategy=ZIGZAG)
    expected = served(request)[1]
    done = pools(world).run(shared, name, 600)
    assert max(weights for weights, *_ in done) == expected.memory["weights"]
    assert max(sent for _, sent, *_ in done) == expected.sent
    assert max(most - held for *_, most, held in done) <= 1.05 * expected.memory["work"]
