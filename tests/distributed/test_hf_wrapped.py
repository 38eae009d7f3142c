"""Test a parallelized model under DDP, FSDP2, PEFT and torch.compile, and a classifier."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForSequenceClassification

from burst_attention import Strategy
from burst_attention.integrations import hf
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import write_rates
from burst_attention.testing import WorkerError
from tests.distributed.test_hf_parallel import BATCHES, model_of, plain
from tests.support import encoder_models
from tests.support.equal import check, equal
from tests.support.hf_models import SMALL, VOCABULARY, WHOLE_HEADS, fixed_strategy, make_model

CASE = "packed by row"


def norm(model, largest=1.0):
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return getattr(whole, "full_tensor", lambda: whole)().item()


def wrapped(how, gradients):
    def wrap(model):
        if how == "DDP":
            return DistributedDataParallel(model)
        for part in (*model.model.layers, model):
            fully_shard(part)
            if gradients == "sum":
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        return model

    options = {"strategy": fixed_strategy(how), "gradients": gradients, "whole": True}
    return equal(model_of("llama"), BATCHES[CASE](), prepare=wrap, **options)


@pytest.mark.parametrize(("how", "reduction"), [("DDP", "mean"), ("FSDP2", "mean"), ("FSDP2", "sum")])
def test_wrappers_defaults_give_the_one_device_norm(pools, how, reduction):
    check(*pools(2).run(wrapped, how, reduction), loss=2e-6, gradient=2e-6)


def compiled(name, by_layer):
    """Compare with one device, and a repeated batch with itself."""

    def compile_(model):
        if not by_layer:
            return torch.compile(model, backend="aot_eager")
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)  # raises at a graph break
        return model

    def call(model, batch):
        losses = [model(**BATCHES[case]()).loss for case in (CASE, "plain", CASE)]
        for loss in losses[:2]:
            loss.backward()
        model.zero_grad()
        assert losses[0].item() == losses[2].item()
        return losses[2]

    alone = make_model(name, "sdpa", num_hidden_layers=1, layer_types=None)
    return equal(alone, BATCHES[CASE](), call=call, prepare=compile_, timeout=60)


@pytest.mark.parametrize(("name", "by_layer"), [pytest.param("llama", False, marks=pytest.mark.slow), ("qwen3", True)])
@pytest.mark.long
def test_compiled(pools, name, by_layer):
    check(*pools(2).run(compiled, name, by_layer), loss=2e-6, gradient=2e-6)


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
    batch, alone, weights = BATCHES[case](), classifier(), torch.tensor([[1.0], [-2.0]])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    if "attention_mask" in inputs:
        inputs["input_ids"] = inputs["input_ids"] * inputs["attention_mask"]  # the model finds padding by its id

    def call(model, batch):
        scores = model(**batch).logits
        torch.testing.assert_close(scores, alone(**batch).logits, rtol=2e-6, atol=2e-6)
        return (scores * weights).sum()

    how = {"strategy": fixed_strategy(case), "gradients": reduction}
    return equal(alone, inputs, stock=lambda model, batch: (model(**batch).logits * weights).sum(), call=call, **how)


@pytest.mark.parametrize(("case", "reduction"), [("plain", "sum"), ("padded on both sides", "mean")])
def test_models_that_classify_sequences(pools, case, reduction):
    check(*pools(3).run(classify, case, reduction), gradient=5e-6)


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
    def prepare(model):
        if how == "compile":
            model.compile(backend="aot_eager")  # what inductor makes of it is not ours
            return
        for layer in next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList)):
            fully_shard(layer)
        fully_shard(model)

    alone, batch = encoder_models.made(model_type, head), encoder_models.make_batch(head, "padded")
    return equal(
        alone, batch, stock=encoder_models.stock_loss, prepare=prepare, whole=how != "compile", strategy=WHOLE_HEADS
    )


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
    check(*pools(2).run(encoder_wrapped, model_type, head, how))
