"""GLM-5.3, whose indexer pools keys, over ranks: logits, loss, all gradients and choices equal those of one process."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from burst_attention import Mask
from burst_attention.attention.plan import Plan
from burst_attention.comm.local import LocalTransport
from burst_attention.inference import ShardedCache
from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers.pooled import PooledIndexer, Seen
from burst_attention.kernels import chosen as kernel
from burst_attention.testing import local_world
from tests.support import vision_models
from tests.support.conditioning import certain, margin_of_choices
from tests.support.generating import check_equal, generate, ids_of, labels_sent, model_of, over_ranks
from tests.support.hybrid_models import apart, certain_tokens, one_process, tokens
from tests.support.indexed_models import COUNT, HEADS, POOL, Sent, make_indexed, noting_choices
from tests.support.indexed_steps import (
    DOCUMENTS,
    GRADIENTS,
    HIDDEN,
    check,
    checkpointed,
    of_latents,
    padded,
    refused,
    stepped,
)
from tests.tools import families

pytest.importorskip("transformers.models.glm5_next", reason="of transformers 5.24")

FAMILY = "glm5_next"
WORLDS = [(1, "auto"), (2, "contiguous"), (3, "zigzag"), (4, "auto")]


def long(*given):
    return pytest.param(*given, marks=pytest.mark.long)


@pytest.mark.parametrize(("world", "layout"), WORLDS)
def test_one_sequence(world, layout):
    check(make_indexed(FAMILY), world, (0, 97), rows=2, layout=layout)


@pytest.mark.parametrize(
    ("family", "changes", "seqlen"),
    [
        (FAMILY, {"index_kpool": 1}, 60),
        (FAMILY, {"index_kpool": 16, "index_topk": 16}, 200),  # several shards hold no whole pool
        long(FAMILY + HEADS, {}, 97),
        long(FAMILY, {"linear_lower_bound": None}, 60),
        long(FAMILY, {"index_kpool": 7, "index_topk": 14, "linear_conv_kernel_dim": 2}, 100),
        long(FAMILY, {"hc_mult": 1}, 60),
        (FAMILY, {}, 3),  # no pool at all
        (FAMILY, {}, 5),
    ],
)
def test_other_sizes(family, changes, seqlen):
    check(make_indexed(family, **changes), 3, (0, seqlen), layout="zigzag")


@pytest.mark.parametrize(("world", "layout"), [(1, "auto"), (2, "zigzag"), (3, "balanced"), (4, "contiguous")])
def test_packed_documents(world, layout):
    """Pools are counted from the start of each document."""
    check(make_indexed(FAMILY), world, DOCUMENTS, layout=layout)


def test_padding():
    model = make_indexed(FAMILY)
    draws = (padded(tokens(70, seed=seed), "right") for seed in range(5, 13))
    batch = certain(draws, lambda batch: margin_of_choices(model, lambda moved: moved(**batch, use_cache=False)))
    loss, gradients = stepped(model, batch, use_cache=False)
    model.zero_grad()
    with local_world(3) as ranks:
        found = ranks.run(lambda group: stepped(hf.parallelize(copy.deepcopy(model), group, gradients="sum"), batch))
    assert abs(found[0][0] / loss - 1) <= 1e-6  # transformers' loss is in fp32
    for name, gradient in gradients.items():
        ours = sum(result[1][name] for result in found)
        assert (ours - gradient).norm() <= 2e-6 * gradient.norm(), name


class Chosen:
    """Notes what the indexers return on all ranks, in the order of calls."""

    def __init__(self, monkeypatch):
        self.found, forward = [], PooledIndexer.forward
        monkeypatch.setattr(
            PooledIndexer, "forward", lambda module, *args, **kwargs: self._noted(forward, module, *args, **kwargs)
        )

    def _noted(self, forward, module, *args, **kwargs):
        found, plan = forward(module, *args, **kwargs), module._plan()
        if plan is not None:
            whole = plan.unshard(found, 1)
            if plan.rank == 0:
                self.found.append(whole.long())
        return found


@pytest.mark.parametrize(("world", "seqlen"), [(2, 120), (3, 121), (4, 48)])
def test_choices_equal_one_process_index_by_index(world, seqlen, monkeypatch):
    model = make_indexed(FAMILY)
    alone, ids = copy.deepcopy(model), certain_tokens(model, (0, seqlen))
    expected, choices = noting_choices(alone), Chosen(monkeypatch)
    alone(ids, use_cache=False)
    with local_world(world) as ranks:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group)(input_ids=ids))
    assert len(choices.found) == len(expected) == 2
    for ours, theirs in zip(choices.found, expected, strict=True):
        assert ours.shape == theirs.shape == (2, seqlen, COUNT + POOL - 1)
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
        assert (theirs[:, -1] >= 0).sum(-1).max() <= COUNT + POOL - 1 < seqlen // 4


@pytest.mark.parametrize("keep", [False, True])
def test_recomputation_makes_the_same_choice_or_keeps_it(keep, monkeypatch):
    model, choose, calls = make_indexed(FAMILY), kernel.choose_between, []
    monkeypatch.setattr(kernel, "choose_between", lambda *given: calls.append(given) or choose(*given))
    choices = Chosen(monkeypatch)
    check(model, 2, (0, 90), layout="contiguous", prepare=functools.partial(checkpointed, keep=keep))
    first, again = choices.found[:2], choices.found[2:]
    assert len(again) == 2
    assert len(calls) == 2 * 2 * (1 if keep else 2)
    for one, other in zip(reversed(first), again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", ["layer", long("keep-attention")])
def test_memory_options(recompute):
    model = make_indexed(FAMILY)
    ids = certain_tokens(model, (0, 64))
    expected = one_process(model, ids, (0, 64))
    model.zero_grad()

    def rank(group):
        ours = copy.deepcopy(model).train()
        hf.parallelize(ours, group, gradients="sum", memory=hf.Memory(recompute=recompute, mlp_chunks=2))
        out = ours(input_ids=ids, logits="gather")
        loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
        return out.logits.detach(), loss.item(), gradients

    with local_world(2) as ranks:
        hidden, loss, (gradient, name) = apart(ranks.run(rank), expected)
    assert hidden <= HIDDEN and loss <= HIDDEN and gradient <= GRADIENTS, (hidden, loss, gradient, name)


@pytest.mark.parametrize("family", [FAMILY, FAMILY + HEADS])
def test_latents_are_sent_if_they_are_smaller(family, monkeypatch):
    """They have no rotary part."""
    model, sent = make_indexed(family), Sent(monkeypatch)
    with local_world(2) as ranks:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group)(input_ids=tokens(48)) and None)
    part = of_latents(model)[0]
    assert sent.found == {(4, 8, 0) if family.endswith(HEADS) else (1, part.kv_lora_rank, part.kv_lora_rank)}


def test_what_is_refused_by_name():
    model, ids = make_indexed(FAMILY), tokens(48)
    no_tail = make_indexed(FAMILY, index_kpool_always_select_tail=False)

    def parallelized(model, **options):
        return lambda group: hf.parallelize(copy.deepcopy(model), group, **options) and None

    def windowed(group):
        ours = hf.parallelize(copy.deepcopy(model), group)
        with hf.shards(ours, {"input_ids": ids}, mask=Mask(window=9)) as shard:
            ours.model(**shard)

    def changed(group):
        ours = hf.parallelize(copy.deepcopy(model), group)
        for part in of_latents(ours):
            vars(part.indexer or part)["index_kpool_always_select_tail"] = False
        ours(input_ids=ids)

    def masked(group):  # recurrent layers would refuse it
        ours = hf.parallelize(make_indexed(FAMILY, layer_types=["indexed_attention"] * 5), group)
        with hf.shards(ours, {"input_ids": ids}) as shard:
            ours.model(**shard, attention_mask=torch.arange(24).expand(2, -1) > 3)

    def padded_in_front(group):
        return hf.parallelize(copy.deepcopy(model), group)(**padded(tokens(70), "left"))

    no_key = "index_kpool_always_select_tail=False leaves the first 3 tokens without a key"
    assert no_key in refused(parallelized(no_tail)) and no_key in refused(changed)
    chunks = hf.Memory(attention_chunks=2)
    assert "attention_chunks=2 is not supported for layers.1.self_attn.indexer" in refused(
        parallelized(model, memory=chunks)
    )
    assert "layout='striped' of the strategy" in refused(parallelized(model, strategy="layout=striped"))
    assert "may cut pools of keys" in refused(windowed)
    assert "a padding mask (zeros in attention_mask) is not supported" in refused(masked)
    assert "padding in front" in refused(padded_in_front)
    with pytest.raises(ValueError, match="was not compared with one process under tensor parallelism"):
        hf.ranks_of_heads(vision_models.build(FAMILY), 2)
    with pytest.raises(ValueError, match=r"Glm5NextTextIndexer pools keys \(index_kpool=4\), and what it sends"):
        hf.indexed_layers(model)


def test_one_key_a_pool_needs_no_tail():
    check(make_indexed(FAMILY, index_kpool=1, index_kpool_always_select_tail=False), 2, (0, 40))


def test_an_unknown_operation_on_what_a_query_sees_is_refused(monkeypatch):
    model = make_indexed(FAMILY)
    seen = Seen(model)
    for change in (
        lambda: seen.gather(1, torch.zeros(1)),
        lambda: torch.where(seen, 1, 0),
        lambda: seen & torch.ones(1),
    ):
        with pytest.raises(ValueError, match="to its mask, which is not known here"):
            change()


def test_the_router_loss_of_the_whole_model(monkeypatch):
    monkeypatch.setattr(families, "make_exact", lambda body: None)  # transformers finds routers by their class
    model = vision_models.build(FAMILY)
    batch = vision_models.text(model, 30)
    batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"], "output_router_logits": True}

    def step(model):
        out = model(**batch)
        out.loss.backward()
        return out.loss.item(), out.aux_loss.item(), model.get_parameter(gate).grad

    gate = "model.language_model.layers.3.mlp.gate.weight"
    with local_world(2) as ranks:
        found = ranks.run(lambda group: step(hf.parallelize(copy.deepcopy(model), group, gradients="sum")))
    loss, router, gradient = step(model)
    assert router > 1 and abs(found[0][1] / router - 1) <= 1e-5 and abs(found[0][0] / loss - 1) <= 1e-6
    assert (sum(each[2] for each in found) - gradient).norm() <= 1e-5 * gradient.norm()


def test_generation_on_one_rank_and_back():
    model, ids = make_indexed(FAMILY), tokens(48)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)

    def rank(group):
        ours = hf.parallelize(copy.deepcopy(model), group)
        made = ours.generate(ids, max_new_tokens=4, do_sample=False)
        assert all(not hasattr(part, "stock_class") for part in hf.unparallelize(ours).modules())
        return made

    with local_world(2) as ranks:
        assert all(torch.equal(made, expected) for made in ranks.run(rank))


TALKING = f"{FAMILY}-vision"  # with images, which no cache over ranks takes


class OfRanks:
    """Notes what the indexers return: by rank and layer, in the order of the sequence."""

    def __init__(self, monkeypatch):
        self.found, forward = {}, PooledIndexer.forward
        monkeypatch.setattr(PooledIndexer, "forward", lambda *given, **named: self._noted(forward, *given, **named))

    def _noted(self, forward, module, *args, **kwargs):
        found, plan = forward(module, *args, **kwargs), module._plan()
        whole = plan.unshard(found, 1) if isinstance(plan, Plan) else found
        rank = plan.rank if isinstance(plan, Plan) else plan.attend.__self__.transport.rank
        self.found.setdefault((rank, module.layer_idx), []).append(whole.long())
        return found


NEW = 6


def conversation(model, cache, said, turns):
    """Generate after each of these turns, given by their new tokens."""
    for new in turns:
        ids = torch.cat([said, new], 1)
        out = generate(model, cache, ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
        said = out.sequences
    return out


@pytest.mark.parametrize(
    ("worlds", "chunk", "count"), [long((2, 1), None, 130), ((3, 2), 64, 131), long((1, 3), None, 60)]
)
def test_a_cache_chooses_as_one_process_does(worlds, chunk, count, monkeypatch, tmp_path):
    """Index by index, on every rank: a prompt, steps, a turn whose one step completes pools; a turn of a loaded cache.

    transformers has a cache, too.
    """
    stock, nothing = copy.deepcopy(model_of(TALKING, "eager")), ids_of(count, 2)[:, :0]

    def alone(model, turns):
        return conversation(model, DynamicCache(config=model.config.get_text_config()), nothing, turns)

    draws = ([ids_of(size, 2, draw=draw) for size in (count, 9, 90)] for draw in range(16))
    turns = certain(draws, lambda turns: margin_of_choices(stock, lambda model: alone(model, turns)))
    said, choices = alone(stock, turns[:2]), OfRanks(monkeypatch)
    expected = {}
    for part in stock.modules():
        if type(part).__name__.endswith("Indexer"):
            noted = expected.setdefault(part.layer_idx, [])
            part.register_forward_hook(lambda _, __, chosen, noted=noted: noted.append(chosen.long()))
    answer = alone(stock, turns)

    def begin(model, empty):
        cache = ShardedCache(model.config, empty.group, prefill_chunk=chunk)
        out = conversation(model, cache, nothing, turns[:2])
        cache.save(tmp_path / "cache")
        return out

    def go_on(model, empty):
        return conversation(
            model, ShardedCache.load(tmp_path / "cache", model.config, empty.group), said.sequences, turns[2:]
        )

    check_equal(over_ranks(TALKING, worlds[0], begin), said)
    begun, choices.found = choices.found, {}
    check_equal(over_ranks(TALKING, worlds[1], go_on), answer)
    length = said.sequences.shape[1] - 1
    for layer, parts in expected.items():
        theirs = torch.cat(parts, 1).sort(-1).values
        for world, found, part in zip(
            worlds, (begun, choices.found), theirs.split([length, theirs.shape[1] - length], 1), strict=True
        ):
            for rank in range(world):
                assert torch.equal(torch.cat(found[rank, layer], 1).sort(-1).values, part), (rank, layer)
    assert len(expected) == 2 and theirs.shape[1] == answer.sequences.shape[1] - 1


def test_what_a_rank_holds_and_sends(monkeypatch):
    """A step sends nothing for the choice. The pools and the last states are on every rank, their bytes counted."""
    labels = labels_sent(monkeypatch, LocalTransport)

    def use(model, cache):
        generate(model, cache, ids_of(200), max_new_tokens=3)
        layers = [*cache.sharded.values()]
        assert [layer.pools is None for layer in layers] == [False, True, False]  # the second one's choice is shared
        count, dim = cache.length // POOL, model.config.text_config.index_head_dim
        for layer in (layers[0], layers[2]):
            assert layer.index is None and layer.pools.shape == (1, count, dim)
            assert layer.columns.shape == (1, 2 * dim + 1, POOL)
        own = sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))
        own += sum(layer.nbytes() for layer in cache.states.values())
        assert cache.nbytes() == own + 2 * 8 * (count * dim + (2 * dim + 1) * POOL)
        held = [len(layer.held) for layer in layers]
        cache.reset()
        assert cache.nbytes() == 0
        return held

    held = over_ranks(TALKING, 3, use)
    assert [sum(each) for each in zip(*held, strict=True)] == [202] * 3 and min(map(min, held)) > 50
    last = [label for rank, label in labels if rank == 0][-6:]
    assert last == [f"decoding, token 201, layer {n}" for n in (1, 2, 4) for _ in range(2)]


def test_a_cache_refuses_by_name():
    ids = ids_of(90, 2)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    config = make_indexed(FAMILY, layer_types=["indexed_attention"] * 5).config  # without recurrent layers

    def use(model, cache):
        with pytest.raises(ValueError, match="padding in front of rows"):
            generate(model, cache, ids * mask, attention_mask=mask, max_new_tokens=2)
        with pytest.raises(ValueError, match="the indexer of layer 0 counts pools from the start of a row"):
            ShardedCache(config, cache.group).check_batch(torch.tensor([0, 20]), "cache")
        for part in of_latents(model):
            vars(part.indexer or part)["index_kpool_always_select_tail"] = False
        with pytest.raises(ValueError, match="index_kpool_always_select_tail=False leaves the first 3 tokens"):
            generate(model, cache, ids, max_new_tokens=2)
        assert not cache.length and not cache.transport.sent and not cache.prefill_sent

    over_ranks(TALKING, 2, use)


def test_a_configuration_that_names_no_pools_is_refused():
    def use(model, cache):
        for layer in cache.sharded.values():
            layer.pool = 0
        with pytest.raises(ValueError, match="layer 1 pools keys, but its configuration says otherwise"):
            generate(model, cache, ids_of(20), max_new_tokens=2)

    over_ranks(TALKING, 2, use)
