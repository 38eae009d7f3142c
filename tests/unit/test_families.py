"""Families of models over three ranks: each is equal to one process or refused by name, and none is plausibly wrong."""

import contextlib
import copy

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from burst_attention.integrations import hf
from burst_attention.integrations.hf.reading import known
from burst_attention.testing import local_world
from burst_train.step.model import _check_parts
from tests.support.generating import TEMPERED
from tests.tools import families, vision_families

# By the configuration's layers, by a layer's own attention, by the parts of the model, by its layers.
REFUSED = {
    "recurrent_gemma": "a gated linear recurrence (RG-LRU) whose state is not passed between ranks",
    "deepseek_v4": "its queries see keys that sum up groups of tokens",
    "bloom": "BloomAttention) adds biases by distance (ALiBi)",
    "musicgen": "MusicgenDecoder) reads several codebooks",
    "bigbird_pegasus": "says is_causal=False, but the configuration is_decoder=True",
    "doge": "DogeAttention) makes its mask from the values of the keys",
    "dory": "lm_head is a DoryLMHead, not a plain linear layer",
    "inkling2_loop_text": "layer_types of the configuration has 'hybrid_sliding'",
}
MECHANISMS = {
    "lara_mini": {"gated delta"},
    "lfm2": {"convolution"},
    "mamba": {"Mamba 1"},
    "gpt_oss": {"sinks"},
    "deepseek_v32": {"indexer"},
    "glm_moe_dsa": {"indexer"},
    "axk2": {"indexer"},
    "dots3_note_text": {"indexer"},
    "hy_v4": {"indexer", "sinks"},
    "minimax_m3_vl_text": {"indexer"},
    "gemma2": {"soft cap"},
    "llama4_text": {"chunks"},
    "gpt_neo": {"scores"},
    "openai-gpt": {"scores"},
    "bart": {"positions"},
    "bert": {"encoder"},
    "roformer": {"encoder", "scores", "positions"},
}
# Run on one rank as they are: everyday, and the others.
ALONE = ("recurrent_gemma", "deepseek_v4", "bloom", "bigbird_pegasus", "doge", "zaya", "rwkv", "xlnet")
ALONE_TOO = (
    *("cpmant", "inkling_text", "inkling2_text", "inkling2_loop_text"),
    *("mpt", "prophetnet", "xlm", "xlstm"),
)
# Not run on one rank here: too large, of several codebooks, without a loss in eval mode (Reformer). Dory's head is
# refused on one rank, too.
NOT_ALONE = ("blt", "dots3_note", "git", "mllama", "phi4_multimodal")
NOT_ALONE += ("musicgen", "musicgen_melody", "reformer", "dory")
WITHOUT_TOKENS = ("inkling2_text", "inkling2_loop_text", "xlstm")  # generate fails without the library, too
BOTH = {None, families.WINDOW}
# Forms that a default configuration does not have, and how they refuse to generate with a cache over ranks.
FORMS = {
    "gemma4_text": ({"num_kv_shared_layers": 2, "layer_types": families._MIXED}, "equal"),
    "ministral3": ({"rope_parameters": TEMPERED}, "equal"),
}
WINDOWS = dict.fromkeys(
    ("gemma3_text", "cohere2", "gemma2", "gpt_oss", "gpt_neo", "lara_mini", "dots3_note_text"), BOTH
)
WINDOWS["mamba"] = set()
# How the others refuse to generate with a cache over ranks.
REFUSED_CACHES = {
    "nemotron": "a custom attention or counts positions",
    "gpt_bigcode": "has learned positions",
    "gpt_neo": "a custom attention or counts positions",
    "mamba": "has no attention",
    "bart": "a custom head or forward",
    "bert": "a custom head or forward",
    "roformer": "a custom head or forward",
    "llama4_text": "a custom attention or counts positions",
    "openai-gpt": "takes no cache",
}
if known.CACHE == "past_key_values":  # transformers 5.24 rewrote it: it calls the attention of the configuration
    REFUSED_CACHES["codegen"], MECHANISMS["codegen"] = "a custom attention or counts positions", {"scores"}


def _supported(model_types):
    """Those of the installed transformers: some are not of all supported versions."""
    return [model_type for model_type in model_types if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "gpt_neox", "gemma3_text", "cohere2", "mixtral", "deepseek_v3", "nemotron", "gpt_bigcode", "moshi"),
        "codegen",
        *_supported(MECHANISMS),
    ],
)
def test_equal(model_type):
    verdict = families.judge(model_type)
    assert verdict.kind == "equal", verdict
    assert verdict.windows == WINDOWS.get(model_type, {None})
    assert verdict.mechanisms == MECHANISMS.get(model_type, set())
    assert bool(verdict.logits) == (model_type in ("codegen", "cohere2", "gemma2", "bert", "roformer"))
    assert REFUSED_CACHES.get(model_type, "equal") in verdict.generates


def test_weights_with_a_near_tie_are_drawn_again():
    """Two keys of A.X K2's first draw have scores 6e-9 apart, and fp32 rounds them by 4e-8."""
    config, _ = families.built("axk2")
    margins = [families.margin(families.model_of("axk2", config, "eager", seed=seed)) for seed in range(2)]
    assert margins[0] < 0.5 and margins[1] > 2, "the draw is another: take one that has a near tie"


