"""Test parallelized models with a custom loss or forward: results equal one device's, or an error names the cause."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from burst_attention.integrations import hf
from tests.distributed.test_hf_parallel import BATCHES, model_of, plain, refusal
from tests.distributed.test_hf_wrapped import classifier
from tests.support.equal import check, equal, own_loss, stock_loss
from tests.support.hf_models import SMALL, fixed_strategy


def smoothed(logits, labels, vocab_size, num_items_in_batch=None, **_):
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), targets, label_smoothing=0.2, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def with_z_loss(logits, labels, vocab_size, **_):
    seen = F.pad(labels, (0, 1), value=-100)[..., 1:] != -100
    return smoothed(logits, labels, vocab_size) + (logits.logsumexp(-1)[seen] ** 2).mean()


LOSSES = {
    "smoothed": smoothed,
    "z-loss": with_z_loss,
    "over padding": lambda logits, **_: (logits**2).mean(),
    "random": lambda logits, **_: F.dropout(logits, 0.5).sum(),
}


class ZForCausalLM(LlamaForCausalLM):
    """A model with a z-loss, labels masked in its forward, and an attribute set for logging."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        masked = labels.masked_fill(labels % 5 == 0, -100)
        out = super().forward(input_ids=input_ids, labels=masked, **kwargs)
        z_loss = (out.logits[:, :-1].logsumexp(-1)[masked[:, 1:] != -100] ** 2).mean()
        self.last_z_loss = z_loss.item()
        out.loss = out.loss + 0.1 * z_loss
        return out


