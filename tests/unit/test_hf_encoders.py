"""Encoders, and models that compute their attention or count their positions themselves, over ranks as threads.

The loss and every parameter's gradient equal those of one process, for whole rows, padding and packed documents.
"""

import copy

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, FNetConfig, FNetForMaskedLM, GPTJConfig, GPTJForCausalLM

from burst_attention import Mask, make_plan
from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers import converted, own_attention
from burst_attention.integrations.hf.reading import models, read, structure
from burst_attention.integrations.hf.running import RunningPlans, running
from burst_attention.testing import WorkerError, local_world
from tests.support import encoder_models as tiny
from tests.tools import families

PLANS = RunningPlans({None: make_plan(8)}, positions=None)

# (model type, head, case, ranks)
EQUAL = [
    ("bert", "ForMaskedLM", "padded", 2),
    ("bert", "ForSequenceClassification", "padded", 3),
    ("roberta", "ForMaskedLM", "whole", 2),
    ("modernbert", "ForMaskedLM", "padded", 3),
    ("gptj", "ForCausalLM", "packed", 4),
    ("opt", "ForCausalLM", "packed", 2),
    ("minicpm3", "ForCausalLM", "packed", 2),
    ("modernbert-decoder", "ForCausalLM", "packed", 2),
    ("electra", "ForCausalLM", "packed", 2),
    ("falcon", "ForCausalLM", "padded", 2),
    ("mvp", "ForCausalLM", "padded", 2),
]
MORE = [
    ("roberta", "ForTokenClassification", "packed", 3),
    ("rembert", "ForMaskedLM", "padded", 2),
    ("modernbert", "ForTokenClassification", "packed", 2),
    ("modernbert", "ForSequenceClassification", "whole", 2),
    ("roformer", "ForMaskedLM", "packed", 3),
    ("bert", "ForCausalLM", "packed", 2),
    ("gpt_neo", "ForCausalLM", "packed", 3),
    ("gpt_neox_japanese", "ForCausalLM", "padded", 3),
    ("openai-gpt", "ForCausalLM", "packed", 2),
    ("xglm", "ForCausalLM", "padded", 2),
    ("bart", "ForCausalLM", "packed", 3),
    ("whisper", "ForCausalLM", "packed", 2),
]


@pytest.mark.parametrize(
    ("model_type", "head", "case", "world"), [*EQUAL, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)]
)
def test_equal_to_one_process(model_type, head, case, world):
    tiny.check_step(tiny.made(model_type, head), tiny.make_batch(head, case), world)


def test_layers_are_recomputed():
    def prepare(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    batch, model = tiny.make_batch("ForCausalLM", "packed"), copy.deepcopy(tiny.made("bart", "ForCausalLM"))
    model.config.attention_dropout = 0.0
    for module in model.modules():
        for name in ("p", "dropout", "activation_dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    tiny.check_step(model, batch, 2, prepare=prepare)


def test_token_types_are_sharded():
    batch = tiny.make_batch("ForMaskedLM", "padded")
    batch["token_type_ids"] = (torch.arange(tiny.LENGTH) > 9).long().repeat(2, 1)
    model = tiny.made("bert", "ForMaskedLM")
    tiny.check_step(model, batch, 3, dtype=torch.float64)
    plain = tiny.stock_loss(model, {name: x for name, x in batch.items() if name != "token_type_ids"})
    assert abs(plain - tiny.stock_loss(model, batch)) > 1e-3


def test_pooler_gives_nothing_on_shards():
    model = copy.deepcopy(tiny.made("bert", "ForSequenceClassification"))
    hf.parallelize(model)
    batch = tiny.make_batch("ForSequenceClassification", "whole")
    with running(RunningPlans({None: make_plan(tiny.LENGTH)}, positions=None)):
        assert model.bert.pooler(torch.zeros(2, 3, 64, dtype=torch.float64)) is None
    logits = model(**batch).logits
    hf.unparallelize(model)
    assert type(model.bert.pooler).__name__ == "BertPooler"
    assert torch.allclose(model(**batch).logits, logits, rtol=1e-12)


class Biased(torch.nn.Module):
    """An attention that adds something to its scores."""

    is_causal, num_heads = True, 2

    def forward(self, q, k, v, change):
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2.0
        return torch.matmul(torch.nn.functional.softmax(change(scores), dim=-1), v)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores + torch.ones(8, 8),
        lambda scores: scores * torch.ones(8, 8),
        lambda scores: torch.tanh(scores),
        lambda scores: scores + torch.full((8, 8), -1e5).triu(2),  # a query sees the next key
        lambda scores: scores * torch.ones(8, 8).tril(),  # and no large negative number for the others
        lambda scores: torch.where(torch.ones(8, 8).tril().bool(), scores, torch.tensor(0.0)),
        lambda scores: torch.nn.functional.softmax(scores, dim=-1),
        lambda scores: scores.view(2, 64, 2),
    ],
)
def test_unknown_scores_are_refused(change):
    module, plans = Biased(), PLANS
    x = torch.randn(2, 2, 8, 4)
    hf.register()
    with pytest.raises(ValueError, match="its attention scores, which is not known here"):
        own_attention._over_shards(module, plans, module.forward, (x, x, x, change), {})


