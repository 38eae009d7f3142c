"""Models that change after ``hf.parallelize``: each call is that of the model as it is now, or refused by name."""

import copy
import random
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import heads
from tests.support.hf_models import HEADS, MIXED, SMALL, VOCABULARY

FAMILIES = {  # the settings of each that differ from SMALL
    "llama": {"attention_bias": True},
    "qwen3": {},
    "gemma2": MIXED | {"attn_logit_softcapping": 2.0},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "gpt_oss": MIXED | {"experts_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2},
}
CHUNKS = hf.Memory(attention_chunks=2)
TOLERANCE = 2e-5  # of norms and rotary angles, which compute in fp32


def model_of(name, adapters=(), **settings):
    """Return a stock model in fp64; ``adapters``: names of LoRA adapters on all of its linear layers."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**SMALL | FAMILIES.get(name, {}) | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.lm_head.weight.data *= 5
    for part in attentions(model):  # scores and outputs so large that their changes show
        for name, x in part.named_parameters():
            x.data *= 8 if x.dim() == 2 else 1
            x.data += torch.linspace(-1, 1, len(x)) if name.endswith("bias") else 0
    for n, each in enumerate(adapters):
        lora = LoraConfig(r=2 + n, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
        model = model.add_adapter(each, lora) or model if n else get_peft_model(model, lora, adapter_name=each)
    for name, x in model.named_parameters():
        if "lora_" not in name:
            x.requires_grad_(True)  # so that something trains while adapters are off
    return model.double().train()


def batch(seed=1):
    ids = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def attentions(model):
    return [part for name, part in model.named_modules() if name.endswith("self_attn")]


def step(model, **given):
    """Return the loss and the gradients of a call."""
    loss = model(**(given or batch())).loss
    loss.backward()
    return loss.item(), taken(model)


def taken(model):
    """Return the gradients and forget them."""
    grads = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    return grads


def assert_same(expected, found):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, grad in expected[1].items():
        other = found[1][name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            scale = max(1e-3, grad.abs().max().item())
            torch.testing.assert_close(other, grad, rtol=0, atol=TOLERANCE * scale, msg=lambda m, n=name: f"{n}: {m}")


def each_attention(change):
    return lambda model: [change(part) for part in attentions(model)]


def scale_queries(part):
    part.scaling *= 3.0


def widen_norms(part):
    part.q_norm.variance_epsilon = part.k_norm.variance_epsilon = 0.5


def cap(part):
    part.attn_logit_softcapping = 0.3


def add_bias(part):
    part.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, part.q_proj.out_features, dtype=torch.float64))


def remove_bias(part):
    part.k_proj.bias = part.q_proj.bias = None


def replace_projection(part):
    torch.manual_seed(5)
    part.v_proj = nn.Linear(part.v_proj.in_features, part.v_proj.out_features, dtype=torch.float64)


def hook_output(part):
    part.o_proj.register_forward_hook(hf.token_wise(lambda _, given, out: 2 * out))


def hook_backward_of_output(part):
    part.o_proj.register_full_backward_pre_hook(hf.token_wise(lambda _, grads: (3 * grads[0],)))


def hook_attention(part):
    part.register_forward_hook(hf.token_wise(lambda _, given, out: (2 * out[0], *out[1:])))


def share_weight(part):
    part.v_proj.weight = part.k_proj.weight


def scale_adapter(part):
    for each in part.modules():
        if isinstance(getattr(each, "scaling", None), dict):
            each.scaling["first"] *= 4


def add_adapter(model):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False), model)
    model.double()


def tuner(method, *given):
    return lambda model: getattr(model.base_model, method)(*given)


CHANGES = {  # family, adapters, and one change for each call after the first
    "scaling": ("llama", (), [each_attention(scale_queries)]),
    "eps of norms": ("qwen3", (), [each_attention(widen_norms)]),
    "a soft cap of scores": ("gemma2", (), [each_attention(cap)]),
    "scaling beside sinks": ("gpt_oss", (), [each_attention(scale_queries)]),
    "scaling of joined projections": ("phi3", (), [each_attention(scale_queries)]),
    "a bias": ("qwen3", (), [each_attention(add_bias)]),
    "no bias": ("llama", (), [each_attention(remove_bias)]),
    "another projection": ("llama", (), [each_attention(replace_projection)]),
    "a shared weight": ("llama", (), [each_attention(share_weight)]),
    "a hook on the output": ("llama", (), [each_attention(hook_output)]),
    "a backward hook on the output": ("llama", (), [each_attention(hook_backward_of_output)]),
    "a hook on the attention": ("llama", (), [each_attention(hook_attention)]),
    "adapters off and on": (
        "llama",
        ("first",),
        [tuner("disable_adapter_layers"), tuner("enable_adapter_layers"), tuner("disable_adapter_layers")],
    ),
    "merged and unmerged": ("llama", ("first",), [tuner("merge_adapter"), tuner("unmerge_adapter")]),
    "merged, off and on": (
        "llama",
        ("first",),
        [tuner("merge_adapter"), tuner("disable_adapter_layers"), tuner("enable_adapter_layers")],
    ),
    "another adapter": (
        "llama",
        ("first", "second"),
        [tuner("set_adapter", "second"), tuner("set_adapter", ["first", "second"]), tuner("set_adapter", "first")],
    ),
    "an adapter's scaling": ("phi3", ("first",), [each_attention(scale_adapter)]),
    "a first adapter": ("llama", (), [add_adapter]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_chunks_of_heads_follow_each_change(what):
    name, adapters, changes = CHANGES[what]
    stock, model = model_of(name, adapters), hf.parallelize(model_of(name, adapters), memory=CHUNKS)
    losses = []
    for change in (lambda _: None, *changes):
        for each in (stock, model):
            torch.manual_seed(1)
            change(each)
        each = step(stock)
        losses.append(each[0])
        assert_same(each, step(model))
    assert abs(losses[1] - losses[0]) > 1e-5 or "merged" in what or "backward" in what or "first" in what


def test_gradients_are_those_of_the_forward():
    losses = []
    for model in (model_of("llama", ("a", "b")), hf.parallelize(model_of("llama", ("a", "b")), memory=CHUNKS)):
        total = 0
        for seed, change in enumerate(("a", "b", None, "a")):
            model.base_model.set_adapter(change) if change else model.base_model.disable_adapter_layers()
            total = total + model(**batch(seed)).loss
            model.base_model.enable_adapter_layers()
        total.backward()
        losses.append((total.item(), taken(model)))
    assert_same(*losses)


def hook(_, *given):
    return None


def replace_forward(part):
    own = part.q_proj.forward
    part.q_proj.forward = lambda x: 2 * own(x)


REFUSED = {  # a change of each attention, and words of the refusal
    "a hook": (lambda part: part.q_proj.register_forward_hook(hf.token_wise(hook)), "q_proj has the hook hook, which"),
    "a hook before": (lambda part: part.k_norm.register_forward_pre_hook(hf.token_wise(hook)), "k_norm has the hook"),
    "a backward hook": (lambda part: part.v_proj.register_full_backward_hook(hf.token_wise(hook)), "v_proj has the ho"),
    "a replaced forward": (replace_forward, "q_proj has a replaced forward"),
    "a buffer": (lambda part: part.register_buffer("bias", torch.zeros(4)), "its parts are q_proj"),
    "an unknown weight": (
        lambda part: part.__setattr__("q_proj", nn.Sequential(part.q_proj, nn.Identity())),
        "it has the weight q_proj.0.weight",
    ),
    "a norm over all heads": (
        lambda part: part.__setattr__("q_norm", nn.LayerNorm((4, 8), dtype=torch.float64)),
        "some of its heads can't run alone",
    ),
    "a tensor with a gradient": (
        lambda part: part.__setattr__("extra", torch.ones(1, requires_grad=True)),
        "it has a tensor that needs a gradient",
    ),
    "shared keys": (lambda part: part.__setattr__("is_kv_shared_layer", True), "it shares keys and values with other"),
}


# A model that several ranks refuse, ``parallelize`` leaves as it is on one rank, where it gets no chunks.
BEFORE = {
    "a replaced forward": r"memory=Memory\(attention_chunks=2\): layers.0.self_attn.q_proj \(Linear\) has the forward "
    "replace_forward.<locals>.<lambda> in place of its class's forward, and each rank would see only its shard; leave "
    "attention_chunks out",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_chunks_of_heads_do_not_know_is_refused_by_name(what):
    change, words = REFUSED[what]
    unknown = re.escape("memory=Memory(attention_chunks=2) does not know how to split Qwen3Attention: ")
    model = hf.parallelize(model_of("qwen3"), memory=CHUNKS)
    step(model)
    each_attention(change)(model)
    with pytest.raises(ValueError, match=f"^{unknown}.*{words}"):
        step(model)
    before = model_of("qwen3")
    each_attention(change)(before)
    text = BEFORE.get(what, f"{unknown}.*{words}")
    with pytest.raises(ValueError, match=f"^{text}"):
        step(hf.parallelize(before, memory=CHUNKS))


SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED["layer_types"] * 2}
SHARED |= {"activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8}
SHARED |= {"vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4, "sliding_window": 7}


def test_layers_that_share_keys_are_refused_before_a_call():
    model = model_of("gemma3n_text", **SHARED)
    with pytest.raises(ValueError, match=r"Gemma3nTextAttention: .* other layers \(num_kv_shared_layers=2\)"):
        hf.parallelize(model, memory=CHUNKS)
    assert_same(step(model_of("gemma3n_text", **SHARED)), step(hf.parallelize(model)))


def test_reentrant_checkpointing_of_shared_keys_is_refused():
    """In transformers it loses the gradients of keys that other layers reuse, without an error."""
    model = hf.parallelize(model_of("gemma3n_text", **SHARED).train())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(
        ValueError, match=r"^gradient checkpointing of layers\.0 .*layers\.2\.self_attn .* of another layer"
    ):
        step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model_of("gemma3n_text", **SHARED).train()), step(model))


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (CHUNKS, "merge_adapter", "LlamaAttention were merged or unmerged since its forward"),
        (
            hf.Memory(recompute="layer"),
            "disable_adapter_layers",
            "forward of LlamaDecoderLayer, which recompute",
        ),
        (hf.Memory(mlp_chunks=2), "merge_adapter", "forward of LlamaMLP, which mlp_chunks runs again"),
    ],
)
def test_a_change_between_a_forward_and_its_backward_is_refused(options, change, words):
    model = hf.parallelize(model_of("llama", ("a",)), memory=options)
    loss = model(**batch()).loss
    tuner(change)(model)
    with pytest.raises(ValueError, match=words):
        loss.backward()


@pytest.mark.parametrize("options", [CHUNKS, hf.Memory(recompute="layer", mlp_chunks=2)])
def test_another_mode_between_a_forward_and_its_backward_is_none(options):
    stock, model = model_of("llama"), hf.parallelize(model_of("llama"), memory=options)
    loss = model(**batch()).loss
    model.eval()
    model(**batch(2))
    loss.backward()
    assert_same(step(stock), (loss.item(), taken(model)))


def test_weights_of_another_call_and_copies_of_a_model():
    stock, model = model_of("llama"), hf.parallelize(model_of("llama"), memory=CHUNKS)
    step(model)
    weights = {name: (2 * x).detach().requires_grad_() for name, x in stock.named_parameters()}
    found = []
    for each in (stock, model):
        loss = torch.func.functional_call(each, weights, (), batch()).loss
        found.append((loss.item(), dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True))))
    assert_same(*found)
    other = copy.deepcopy(model)
    each_attention(scale_queries)(model)
    each_attention(scale_queries)(stock)
    assert_same(step(stock), step(model))
    assert_same(step(model_of("llama")), step(other))


LOGITS = {  # by family: settings one after the other, of the configuration and of the model
    "granite": [{"logits_scaling": 0.5}, {"logits_scaling": 7.0}],
    "cohere": [{"logit_scale": 0.75}, {"logit_scale": 2.0}],
    "gemma2": [{"final_logit_softcapping": 0.5}, {"final_logit_softcapping": None}, {"final_logit_softcapping": 9.0}],
    "gemma3 capped": [{"final_logit_softcapping": None}],
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_follow_each_change_of_their_settings(name):
    kind, settings = HEADS[name]
    stock, model = model_of(kind, **settings), hf.parallelize(model_of(kind, **settings))
    losses = [step(stock)[0]]
    for change in LOGITS[name]:
        for each in (stock, model):
            for setting, value in change.items():
                setattr(each.config, setting, value)
                if setting in vars(each):  # some models copy it when they are made
                    setattr(each, setting, value)
        expected, found = step(stock), step(model)
        assert abs(expected[0] - losses[-1]) > 1e-4
        losses.append(expected[0])
        assert_same(expected, found)
        gathered = model(input_ids=batch()["input_ids"], logits="gather").logits
        torch.testing.assert_close(gathered, stock(**batch()).logits, rtol=1e-5, atol=1e-6)


def test_the_form_of_logits_is_found_again_only_after_a_change(monkeypatch):
    found, real = [], heads.find_form
    monkeypatch.setattr(heads, "find_form", lambda model: found.append(model) or real(model))
    model = hf.parallelize(model_of("granite"))
    for _ in range(3):
        step(model)
    assert len(found) == 1
    model.config.logits_scaling = 2.0
    step(model)
    assert len(found) == 2


@pytest.mark.parametrize("windows", [(5, 9), (None, 5), (5, None)])
def test_windows_follow_the_configuration(windows):
    stock, model = (model_of("mistral", sliding_window=windows[0]) for _ in range(2))
    hf.parallelize(model)
    losses = []
    for window in windows:
        stock.config.sliding_window = model.config.sliding_window = window
        losses.append(step(stock))
        assert_same(losses[-1], step(model))
    assert abs(losses[0][0] - losses[1][0]) > 1e-5


def test_a_backward_hook_on_the_head_is_refused():
    model = hf.parallelize(model_of("llama"))
    model.lm_head.register_full_backward_hook(hook)
    with pytest.raises(TypeError, match="lm_head has a hook hook, which may change the logits"):
        step(model)


def draw_changes(draw, name):
    """Return changes of a model with two adapters, each of which says what it did."""
    factor = draw.uniform(0.4, 2.0)

    def scale(part):
        part.scaling *= factor

    def hook_part(part):
        part.register_forward_hook(hf.token_wise(lambda _, given, out: (factor * out[0], *out[1:])))

    def freeze(part):
        for x in [*part.parameters()][:3]:
            x.requires_grad_(not x.requires_grad)

    switches = ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter", "unmerge_adapter")
    changes = [each_attention(each) for each in (scale, hook_part, freeze, hook_output, hook_backward_of_output)]
    changes += [tuner(each) for each in switches] * 2
    return changes + [tuner("set_adapter", each) for each in ("a", "b", ["a", "b"])] * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_drawn_changes(seed):
    draw = random.Random(seed)
    name = draw.choice([*FAMILIES])
    stock = model_of(name, ("a", "b"))
    options = hf.Memory(attention_chunks=draw.choice([2, 4]), mlp_chunks=draw.choice([1, 3]))
    models = [stock, *(hf.parallelize(model_of(name, ("a", "b")), memory=each) for each in (None, options))]
    for _ in range(8):
        change, given = draw.choice(draw_changes(draw, name)), batch(draw.randrange(9))
        for each in models:
            change(each)
        if draw.random() < 0.3:
            with torch.no_grad():
                losses = [each(**given).loss.item() for each in models]
            assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
        elif stock(**given).loss.requires_grad:
            expected, *found = (step(each, **given) for each in models)
            for each in found:
                assert_same(expected, each)