def doubled(forward):
    @functools.wraps(forward)
    def inner(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.loss = 2 * out.loss
        return out

    return inner


class LossForCausalLM(LlamaForCausalLM):
    @property
    def loss_function(self):
        return smoothed


class TwiceForCausalLM(LlamaForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.loss = out.loss + super().forward(**kwargs).loss
        return out


class RandomForCausalLM(LlamaForCausalLM):
    def forward(self, **kwargs):
        torch.rand(1)
        return super().forward(**kwargs)


def changing(change):
    """Return a class whose forward calls LlamaForCausalLM's with changed arguments."""

    class ChangingForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            return super().forward(**change(self, input_ids, attention_mask), **kwargs)

    return ChangingForCausalLM


KINDS = {
    "z": lambda: ZForCausalLM,
    "decorated": lambda: type(
        "DecoratedForCausalLM", (LlamaForCausalLM,), {"forward": doubled(LlamaForCausalLM.forward)}
    ),
    "loss": lambda: LossForCausalLM,
    "twice": lambda: TwiceForCausalLM,
    "random values": lambda: RandomForCausalLM,
    "scaled": lambda: changing(lambda self, ids, mask: {"inputs_embeds": 3 * self.model.embed_tokens(ids)}),
    "masked": lambda: changing(lambda self, ids, mask: {"input_ids": torch.where(ids == 7, 1, ids)}),
    "unmasked": lambda: changing(lambda self, ids, mask: {"input_ids": ids}),
    "not causal": lambda: changing(lambda self, ids, mask: {"input_ids": ids, "is_causal": False}),
    "without attentions": lambda: changing(lambda self, ids, mask: {"input_ids": ids, "output_attentions": False}),
}


def own(name):
    if name not in (*KINDS, "patched"):
        return model_of(name)
    kind = KINDS[name]() if name != "patched" else type("PatchedForCausalLM", (LlamaForCausalLM,), {})
    if name == "patched":
        kind.forward = doubled(kind.forward)
    torch.manual_seed(0)
    return kind(LlamaConfig(**SMALL, attn_implementation="sdpa", pad_token_id=0)).double()


def give(model, loss):
    if loss in LOSSES:
        model.loss_function = LOSSES[loss]
    elif loss is not None:
        model.loss_type = loss


def against_one(name, loss, when, case, reduction):
    batch, alone = BATCHES[case](), own(name)
    if when == "before":
        give(alone, loss)

    def stock(model, batch):
        give(model, loss)
        return model(**{name: value.clone() for name, value in batch.items()}, use_cache=False).loss

    def call(model, batch):
        if when == "after":
            give(model, loss)
        out = model(**batch)
        if hasattr(model, "last_z_loss"):
            stock(alone, batch)
            assert model.last_z_loss == pytest.approx(alone.last_z_loss, rel=1e-6)
        return out.loss

    return equal(alone, batch, stock=stock, call=call, strategy=fixed_strategy(name, loss), gradients=reduction)


@pytest.mark.parametrize(
    ("world", "name", "loss", "when", "case", "reduction"),
    [
        (3, "tied", "smoothed", "before", "plain", "mean"),
        (3, "llama", "smoothed", "after", "padded on both sides", "sum"),
        (3, "llama", "z-loss", "before", "packed by row", "sum"),
        (3, "tied", "ForMaskedLM", "after", "plain", "mean"),
        (2, "mixtral", "smoothed", "after", "right padded", "mean"),
        (2, "z", None, "before", "padded on both sides", "sum"),
        (2, "decorated", None, "before", "packed by row", "mean"),
        (2, "loss", None, "before", "padded on both sides", "mean"),
        (2, "patched", None, "before", "packed by row", "sum"),
        (2, "without attentions", None, "before", "plain", "mean"),
    ],
)
def test_the_models_own_loss_or_forward(pools, world, name, loss, when, case, reduction):
    found = pools(world).run(against_one, name, loss, when, case, reduction)
    check(*found, loss=1e-6, gradient=2e-6)  # transformers' losses compute in fp32


def refused(name, loss, case, changes):
    model = hf.parallelize(own(name), strategy=fixed_strategy(name), timeout=10)
    if loss != "on rank 1 alone":
        give(model, loss)
    elif dist.get_rank() == 1:
        model.loss_function = smoothed
    return refusal(model, **BATCHES[case]() | changes)


@pytest.mark.parametrize(
    ("name", "loss", "case", "changes", "message"),
    [
        ("scaled", None, "plain", {}, "calls its model with another inputs_embeds"),
        ("masked", None, "plain", {}, "calls its model with another input_ids"),
        ("unmasked", None, "right padded", {}, "calls its model with another attention_mask"),
        ("twice", None, "plain", {}, "calls its model twice"),
        ("not causal", None, "plain", {}, "calls its model with another is_causal"),
        ("random values", None, "plain", {}, "draws random values"),
        ("llama", "random", "plain", {}, "draws random values"),
        ("llama", "over padding", "right padded", {}, "depends on the logits of padding"),
        ("llama", "on rank 1 alone", "plain", {}, "a forward or a loss of the model's own"),
        ("llama", "smoothed", "plain", {"fused_lm_head": True}, "fused_lm_head=True is refused: LlamaForCausalLM has"),
        ("llama", "smoothed", "plain", {"logits_to_keep": 2}, "logits_to_keep=2 is refused: LlamaForCausalLM has a"),
    ],
)
def test_what_cannot_be_proved_is_refused_by_name(pools, name, loss, case, changes, message):
    for text in pools(2).run(refused, name, loss, case, changes):
        assert message in text


def sharded(loss, head):
    """Under FSDP2."""
    alone = model_of("llama")
    give(alone, loss)

    def shard(model):
        for part in (*model.model.layers, head(model), model):
            fully_shard(part)

    stock = stock_loss if loss is None else own_loss
    return equal(alone, plain(), stock=stock, prepare=shard, whole=True, strategy=fixed_strategy(loss))


def alone(model):
    return model.lm_head


def with_the_norm(model):
    return [model.model.norm, model.lm_head]


@pytest.mark.parametrize(("loss", "head"), [("smoothed", alone), (None, with_the_norm)])
def test_a_head_that_is_sharded_by_itself(pools, loss, head):
    check(*pools(2).run(sharded, loss, head), loss=2e-6, gradient=2e-6)


def test_a_head_that_is_sharded_alone_names_the_group(pools):
    for text in pools(2).run(refusal, sharded, None, alone):
        assert "fully_shard([model.model.norm, model.lm_head])" in text


def fused_and_plain(items):
    model = hf.parallelize(model_of("llama"), strategy=fixed_strategy(), timeout=30)
    options = plain() | {"num_items_in_batch": items}
    return model(**options, fused_lm_head=True).loss.item(), model(**options).loss.item()


@pytest.mark.parametrize("items", [None, 7, torch.tensor(61.0)])
def test_the_fused_loss_is_divided_as_the_plain_one(pools, items):
    for fused, loss in pools(2).run(fused_and_plain, items):
        assert fused == pytest.approx(loss, rel=1e-12)


def tuples(reduction):
    alone = classifier()
    batch = {"input_ids": plain()["input_ids"], "labels": torch.tensor([0.5, -1.0], dtype=torch.float64)}

    def call(model, batch):
        out, expected = model(**batch), alone(**batch)
        torch.testing.assert_close(out[:2], expected[:2], rtol=2e-6, atol=2e-6)
        return out[0]

    how = {"strategy": fixed_strategy(reduction), "gradients": reduction}
    return equal(alone, batch | {"return_dict": False}, stock=lambda model, batch: model(**batch)[0], call=call, **how)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_classifier_that_returns_tuples(pools, reduction):
    check(*pools(2).run(tuples, reduction), gradient=5e-6)


def configured():
    model = hf.parallelize(model_of("llama"), timeout=30)
    model.config.return_dict = False
    assert isinstance(model(**plain()), tuple)
    model.config.output_hidden_states = True
    assert len(model(**plain())[1]) == 3
    assert len(model(**plain(), output_hidden_states=False)) == 1
    model.config._output_attentions = True  # transformers refuses to set it later than the attention
    return refusal(model, **plain())


def test_what_the_configuration_asks_for(pools):
    for text in pools(2).run(configured):
        assert "output_attentions=True of the configuration is refused" in text


def pickled():
    one, model = model_of("llama"), hf.parallelize(model_of("llama"), timeout=30)
    text = refusal(torch.save, model, io.BytesIO())
    before = model(**plain()).loss.item()
    for again in (copy.copy(model), copy.deepcopy(model)):
        assert again(**plain()).loss.item() == before
    hf.unparallelize(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config._attn_implementation == one.config._attn_implementation
    assert loaded(**plain()).loss.item() == one(**plain()).loss.item()
    with pytest.raises(ValueError, match="that is not parallelized"):
        hf.unparallelize(model)
    assert hf.parallelize(model, timeout=30)(**plain()).loss.item() == before
    return text


def test_pickling_names_the_way_back(pools):
    for text in pools(2).run(pickled):
        assert "pickle hf.unparallelize(model)" in text


@pytest.mark.parametrize("decorated", [True, False])
def test_the_classs_own_forward_may_be_set_on_the_model(decorated):
    """accelerate sets it when it unwraps a model that ran under its autocast, as DPO's reference model."""
    model = model_of("llama")
    function = type(model).forward if decorated else type(model).forward.__wrapped__
    model.forward = function.__get__(model)
    expected = stock_loss(model_of("llama"), plain())
    assert hf.parallelize(model)(**plain()).loss.item() == pytest.approx(expected.item(), rel=1e-12)
    other = model_of("llama")
    other.forward = model_of("llama").forward  # of another object, with other weights
    with pytest.raises(ValueError, match="in place of its class's forward"):
        hf.parallelize(other)
