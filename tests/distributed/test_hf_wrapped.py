"""Test a parallelized model under DDP, FSDP2, PEFT and torch.compile, and a classifier."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForSequenceClassification

from burst_attention import Strategy
from burst_attention.integrations import hf
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import write_rates
from burst_attention.testing import WorkerError
from tests.distributed.test_hf_parallel import BATCHES, gradients, model_of, plain, stock_loss, worst_error
from tests.support import encoder_models
from tests.support.conditioning import moved_copy, share_of_loss, worst_share
from tests.support.hf_models import SMALL, VOCABULARY, fixed_strategy, make_model

CASE = "packed by row"


def norm(model, largest=1.0):
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return getattr(whole, "full_tensor", lambda: whole)().item()


def of_one_device(name="llama"):
    """Return (loss, gradient norm) of the stock model."""
    one = model_of(name)
    loss = stock_loss(one, BATCHES[CASE]())
    loss.backward()
    return loss.item(), norm(one)


def wrapped(how, gradients):
    """Return (loss, gradient norm) under a wrapper, and on one device."""
    model = hf.parallelize(model_of("llama"), strategy=fixed_strategy(how), gradients=gradients, timeout=30)
    if how == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if gradients == "sum":
            for part in (*model.model.layers, model):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
    loss = model(**BATCHES[CASE]()).loss
    loss.backward()
    return (loss.item(), norm(model)), of_one_device()


@pytest.mark.parametrize(("how", "reduction"), [("DDP", "mean"), ("FSDP2", "mean"), ("FSDP2", "sum")])
def test_wrappers_defaults_give_the_one_device_norm(pools, how, reduction):
    for got, wanted in pools(2).run(wrapped, how, reduction):
        assert got == pytest.approx(wanted, rel=2e-6)


def compiled(name, by_layer):
    """Return (loss, gradient norm) when compiled, on one device, and whether a repeated batch agrees."""
    one, model = (make_model(name, "sdpa", num_hidden_layers=1, layer_types=None) for _ in range(2))
    expected = stock_loss(one, BATCHES[CASE]())
    expected.backward()
    hf.parallelize(model, timeout=60)
    runs = model if by_layer else torch.compile(model, backend="aot_eager")
    for layer in model.model.layers if by_layer else ():
        layer.compile(backend="aot_eager", fullgraph=True)  # raises at a graph break
    losses = []
    for case in (CASE, "plain", CASE):
        model.zero_grad()
        loss = runs(**BATCHES[case]()).loss
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return (losses[0], norm(model)), (expected.item(), norm(one)), losses[0] == losses[2]


@pytest.mark.parametrize(("name", "by_layer"), [pytest.param("llama", False, marks=pytest.mark.slow), ("qwen3", True)])
@pytest.mark.long
def test_compiled(pools, name, by_layer):
    for got, wanted, same in pools(2).run(compiled, name, by_layer):
        assert got == pytest.approx(wanted, rel=2e-6)
        assert same


LENGTHS = {"plain": ((24,), (32,), (41,), (58,)), "packed": ((11, 20, 6), (5, 24), (30, 3, 8))}


def batch_of(documents):
    """Return two rows of these documents."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (2, sum(documents)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in documents]).repeat(2, 1)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def compiled_for_lengths(folder, *how):
    """Run :func:`graphs_for_lengths` with the rates of this folder: measured ones may split heads otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", folder)
        return graphs_for_lengths(*how)


def graphs_for_lengths(kind, dynamic, strategy=None, autocast=False):
    """Return the number of graphs of a layer after each batch, and the largest error of a loss or a gradient norm."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    changes = {"dtype": torch.float32, "use_cache": False, "num_hidden_layers": 1}
    spread, one = (make_model("llama", "sdpa", **changes) for _ in range(2))
    hf.parallelize(spread, strategy=strategy, timeout=60)
    hf.parallelize(one, strategy=strategy, timeout=60)
    for layer in spread.model.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=dynamic)  # only graphs count
    graphs, worst = [], 0.0
    for documents in LENGTHS[kind]:
        batch, found = batch_of(documents), []
        for model in (spread, one):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss
            loss.backward()
            found.append(torch.tensor((loss.item(), norm(model))))
        worst = max(worst, ((found[0] - found[1]).abs() / found[1]).max().item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs, worst


CUT = Strategy(ulysses_degree=2, cache_qkv=True)


@pytest.mark.parametrize(
    ("kind", "dynamic", "strategy", "autocast", "expected"),
    [
        ("plain", True, None, False, [1, 1, 1, 1]),
        ("packed", None, CUT, False, [1, 2, 2]),
        ("plain", None, None, True, [1, 2, 2, 2]),  # parallelize expects fp32, the first call shows bf16
    ],
)
@pytest.mark.long
def test_a_third_length_does_not_compile_again(pools, tmp_path, kind, dynamic, strategy, autocast, expected):
    write_rates(preset("cpu"), tmp_path / "burst-attention" / "rates.toml")
    for graphs, worst in pools(2).run(compiled_for_lengths, str(tmp_path), kind, dynamic, strategy, autocast):
        assert graphs == expected
        assert worst <= (2e-2 if autocast else 1e-5)


def classifier():
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_labels=1, pad_token_id=0, attn_implementation="sdpa")
    return LlamaForSequenceClassification(config).double()


