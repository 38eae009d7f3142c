"""Test that models with parts that mix tokens are refused, and that batches without the plan's attention are."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    GPT2Config,
    GPTJConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2MoeConfig,
    RobertaConfig,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.models.llama.modeling_llama import LlamaMLP

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.integrations import hf
from burst_attention.integrations.hf import measure
from burst_attention.integrations.hf.layers import checks
from burst_attention.integrations.hf.reading import attached, read
from burst_attention.loss import next_token_loss, next_token_nll
from burst_attention.testing import WorkerError, local_world
from burst_train.data.tokenizer import ByteTokenizer
from burst_train.step.model import model_config
from tests.support.hf_models import MIXED, SEQLEN, SMALL, WINDOW, make_batch, make_model
from tests.tools import families
from tests.tools.families import model_class, tiny_config


def over_ranks(call, world=2):
    """Return rank 0's error text of ``call(plan)``; all ranks must raise a ValueError.

    The ranks are threads: a call that registers hooks, as ``check_model`` does, takes a model of its own.
    """
    with pytest.raises(WorkerError) as caught, local_world(world, timeout=20) as ranks:
        ranks.run(lambda group: call(make_plan(SEQLEN, group=group)))
    assert len(caught.value.errors) == world
    assert {type(error) for error in caught.value.errors.values()} == {ValueError}, caught.value
    return str(caught.value.errors[0])


def succeeds(call, world=2):
    """Run ``call(plan)`` on ranks; none may fail."""
    with local_world(world, timeout=20) as ranks:
        ranks.run(lambda group: call(make_plan(SEQLEN, group=group)) and None)


class Shift(nn.Module):
    """A part that adds the previous token to each token; its class is unknown."""

    def forward(self, x):
        return x + x.roll(1, 1)


class LengthLayer(nn.Module):
    """A part that depends only on the number of tokens."""

    def forward(self, x):
        return x * x.shape[1]


class NoiseLayer(nn.Module):
    """A part that draws random values in training without nn.Dropout."""

    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x


class CountingLayer(nn.Module):
    """A part that counts positions from the start of its input."""

    def __init__(self):
        super().__init__()
        self.position_embeddings = nn.Embedding(SEQLEN, 32).double()

    def forward(self, x):
        return x + self.position_embeddings(torch.arange(x.shape[1]))


for _each in (LengthLayer, NoiseLayer, CountingLayer):
    _each.__module__ = "transformers_modules.of_somebody"


class OwnLinear(nn.Linear):
    """A subclass with another forward."""

    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


class NamedLinear(nn.Linear):
    """A subclass that inherits nn.Linear's forward."""


class OwnMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


def with_part(part):
    """Return a model with ``part`` after the feed-forward of its first layer."""
    model = make_model("llama")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, part)
    return model


def forward(model, plan, plans=None):
    shard = hf.shard_batch(make_batch(), plan)
    arguments = {"position_ids": shard["position_ids"], "plan": plans or plan, "use_cache": False}
    return model.model(shard["input_ids"], **arguments)[0], shard


def test_a_part_that_is_not_known_is_refused_by_the_attention():
    for part, text in (
        (Shift(), "layers.0.mlp.1 (Shift) is not known to treat each token independently"),
        (nn.Conv1d(SEQLEN // 2, SEQLEN // 2, 1).double(), "(Conv1d) is not known to treat each token independently"),
        (CountingLayer(), "(CountingLayer) counts positions itself, from the start of its input"),
    ):
        model = with_part(part)
        assert text in over_ranks(lambda plan, model=model: forward(model, plan))
    assert forward(with_part(Shift()), make_plan(SEQLEN))[0].isfinite().all(), "one rank takes any part"
    hf.check_model(with_part(Shift()), make_plan(SEQLEN))


def test_a_hybrid_that_is_not_parallelized_is_refused():
    config = Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], attn_implementation="burst", pad_token_id=0)
    hf.register()
    model = Lfm2ForCausalLM(config).double()
    assert "layers.0.conv (Lfm2ShortConv) passes a state from token to token" in over_ranks(
        lambda plan: forward(model, plan)
    )
    assert forward(model, make_plan(SEQLEN))[0].isfinite().all()