@pytest.mark.parametrize("model_type", FORMS)
def test_other_forms_are_equal(monkeypatch, model_type):
    settings, generates = FORMS[model_type]
    monkeypatch.setitem(families.OWN, model_type, families.OWN.get(model_type, {}) | settings)
    verdict = families.judge(model_type)
    assert verdict.kind == "equal", verdict
    assert generates in verdict.generates


@pytest.mark.parametrize("model_type", _supported(REFUSED))
def test_refused(model_type):
    verdict = families.judge(model_type)
    assert verdict.kind == "refused", verdict
    assert REFUSED[model_type] in verdict.text


@pytest.mark.parametrize("model_type", _supported(ALONE))
def test_one_rank_runs_what_several_refuse(model_type):
    plain, model = _plain_and_alone(model_type)
    with pytest.raises(ValueError, match="logits is refused: the model runs as it is, because"):
        model(**families.batch(), logits="gather")
    with pytest.raises(ValueError, match="seq_idx is refused"):
        model(**families.batch(), seq_idx=torch.zeros(2, families.SEQLEN))
    assert type(hf.unparallelize(model)) is type(plain)
    with pytest.raises(ValueError, match=r"memory=Memory\(mlp_chunks=2\): "):
        hf.parallelize(model, memory=hf.Memory(mlp_chunks=2))


@pytest.mark.long
@pytest.mark.parametrize("model_type", _supported(ALONE_TOO))
def test_one_rank_runs_each_model_that_several_refuse(model_type):
    _plain_and_alone(model_type)


def _plain_and_alone(model_type):
    """A model, and its copy on one rank; their losses, gradients and tokens are the same."""
    own = families.OWN.get(model_type, {})
    config, parts = families.built(model_type, **own)
    assert sum(each.numel() for each in parts.parameters()) < families.LARGEST
    plain = families.model_of(model_type, config, "eager").float()
    model, batch = copy.deepcopy(plain), families.batch()
    with pytest.warns(UserWarning, match="leaves the model as it is, which only one rank can do"):
        hf.parallelize(model)
    losses = [each(**batch, use_cache=False).loss for each in (plain, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, found.grad)
    if model_type not in WITHOUT_TOKENS:
        assert torch.equal(families._generated(plain), families._generated(model))
    return plain, model


def test_the_page_names_each_model_and_groups_reasons():
    suffix = "and each rank would see only its shard; run it on one rank, where it sees the whole sequence"
    verdicts = [families.Verdict(f"no{n}", "refused", f"h.{n} (Own{n}) mixes tokens, {suffix}") for n in (1, 2)]
    verdicts += [
        families.Verdict("plain", "equal", hidden=1e-7, gradients=2e-7, windows={None}),
        families.Verdict("mixed", "equal", hidden=2e-7, gradients=1e-7, windows={None, 5}, mechanisms={"sinks"}),
    ]
    page = families.page(verdicts)
    assert "**Equal** (2): loss and logits differ by at most 2e-07, gradients by 2e-07" in page
    assert "| attention alone | plain |" in page and "| sinks | mixed |" in page and "| windows | mixed |" in page
    assert page.endswith("**Refused** (2):\n\n- no1 (Own1), no2 (Own2): mixes tokens")


def test_the_page_of_vision_language_models_groups_how_they_generate():
    own = "is a vision-language model that has no cache over ranks: with text alone it changes embeddings; generate on"
    verdicts = [vision_families.Verdict(f"{n}", "equal", generates=f"Own{n} {own} one rank") for n in (1, 2)]
    verdicts += [
        vision_families.Verdict("plain", "equal", packed="equal", generates="equal"),
        vision_families.Verdict("text", "not built", "no images are made here", generates="equal"),
        vision_families.Verdict("stuck", "not built", "no images are made here", generates="not run: TypeError: no"),
        vision_families.Verdict("away", "refused", "it is too large"),
    ]
    page = vision_families.page(verdicts)
    assert "**Equal** (3): losses" in page and "\n\n1, 2, plain.\n\n" in page
    assert "**Generate over ranks** (2): " in page and "\n\nplain, text.\n\n" in page
    assert "**Not generated** (1):\n\n- stuck: TypeError: no\n\n" in page
    assert "**Refuse the cache** (2):\n\n- 1, 2: with text alone it changes embeddings\n\n**Not built**" in page
    assert page.endswith("**Refused** (1):\n\n- away: it is too large")


@pytest.mark.slow
def test_every_family_is_equal_or_refused():
    verdicts = [families.judge(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert [verdict for verdict in verdicts if verdict.kind in ("different", "error")] == []
    assert sum(verdict.kind == "equal" for verdict in verdicts) >= 150
    refused = {verdict.model_type for verdict in verdicts if verdict.kind == "refused"}
    assert refused <= {*ALONE, *ALONE_TOO, *NOT_ALONE}, "each is run on one rank, or named with a reason"


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_a_loss_that_a_forward_adds_counts(factor):
    """Bamba's z-loss; where it counts, the model's own forward runs around gathered states."""
    config, _ = families.built("bamba", z_loss_coefficient=factor)
    model = families.model_of("bamba", config, "eager")
    ids = torch.arange(3, 45).view(2, 21)
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss

    def rank(group):
        return hf.parallelize(copy.deepcopy(model), group)(input_ids=ids, labels=ids, use_cache=False).loss

    with local_world(2) as ranks:
        for loss in ranks.run(rank):
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)
    refusal = pytest.raises(ValueError, match=r"z_loss_coefficient=0\.5 of the configuration adds a loss")
    with refusal if factor else contextlib.nullcontext():
        _check_parts(config, model)
