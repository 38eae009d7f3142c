"""Generate over ranks with indexers: tokens, logits and choices of one process, where most keys are not chosen."""

import copy

import pytest
import torch

from burst_attention.attention.dealt import choose_dealt, dealt_bytes
from burst_attention.comm.link import connect
from burst_attention.comm.local import LocalTransport
from burst_attention.inference import ShardedCache, cache
from burst_attention.inference.slots import Held, seen_keys
from burst_attention.integrations import hf
from burst_attention.testing import local_world
from tests.distributed.test_generate import at_all_worlds, continued, padded, rows_alone, tokens_at_once
from tests.distributed.test_mesh import mesh_of
from tests.support.generating import (
    GREEDY,
    alone,
    available,
    certain_ids,
    check_equal,
    generate,
    ids_of,
    labels_sent,
    model_of,
    over_ranks,
)
from tests.support.indexed_models import CACHED, COUNT, Choices, noting_choices

NEW = 12
BLOCKS = "minimax_m3_vl"
POOLS = "glm5_next-vision"
VISION = available("hy_v4_vl-vision", "mistral_large4-vision", POOLS)  # on text alone
EVERYDAY = ("deepseek_v32", "glm_moe_dsa", BLOCKS)


def families_but(*left_out):
    """The families as parameters; some are of the long tests."""
    marks = {True: (), False: pytest.mark.long}
    return [pytest.param(x, marks=marks[x in EVERYDAY]) for x in (*CACHED, *VISION) if x not in left_out]


@pytest.mark.parametrize("family", families_but())
@pytest.mark.parametrize(("count", "rows", "worlds"), [(150, 2, (1, 2, 3, 4)), (7, 1, (3,))])
def test_tokens_and_logits_equal_one_process(family, count, rows, worlds):
    """After 7 tokens the first steps have fewer keys than are chosen, all of them on one rank."""
    at_all_worlds(family, certain_ids(family, count, rows, max_new_tokens=NEW), worlds, max_new_tokens=NEW)


def over_a_mesh(family):
    """Compare a cut model on a rank with one process: with a sharded cache, and alone."""
    mesh, ids, settings = mesh_of(1, 2, 2), certain_ids(family, 100, 2, max_new_tokens=NEW), {"max_new_tokens": NEW}
    expected, model = alone(family, ids, **settings), copy.deepcopy(model_of(family, "eager"))
    hf.parallelize(hf.tensor_parallel(model, mesh["tp"]), mesh["cp"], timeout=60)
    check_equal([generate(model, ShardedCache(model.config, mesh["cp"]), ids, **settings)], expected)
    return torch.equal(model.generate(ids, **GREEDY | settings).sequences, expected.sequences)


@pytest.mark.parametrize("family", families_but(POOLS))
def test_models_that_are_cut_by_tensor_parallelism(pools, family):
    assert all(pools(4).run(over_a_mesh, family))


@pytest.mark.parametrize("family", families_but(BLOCKS, *VISION))
def test_a_batch_of_different_lengths(family):
    lengths = (150, 91, 1)
    ids, mask = padded(lengths)
    at_all_worlds(family, ids, (1, 3), rows_alone(family, ids, lengths), attention_mask=mask, max_new_tokens=NEW)


