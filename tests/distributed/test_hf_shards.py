"""Test ``hf.shards``: a body on shards under masks that no batch describes, and losses of each rank's own states."""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
)

from burst_attention import Mask, make_plan
from burst_attention.integrations import hf
from burst_attention.testing import local_world
from tests.support.equal import check, equal
from tests.support.hf_models import MODELS, SEQLEN, VOCABULARY, WHOLE_HEADS, WINDOW, make_batch, make_model
from tests.support.hybrid_models import make_hybrid

CUT = (0, 11, 12, 30, SEQLEN)
BLOCKS = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
MASKS = {
    "causal": Mask(),
    "prefix": Mask(prefix=13),
    "window": Mask(window=9),
    "narrow": Mask(window=3),
    "documents": Mask(cu_seqlens=CUT),
    "blocks": Mask(blocks=BLOCKS | torch.eye(5).bool(), block=8),
    "groups": Mask(together=torch.arange(SEQLEN) // 7 - 1),
}


def dense(mask, window):
    seen = torch.from_numpy(mask.dense(SEQLEN))
    if window is not None:
        places = torch.arange(SEQLEN)
        seen = seen & (places[:, None] - places < window) & (places - places[:, None] < window)
    return seen[None, None]


WEIGHTS = torch.linspace(0.5, 2, SEQLEN, dtype=torch.float64)


def loss_of(hidden, labels, weights):
    """A loss of each token that no batch can ask for: of the states, and of those where there is a label."""
    return (hidden.square().mean(-1) + hidden[..., 0] * (labels != -100)) * weights


def in_one_process(mask, model, batch):
    """The loss under transformers' attention, by dense masks."""
    windows = hf.layer_windows(model.config)
    full = dense(mask, None)
    if len({*windows}) > 1:
        full = {"full_attention": full, "sliding_attention": dense(mask, WINDOW)}
    elif windows[0] is not None:
        full = dense(mask, WINDOW)
    positions = torch.from_numpy(mask.document_positions(torch.arange(SEQLEN).numpy()))
    given = {"position_ids": positions.repeat(2, 1), "attention_mask": full, "use_cache": False}
    hidden = model.model(batch["input_ids"], **given)[0]
    labels = torch.full_like(batch["labels"], -100)
    labels[:, :-1] = batch["labels"][:, 1:]
    labels[:, [border - 1 for border in mask.cu_seqlens or ()]] = -100
    return loss_of(hidden, labels, WEIGHTS).sum()


def over_ranks(mask, model, batch):
    """A rank's share of the loss, to which its gradients belong; its value is the sum over the ranks."""
    with hf.shards(model, batch, mask=mask) as shard:
        hidden = model.model(**shard)[0]
    losses = loss_of(hidden, shard.labels, shard.plan.shard(WEIGHTS, 0))
    return losses.sum() + shard.plan.unshard(losses.detach(), 1).sum() - losses.detach().sum()


def check_loss(name, world, mask, *, checkpointing=False, memory=None):
    """Assert that the loss and every gradient, summed over the ranks, are one process's."""
    alone = make_model(name, "sdpa").train()
    if checkpointing:
        alone.gradient_checkpointing_enable({"use_reentrant": False})
    sides = {"stock": partial(in_one_process, mask), "call": partial(over_ranks, mask)}
    how = {"threads": world, "gradients": "sum", "strategy": WHOLE_HEADS, "memory": memory}
    check(equal(alone, make_batch(), **sides, **how))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in MASKS),
        *((name, "documents") for name in MODELS if name != "llama"),
        ("gemma3", "blocks"),
        ("mistral", "causal"),
        *((name, "narrow") for name in ("mistral", "gemma3")),
        ("qwen3", "window"),
    ],
)
def test_a_loss_of_local_states_under_a_mask_is_one_process(name, kind):
    for world in (2, 3):
        check_loss(name, world, MASKS[kind])


@pytest.mark.parametrize(
    "options", [{"checkpointing": True}, {"memory": hf.Memory(attention_chunks=2, recompute="layer")}]
)
def test_layers_that_run_again_keep_the_mask(options):
    check_loss("gemma3", 2, MASKS["blocks"], **options)