def test_what_code_does_not_tell_is_measured():
    model = with_part(LengthLayer())
    reported = over_ranks(lambda plan: hf.check_model(copy.deepcopy(model), plan))
    assert (
        "(LengthLayer) was run on random tokens: results of a token depend on other tokens, and each rank" in reported
    )


STATISTICS = {
    "maximum": lambda x: x / x.abs().max(),
    "maximum of a channel": lambda x: x / x.abs().amax((0, 1)),
    "quantized by the maximum": lambda x: (x * (127 / x.abs().max())).round() * (x.abs().max() / 127),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "norm": lambda x: x / x.norm(),
    "threshold of the largest": lambda x: x * (x.abs() >= x.abs().flatten().topk(max(1, x.numel() // 4)).values[-1]),
    "capacity": lambda x: x * (torch.arange(x.shape[1]) < 14)[:, None],
    "capacity for equal tokens": lambda x: x * (_earlier_equal(x) < 7)[..., None],
    "batch statistics": lambda x: (x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt(),
}


def _earlier_equal(x):
    """For each token the number of earlier tokens that an expert, picked by the largest channel, would also get."""
    picked = x.argmax(-1)
    return torch.tril(picked[..., None] == picked[:, None], -1).sum(-1)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_declared_part_that_depends_on_a_statistic_of_all_tokens_is_found(statistic):
    """Of 12 random models none may pass; the statistic may lie in the tokens that are compared."""

    @hf.token_wise
    class Declared(nn.Module):
        def forward(self, x):
            return STATISTICS[statistic](x)

    passed = []
    for seed in range(12):
        torch.manual_seed(seed)
        model = make_model("llama")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model.model.layers[seed % 2].mlp.down_proj = nn.Sequential(
            Declared(), model.model.layers[seed % 2].mlp.down_proj
        )
        try:
            measure.check_by_measure(read(model), make_plan(SEQLEN))
            passed.append(seed)
        except ValueError as error:
            assert "depend on" in str(error)
    assert not passed


def test_random_values_are_measured_in_training():
    model = with_part(nn.Sequential(hf.token_wise(NoiseLayer)(), nn.Dropout(0.5)))
    assert "differ from run to run" in over_ranks(lambda plan: hf.check_model(copy.deepcopy(model).train(), plan))
    succeeds(lambda plan: hf.check_model(copy.deepcopy(model).eval(), plan))


def test_a_subclass_is_trusted_if_it_inherits_its_forward():
    own, named = OwnLinear(32, 32).double(), NamedLinear(32, 32).double()
    assert "(OwnLinear) is not known" in over_ranks(lambda plan: forward(with_part(own), plan))
    succeeds(lambda plan: forward(with_part(named), plan))
    model = make_model("llama")
    model.model.layers[1].mlp = OwnMLP(model.config).double()
    assert "layers.1.mlp (OwnMLP) is not known" in over_ranks(lambda plan: forward(model, plan))


def test_a_part_with_another_forward_is_refused():
    model = make_model("llama")
    part = model.model.layers[0].mlp
    part.forward = lambda x: type(part).forward(part, x - x.mean(1, keepdim=True))
    assert "layers.0.mlp (LlamaMLP) has the forward test_a_part_with" in over_ranks(lambda plan: forward(model, plan))


@pytest.mark.parametrize("put", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_on_parts_are_refused(put):
    def by_length(module, *args):
        return None

    model = make_model("llama")
    getattr(model.model.layers[1], put)(by_length)
    refusal = "model.layers.1 (LlamaDecoderLayer) has the hook test_hooks_on_parts_are_refused.<locals>.by_length"
    assert refusal.removeprefix("model.") in over_ranks(lambda plan: forward(model, plan))
    assert refusal in over_ranks(lambda plan: hf.check_model(copy.deepcopy(model), plan))
    assert refusal in over_ranks(lambda plan: hf.parallelize(model, plan.transport.group))


def test_what_is_declared_to_treat_each_token_by_itself_is_taken():
    seen = []

    class OwnNorm(nn.Module):
        def forward(self, x):
            return x / x.norm(dim=-1, keepdim=True)

    class ShiftedNorm(OwnNorm):
        def forward(self, x):
            return super().forward(x.roll(1, 1))

    assert hf.token_wise(OwnNorm) is OwnNorm
    model = with_part(OwnNorm())
    model.model.layers[1].register_forward_hook(hf.token_wise(lambda *_: seen.append(True)))
    succeeds(lambda plan: forward(model, plan))
    assert seen
    assert "ShiftedNorm) is not known" in over_ranks(lambda plan: forward(with_part(ShiftedNorm()), plan))
    hf.token_wise(ShiftedNorm)
    assert "depend on other tokens" in over_ranks(lambda plan: hf.check_model(with_part(ShiftedNorm()), plan))


@pytest.mark.parametrize("wrong", [3, int, NamedLinear])
def test_a_declaration_is_of_a_module_class_with_a_forward_or_of_a_function(wrong):
    with pytest.raises(TypeError, match=r"token_wise\("):
        hf.token_wise(wrong)


def random_model(name):
    if name == "starcoder2":
        return Starcoder2ForCausalLM(Starcoder2Config(**SMALL, residual_dropout=0.3, attn_implementation="burst"))
    if name == "mixtral":
        changes = {"num_local_experts": 4, "router_jitter_noise": 0.1, "sliding_window": None}
        return MixtralForCausalLM(MixtralConfig(**SMALL | changes, attn_implementation="burst"))
    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    config.attention_dropout, config.dropout, config.layerdrop = 0.0, 0.0, 0.5
    config._attn_implementation = "burst"
    return OPTForCausalLM(config)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("starcoder2", "residual_dropout=0.3"), ("mixtral", "jitter_noise=0.1"), ("opt", "layerdrop=0.5")],
)
def test_random_values_of_parts_are_refused_in_training(name, setting):
    hf.register()
    model = random_model(name)
    with pytest.raises(ValueError, match=setting):
        attached.check_random(read(model.train()))
    if name != "opt":  # a rank that drops all its layers never calls the attention
        assert setting in over_ranks(lambda plan: forward(model.train(), plan))
        assert setting in over_ranks(lambda plan: hf.parallelize(model.train(), plan.transport.group))
        with pytest.raises(ValueError, match=setting):
            hf.check_config(model.config)
        hf.check_config(model.config, training=False)
    succeeds(lambda plan: forward(model.eval(), plan))


def test_dropout_is_refused_over_ranks_and_where_layers_are_computed_again():
    model, ids = make_model("llama"), torch.zeros(1, SEQLEN, dtype=torch.long)
    model.model.layers[0].mlp.add_module("more", nn.Dropout(0.1))
    refused = r"more \(Dropout\) has p=0\.1, so it draws random values"
    assert re.search(refused, over_ranks(lambda plan: forward(copy.deepcopy(model).train(), plan)))
    found = over_ranks(
        lambda plan: hf.parallelize(copy.deepcopy(model).train(), plan.transport.group)(input_ids=ids, labels=ids)
    )
    assert re.search(refused, found)
    for memory in (hf.Memory(recompute="layer"), hf.Memory(mlp_chunks=2)):
        alone = hf.parallelize(copy.deepcopy(model), memory=memory)
        alone.eval()(input_ids=ids, labels=ids)
        with pytest.raises(ValueError, match=refused):
            alone.train()(input_ids=ids, labels=ids)
    hf.parallelize(copy.deepcopy(model).train())(input_ids=ids, labels=ids)


def test_the_noise_of_neftune_is_refused():
    model = make_model("llama")
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    assert "adds the noise of NEFTune" in over_ranks(lambda plan: forward(model, plan))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_right_model_passes_the_measure_and_keeps_its_mode(name):
    model = make_model(name).train()
    model.model.norm.eval()

    def check(group):
        own = copy.deepcopy(model)  # ranks that are threads would set the modes of one model at the same time
        full = make_plan(SEQLEN, group=group)
        hf.check_model(own, full if name == "llama" else {None: full, WINDOW: full.with_mask(Mask(window=WINDOW))})
        return own.model.layers[0].training, own.model.norm.training

    for world in (1, 2):
        with local_world(world, timeout=20) as ranks:
            assert ranks.run(check) == [(True, False)] * world


def test_a_switched_layer_or_model_is_refused():
    model, other = make_model("llama"), make_model("llama", "sdpa")
    refused = "attn_implementation='sdpa' of layers of Llama"
    assert refused in over_ranks(lambda plan: hf.check_model(copy.deepcopy(other), plan))
    model.model.layers[1].self_attn.config = other.config
    assert refused in over_ranks(lambda plan: forward(model, plan))


def losses_of(models, plan, *, cut_ahead=False, loss=next_token_loss, copied=(), moved=()):
    """Run each model on a batch, then the loss; ``copied``, ``moved``: models whose labels, positions are copies."""

    def cut(n):
        return hf.shard_batch({name: x.roll(n, 1) for name, x in make_batch().items()}, plan)

    shards = [cut(n) for n in range(len(models))] if cut_ahead else map(cut, range(len(models)))
    for n, (model, shard) in enumerate(zip(models, shards, strict=True)):
        positions = shard["position_ids"].clone() if n in moved else shard["position_ids"]
        hidden = model.model(shard["input_ids"], position_ids=positions, plan=plan, use_cache=False)[0]
        labels = shard["shift_labels"].clone() if n in copied else shard["shift_labels"]
        for _ in range(2):
            loss(hidden, model.lm_head.weight, labels, plan)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("sdpa",), {}),
        (("sdpa",), {"loss": next_token_nll, "copied": (0,)}),
        (("burst", "sdpa"), {}),  # switched between batches
        pytest.param(("burst", "sdpa"), {"cut_ahead": True}, id="own_batch"),  # an attention counts for that alone
        (("burst", "sdpa"), {"copied": (1,)}),
    ],
)
def test_a_switched_model_is_refused_by_the_loss(names, options):
    models = [make_model("llama", name) for name in names]
    assert "no attention has used the plan for this batch" in over_ranks(
        lambda plan: losses_of(models, plan, **options)
    )


