"""Compare a step's predicted memory with a rank's tensors and its resident memory."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from burst_bench.harness.memory import give_back, peak_during, resident
from burst_bench.pool import WorkerPool
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from burst_attention.launch.join import join
from burst_train.cli.preflight import predict_memory
from burst_train.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from burst_train.forecast.memory import PARTS
from burst_train.memory import MemoryConfig
from burst_train.step.loop import Trainer
from tests.support.training import config_of, saved_model

BATCH = 8  # of short sequences: memory without the attention's time
SIZES = {"vocab_size": 258, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2**20}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A few long documents."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"{n * n % 97} times {n} is odd.\n" for n in range(12_000))
    for name in "abc":
        (folder / f"{name}.txt").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(LlamaConfig(**SIZES), tmp_path_factory.mktemp("model"), 1)


def steps(config):
    with join(device="cpu", timeout=60) as context:
        for _ in itertools.islice(Trainer(config, context).steps(), 2):
            pass


def most_resident(config):
    """Above the start: the model, and two steps. What a first step brings that is no tensor is there before."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory without writes is not resident
    try:
        peak_during(lambda: steps(replace(config, data=replace(config.data, seq_len=97))))
        give_back()
        before = resident()
        return peak_during(lambda: steps(config))[1] - before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling


def allocated_during(call):
    """Return the most bytes of tensors made by ``call`` that existed at the same time.

    torch's CPU allocator counts them. So tensors within operators are included; rounding to pages, free memory and
    everything except tensors is not. Memory that another thread frees, as gloo's threads do, counts until its address
    is allocated again. With several ranks the result may therefore be too high, by the size of messages.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    found, events = [*recorded.profiler.kineto_results.experimental_event_tree()], []
    while found:
        event = found.pop()
        found += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append(event)
    live, now, most = {}, 0, 0
    for event in sorted(events, key=lambda each: each.start_time_ns):
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        now += max(size, 0) - live.pop(place, 0)
        if size > 0:
            live[place] = size
        most = max(most, now)
    return most


def most_of_tensors(config):
    """Return what a rank holds of the model in two steps, and what it allocates meanwhile."""
    with join(device="cpu", timeout=60, tensor_parallel=config.parallel.tensor_parallel) as context:
        trainer = Trainer(config, context)
        shards = [p.to_local() for p in trainer.model.parameters()] + [*trainer.model.buffers()]
        held = sum(x.untyped_storage().nbytes() for x in shards)
        return held + allocated_during(lambda: [*itertools.islice(trainer.steps(), 2)])


def parts_of(config, length, world, batch=1, strategy="auto", dtype="float32", optim=None, tensor_parallel=1, **flags):
    packing = {"packing": "balanced"} if strategy == "balanced" else {}
    asked = TrainConfig(
        data=DataConfig(seq_len=length, pack="documents" if packing else "none"),
        model=ModelConfig(dtype=dtype),
        parallel=ParallelConfig(
            strategy="ulysses_degree=1" if packing else strategy,
            device="cpu",
            tensor_parallel=tensor_parallel,
            **packing,
        ),
        optim=OptimConfig(batch=batch, **(optim or {})),
        memory=MemoryConfig(**flags),
    )
    return predict_memory(asked, config, world)


def predicted(model, length, world, batch=BATCH, **flags):
    return sum(parts_of(AutoConfig.from_pretrained(model), length, world, batch, **flags).values())


def config_for(corpus, model, out, length, strategy="auto", batch=BATCH, **flags):
    shared = {
        "pack": "none",
        "batch": batch,
        "held_out": 0.0,
        "model": model,
        "tokenizer": "bytes",
        "strategy": strategy,
    }
    return config_of(corpus, out, seq_len=length, **shared, **flags)


def hold(config, expected, world):
    """Measure in new processes: memory left by other tests would be resident too."""
    with WorkerPool(world, timeout=120) as pool:
        resident_bytes = max(pool.run(most_resident, config))
        tensors = max(pool.run(most_of_tensors, config))
    # Messages' tensors that gloo's threads set free are counted on and on.
    assert 0.9 * expected < tensors < (1.1 if world == 1 else 1.25) * expected, (expected, tensors, resident_bytes)
    assert resident_bytes == pytest.approx(expected, rel=0.1), (expected, tensors, resident_bytes)
    ratios = f"tensors {tensors / expected:.3f}, resident {resident_bytes / expected:.3f}"
    print(f"{expected / 2**20:.1f} MiB predicted, {ratios}")


WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
MIXED = {"intermediate_size": 256, "num_local_experts": 5, "num_experts_per_tok": 2}
NORMED = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32}
NARROW = {"intermediate_size": 128, "num_key_value_heads": 4}
SLICED = {"remat": "keep-attention", "strategy": "ulysses_degree=2"}


def case(mark, kind, sizes, world=2, **flags):
    return pytest.param(kind, sizes, world, flags, marks=mark)


@pytest.mark.parametrize(
    ("kind", "sizes", "world", "flags"),
    [
        case(pytest.mark.long, LlamaConfig, {}, remat="layer"),
        case(pytest.mark.slow, LlamaConfig, {}, world=1, remat="none"),
        case(pytest.mark.slow, LlamaConfig, {}, remat="keep-attention"),
        # With head groups, a slice replaces q, k and v; under keep-attention it adds to the layer's input and out.
        case(pytest.mark.long, LlamaConfig, NARROW, **SLICED),
        case(pytest.mark.slow, LlamaConfig, NARROW, **SLICED | {"remat": "none"}),
        case(pytest.mark.slow, LlamaConfig, NARROW | {"num_key_value_heads": 1}, **SLICED),
        case(pytest.mark.long, Qwen3Config, {"head_dim": 32}, remat="keep-attention"),
        case(pytest.mark.long, Qwen2Config, {"head_dim": 32}, remat="none"),
        case(pytest.mark.long, MistralConfig, {"head_dim": 32}, remat="layer", mlp_chunks=4),
        case(pytest.mark.long, LlamaConfig, {"vocab_size": 4096}, remat="none"),
        case(pytest.mark.long, LlamaConfig, {}, world=4, remat="none", tensor_parallel=2),
        case(pytest.mark.slow, LlamaConfig, {}, remat="layer", mlp_chunks=4, tensor_parallel=2),
        case(pytest.mark.slow, Qwen3Config, {"head_dim": 32}, remat="layer", tensor_parallel=2),
        case(pytest.mark.slow, LlamaConfig, WIDE, remat="none", batch=1, tensor_parallel=2),
        case(pytest.mark.long, MixtralConfig, MIXED, remat="none"),
        case(pytest.mark.long, MixtralConfig, MIXED, remat="layer"),
        case(pytest.mark.slow, MixtralConfig, MIXED, remat="keep-attention"),
        case(pytest.mark.long, Qwen3MoeConfig, NORMED, remat="none"),
        case(pytest.mark.slow, Qwen3MoeConfig, NORMED, remat="layer"),
        # Weights of experts are most of it. Over several ranks what gloo's threads free is counted at random.
        case(pytest.mark.slow, MixtralConfig, MIXED | {"num_local_experts": 64}, world=1, remat="none", batch=1),
        case(pytest.mark.long, MixtralConfig, MIXED | {"num_local_experts": 64}, world=1, remat="layer", batch=1),
        case(pytest.mark.slow, Qwen3MoeConfig, NORMED | {"num_experts": 32}, world=1, remat="keep-attention", batch=2),
    ],
)
def test_the_tensors_at_the_peak_are_as_predicted(pools, corpus, tmp_path, kind, sizes, world, flags):
    """The strategy is fixed: else rates decide whether heads are cut, and a prediction doesn't know measured ones."""
    folder, flags = tmp_path / "model", {"strategy": "ulysses_degree=1"} | flags
    AutoModelForCausalLM.from_config(kind(**SIZES | sizes)).save_pretrained(folder)
    config = config_for(corpus, str(folder), tmp_path / "out", 250 * world, **flags)
    most = max(pools(world).run(most_of_tensors, config))
    assert most == pytest.approx(predicted(str(folder), 250 * world, world, **flags), rel=0.1)


@pytest.fixture(scope="module")
def tailed(tmp_path_factory):
    """A corpus whose documents have a long tail of lengths."""
    folder, draw = tmp_path_factory.mktemp("tailed"), random.Random(5)
    for n in range(200):
        length = min(3000, int(draw.lognormvariate(4.5, 1.5)) + 20)
        (folder / f"{n:03}.txt").write_text("".join(draw.choices("abcdefgh \n", k=length)))
    return str(folder)


@pytest.mark.parametrize(
    ("world", "remat"),
    [(2, "none"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, "layer"), (4, "keep-attention")))],
)
@pytest.mark.long
def test_the_fullest_rank_of_a_balanced_row_is_predicted(pools, tailed, model, tmp_path, world, remat):
    """No step may need more than the prediction, which is for a rank that is as full as the layout allows."""
    length, whole = 125 * world, {"strategy": "ulysses_degree=1"}
    shared = {"held_out": 0.0, "model": model, "tokenizer": "bytes", "remat": remat, "seq_len": length}
    config = config_of(tailed, tmp_path, **shared, **whole, packing="balanced", batch=BATCH)
    expected = predicted(model, length, world, strategy="balanced", remat=remat)
    most = max(pools(world).run(most_of_tensors, config))
    print(f"{expected / 2**20:.1f} MiB predicted, {most / expected:.3f} of it allocated")
    assert most == pytest.approx(expected, rel=0.1)