def test_without_a_mask_the_loss_is_the_models():
    """Padding and documents are described as for the model's call, and the gradients of both are the same."""
    batch = make_batch()
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(CUT)])
    packed = batch | {"position_ids": positions.repeat(2, 1)}
    padded = batch | {"attention_mask": (torch.arange(SEQLEN) < torch.tensor([[40], [31]])).long()}
    padded["labels"] = torch.where(padded["attention_mask"] == 1, batch["labels"], -100)

    ready = make_model("qwen3").train()

    def losses(group):
        made = []
        for given in (batch, packed, padded):
            model = copy.deepcopy(ready)
            hf.parallelize(model, group, strategy=WHOLE_HEADS, gradients="sum")
            model(**given).loss.backward()
            expected = {name: x.grad.clone() for name, x in model.named_parameters()}
            model.zero_grad()
            with hf.shards(model, given) as shard:
                hidden = model.model(**shard)[0]
            hf.next_token_loss(model, hidden, shard.labels, shard.plan).backward()
            made.append(all(torch.equal(x.grad, expected[name]) for name, x in model.named_parameters()))
        return made

    with local_world(3) as ranks:
        assert ranks.run(losses) == [[True] * 3] * 3


@pytest.mark.parametrize("mask", [None, Mask(cu_seqlens=CUT)])
def test_shifted_labels_are_taken_as_they_are(mask):
    shifted = make_batch()["labels"]
    model = hf.parallelize(make_model("llama"))
    for labels in ({}, {"labels": shifted}):  # as trainers pass both
        with hf.shards(model, {"input_ids": IDS, "shift_labels": shifted, **labels}, mask=mask) as shard:
            assert torch.equal(shard.labels, shifted)


def test_two_open_blocks_keep_their_documents():
    """Bart counts positions in a part that gets no keywords."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    config = BartConfig(**sizes, decoder_ffn_dim=48, dropout=0.0, attn_implementation="sdpa")
    torch.manual_seed(0)
    ready, cuts = BartForCausalLM(config).double(), (CUT, (0, 5, SEQLEN))
    places = [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cut)])[None].repeat(2, 1) for cut in cuts]

    def run(group):
        model = hf.parallelize(copy.deepcopy(ready), group, strategy=WHOLE_HEADS)
        first, second = ({"input_ids": IDS, "position_ids": each} for each in places)
        with hf.shards(model, first) as a, hf.shards(model, second) as b:
            made = [(each, model.model(**each)[0]) for each in (a, b)]
        return [each.plan.unshard(hidden.detach(), 1) for each, hidden in made]

    with local_world(2) as ranks:
        made = ranks.run(run)[0]
    for found, cut in zip(made, cuts, strict=True):
        parts = [ready.model(input_ids=IDS[:, a:b], use_cache=False)[0] for a, b in itertools.pairwise(cut)]
        assert (found - torch.cat(parts, 1)).norm() <= 1e-6 * found.norm()  # layer norms are in fp32


def test_a_hybrid_keeps_its_states():
    def call(model, batch):
        with hf.shards(model, batch) as shard:
            hidden = model.model(**shard)[0]
        return hf.next_token_loss(model, hidden, shard.labels, shard.plan)

    ids = torch.arange(SEQLEN)[None] % 50
    batch, how = {"input_ids": ids, "labels": ids}, {"gradients": "sum", "strategy": WHOLE_HEADS}
    check(equal(make_hybrid("qwen3_5").train(), batch, threads=2, call=call, **how), gradient=1e-6)


IDS = make_batch()["input_ids"]
REFUSED = {
    "batch is a list": (TypeError, [IDS], None),
    "mask='causal' must be a burst_attention.Mask": (TypeError, {"input_ids": IDS}, "causal"),
    "input_ids are missing": (ValueError, {}, None),
    "batch has pixel_values=Tensor.* use shard.plan.shard": (ValueError, {"input_ids": IDS, "pixel_values": IDS}, None),
    r"batch has use_cache=False, which hf.shards can't cut; leave it out$": (
        ValueError,
        {"input_ids": IDS, "use_cache": False},
        None,
    ),
    "the attention of LlamaForCausalLM is causal=True": (ValueError, {"input_ids": IDS}, Mask(causal=False)),
    "position_ids and mask=Mask(.*) both describe documents": (
        ValueError,
        {"input_ids": IDS, "position_ids": torch.arange(SEQLEN)[None]},
        Mask(),
    ),
    "attention_mask has padding, which mask=": (
        ValueError,
        {"input_ids": IDS, "attention_mask": (torch.arange(SEQLEN) < 30).long().repeat(2, 1)},
        Mask(),
    ),
    "must be rearranged: its rows have other documents, padding in front": (
        ValueError,
        {"input_ids": IDS, "attention_mask": (torch.arange(SEQLEN) > 3).long().repeat(2, 1)},
        None,
    ),
    "cu_seqlens ends at 30, the sequence at 40": (ValueError, {"input_ids": IDS}, Mask(cu_seqlens=[0, 30])),
    "input_ids holds 64, outside of the 64 rows": (ValueError, {"input_ids": IDS.clamp(min=VOCABULARY)}, None),
}


def refusals(call, world=2):
    ready = make_model("llama")

    def run(group):
        model = hf.parallelize(copy.deepcopy(ready), group, strategy=WHOLE_HEADS, timeout=10)
        try:
            call(model, group)
        except (TypeError, ValueError) as error:
            return type(error), str(error)
        return None, "nothing was raised"

    with local_world(world) as ranks:
        return ranks.run(run)


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_does_not_take_is_refused_on_all_ranks(message):
    kind, batch, mask = REFUSED[message]

    def call(model, group):
        with hf.shards(model, batch, mask=mask):
            pass

    for made in refusals(call):
        assert made[0] is kind and re.search(message, made[1]), made


def test_ranks_with_other_masks_or_batches_disagree():
    def by_rank(model, rank, case):
        ids = IDS + (rank if case == "batch" else 0)
        mask = Mask(prefix=3 + rank) if case == "mask" else None
        with hf.shards(model, {"input_ids": ids % VOCABULARY}, mask=mask):
            pass

    ready = make_model("llama")

    def run(group):
        model = hf.parallelize(copy.deepcopy(ready), group, strategy=WHOLE_HEADS, timeout=10)
        found = []
        for case in ("mask", "batch"):
            with pytest.raises(Exception, match="disagree") as error:
                by_rank(model, model._burst.plans.base.rank, case)
            found.append(f"{type(error.value).__name__}: {error.value}")
        return found

    with local_world(2) as ranks:
        for masks, batches in ranks.run(run):
            assert masks.startswith("DisagreementError") and "prefix=3" in masks and "prefix=4" in masks
            assert batches.startswith("DisagreementError") and "the digest of input_ids" in batches


def test_a_call_of_the_whole_model_inside_is_refused_and_a_body_outside_too():
    def inside(model, group):
        with hf.shards(model, {"input_ids": IDS}) as shard:
            model(**shard)

    def outside(model, group):
        with hf.shards(model, {"input_ids": IDS}) as shard:
            pass
        model.model(shard["input_ids"])

    for kind, text in refusals(inside):
        assert kind is ValueError and "inside of hf.shards call its body" in text
    for kind, text in refusals(outside):
        assert kind is ValueError and "plan is missing: call hf.parallelize(model), then the model, or its body" in text


def test_a_body_without_its_shards_positions_is_refused():
    """BERT embeds positions before its first layer, so no attention sees those that it counts."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = hf.parallelize(BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4)).eval())
    with hf.shards(model, {"input_ids": IDS}) as first, hf.shards(model, {"input_ids": IDS}) as shard:
        others = {name: x for name, x in shard.items() if name != "position_ids"}
        with pytest.raises(ValueError, match="position_ids of BertModel are missing on rank 0; call it with all"):
            model.bert(**others)
        with pytest.raises(ValueError, match="position_ids of BertModel are not those of its shard on rank 0"):
            model.bert(**others, position_ids=first["position_ids"])
        model.bert(**first), model.bert(**shard)
    assert model.bert(**shard).pooler_output is None  # the shard's first token is not the sequence's