@pytest.mark.parametrize("options", [{"copied": (1,), "moved": (1,)}, {"cut_ahead": True, "copied": (0, 1, 2)}])
def test_copied_labels_are_those_of_their_own_batch_and_copied_positions_are_fine(options):
    model = make_model("llama")
    succeeds(lambda plan: losses_of([model] * 3, plan, **options))


def test_an_attention_of_ones_own_counts():
    """Without a transformers model, burst_attention itself marks the plan as used."""

    def call(plan):
        for copied in (False, True):
            shard = hf.shard_batch(make_batch(), plan)
            x = torch.randn(2, 1, plan.length, 8)
            hidden = burst_attention(x, x, x, plan)[:, 0]
            labels = shard["shift_labels"].clone() if copied else shard["shift_labels"]
            next_token_loss(hidden, torch.randn(64, 8), labels, plan)

    succeeds(call)


def test_fewer_tokens_than_ranks():
    model = make_model("llama")

    def call(plan):
        short = make_plan(2, group=plan.transport.group)
        model(**hf.shard_batch(make_batch(seqlen=2), short), plan=short, use_cache=False)

    assert "the sequence has 2 tokens for 3 ranks" in over_ranks(call, 3)


def test_configurations_that_are_fine():
    hf.check_config(LlamaConfig(**SMALL | {"attention_dropout": 0.1}), training=False)
    hf.check_config(Cohere2Config(**SMALL | MIXED))
    hf.check_config(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))
    hf.check_config(Qwen2MoeConfig(**SMALL, num_experts=4, use_sliding_window=False))


