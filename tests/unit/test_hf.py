"""The Hugging Face integration on one rank: equal to transformers' own attention."""

import gc
import weakref

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from burst_attention import Mask, make_plan
from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers import checks
from burst_attention.integrations.hf.layers.checks import MaskRequest
from burst_attention.integrations.hf.reading import known
from tests.support.hf_models import (
    DOCUMENTS,
    MODELS,
    SEQLEN,
    SMALL,
    VOCABULARY,
    WINDOW,
    make_batch,
    make_model,
    make_plans,
)


def forward_and_gradients(model, inputs, **options):
    logits = model(
        input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False, **options
    ).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_close(ours, theirs, bound=1e-6):
    """Compare with fp32's precision, because fp64 models compute norms and rotary angles in fp32."""
    pairs = [(ours[0], theirs[0]), *((ours[1][name], theirs[1][name]) for name in theirs[1])]
    for x, y in pairs:
        assert y.norm() > 0
        assert (x - y).norm() <= bound * y.norm()


def logits_of(model, shard, plan=None, **options):
    given = {"plan": plan} if plan is not None else {}
    return model(**shard, **given, use_cache=False, **options).logits


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


@pytest.mark.parametrize(
    ("name", "cu_seqlens", "changes"),
    [
        *((name, DOCUMENTS, {}) for name in MODELS),
        ("llama", None, {}),
        ("gemma3", None, {"query_pre_attn_scalar": 3}),  # the scale is the model's
        ("mistral", None, {"sliding_window": None}),
    ],
)
def test_equals_transformers(name, cu_seqlens, changes):
    plan = make_plan(SEQLEN) if "sliding_window" in changes else make_plans(name, cu_seqlens=cu_seqlens)
    shard = hf.shard_batch(make_batch(), plan)
    ours = forward_and_gradients(make_model(name, **changes), shard, plan=plan)
    assert_close(ours, forward_and_gradients(make_model(name, "sdpa", **changes), shard))


@pytest.mark.parametrize(("name", "reentrant"), [("llama", True), ("gemma3", False)])
def test_gradient_checkpointing(name, reentrant):
    plan = make_plans(name, cu_seqlens=DOCUMENTS)
    shard = hf.shard_batch(make_batch(), plan)
    expected = forward_and_gradients(make_model(name).train(), shard, plan=plan)
    model = make_model(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_close(forward_and_gradients(model, shard, plan=plan), expected, bound=1e-12)


def test_autocast_equals_sdpa_under_autocast():
    plan = make_plan(SEQLEN)
    shard = hf.shard_batch(make_batch(), plan)
    exact = forward_and_gradients(make_model("llama", dtype=torch.float32), shard, plan=plan)
    with torch.autocast("cpu", torch.bfloat16):
        ours = forward_and_gradients(make_model("llama", dtype=torch.float32), shard, plan=plan)
        theirs = forward_and_gradients(make_model("llama", "sdpa", dtype=torch.float32), shard)
    for name, gradient in exact[1].items():
        assert (ours[1][name] - gradient).norm() <= 1.5 * (theirs[1][name] - gradient).norm()


def test_arguments_that_change_nothing(llama):
    """Global positions of packed documents, a cache that nobody reads, and a mask of ones."""
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=DOCUMENTS))
    shard = hf.shard_batch(make_batch() | {"attention_mask": torch.ones(2, SEQLEN)}, plan)
    assert set(shard) == {"input_ids", "position_ids", "shift_labels"}
    expected = logits_of(llama, shard, plan)
    again = logits_of(llama, shard | {"position_ids": plan.positions[None]}, plan)
    assert (again - expected).abs().max() <= 1e-5
    more = {"attention_mask": torch.ones(2, SEQLEN), "use_cache": True, "output_hidden_states": True}
    assert torch.equal(llama(**shard, **more, plan=plan).logits, expected)


def test_a_window_that_no_query_looks_past_has_no_effect():
    model = make_model("mistral", sliding_window=18)
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=DOCUMENTS))
    shard = hf.shard_batch(make_batch(), plan)
    expected = logits_of(make_model("mistral", "sdpa", sliding_window=None), shard)
    for each in (plan, {None: plan}):
        assert (logits_of(model, shard, each) - expected).abs().max() <= 1e-6


def test_a_layer_without_windows_takes_the_plans_and_need_not_be_causal(llama):
    plan = make_plan(SEQLEN, mask=Mask(window=WINDOW))
    shard = hf.shard_batch(make_batch(), plan)
    seen = plan.positions[:, None] - plan.positions[None]
    seen = ((seen >= 0) & (seen < WINDOW))[None, None]
    expected = logits_of(make_model("llama", "sdpa"), shard, attention_mask=seen)
    assert (logits_of(llama, shard, plan) - expected).abs().max() <= 1e-6
    both = make_plan(SEQLEN, mask=Mask(causal=False))
    expected = logits_of(make_model("llama", "sdpa", is_causal=False), shard)
    assert (logits_of(make_model("llama", is_causal=False), shard, both) - expected).abs().max() <= 1e-6


