"""Test every PEFT tuner over ranks: loss and gradients equal one process's, or an error names the adapter."""

import re
import tempfile
import warnings

import peft
import pytest
import torch
import torch.distributed as dist
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from burst_attention import DisagreementError
from burst_attention.integrations import hf
from burst_attention.testing import WorkerError, local_world
from tests.distributed.test_hf_parallel import BATCHES
from tests.support.adapters import LINEARS, LORA, TUNERS, adapted, saved_adapter
from tests.support.conditioning import greatest
from tests.support.equal import check, equal
from tests.support.hf_models import fixed_strategy, make_model

CASE = "packed by row"


def config_of(tuner, variant=None):
    options = LORA[variant][0] if variant else TUNERS[tuner][0]
    if tuner == "LORA":
        options = {"r": 4, "target_modules": LINEARS, "init_lora_weights": False} | options
    if tuner == "XLORA":
        options = options | {"adapters": saved_adapter(tempfile.mkdtemp(), make_model("llama", dtype=torch.float32))}
    return PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(tuner)](**options)


def trained(tuner, variant=None, case=CASE, late=False):
    """Return how far a step is from one process's and the largest norm of a gradient there, or the error message."""
    warnings.simplefilter("ignore")
    config, batch = config_of(tuner, variant), BATCHES[case]()
    # Both are new models: a copy would lose the hooks of OSF's parameters.
    alone, base = (make_model("llama", "sdpa", dtype=torch.float32, use_cache=False) for _ in range(2))
    alone, strategy = adapted(alone, config).train(), fixed_strategy(tuner, *([] if late else [variant]))
    try:
        if late:  # attach the adapter after the model has run over ranks
            hf.parallelize(base.double(), strategy=strategy, timeout=30)(**batch)
            model = adapted(base, config)
        else:
            model = hf.parallelize(adapted(base, config).train(), strategy=strategy, timeout=30)
        found = equal(alone, batch, model=model)
    except (TypeError, ValueError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return found, greatest(x.grad.norm().item() for x in alone.parameters() if x.grad is not None)


def judge(results, refusal):
    for result in results:
        if refusal is None:
            assert not isinstance(result, str), result
            check(result[0], loss=2e-6, gradient=2e-5)
            assert result[1] > 1e-4  # the adapter has an effect
        else:
            assert isinstance(result, str), result
            assert re.search(refusal, result), result


def test_every_tuner_of_peft_has_a_case():
    assert set(TUNERS) == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.mark.parametrize(
    "tuner", [name if name == "LORA" else pytest.param(name, marks=pytest.mark.long) for name in TUNERS]
)
def test_every_tuner_is_equal_or_refused(pools, tuner):
    if tuner == "ADAMSS":
        pytest.importorskip("sklearn")
    judge(pools(2).run(trained, tuner), TUNERS[tuner][1])


@pytest.mark.long
@pytest.mark.parametrize("variant", LORA)
def test_every_kind_of_lora_is_equal_or_refused(pools, variant):
    judge(pools(2).run(trained, "LORA", variant), LORA[variant][1])


@pytest.mark.parametrize("variant", ["saved embeddings", "trainable tokens"])
def test_adapters_of_embeddings_take_padding_in_front(pools, variant):
    """A copy of the embeddings must not count as learned positions."""
    judge(pools(2).run(trained, "LORA", variant, "left padded"), None)


@pytest.mark.parametrize(("tuner", "refusal"), [("LORA", None), ("LILY", "mixes tokens")])
def test_adapters_attached_between_two_calls(pools, tuner, refusal):
    judge(pools(2).run(trained, tuner, None, CASE, True), refusal)


DRAWING = [(kind, rate) for kind in ("LOHA", "LOKR") for rate in ("rank_dropout", "module_dropout")]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        *(((kind, {rate: 0.5}), rf"{rate}={{'default': 0.5}}") for kind, rate in DRAWING),
        (("OFT", {"module_dropout": 0.5}), "oft.layer.MultiplicativeDropoutLayer, which draws random values"),
        (("BOFT", {"boft_dropout": 0.5}), "boft.layer.MultiplicativeDropoutLayer, which draws random values"),
    ],
)
def test_adapters_that_draw_weights_are_refused(options, refusal):
    kind, changes = options
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**TUNERS[kind][0] | changes)
    model = adapted(make_model("llama", "sdpa", dtype=torch.float32), config).train()
    with local_world(2, timeout=20) as ranks, pytest.raises(WorkerError) as caught:
        ranks.run(lambda group: hf.parallelize(model, group))
    assert set(map(type, caught.value.errors.values())) == {ValueError}
    assert refusal in str(caught.value)


def draws_later(kind, rate, how):
    """Run a parallelized model, make its adapter draw weights, and run it again in evaluation and in training mode."""
    options = {"r": 4, "target_modules": LINEARS}
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    model = adapted(make_model("llama", "sdpa", dtype=torch.float32), config(**options))
    hf.parallelize(model, strategy=fixed_strategy(how), timeout=30)
    batch = BATCHES[CASE]()
    model.train()(**batch)
    if how == "added":
        model.add_adapter("second", config(**options, **{rate: 0.5}))
        model.double().base_model.set_adapter("second")
    else:
        for part in model.modules():
            getattr(part, rate, {}).update(default=0.5)
    losses = [model.eval()(**batch).loss.item() for _ in range(2)]
    try:
        if how == "one layer":
            model.base_model.model.model.layers[1].train()
        else:
            model.train()
        model(**batch)
    except ValueError as refusal:
        return losses, str(refusal)
    return losses, "nothing"


@pytest.mark.parametrize(
    ("kind", "rate", "how"),
    [(*each, how) for each, how in zip(DRAWING, ("added", "set", "one layer", "set"), strict=True)],
)
def test_adapters_that_draw_weights_from_now_on_are_refused(pools, kind, rate, how):
    for losses, refusal in pools(2).run(draws_later, kind, rate, how):
        assert losses[0] == losses[1]  # nothing is drawn in evaluation mode
        assert re.search(rf"{rate}={{.*0.5}}, so it draws random values", refusal), refusal


def wrong(what):
    """AdaLoRA's term of the loss would count once per rank; random buffers (UniLoRA's) must be equal on all ranks."""
    model = adapted(make_model("llama", "sdpa", dtype=torch.float32), config_of(what))
    if what == "UNILORA":
        next(buffer for name, buffer in model.named_buffers() if "indices" in name).fill_(dist.get_rank())
    hf.parallelize(model, gradients="sum" if what == "ADALORA" else "mean", timeout=30)
    return model(**BATCHES[CASE]()).loss


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("ADALORA", ValueError, "AdaLoRA adds to the loss on every rank"),
        ("UNILORA", DisagreementError, "a sample of the weights"),
    ],
)
def test_sums_of_adalora_and_buffers_that_differ_are_refused(pools, what, error, message):
    with pytest.raises(WorkerError, match=message) as caught:
        pools(2).run(wrong, what)
    assert set(map(type, caught.value.errors.values())) == {error}