def test_plans_made_apart_are_watched_together():
    """Cut a batch by one of the plans that the model takes."""
    model = make_model("qwen3")

    def call(plan):
        plans = {WINDOW: make_plan(SEQLEN, mask=Mask(window=WINDOW), group=plan.transport.group), None: plan}
        hidden, shard = forward(model, plan, plans)
        next_token_loss(hidden, model.lm_head.weight, shard["shift_labels"], plan)

    succeeds(call)


def test_a_model_with_its_own_attention_is_refused_with_one_rank_too():
    """Its tokens would see later tokens, because it gets no mask."""
    hf.register()
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, attn_implementation="burst")
    with pytest.raises(ValueError, match=r"BloomAttention\) computes its attention itself"):
        BloomForCausalLM(config)(make_batch()["input_ids"], use_cache=False)


def test_training_asks_a_loaded_configuration(tmp_path):
    LlamaConfig(**SMALL | {"attention_dropout": 0.1, "vocab_size": 300}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--model .*: attention_dropout=0\.1 of the configuration"):
        model_config(str(tmp_path), ByteTokenizer(), SEQLEN)
    assert model_config(str(tmp_path), ByteTokenizer(), SEQLEN, training=False).attention_dropout == 0.1


def test_plans_of_other_documents_are_refused():
    plan = make_plan(SEQLEN)
    other = plan.with_mask(Mask(window=7, cu_seqlens=(0, 5, SEQLEN)))
    with pytest.raises(ValueError, match="masks of different documents, prefixes or blocks"):
        checks.choose({None: plan, 7: other}, 7)


BEYOND = {  # whose tables of positions have 24 rows; that of types has 2
    "gpt2": GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=24),
    "gptj": GPTJConfig(n_embd=32, n_layer=1, n_head=2, n_positions=24, rotary_dim=8),
    "opt": OPTConfig(
        hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=24
    ),
    "bart": BartConfig(
        d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, max_position_embeddings=24
    ),
    "bert": BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=24),
    "bert's types": BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64),
    "roberta": RobertaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=24),
}
HIGHEST = {"bert's types": "token_type_ids holds 2, outside of the 2 rows"}
HIGHEST |= {"roberta": "position_ids holds 31, outside of the 24 rows"}


