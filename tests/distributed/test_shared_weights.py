"""Weights that ranks share by rows, and experts: the tokens of one process, and no weight moves in a step."""

import copy
import functools
import os
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from burst_bench.pool import WorkerPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from burst_attention.attention.dealt import dealt_bytes
from burst_attention.comm.transport import Transport
from burst_attention.inference import ShardedCache, columns, in_place, shard_weights, weights
from burst_attention.inference.weights import step_bytes
from burst_attention.integrations import hf
from burst_attention.testing import WorkerError, local_world
from tests.support.generating import (
    GREEDY,
    POSITIONS,
    SHARED,
    check_equal,
    check_that_rank_1_is_named,
    error_of_killing_rank_1,
    generate,
    ids_of,
    labels_sent,
    model_of,
)
from tests.support.hf_models import WHOLE_HEADS, make_model

NEW = 8


@hf.token_wise
class In8Bits(nn.Module):
    """A linear layer of 8-bit weights, as packages for quantization have."""

    def __init__(self, linear):
        super().__init__()
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127, requires_grad=False)
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale)


def in_8_bits(model):
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.o_proj = In8Bits(layer.mlp.up_proj), In8Bits(layer.self_attn.o_proj)
    return model


def with_lora(targets, model):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


# By name: another model, and what becomes of it.
CHANGED = {
    "lora of q and v": ("llama", functools.partial(with_lora, ["q_proj", "v_proj"])),
    "lora of all": ("llama", functools.partial(with_lora, "all-linear")),
    "lora of experts' layers": ("deepseek_v3", functools.partial(with_lora, ["q_a_proj", "o_proj", "down_proj"])),
    "8 bits": ("llama", in_8_bits),
}
# Whose matrices that no rank can compute by rows are more than 1/64 of these small models.
GATHERED = (
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5",
    "qwen3_next",
    "bamba",
    "kimi_linear",
    "nemotron_h",
    "gemma4_text",
    f"gemma4_text{SHARED}",
    f"gemma3n_text{SHARED}",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m3_vl",
    *CHANGED,
)


def made(name, implementation="burst"):
    """Return a new model; transformers makes biases of zeros, which would hide a wrong one."""
    own, change = CHANGED.get(name, (name, lambda model: model))
    if name == "nine heads":
        sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
        sizes |= {"max_position_embeddings": POSITIONS}
        model = make_model("llama", implementation, torch.float32, **sizes).eval()
    else:
        model = copy.deepcopy(model_of(own, implementation))
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.normal_(part.bias, generator=torch.Generator().manual_seed(1))
    return change(model)


def one_process(name, ids, **options):
    return made(name, "eager").generate(ids, **GREEDY | {"max_new_tokens": NEW} | options)