CHUNKS = {"batch": 64, "remat": "layer", "attention_chunks": 2, "mlp_chunks": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "length", "world", "flags"),
    [
        *(
            ({}, length * world, world, {"remat": remat})
            for length, world, remat in itertools.product(
                (700, 1000, 1500), (1, 2), ("none", "layer", "keep-attention")
            )
        ),
        # Weights are most of it.
        *((WIDE, 256, world, {"remat": "none", "batch": 1}) for world in (1, 2)),
        *((WIDE, 512, world, {"remat": "layer", "batch": 1}) for world in (1, 2)),
        ({"num_hidden_layers": 8}, 600, 2, CHUNKS),
        *(({"num_hidden_layers": 8}, 300 * world, world, CHUNKS | {"offload": "disk"}) for world in (2, 4)),
    ],
)
def test_the_peak_is_as_predicted(corpus, tmp_path, sizes, length, world, flags):
    folder = tmp_path / "model"
    flags = flags | ({"offload": f"disk:{tmp_path}"} if "offload" in flags else {})
    LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).save_pretrained(folder)
    config = config_for(corpus, str(folder), tmp_path / "out", length, **flags)
    hold(config, predicted(str(folder), length, world, **flags), world)


@pytest.mark.long
def test_each_flag_lowers_the_prediction(model):
    plain, layer, pieces, keep = (
        predicted(model, 8192, 2, **flags)
        for flags in ({}, {"remat": "layer"}, {"remat": "layer", "mlp_chunks": 4}, {"remat": "keep-attention"})
    )
    assert plain > 1.5 * layer and layer > 1.1 * pieces and plain > keep > layer
    heads = predicted(model, 8192, 2, remat="layer", mlp_chunks=4, attention_chunks=2)
    assert (
        pieces
        > 1.05 * heads
        > 1.1 * predicted(model, 8192, 2, remat="layer", mlp_chunks=4, attention_chunks=2, offload="disk:/scratch")
    )
    assert plain > 1.3 * predicted(model, 8192, 2, mlp_chunks=4), "pieces are recomputed, whatever the layer is"
    assert predicted(model, 16384, 4, remat="layer") == pytest.approx(layer, rel=0.05), "of a rank"


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_every_architecture_is_predicted(kind):
    config = kind(**SIZES | {"max_position_embeddings": 4096})
    if kind is MistralConfig:
        config.sliding_window = 700
    single, half = parts_of(config, 4096, 3), parts_of(config, 4096, 3, dtype="bfloat16", optim={"accumulate": 2})
    for parts in (single, half):
        assert tuple(parts) == PARTS and min(parts.values()) >= 0
    assert sum(half.values()) < 0.75 * sum(single.values())
    assert half["gradients"] == half["weights"], "kept from micro-step to micro-step"


def test_what_no_formula_gives_is_not_predicted():
    config = LlamaConfig(**SIZES)
    assert parts_of(config, 64, 2, dtype="float64") is None and parts_of(config, 64, 1, strategy="single") is None
    assert parts_of(Gemma2Config(**SIZES), 64, 2) is None
    assert parts_of(config, 64, 2, strategy="tensor") is None
    mixture = MixtralConfig(**SIZES | MIXED)
    assert parts_of(mixture, 64, 2) and parts_of(mixture, 64, 2, mlp_chunks=2) is None
    assert parts_of(mixture, 64, 2, tensor_parallel=2) is None
    mixture.quantization_config = {"quant_method": "fp8"}
    assert parts_of(mixture, 64, 2) is None


def test_a_balanced_layout_is_as_full_as_it_may_be():
    config = LlamaConfig(**SIZES)
    asked = (parts_of(config, 8192, 4, strategy=f"layout={name},ulysses_degree=1") for name in ("balanced", "zigzag"))
    balanced, even = (sum(parts.values()) for parts in asked)
    assert balanced > 1.02 * even


def test_weights_count_once_however_many_tokens():
    few, many = (parts_of(LlamaConfig(**SIZES), n, 2) for n in (4096, 8192))
    assert few["weights"] == many["weights"] > 0 and few["AdamW"] == 2 * few["weights"]
    assert many["activations"] == pytest.approx(2 * few["activations"], rel=0.1)


@pytest.mark.long
def test_whole_gradients_are_there_for_one_layer_at_a_time():
    """Use many layers and few tokens, so that there are fewer whole gradients than weights."""
    parts = parts_of(LlamaConfig(**SIZES | {"num_hidden_layers": 40}), 64, 8)
    assert sum(parts.values()) < 8 * parts["weights"]