@pytest.mark.parametrize("family", families_but())
def test_pieces_turns_and_a_saved_cache(family, tmp_path):
    """A prompt in 3 pieces and a short turn over 3 ranks; a long turn and a step over others that load the cache."""
    first, second, third = ids_of(301), ids_of(5), ids_of(150)

    def begin(run):
        said = run(first, max_new_tokens=70).sequences
        return run(torch.cat([said, second], 1)).sequences

    def expected_run(ids, **options):
        return alone(family, **continued(ids) | options)

    said = begin(expected_run)
    longer = torch.cat([said, third], 1)

    def save(model, empty):
        pieces = ShardedCache(model.config, empty.group, prefill_chunk=110)
        run = lambda ids, **options: generate(model, pieces, **continued(ids) | options)  # noqa: E731
        found, counts = tokens_at_once(model, lambda: begin(run))
        steps = 1 + (family == POOLS)  # recurrent layers get the prompt's last 2 tokens together
        assert len(counts) == 3 + steps and max(counts) <= 34, "pieces on shards, then 6 tokens on every rank"
        pieces.save(tmp_path / "cache")
        return found

    assert all(torch.equal(found, said) for found in over_ranks(family, 3, save))

    def load(model, empty):
        loaded = ShardedCache.load(tmp_path / "cache", model.config, empty.group)
        assert loaded.length == said.shape[1] - 1
        other, name = copy.deepcopy(model.config), "index_topk_blocks" if family == BLOCKS else "index_topk"
        setattr(other.get_text_config(decoder=True), name, 4)
        with pytest.raises(ValueError, match=f"another model: {name} was"):
            ShardedCache.load(tmp_path / "cache", other, empty.group)
        return generate(model, loaded, **continued(longer))

    for world in (1, 4):
        check_equal(over_ranks(family, world, load), expected_run(longer))


@pytest.mark.parametrize("family", [pytest.param(x, marks=pytest.mark.long) for x in EVERYDAY])
def test_two_hundred_tokens(family):
    """Pages of several ranks are full then."""
    at_all_worlds(family, ids_of(100), (3,), max_new_tokens=200)


@pytest.mark.parametrize("family", families_but(POOLS))
def test_choices_equal_one_process_index_by_index(family, monkeypatch):
    """Of the prompt's queries on shards, and of every step."""
    ids = certain_ids(family, 100, max_new_tokens=NEW)
    stock = copy.deepcopy(model_of(family, "eager"))
    expected = noting_choices(stock)
    stock.generate(ids, **GREEDY, max_new_tokens=NEW)
    choices, steps, choose = Choices(monkeypatch), [], cache.choose_dealt

    def noted(*given, **options):
        found = choose(*given, **options)
        if given[5].rank == 1:
            steps.append(found)
        return found

    monkeypatch.setattr(cache, "choose_dealt", noted)
    over_ranks(family, 3, lambda *both: generate(*both, ids, max_new_tokens=NEW))
    full = len(choices.found)
    assert full == len(expected) // NEW and len(steps) == full * NEW
    size = getattr(stock.config, "index_block_size", 0) if family == BLOCKS else 0
    for whole, ours in zip(expected[:full], choices.found, strict=True):
        check_choice(ours[..., COUNT:, :], whole[..., COUNT:-1, :], size)
    last = [whole[..., -1:, :] for whole in expected[:full]]  # every rank computes the prompt's last token
    for theirs, ours in zip([*last, *expected[full:]], steps, strict=True):
        check_choice(ours, theirs, size)