def test_models_without_a_body_on_shards_are_refused():
    with (
        pytest.raises(TypeError, match=r"is not parallelized; call hf\.parallelize first"),
        hf.shards(torch.nn.ReLU(), {}),
    ):
        pass
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0))
    hf.parallelize(model)
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(ValueError, match="labels: LlamaForSequenceClassification predicts no"), hf.shards(model, batch):
        pass
    with hf.shards(model, {"input_ids": IDS}) as shard:
        assert shard.labels is None and model.model(**shard)[0].shape == (2, SEQLEN, 32)


def test_masks_that_do_not_fit_a_model_are_refused():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    roberta = hf.parallelize(RobertaForMaskedLM(RobertaConfig(**sizes, num_attention_heads=4)).eval())
    cases = (
        (roberta, Mask(False, cu_seqlens=CUT), "has documents, but RobertaForMaskedLM counts positions over the whole"),
        (hf.parallelize(make_model("mistral")), Mask(prefix=3), f"window of {WINDOW} tokens: pass a mask without pre"),
    )
    for model, mask, message in cases:
        with pytest.raises(ValueError, match=message), hf.shards(model, {"input_ids": IDS}, mask=mask):
            pass


def test_the_old_spelling_warns_and_names_the_new_one():
    batch, plan = make_batch(), make_plan(SEQLEN)
    with pytest.warns(FutureWarning, match=r"with hf.shards\(model, batch, mask=plan.mask\)"):
        shard = hf.shard_batch(batch, plan)
    given = {"position_ids": shard["position_ids"], "use_cache": False}
    old = make_model("llama").model(shard["input_ids"], plan=plan, **given)[0]
    model = hf.parallelize(make_model("llama"))
    with hf.shards(model, batch) as shard:
        assert torch.equal(model.model(**shard)[0], old)