@pytest.mark.parametrize("name", BEYOND)
def test_integers_beyond_their_table_are_refused_on_every_rank(name):
    """By one rank's IndexError the others would wait until their deadline."""
    config = copy.deepcopy(BEYOND[name])
    for setting in ("vocab_size", "intermediate_size"):
        setattr(config, setting, 64)
    for setting in [name for name in config.to_dict() if "drop" in name]:
        setattr(config, setting, 0.0)
    kind = AutoModelForMaskedLM if "bert" in name else AutoModelForCausalLM
    made, ids = kind.from_config(config).double().eval(), torch.arange(30)[None] + 4
    batch = {"input_ids": ids, "labels": ids}
    if "types" in name:
        batch["token_type_ids"] = torch.arange(30)[None] // 14

    def call(plan):
        model = hf.parallelize(copy.deepcopy(made), plan.transport.group)
        short = {key: x[:, :14] for key, x in batch.items()}
        assert model(**short).loss.isfinite()
        model(**batch)

    assert HIGHEST.get(name, "position_ids holds 29, outside of the 24 rows") in over_ranks(call)


def test_dropout_is_refused_by_the_names_of_the_models_own_settings():
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, summary_first_dropout=0.0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    ids = torch.arange(30)[None]
    named = "attn_pdrop=0.1"

    def call(plan):
        return hf.parallelize(copy.deepcopy(model), plan.transport.group)(input_ids=ids, labels=ids)

    reported = over_ranks(call)
    assert all(f"{name}_pdrop=0.1" in reported for name in ("attn", "embd", "resid")), reported
    for each in model.modules():
        if type(each) is nn.Dropout:
            each.p = 0.0
    model.transformer.h[0].attn.attn_dropout.p = 0.1
    assert named in over_ranks(call)


