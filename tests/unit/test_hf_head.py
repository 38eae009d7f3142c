"""The loss of a Hugging Face model's own logits, whatever it makes of its head's product."""

import re
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

from burst_attention import Mask, make_plan
from burst_attention.integrations import hf
from burst_attention.loss import LogitForm
from tests.support import vision_models
from tests.support.equal import check
from tests.support.hf_models import (
    HEADS,
    MODELS,
    SEQLEN,
    SMALL,
    make_batch,
    make_model,
    make_plans,
    on_shards,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "hugging-face.md"


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_equal_the_models_own(name):
    found, from_plain = on_shards(name, threads=1)
    check(found)
    assert from_plain > 1e-3, "the product alone would do"


FORMS = {
    **dict.fromkeys(MODELS, LogitForm()),
    "granite": LogitForm(factor=1 / 3),
    "cohere": LogitForm(factor=0.25),
    "cohere2": LogitForm(factor=0.375),
    "gemma2": LogitForm(softcap=2.5),
    "gemma3 capped": LogitForm(softcap=2.0),
    "phi": LogitForm(),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_found_exactly(name):
    for dtype in (torch.float64, torch.bfloat16):
        model = make_model(name, dtype=dtype)
        head = hf.find_head(model)
        assert head.form == FORMS[name]
        assert head.weight is model.lm_head.weight and head.bias is model.lm_head.bias
        assert hf.find_head(model, LogitForm(factor=3.0)).form.factor == 3.0


def test_a_factor_next_to_the_head_is_found():
    """Falcon-H1 keeps it in the body."""
    with torch.device("meta"):
        model = FalconH1ForCausalLM(FalconH1Config(lm_head_multiplier=0.039, num_hidden_layers=1, vocab_size=7))
    assert hf.find_form(model) == LogitForm(factor=0.039)


def test_the_model_is_left_as_it_is():
    model = make_model("granite")
    before = dict(model._modules)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    hf.find_form(model)
    assert model._modules == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Changed(LlamaForCausalLM):
    """Next year's model: it does to its logits what no model of today does."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.change(out.logits)
        return out


def changed(change):
    config = make_model("llama").config
    kind = type("NextYearsForCausalLM", (Changed,), {"change": staticmethod(change)})
    return kind(config).double()


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (lambda z: 0.3 * z, LogitForm(factor=0.3)),
        (lambda z: -z, LogitForm(factor=-1.0)),
        (lambda z: 20 * torch.tanh(z / 20), LogitForm(softcap=20.0)),
        (lambda z: 5 * torch.tanh(z.float() / 5), LogitForm(softcap=5.0)),
        (lambda z: z.float(), LogitForm()),
        (lambda z: 30 * torch.tanh(0.7 * z / 30), LogitForm(factor=0.7, softcap=30.0)),
    ],
)
def test_a_form_under_any_name_is_found(change, form):
    found = hf.find_form(changed(change))
    assert found.softcap == form.softcap and abs(found.factor - form.factor) <= 1e-15


def masked(z):
    """Mask some token ids, like Chameleon, so that they are never sampled."""
    z = z.clone()
    z[..., 5:9] = torch.finfo(z.dtype).min
    return z


STRANGE = {
    "another bias": (lambda z: z + torch.linspace(-1, 1, z.shape[-1]), "neither a factor"),
    "a factor for each token id": (lambda z: z * torch.linspace(1, 2, z.shape[-1]), "neither a factor"),
    "masked token ids": (masked, "for token id 5"),
    "another saturation": (lambda z: z.clamp(-30, 30), "neither a factor"),
    "softmax": (lambda z: z.log_softmax(-1), "neither a factor"),
    "nothing left": (lambda z: 0 * z, "neither a factor"),
    "not a number": (lambda z: z * float("nan"), "neither a factor"),
    "a shorter vocabulary": (lambda z: z[..., :-1], r"returns torch.float64 \[1, 3, 63\] for a head product"),
    "half precision": (lambda z: z.bfloat16(), "returns torch.bfloat16"),
    "an error": (lambda z: z.nothing, "AttributeError: 'Tensor' object has no attribute 'nothing'"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_form_that_the_loss_can_not_compute_is_refused_by_name(name):
    change, message = STRANGE[name]
    model, plan = changed(change), make_plan(SEQLEN)
    shard = hf.shard_batch(make_batch(), plan)
    hidden = torch.zeros(2, SEQLEN, SMALL["hidden_size"], dtype=torch.float64)
    with pytest.raises(ValueError, match=message) as raised:
        hf.next_token_loss(model, hidden, shard["shift_labels"], plan)
    assert "NextYearsForCausalLM" in str(raised.value)


def test_hidden_states_changed_before_the_head_are_refused():
    with torch.device("meta"):
        model = MiniCPM3ForCausalLM(MiniCPM3Config(vocab_size=7, num_hidden_layers=1))
    assert model.config.logits_scaling != 1
    with pytest.raises(ValueError, match="MiniCPM3ForCausalLM does not pass the hidden states of its model"):
        hf.find_form(model)


def with_adapter():
    """Return a model whose head adds to its product, like LoRA."""

    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = make_model("llama")
    model.lm_head = Adapted(SMALL["hidden_size"], 64)
    return model


def with_quantized_head():
    """Return a model whose head holds its weight as torchao does: as a tensor of another class."""

    class Int8Tensor(torch.Tensor):
        pass

    model = make_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.as_subclass(Int8Tensor))
    return model


def with_adapted_head():
    base = make_model("llama")
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=["lm_head"]))


WRONG = {
    "model is a ModuleDict": lambda: nn.ModuleDict({"module": make_model("llama")}),
    "model is a LlamaModel": lambda: make_model("llama").model,
    "model is a NoneType": lambda: None,
    "lm_head is a Adapted, not a plain linear layer": with_adapter,
    r"lm_head has an adapter \(peft.tuners.lora.layer.Linear\), .* train the head whole": with_adapted_head,
    "lm_head has a weight of type Int8Tensor, .* leave lm_head out of the quantization": with_quantized_head,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_has_no_plain_head_is_refused(message):
    with pytest.raises(TypeError, match=message):
        hf.find_head(WRONG[message]())


@pytest.mark.parametrize("name", ["granite", "phi", "gemma3 capped"])
def test_the_call_computes_loss_tokens_and_last_logits_as_stock_code(name):
    plan = make_plans(name)
    shard = hf.shard_batch(make_batch(), plan)
    model, labels = make_model(name).eval(), shard["shift_labels"]
    given = {"position_ids": shard["position_ids"], "plan": plan, "use_cache": False}
    logits = model(shard["input_ids"], **given).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    hf.parallelize(model)
    batch = {"input_ids": shard["input_ids"], "shift_labels": labels}
    assert abs(model(**batch).loss - expected.sum() / (labels != -100).sum()) <= 1e-12
    assert (model(**batch, fused_lm_head="log_probs").log_probs.flatten() + expected).abs().max() <= 1e-12
    last = model(input_ids=shard["input_ids"], logits_to_keep=1).logits
    assert (last[:, 0] - logits[:, -1]).abs().max() <= 1e-12


def block_of_the_page(containing):
    """Return the page's Python block for one rank, without lines about the process group."""
    [block] = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if containing in b]
    return "\n".join(line for line in block.splitlines() if not line.startswith("dist."))


def test_the_pages_block_stands_by_itself_and_gives_the_models_loss(capsys):
    names = {}
    exec(block_of_the_page("hf.shards("), names)
    config = type(names["model"].config)(**names["model"].config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.load_state_dict(names["model"].state_dict())
    seen = torch.from_numpy(Mask(prefix=1_000).dense(4_001))[None, None]
    expected = model(names["ids"], labels=names["ids"], attention_mask=seen).loss
    assert abs(names["loss"] - expected) <= 1e-6 * expected
    assert all(parameter.grad.isfinite().all() for parameter in names["model"].parameters())


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_a_head_that_something_was_added_to_is_refused(how):
    model = make_model("llama")
    if how == "hook":
        model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)
    elif how == "pre-hook":
        model.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    else:
        model.lm_head.forward = lambda x: x
    with pytest.raises(TypeError, match=r"lm_head has a (hook|replaced forward)"):
        hf.find_head(model)


def test_a_model_that_takes_no_text_alone_is_refused_by_name():
    """On transformers 5.23 the language model inside of it is refused first."""
    with pytest.raises(ValueError, match=r"(Blip2|OPT)\w+ .*; its loss can't be computed over shards$"):
        hf.find_form(vision_models.build("blip-2"))