def classify(case, reduction):
    batch, one, model = BATCHES[case](), classifier(), classifier()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    if "attention_mask" in inputs:
        inputs["input_ids"] = inputs["input_ids"] * inputs["attention_mask"]  # the model finds padding by its id
    scores = one(**inputs).logits
    wanted = gradients(one, (scores * torch.tensor([[1.0], [-2.0]])).sum())
    hf.parallelize(model, strategy=fixed_strategy(case), gradients=reduction, timeout=30)
    got_scores = model(**inputs).logits
    got = gradients(model, (got_scores * torch.tensor([[1.0], [-2.0]])).sum())
    torch.testing.assert_close(got_scores, scores, rtol=2e-6, atol=2e-6)
    return worst_error(got, wanted, reduction)


@pytest.mark.parametrize(("case", "reduction"), [("plain", "sum"), ("padded on both sides", "mean")])
def test_models_that_classify_sequences(pools, case, reduction):
    assert max(pools(3).run(classify, case, reduction)) <= 5e-6


def copied_and_switched():
    """Switch the original's attention; return the loss of its copy after, and its loss before."""
    model = hf.parallelize(model_of("llama"), timeout=30)
    batch = plain()
    before = model(**batch).loss.item()
    again = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa' of layers"):
        model(**batch)
    return again(**batch).loss.item(), before


def test_a_copy_has_layers_of_its_own(pools):
    for again, before in pools(2).run(copied_and_switched):
        assert again == before


def hooked(late):
    model = model_of("llama")
    if not late:
        model.model.layers[0].register_forward_hook(lambda *_: None)
    model = hf.parallelize(model, strategy=fixed_strategy(), timeout=30)
    model.register_forward_hook(lambda *_: None)  # allowed: it gets whole results
    model.enable_input_require_grads()
    model(**plain())
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model(**plain()).loss


@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_parts_are_refused_whenever_they_come(pools, late):
    with pytest.raises(WorkerError, match=r"layers\.0 \(LlamaDecoderLayer\) has the hook hooked") as caught:
        pools(2).run(hooked, late)
    assert set(map(type, caught.value.errors.values())) == {ValueError}


def encoder_wrapped(model_type, head, how):
    """Return the loss and the worst gradient as shares of their bounds."""
    model, batch = encoder_models.made(model_type, head), encoder_models.make_batch(head, "padded")
    expected, gradients = encoder_models.one_process(model, batch)
    other, moved = encoder_models.one_process(moved_copy(model), batch)

    def prepare(parallel):
        if how == "compile":
            parallel.compile(backend="aot_eager")  # what inductor makes of it is not ours
            return
        for layer in next(each for each in parallel.modules() if isinstance(each, torch.nn.ModuleList)):
            fully_shard(layer)
        fully_shard(parallel)

    loss, ours = encoder_models.over_ranks(model, batch, dist.group.WORLD, "mean", prepare)
    for name, gradient in ours.items():
        if how == "fully_shard":
            ours[name] = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return share_of_loss(loss.item(), expected.item(), other.item()), worst_share(ours, gradients, moved)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "head", "how"),
    [
        ("modernbert", "ForMaskedLM", "compile"),
        ("gptj", "ForCausalLM", "fully_shard"),
        ("bert", "ForSequenceClassification", "fully_shard"),
    ],
)
def test_encoders_and_models_with_their_own_attention(pools, model_type, head, how):
    for loss, gradient in pools(2).run(encoder_wrapped, model_type, head, how):
        assert loss <= 1
        assert gradient <= 1