def shared_model(name, timeout=30, *, apart=False):
    """Return a model whose weights all ranks share, and a cache for it. ``apart``: as on a host for each rank."""
    model = hf.parallelize(made(name), strategy=WHOLE_HEADS, timeout=timeout)
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(in_place, "host", lambda: str(dist.get_rank()))
        shard_weights(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, ShardedCache(model.config, timeout=timeout)


def sendable(out):
    return SimpleNamespace(sequences=out.sequences, logits=out.logits)


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


def generated(name, count, rows, apart):
    """Return a rank's tokens and logits; the share of matrices that it holds; those that each token gathers."""
    whole = {key: x.numel() for key, x in made(name).named_parameters() if x.dim() > 1}
    model, cache = shared_model(name, apart=apart)
    held = {key: (x.to_local() if isinstance(x, DTensor) else x).numel() for key, x in model.named_parameters()}
    share = sum(held[key] for key in whole) / sum(whole.values())
    cut = [key for key, x in model.named_parameters() if key in whole and isinstance(x, DTensor)]
    gathered = [key for key in cut if "burst_part" not in vars(model.get_submodule(key.rpartition(".")[0]))]
    out = generate(model, cache, ids_of(count, rows), max_new_tokens=NEW)
    return sendable(out), share, gathered, any(isinstance(part, FSDPModule) for part in model.modules())


@pytest.mark.parametrize("apart", [False, long(True)])
@pytest.mark.parametrize(
    ("name", "count", "rows", "world"),
    [
        ("llama", 7, 1, 2),
        ("llama", 100, 2, 3),
        ("qwen2", 100, 1, 2),
        ("gemma3", 100, 1, 3),
        ("deepseek_v3", 70, 1, 2),
        ("qwen3_5", 70, 1, 2),
        ("glm_moe_dsa", 70, 1, 2),
        ("lora of q and v", 70, 1, 2),
        ("nine heads", 70, 1, 2),  # a rank has half of a head's rows
        long("nine heads", 70, 2, 4),
        long("lora of all", 100, 2, 3),
        long("lora of experts' layers", 70, 1, 2),
        long("8 bits", 100, 1, 3),
        long("phi", 100, 1, 3),  # all linear layers have biases, the head too
        ("mixtral", 100, 2, 3),
        ("gpt_oss", 7, 1, 2),
        long("llama", 100, 1, 1),
        long("llama", 100, 1, 4),
        long("qwen3", 100, 1, 3),
        long("mistral", 7, 1, 3),
        long("cohere2", 100, 1, 2),
        long("gemma2", 100, 1, 3),
        long("gpt_oss", 100, 1, 2),
        long("gemma4_text", 100, 1, 3),
        (f"gemma4_text{SHARED}", 100, 1, 2),
        long(f"gemma4_text{SHARED}", 100, 2, 3),
        long(f"gemma3n_text{SHARED}", 100, 2, 3),
        long("bamba", 70, 1, 3),
        long("kimi_linear", 70, 1, 2),
        long("lfm2", 100, 1, 3),
        long("lfm2_moe", 100, 1, 2),
        long("nemotron_h", 100, 1, 2),
        long("deepseek_v32", 100, 2, 3),
        long("minimax_m3_vl", 100, 1, 2),
        long("mixtral", 100, 1, 1),
        long("mixtral", 7, 1, 4),
        long("qwen3_moe", 100, 2, 4),
        long("glm4_moe", 100, 1, 2),
        long("deepseek_v2", 100, 1, 2),
        long("deepseek_v3", 70, 2, 4),
        long("gpt_oss", 100, 2, 4),
        long("qwen3_next", 70, 1, 2),
    ],
)
def test_tokens_and_logits_equal_one_process(pools, name, count, rows, world, apart):
    done = pools(world).run(generated, name, count, rows, apart)
    check_equal([out for out, *_ in done], one_process(name, ids_of(count, rows)))
    for _, share, gathered, by_fsdp in done:
        assert share < 1.15 / world, "a rank holds more than its share"
        if world > 1:
            assert bool(gathered) == by_fsdp
            assert bool(gathered) == (name in GATHERED), gathered
            # An adapter of the experts' layers is on the experts of a mixture, too.
            assert name in CHANGED or not any(".experts." in key for key in gathered), "each token gathers experts"


# Other mixtures of docs/models.md that generate.
MIXTURES = (
    *("afmoe", "aria_text", "axk1", "bailing_hybrid", "beam", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "flint", "glm4_moe_lite", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "lara_mini", "mellum", "mimo_v2_flash", "minimax_m2", "olmoe"),
    *("phimoe", "qwen2_moe", "qwen3_5_moe_text", "solar_open"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_other_mixtures(pools, name):
    world, apart = (2, 4)[MIXTURES.index(name) % 2], MIXTURES.index(name) % 4 > 1
    done = pools(world).run(generated, name, 70, 1, apart)
    check_equal([out for out, *_ in done], one_process(name, ids_of(70)))
    for _, share, gathered, _ in done:
        assert share < 1.15 / world, "a rank holds more than its share"
        assert not any(".experts." in key for key in gathered), "each token gathers experts"


def experts_of_ranks(name, apart):
    """Return a rank's tokens and logits, and how many experts each of its layers has, by weight."""
    model, cache = shared_model(name, apart=apart)
    out = generate(model, cache, ids_of(70), max_new_tokens=NEW)
    held = {key: len(x.to_local()) for key, x in model.named_parameters() if ".experts." in key}
    return sendable(out), held


@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_without_experts_computes_none(pools, apart):
    """Four experts of gpt-oss on three ranks, with biases and transposed weights."""
    done = pools(3).run(experts_of_ranks, "gpt_oss", apart)
    check_equal([out for out, _ in done], one_process("gpt_oss", ids_of(70)))
    for (_, held), count in zip(done, (2, 2, 0), strict=True):
        assert len(held) == 2 * 4 and set(held.values()) == {count}


def with_gathered_experts():
    """Return a rank's tokens and logits where the sum of the ranks' parts were not the whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "adds_up", lambda *_: False)
        model, cache = shared_model("mixtral")
    experts = [x for module in model._burst.shared.modules if (x := vars(module).get("num_experts"))]
    assert not experts and isinstance(model, FSDPModule)
    return sendable(generate(model, cache, ids_of(70), max_new_tokens=NEW))


def test_experts_whose_parts_do_not_add_up_are_gathered(pools):
    check_equal(pools(2).run(with_gathered_experts), one_process("mixtral", ids_of(70)))


def chosen_apart():
    """Rank 1 chooses other experts; return the error of a token."""
    model, cache = shared_model("mixtral", timeout=5)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        if dist.get_rank():
            mixed = columns.Shared.mixed
            patch.setattr(
                columns.Shared,
                "mixed",
                lambda self, module, x, index, weights: mixed(self, module, x, 7 - index, weights),
            )
        generate(model, cache, ids_of(70), max_new_tokens=2)
    return str(caught.value)


def test_ranks_that_choose_other_experts_refuse(pools):
    assert all("experts: ranks chose other experts for a token" in error for error in pools(2).run(chosen_apart))


def in_half(shares):
    """Return what a rank generates in bf16: tokens and logits, and the tokens of a search without logits."""
    model = hf.parallelize(made("qwen2").bfloat16(), strategy=WHOLE_HEADS, timeout=30)
    if shares:
        shard_weights(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    read = generate(model, ShardedCache(model.config, timeout=30), ids_of(70, 3), max_new_tokens=NEW)
    plain = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    return sendable(read), model.generate(
        ids_of(70, 3), past_key_values=ShardedCache(model.config, timeout=30), **plain
    )


@pytest.mark.parametrize("world", [2, long(3)])
def test_half_precision_rounds_as_with_whole_weights(pools, world):
    """Another shape of a product may add up in another order, which can decide between nearly equal logits."""
    ((shared, plain), *others), ((whole, _), *_) = (pools(world).run(in_half, shares) for shares in (True, False))
    logits, wanted = torch.stack(shared.logits), torch.stack(whole.logits)
    for out, tokens in others:
        assert torch.equal(torch.stack(out.logits), logits), "ranks have other bits"
        assert torch.equal(tokens, plain)
    assert torch.equal(plain, shared.sequences) and torch.equal(plain[:, -NEW:], logits.argmax(-1).T)
    for row in range(3):
        same = (plain[row, -NEW:] == whole.sequences[row, -NEW:]).cumprod(0).sum()
        bound = 2 * torch.finfo(torch.bfloat16).eps * wanted[:, row].abs().max()
        assert (logits[: same + 1, row] - wanted[: same + 1, row]).abs().max() <= bound
        assert same, "the first token differs"


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_the_quantizer_of_torch_is_refused_by_name():
    """Its layers round their input by the greatest of all tokens."""
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    model = quantize(made("llama", "sdpa"), {nn.Linear}, dtype=torch.qint8)
    with local_world(2, timeout=20) as ranks, pytest.raises(WorkerError) as caught:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group))
    for error in caught.value.errors.values():
        assert "layers.0.self_attn.q_proj (Linear) is not known to treat each token independently" in str(error)


SAMPLED = {"do_sample": True, "top_k": 5, "temperature": 1.3, "max_new_tokens": NEW}


def sampled(name):
    model, cache = shared_model(name)
    torch.manual_seed(3)
    return generate(model, cache, ids_of(80), **SAMPLED).sequences


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_seed_gives_the_text_of_one_process(pools, name):
    model = made(name, "eager")  # which draws from the same generator, if it is the first
    torch.manual_seed(3)
    expected = model.generate(ids_of(80), **GREEDY | SAMPLED).sequences
    assert all(torch.equal(each, expected) for each in pools(3).run(sampled, name))


def turns(name, folder):
    """A prompt in pieces, a short turn, a long one; the cache is saved before the last."""
    model, cache = shared_model(name)
    cache = ShardedCache(model.config, timeout=30, prefill_chunk=70)
    said = generate(model, cache, ids_of(150), max_new_tokens=NEW).sequences
    said = generate(model, cache, torch.cat([said, ids_of(5)], 1), max_new_tokens=NEW).sequences
    cache.save(folder)
    longer = torch.cat([said, ids_of(90)], 1)
    return sendable(generate(model, cache, longer, max_new_tokens=NEW)), longer


def continued(name, folder, longer, shares):
    """Continue a saved cache with weights that ranks share, or with whole ones."""
    model = shared_model(name)[0] if shares else hf.parallelize(made(name), strategy=WHOLE_HEADS, timeout=30)
    cache = ShardedCache.load(folder, model.config, timeout=30)
    return sendable(generate(model, cache, longer, max_new_tokens=NEW))


@pytest.mark.parametrize("name", ["gemma3", "mixtral", long("qwen3_5")])
def test_turns_pieces_and_a_saved_cache(pools, tmp_path, name):
    done = pools(2).run(turns, name, tmp_path / "cache")
    expected = one_process(name, ids_of(150)).sequences
    expected = one_process(name, torch.cat([expected, ids_of(5)], 1)).sequences
    longer = torch.cat([expected, ids_of(90)], 1)
    assert all(torch.equal(each, longer) for _, each in done)
    expected = one_process(name, longer)
    check_equal([out for out, _ in done], expected)
    for world, shares in ((3, True), (1, True), (2, False)):
        check_equal(pools(world).run(continued, name, tmp_path / "cache", longer, shares), expected)


def counted(name, apart):
    """Return bytes of a token, those predicted, the messages of the last step by label, and bytes of the prompt."""
    model, cache = shared_model(name, apart=apart)
    assert not isinstance(model, FSDPModule), "FSDP2 gathers weights in each step"
    generate(model, cache, ids_of(80), max_new_tokens=3)
    prompt, before = model._burst.shared.transport.sent, cache.sent
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        labels = labels_sent(patch, Transport)
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    held = sum(x.to_local().nbytes for x in model.parameters() if isinstance(x, DTensor))
    return cache.sent - before, step_bytes(model, logits=True), [label for _, label in labels], prompt, held


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_step_gathers_no_weight_and_sends_what_is_predicted(pools, name, world, apart):
    of_layer = dealt_bytes(world=world, batch=1, queries=1, q_heads=4, v_head_dim=8, dtype=torch.float32)
    for sent, predicted, labels, prompt, held in pools(world).run(counted, name, apart):
        assert sent == 2 * of_layer + predicted
        shared = [label for label in labels if label.startswith("a step, ")]
        layers = [f"the {part.format(n)}" for n in range(2) for part in PARTS[name]]
        expected = [f"a step, {each}" for each in ("the rows of model.embed_tokens", *layers, "the columns of lm_head")]
        assert shared == [label for label in expected for _ in range(world - 1)], "q, k and v share an exchange"
        assert sum(label.startswith("decoding") for label in labels) == 2 * (world - 1)
        if apart:
            assert held / 2 < prompt < 2.5 * (world - 1) * held, "the prompt gathered a layer more than once"
        else:
            assert prompt < held / 2, "the prompt gathered weights that this host has"


ATTENTION = ("columns of model.layers.{}.self_attn.q_proj", "columns of model.layers.{}.self_attn.o_proj")
PARTS = {
    "llama": (*ATTENTION, "columns of model.layers.{}.mlp.gate_proj", "columns of model.layers.{}.mlp.down_proj"),
    "mixtral": (*ATTENTION, "experts of model.layers.{}.mlp.experts"),
}


def mixed_in_half(shares):
    """Return a mixture's logits in bf16, bytes of a further token, those predicted, and dtypes that experts send."""
    model = hf.parallelize(made("mixtral").bfloat16(), strategy=WHOLE_HEADS, timeout=30)
    if shares:
        shard_weights(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    cache = ShardedCache(model.config, timeout=30)
    out, before = generate(model, cache, ids_of(70), max_new_tokens=NEW), cache.sent
    found, expect = set(), Transport.expect

    def noting(self, every, *, label):
        found.update(x.dtype for x in every if "experts" in label)
        return expect(self, every, label=label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "expect", noting)
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
    return torch.stack(out.logits), cache.sent - before, step_bytes(model, logits=True), found


def test_results_of_experts_are_added_in_fp32(pools):
    shared, whole = (pools(3).run(mixed_in_half, shares) for shares in (True, False))
    of_layer = dealt_bytes(world=3, batch=1, queries=1, q_heads=4, v_head_dim=8, dtype=torch.bfloat16)
    wanted = whole[0][0][0]
    for logits, sent, predicted, dtypes in shared:
        assert sent == 2 * of_layer + predicted and dtypes == {torch.float32}
        assert torch.equal(logits, shared[0][0]), "ranks have other bits"
        assert (logits[0] - wanted).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


def refusals():
    """Return what each wrong use says, and whether generation works afterwards."""
    model, cache = shared_model("llama")
    whole = hf.parallelize(made("llama"), timeout=30)
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    halves = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    other = made("llama")
    other.lm_head.weight.data += rank
    other = hf.parallelize(other, timeout=30)
    ids, said = ids_of(70), []
    for use in (
        lambda: model(ids, labels=ids),
        lambda: shard_weights(model, mesh),
        lambda: shard_weights(whole, halves["b"]),
        lambda: shard_weights(whole, halves),
        lambda: shard_weights(other, mesh),
        lambda: shard_weights(made("llama"), mesh),
        lambda: copy.deepcopy(model),
        lambda: hf.unparallelize(model),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            use()
        said.append(str(caught.value))
    return said, sendable(generate(model, cache, ids, max_new_tokens=NEW))


def test_every_rank_refuses_other_uses(pools):
    done = pools(2).run(refusals)
    for said, _ in done:
        texts = (
            "shard_weights has shared the weights of",
            "sharded already",
            "mesh has the ranks",
            "DeviceMesh of one",
        )
        for text, error in zip(
            (*texts, "values: rank 0 has", "not parallelized", "can't be copied", "load it again"), said, strict=True
        ):
            assert text in error
    check_equal([out for _, out in done], one_process("llama", ids_of(70)))


CHANGES = {
    "data": lambda x: x.data.mul_(1.5),
    "rows": lambda x: x.data.to_local().mul_(1.5),
    "rows of one rank": lambda x: x.data.to_local().mul_(1.5) if dist.get_rank() else None,
}


def assigned(model):
    weights = {key: torch.clone(x) * 1.5 for key, x in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


def changed(change):
    """Return what a second turn of a cache says after a change of the weights that no version counts."""
    model, cache = shared_model("llama")
    said = generate(model, cache, ids_of(70), max_new_tokens=4).sequences
    if change == "assigned":
        assigned(model)
    else:
        CHANGES[change](model.model.layers[0].mlp.down_proj._parameters["weight"])
    with pytest.raises(ValueError) as caught:
        generate(model, cache, said, max_new_tokens=4)
    return str(caught.value)


def assigned_anew(ranks):
    """Return the logits of a prompt after some ranks got other weights, which lie elsewhere; or the error."""
    model, cache = shared_model("llama")
    weights = {key: torch.clone(x) * 1.5 for key, x in model.state_dict().items()}
    if dist.get_rank() in ranks:
        model.load_state_dict(weights, assign=True)
    try:
        return sendable(generate(model, cache, ids_of(70), max_new_tokens=NEW))
    except ValueError as error:
        return str(error)


def test_a_prompt_reads_weights_that_were_assigned(pools):
    other = made("llama", "eager")
    other.load_state_dict({key: 1.5 * x for key, x in other.state_dict().items()})
    expected = other.generate(ids_of(70), **GREEDY | {"max_new_tokens": NEW})
    check_equal(pools(2).run(assigned_anew, (0, 1)), expected)
    for error in pools(2).run(assigned_anew, (1,)):
        assert "rows of shared weights in place" in error


def without_room():
    """Return whether a prompt reads rows in place where one rank has no memory for them."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(in_place, "_opened", lambda *_: os.open("/does not exist", os.O_RDONLY))
        model, cache = shared_model("llama")
    out = generate(model, cache, ids_of(70), max_new_tokens=NEW)
    return model._burst.shared.in_place, sendable(out)


def test_ranks_that_cannot_read_each_other_gather(pools):
    done = pools(2).run(without_room)
    assert not any(in_place for in_place, _ in done)
    check_equal([out for _, out in done], one_process("llama", ids_of(70)))


@pytest.mark.parametrize("change", [*CHANGES, "assigned"])
def test_a_cache_does_not_continue_with_other_rows(pools, change):
    errors = pools(2).run(changed, change)
    assert "was changed since it filled the cache" in "".join(errors), errors


def one_in_inference_mode():
    model, cache = shared_model("llama")
    with torch.inference_mode(dist.get_rank() == 1), pytest.raises(ValueError) as caught:
        model(ids_of(70), cache=cache, logits_to_keep=1)
    return str(caught.value)


def test_ranks_agree_on_inference_mode(pools):
    for error in pools(2).run(one_in_inference_mode):
        assert "is_inference_mode_enabled" in error


def wrongly_shared():
    """Share a projection of latent attention that gets what each rank holds of the cache; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_used_apart", lambda kind: frozenset())
        model, cache = shared_model("deepseek_v3")
    with pytest.raises(ValueError) as caught:
        generate(model, cache, ids_of(70), max_new_tokens=NEW)
    return str(caught.value)


def test_columns_of_keys_that_differ_between_ranks_are_refused(pools):
    assert all("kv_b_proj gets keys of the cache" in error for error in pools(2).run(wrongly_shared))


def saved(name, folder):
    model, _ = shared_model(name)
    model.save_pretrained(folder)
    return True


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_weights_that_ranks_share_are_saved_whole(pools, tmp_path, name):
    pools(3).run(saved, name, tmp_path / "model")
    loaded = type(model_of(name)).from_pretrained(tmp_path / "model")
    for key, x in made(name).state_dict().items():
        assert torch.equal(loaded.state_dict()[key], x)


def dies():
    return error_of_killing_rank_1(*shared_model("llama", timeout=5))


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_in_time():
    check_that_rank_1_is_named(dies)


def loses():
    """Rank 1 can't compute its columns, whose receives the others have begun; return errors of two calls."""
    (model, cache), found = shared_model("llama", timeout=3), []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(columns, "F", SimpleNamespace(linear=None))
        for held in (cache, ShardedCache(model.config, timeout=3)):
            with pytest.raises((TypeError, RuntimeError)) as caught:
                generate(model, held, ids_of(80), max_new_tokens=2)
            found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


@pytest.mark.long
def test_a_rank_that_cannot_compute_its_columns_fails_the_group():
    with WorkerPool(2, timeout=30) as pool:
        (waited, later), (failed, refused) = pool.run(loses, timeout=240)
    assert "ExchangeError: rank 0 could not receive from rank 1 in a step, the columns of" in waited
    assert failed.startswith("TypeError") and "this process group failed before (a step, the columns of" in refused
    assert "failed before" in later