def test_a_whole_batch_without_a_label_warns_once():
    made, ids = make_model("llama"), torch.arange(30)[None]
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    def call(plan):
        model = hf.parallelize(copy.deepcopy(made), plan.transport.group)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            losses = [model(**batch).loss.item() for _ in range(2)]
            model(input_ids=ids, labels=ids)
        return losses, [str(each.message) for each in seen if "no label" in str(each.message)]

    with local_world(1) as ranks:
        losses, warned = ranks.run(lambda group: call(make_plan(SEQLEN, group=group)))[0]
    assert losses == [0.0, 0.0] and len(warned) == 1 and "its loss is 0" in warned[0]


def test_moshi_runs_beyond_the_window_of_its_configuration():
    """Its layers use none in transformers, and so on shards."""
    config = families.tiny_config("moshi")
    model = families.model_class("moshi")(config).double().eval()
    ids = torch.randint(3, families.VOCABULARY, (1, 4 * config.sliding_window))
    alone = model(ids, labels=ids).loss
    assert abs(hf.parallelize(model)(input_ids=ids, labels=ids).loss - alone) <= 1e-6


def test_a_window_that_the_configuration_lacks_names_its_settings():
    """Not plans, which ``parallelize`` makes itself."""
    model = hf.parallelize(make_model("qwen2"))
    model.model.layers[1].self_attn.sliding_window = 3
    with pytest.raises(ValueError, match=r"sliding_window=3 .*; set layer_types and sliding_window of the config"):
        model(**make_batch())


def test_a_model_without_a_head_names_the_class_to_load():
    with pytest.raises(TypeError, match=r"model is a LlamaModel, and .* load it by AutoModelForCausalLM"):
        hf.parallelize(make_model("llama").model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_grouped_experts_are_refused_in_fp64(name):
    """The default of transformers; torch has no grouped product in fp64."""
    config = CONFIG_MAPPING[name](**SMALL, attn_implementation="eager", num_experts_per_tok=2, num_experts=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    refusal = "dtype=torch.float64 of .*Experts: experts_implementation='grouped_mm' has no fp64; load the model with "
    with pytest.raises(ValueError, match=refusal):
        hf.parallelize(model.double())
    batch = make_batch()
    hf.parallelize(model.float())(**batch)
    model.double()
    with pytest.raises(ValueError, match=refusal):
        model(**batch)
    model.set_experts_implementation("eager")
    loss = model(**batch).loss.item()
    stock = hf.unparallelize(model)(**batch).loss.item()  # from logits in fp32
    assert loss == pytest.approx(stock, rel=1e-6)


def test_layers_of_full_attention_may_have_the_window() -> None:
    """MiniMax's attention gets the configuration's window in all layers that are not linear."""
    config = tiny_config("minimax", sliding_window=5)
    kinds = {"full_attention": 5, "linear_attention": None}
    assert {*config.layer_types} == {*kinds}
    assert hf.layer_windows(config) == [kinds[kind] for kind in config.layer_types]


def test_a_router_loss_that_is_not_wanted_is_none_that_a_forward_adds():
    """Else the model's own forward would run, which has no cache over ranks."""
    assert hf.added_losses(model_class("jetmoe")(tiny_config("jetmoe"))) == {}


def test_a_router_loss_that_a_model_does_not_have_is_refused_when_it_is_parallelized() -> None:
    model = model_class("jetmoe")(tiny_config("jetmoe", output_router_logits=True))
    with pytest.raises(ValueError, match="output_router_logits=True: JetMoeForCausalLM has no router loss"):
        hf.parallelize(model)