def test_a_fused_attention_over_a_shard_alone_is_refused():
    class Fused(Biased):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    module, x = Fused(), torch.randn(2, 2, 8, 4)
    with pytest.raises(ValueError, match="Fused hides its attention scores, which is not known here"):
        own_attention._over_shards(
            module, RunningPlans({None: make_plan(8)}, positions=None), module.forward, (x, x, x), {}
        )


class Dropping(Biased):
    """An attention with dropout of its weights, by a function."""

    def forward(self, q, k, v):
        weights = torch.nn.functional.softmax(torch.matmul(q, k.transpose(-1, -2)) / 2.0, dim=-1)
        return torch.matmul(torch.nn.functional.dropout(weights, 0.5, training=True), v)


def test_dropout_of_weights_is_refused():
    module, x = Dropping(), torch.randn(2, 2, 8, 4)
    hf.register()
    with pytest.raises(ValueError, match=r"dropout=0\.5 of attention weights is not supported"):
        own_attention._over_shards(
            module, RunningPlans({None: make_plan(8)}, positions=None), module.forward, (x, x, x), {}
        )


def test_parts_that_are_not_converted_are_refused():
    """By hand, without ``hf.parallelize``."""
    hf.register()
    for model_type in ("bart", "gpt_neo"):
        model = tiny.made(model_type, "ForCausalLM")
        with pytest.raises(ValueError, match=r"call hf\.parallelize\(model\)"):
            converted.check_converted(read(model))


def test_encoder_is_not_causal_and_mixtures_are_refused():
    model = BertForMaskedLM(BertConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=2))
    assert models.is_causal(read(model.bert)) is False
    model.bert.encoder.layer[1].attention.self.is_causal = True
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self of BertModel is causal, but"):
        models.is_causal(read(model.bert))
    model.config.is_decoder = True
    with pytest.raises(ValueError, match="says is_causal=False, but the configuration is_decoder=True"):
        models.is_causal(read(model.bert))
    with local_world(2, timeout=30) as ranks, pytest.raises(WorkerError, match="is_decoder=True, so its mask is not"):
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group))


# Decoders that run as encoders, by their configuration.
BIDIRECTIONAL = {
    "gemma3_text": {"use_bidirectional_attention": True, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"use_bidirectional_attention": "all", "layer_types": ["sliding_attention", "full_attention"]},
    "llama": {"is_causal": False},
    "mistral": {"is_causal": False},
}