def test_register_twice_keeps_the_first_and_takes_no_other_name(monkeypatch):
    hf.register()
    first = AttentionInterface._global_mapping["burst"], AttentionMaskInterface._global_mapping["burst"]
    hf.register()
    assert (AttentionInterface._global_mapping["burst"], AttentionMaskInterface._global_mapping["burst"]) == first
    monkeypatch.setitem(AttentionInterface._global_mapping, "burst", lambda *_: None)
    with pytest.raises(ValueError, match="'burst' is taken"):
        hf.register()


def test_a_plan_is_not_kept_alive(llama):
    plan = make_plan(SEQLEN)
    llama(**hf.shard_batch(make_batch(), plan), plan=plan, use_cache=False)
    alive = weakref.ref(plan)
    del plan
    gc.collect()
    assert alive() is None


def test_gpt2_equals_transformers():
    hf.register()
    size = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=DOCUMENTS))
    shard, logits = hf.shard_batch(make_batch(), plan), []
    for implementation, options in (("burst", {"plan": plan}), ("sdpa", {})):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**size, attn_implementation=implementation)).double().eval()
        logits.append(model(**shard, **options, use_cache=False).logits)
    assert (logits[0] - logits[1]).abs().max() <= 1e-9


@pytest.mark.parametrize(
    ("create", "options", "foreign"),
    [
        (create_causal_mask, {}, None),
        (create_causal_mask, {"position_ids": torch.tensor([[0, 1, 5, 6]])}, None),
        (create_causal_mask, {"and_mask_function": lambda b, h, q, k: k > 2}, "the mask <lambda>"),
        (create_causal_mask, {"or_mask_function": lambda b, h, q, k: k > 2}, "the mask or_masks"),
        (create_causal_mask, {"block_sequence_ids": torch.tensor([[0, 0, 1, 1]])}, ()),  # groups are in together
        (
            create_chunked_causal_mask,
            {"attention_mask": torch.tensor([[0, 1, 1, 1]])},
            ("the mask chunked_overlay", "a padding mask (zeros in attention_mask)"),
        ),
    ],
)
def test_mask_functions(create, options, foreign):
    hf.register()
    config = LlamaConfig(**SMALL, attn_implementation="burst", attention_chunk_size=2)
    arguments = {"attention_mask": None, known.CACHE: None} | options
    request = create(config=config, inputs_embeds=torch.zeros(1, 4, 32), **arguments)
    if foreign is None:
        assert request is None
    else:
        assert request.foreign == (foreign if isinstance(foreign, tuple) else (foreign,))


def test_the_chunk_and_the_window_of_a_mask_function():
    """Some layers don't pass their window to the attention; then it comes from the mask."""
    hf.register()
    config = LlamaConfig(**SMALL, attn_implementation="burst", attention_chunk_size=2)
    places, hidden = torch.tensor([[0, 1, 5, 6]]), torch.zeros(1, 4, 32)
    request = create_chunked_causal_mask(config, hidden, None, None, position_ids=places)
    assert (request.chunk, request.window, request.foreign) == (2, None, ())
    with pytest.raises(ValueError, match="attention_chunk_size=2 of the layer has no plan"):
        checks.choose(make_plan(4), None, request.chunk)
    config = MistralConfig(**SMALL, sliding_window=3, attn_implementation="burst")
    for given in (None, places):
        request = create_sliding_window_causal_mask(config, hidden, None, None, position_ids=given)
        assert request == MaskRequest(causal=True, window=3, foreign=())


def test_shard_batch_gives_the_plans_tokens():
    plan = make_plan(SEQLEN, mask=Mask(cu_seqlens=DOCUMENTS))
    batch = make_batch()
    shard = hf.shard_batch(batch, {None: plan}, ignore_index=-7)
    assert torch.equal(shard["input_ids"], batch["input_ids"][:, plan.positions])
    assert torch.equal(shard["position_ids"], plan.document_positions.expand(2, -1))
    expected = batch["input_ids"].roll(-1, 1)
    expected[:, [border - 1 for border in DOCUMENTS[1:]]] = -7
    assert torch.equal(shard["shift_labels"], expected[:, plan.positions])
    assert set(hf.shard_batch({"input_ids": batch["input_ids"]}, plan)) == {"input_ids", "position_ids"}


def test_inference_mode_compares_positions_in_every_call(llama):
    plan, batch = make_plan(SEQLEN), make_batch()
    expected = logits_of(llama, hf.shard_batch(batch, plan), plan)
    with torch.inference_mode():
        shard = hf.shard_batch({"input_ids": batch["input_ids"].clone()}, plan)
        assert shard["position_ids"].is_inference()
        for _ in range(2):
            assert torch.equal(logits_of(llama, shard, plan), expected)
        shard["position_ids"][:, 3] += 1  # an inference tensor does not record this write
        with pytest.raises(ValueError, match="position_ids differ from"):
            logits_of(llama, shard, plan)
    # A plan that was used in inference mode still works for training.
    logits_of(llama, hf.shard_batch(batch, plan), plan).sum().backward()