def check_choice(ours, theirs, size):
    if size:
        blocks = ours.unflatten(-1, (-1, size))[..., 0]
        ours = blocks.where(blocks < 0, blocks // size)
    assert torch.equal(ours, theirs.sort(-1).values)


def test_a_step_sends_two_messages_a_full_layer_of_a_size_that_no_length_changes(monkeypatch):
    """A "shared" layer, the second, sends one. To each peer, over two ranks."""
    labels = labels_sent(monkeypatch, LocalTransport)

    def use(model, empty):
        sent = []
        for count in (80, 300):
            one = ShardedCache(model.config, empty.group)
            generate(model, one, ids_of(count), max_new_tokens=2)
            sent.append(one.transport.sent)
        return sent

    layers = [f"{what}, layer {n}" for n, what in ((0, "c"), (0, "d"), (1, "d"), (2, "c"), (2, "d"))]
    names = {"c": "choosing, token 300", "d": "decoding, token 300"}
    config = model_of("glm_moe_dsa").config
    heads = {"q_heads": config.num_attention_heads, "v_head_dim": config.v_head_dim}
    attention = dealt_bytes(world=2, batch=1, queries=1, **heads, dtype=torch.float64)
    for rank, sent in enumerate(over_ranks("glm_moe_dsa", 2, use)):
        last = [label for of, label in labels if of == rank][-len(layers) :]
        assert last == [f"{names[each[0]]}{each[1:]}" for each in layers]
        assert sent == [2 * (3 * attention + 2 * 8 * COUNT)] * 2, "two steps, of three layers"


def test_memory_counts_the_indexers_keys():
    def use(model, one):
        generate(model, one, ids_of(200), max_new_tokens=1)
        layers = one.sharded.values()
        keys = sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))
        held = [len(layer.held) for layer in layers]
        assert [layer.index is None for layer in layers] == [False, True, False]  # the second one's is shared
        assert one.nbytes() == keys + 8 * 8 * sum(layer.index.shape[2] for layer in layers if layer.index is not None)
        assert one.figures()[one.transport.rank]["cache_bytes"] == one.nbytes()
        one.reset()
        assert one.nbytes() == 0
        return held

    held = over_ranks("glm_moe_dsa", 3, use)
    assert [sum(each) for each in zip(*held, strict=True)] == [200] * 3


def test_blocks_refuse_padding_in_front_before_anything_moves():
    ids, mask = padded((90, 70))

    def use(model, one):
        with pytest.raises(ValueError) as caught:
            generate(model, one, ids, attention_mask=mask, max_new_tokens=2)
        assert not one.length and not one.transport.sent and not one.prefill_sent
        return str(caught.value), generate(model, one, ids[:1], max_new_tokens=NEW)

    outs = over_ranks(BLOCKS, 2, use)
    assert all("the indexer of layer 0 counts blocks from the start of a row" in said for said, _ in outs)
    check_equal([out for _, out in outs], alone(BLOCKS, ids[:1], max_new_tokens=NEW))


@pytest.mark.parametrize("strategy", ["ring-attention", "layout=striped,circulate=key-value,ulysses_degree=1"])
def test_any_strategy_that_keeps_heads_whole_fills_the_cache(strategy):
    first, longer = ids_of(150), torch.cat([ids_of(150), ids_of(141)], 1)

    def use(model, one):
        generate(model, one, first, max_new_tokens=1)
        return generate(model, one, longer, max_new_tokens=NEW)

    check_equal(
        over_ranks("deepseek_v32", 2, use, strategy=strategy), alone("deepseek_v32", longer, max_new_tokens=NEW)
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("holes", [[(0, 0), (0, 0)], [(0, 5), (30, 47)]])
def test_of_equal_scores_the_lower_column_is_chosen(world, holes):
    """Small integers have many equal scores. Against a stable sort; two queries, the rows' columns without a token."""
    stretches = [range(n, min(n + 9, 150)) for n in range(0, 150, 9)]
    q, k, weights = (
        torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(n)).float()
        for n, shape in enumerate([(2, 4, 2, 6), (2, 1, 150, 6), (2, 4, 2)])
    )
    scores = torch.relu(q @ k.mT).mul(weights[..., None]).sum(1)
    columns = torch.arange(150)
    hidden = torch.stack([(columns >= a) & (columns < b) for a, b in holes])[:, None]
    scores = scores.masked_fill(hidden | (columns > columns[-2:, None]), -torch.inf)
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    assert (values[..., COUNT - 1] == values[..., COUNT]).all(), "the lower column has nothing to decide"
    expected = order[..., :COUNT].sort(-1).values

    def rank(group):
        transport, _ = connect(group, None)
        held = Held(stretches[transport.rank :: world])
        places = torch.from_numpy(held.slots())
        seen = seen_keys(held, range(148, 150), None, holes)
        return choose_dealt(q, k[:, :, places], weights, places, seen, transport, count=COUNT, first=148)

    with local_world(world) as ranks:
        for found in ranks.run(rank):
            assert torch.equal(found, expected)