@pytest.mark.parametrize(
    ("model_type", "case", "world"),
    [
        ("gemma3_text", "whole", 3),
        ("gemma3_text", "packed", 2),
        ("gemma4_text", "packed", 2),
        ("llama", "padded", 3),
        ("mistral", "whole", 2),
        pytest.param("gemma4_text", "whole", 3, marks=pytest.mark.long),
        pytest.param("mistral", "packed", 3, marks=pytest.mark.long),
        pytest.param("llama", "packed", 2, marks=pytest.mark.long),
    ],
)
def test_decoders_made_encoders_equal_one_process(monkeypatch, model_type, case, world):
    settings = families.OWN.get(model_type, {}) | BIDIRECTIONAL[model_type] | {"num_hidden_layers": 2}
    monkeypatch.setitem(families.OWN, model_type, settings)
    model, batch = tiny.made.__wrapped__(model_type, "ForCausalLM"), tiny.make_batch("ForCausalLM", case)
    tiny.check_step(model, batch, world)
    causal = copy.deepcopy(model)
    causal.config.is_causal, causal.config.use_bidirectional_attention = True, None
    assert abs(tiny.stock_loss(causal, batch) - tiny.stock_loss(model, batch)) > 1e-4


@pytest.mark.parametrize(
    ("model_type", "setting", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "makes causal masks, which only some of transformers'"),
        ("llama4_text", {"is_causal": False}, "is_causal=False of the configuration: chunked layers of"),
        ("bamba", {"is_causal": False}, "passes a state from token to token"),
        ("nemotron", {"is_causal": False}, "does not get it"),
    ],
)
def test_decoders_that_are_not_certain_to_be_encoders_are_refused(model_type, setting, message):
    with pytest.raises(ValueError, match=message):
        hf.check_config(families.tiny_config(model_type, **setting))


def test_a_model_without_a_known_attention_is_refused():
    """FNet mixes tokens by a Fourier transform; its classes have harmless names."""
    model = FNetForMaskedLM(FNetConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1)).eval()
    with pytest.raises(ValueError, match="Sequential has no attention and no recurrence that is known"):
        structure.check_exchanges(read(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    refusal = r"\(FNetBasicFourierTransform\) is not known to treat each token independently: it uses fft_fftn"
    with local_world(2, timeout=30) as ranks, pytest.raises(WorkerError, match=refusal):
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group))
    ids = torch.arange(16)[None]
    expected = model(input_ids=ids).logits
    with pytest.warns(UserWarning, match="leaves the model as it is"):
        assert torch.equal(hf.parallelize(model)(input_ids=ids).logits, expected)


def test_dropout_and_packing_without_positions_are_refused():
    model = tiny.made("roberta", "ForMaskedLM")
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 3, 8])}
    model = hf.parallelize(copy.deepcopy(model))
    with pytest.raises(ValueError, match="cu_seq_lens_q packs documents"):
        model(**batch)
    with pytest.raises(ValueError, match="inputs_embeds without position_ids are refused"):
        model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]))
    dropping = GPTJForCausalLM(GPTJConfig(vocab_size=8, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, attn_pdrop=0.5))
    with local_world(2, timeout=30) as ranks, pytest.raises(WorkerError, match="dropout"):
        ranks.run(lambda group: _one_step(copy.deepcopy(dropping), group))


def test_a_head_with_dropout_may_be_parallelized_before_eval():
    model = tiny.made("bert", "ForTokenClassification").train()
    ids = torch.ones(1, 8, dtype=torch.long)
    with local_world(2, timeout=30) as ranks, pytest.raises(WorkerError, match=r"has p=0\.1"):
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group)(ids))
    with local_world(2, timeout=30) as ranks:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group).eval()(ids))


def _one_step(model, group):
    hf.parallelize(model, group)
    model.train()
    ids = torch.zeros(1, 8, dtype=torch.long)
    return model(input_ids=ids, labels=ids).loss


def test_masks_of_encoders():
    """Padding is a document, and every mask is not causal."""
    model = hf.parallelize(copy.deepcopy(tiny.made("bert", "ForMaskedLM")))
    batch = tiny.make_batch("ForMaskedLM", "padded")
    model(**batch)
    (plans,) = model._burst.plans._plans.values()
    assert plans.one.mask == Mask(causal=False, cu_seqlens=(0, 29, 46, 58))
