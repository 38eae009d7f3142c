"""Every engine trains the same model to the same loss; what an engine can't do it refuses by name."""

from __future__ import annotations

import pytest
import torch
from burst_train.engines import ENGINES, Heads, choose
from burst_train.engines.subgroup import Subgroup
from burst_train.engines.ulysses import ulysses_attention
from burst_train.engines.usp import Slices, UspAttention
from burst_train.engines.whole import whole_attention
from burst_train.step.loop import train
from burst_train.step.model import build_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention.batch import Plans
from burst_attention.attention.new_plan import single_rank_plan
from burst_attention.comm.transport import Receive, Send
from burst_attention.integrations import hf
from burst_attention.launch.mesh import make_mesh
from burst_attention.plan.layout import Layout
from burst_attention.testing import attend, local_world
from burst_attention.testing.check import relative_l2
from tests.support.training import config_of, losses, norms, write_corpus

STEPS = 20
EVERY = [
    ("burst", "zigzag", 2, {}),
    *(
        pytest.param(*row, marks=pytest.mark.long)
        for row in (
            ("tensor-sequence", "auto", 2, {}),
            ("usp", "auto", 4, {}),
            ("tensor", "auto", 2, {"accumulate": 2}),
        )
    ),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("ulysses", "auto", 2, {}),
            ("ring", "contiguous", 2, {}),
            ("burst", "striped", 4, {}),
            ("tensor-sequence", "auto", 4, {"data_parallel": 2}),
            ("single", "auto", 2, {"data_parallel": 2}),
        )
    ),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(pools, corpus, tmp_path_factory):
    """Losses and gradient norms of a single rank, by how many sequences a step has."""
    known = {}

    def get(sequences):
        if sequences not in known:
            out = tmp_path_factory.mktemp("single")
            changes = {"engine": "single", "seq_len": 96, "steps": STEPS, "accumulate": sequences}
            pools(1).run(train, config_of(corpus, out, **changes))
            known[sequences] = losses(out), norms(out)
        return known[sequences]

    return get


@pytest.mark.parametrize(("engine", "layout", "world", "changes"), EVERY)
def test_every_engine_trains_as_a_single_rank(pools, corpus, tmp_path, expected, engine, layout, world, changes):
    settings = {"engine": engine, "layout": layout, "seq_len": 96, "steps": STEPS, **changes}
    pools(world).run(train, config_of(corpus, tmp_path, **settings))
    right, right_norms = expected(changes.get("data_parallel", 1) * changes.get("accumulate", 1))
    assert right[-1] < right[0] - 0.3, "it learns"
    assert losses(tmp_path) == pytest.approx(right, abs=1e-4)
    assert norms(tmp_path) == pytest.approx(right_norms, rel=1e-3)


SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.1,
}
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "grouped and tied": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "norms of heads": lambda: Qwen3Config(**SIZES),
    "biases and windows": lambda: Qwen2Config(
        **SIZES | {"num_key_value_heads": 2}, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
}


def parameter_gradients(engine_name, layout, kind="llama"):
    """Whole fp64 gradients by name on this rank, of one packed sequence."""
    engine, world = choose(engine_name, strategy=Strategy(layout=layout)), torch.distributed.get_world_size()
    mesh, everyone = make_mesh("cpu"), init_device_mesh("cpu", (world,))
    config = MODELS[kind]()
    engine.check(Heads.of(config), 64, world)
    dtype = torch.float64
    model = build_model("tiny", config, engine, dtype=dtype, mesh=mesh, everyone=everyone, seed=3)
    ids = torch.randint(0, 200, (1, 64), generator=torch.Generator().manual_seed(5))
    plans = Plans.by_windows(engine.plan(64, group=mesh["context"]), hf.layer_windows(config), (0, 11, 40, 64))
    with CommDebugMode() as counter:
        loss = model(engine.shard({"input_ids": ids, "labels": ids}, plans), plans, None)
        forward = dict(counter.get_comm_counts())
        loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        grads[name] = parameter.grad.full_tensor()
    counts = ({str(k): n for k, n in c.items()} for c in (forward, counter.get_comm_counts()))
    return loss.item(), grads, list(counts)


@pytest.mark.parametrize(
    ("engine", "layout", "world"),
    [
        ("burst", "auto", 4),
        ("ring", "contiguous", 4),
        ("ulysses", "auto", 4),
        ("usp", "auto", 4),
        ("usp", "contiguous", 4),
        ("tensor", "auto", 4),
        ("tensor-sequence", "auto", 4),
        ("tensor-sequence", "auto", 2),
    ],
)
@pytest.mark.long
def test_every_gradient_is_the_single_ranks(pools, engine, layout, world):
    ((loss, expected, _),) = pools(1).run(parameter_gradients, "single", "auto")
    for rank, (own_loss, grads, _) in enumerate(pools(world).run(parameter_gradients, engine, layout)):
        assert_same(rank, own_loss, grads, loss, expected)


def assert_same(rank, own_loss, grads, loss, expected):
    assert own_loss == pytest.approx(loss, abs=1e-12)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert expected[name].abs().max() > 0, name
        assert relative_l2(grad, expected[name]) < 1e-11, (rank, name)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "llama"])
@pytest.mark.parametrize("engine", ["burst", "ulysses", "usp", "tensor", "tensor-sequence"])
@pytest.mark.long
def test_other_models_gradients_are_the_single_ranks_too(pools, engine, kind):
    ((loss, expected, _),) = pools(1).run(parameter_gradients, "single", "auto", kind)
    if kind == "biases and windows":
        assert len(set(hf.layer_windows(MODELS[kind]()))) == 2
    for rank, (own_loss, grads, _) in enumerate(pools(2).run(parameter_gradients, engine, "auto", kind)):
        assert_same(rank, own_loss, grads, loss, expected)


def test_tensor_parallelism_exchanges_no_more_than_megatron(pools):
    """Per block and pass: two sums, or, with sequence parallelism, two gathers and two scatters."""
    layers = 2
    _, _, (forward, both) = pools(2).run(parameter_gradients, "tensor", "auto")[0]
    sums = "c10d_functional.all_reduce"
    assert forward[sums] == 2 * layers
    # Of the head's gradient there is one more sum; all else is computed alike on every rank.
    assert both[sums] == 4 * layers + 1
    _, _, (forward, both) = pools(2).run(parameter_gradients, "tensor-sequence", "auto")[0]
    gather, scatter = "c10d_functional.all_gather_into_tensor", "c10d_functional.reduce_scatter_tensor"
    assert (forward[gather], forward[scatter]) == (2 * layers, 2 * layers)
    assert (both[gather], both[scatter]) == (4 * layers, 4 * layers)


def ulysses_and_oracle(seqlen, kv_heads, mask):
    return engine_and_oracle(choose("ulysses"), seqlen, kv_heads, mask)


def usp_and_oracle(seqlen, kv_heads, mask, layout, heads="auto"):
    return engine_and_oracle(
        choose("usp", strategy=Strategy(layout=layout, ulysses_degree=heads)), seqlen, kv_heads, mask
    )


def engine_and_oracle(engine, seqlen, kv_heads, mask):
    """Errors of out, dq, dk and dv on this rank; bytes that it sent, and that were predicted."""
    plan = engine.plan(seqlen, group=None).with_mask(mask)
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, seqlen, 8, generator=make, dtype=torch.float64) for heads in (8, kv_heads, kv_heads, 8)
    )
    inputs = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
    sent = plan.transport.sent
    out = engine.attend(*inputs, plan)
    grads = torch.autograd.grad(out, inputs, plan.shard(dout, 2))
    heads = Heads(q_heads=8, kv_heads=kv_heads, head_dim=8, hidden=64, intermediate=64)
    predicted = sum(engine.sent([plan], heads, batch=2, dtype=torch.float64))
    right = attend(q, k, v, mask, dout=dout)
    expected = [plan.shard(x, 2) for x in (right.out, right.dq, right.dk, right.dv)]
    errors = [relative_l2(x, y) for x, y in zip((out, *grads), expected, strict=True)]
    return errors, plan.transport.sent - sent, predicted


@pytest.mark.parametrize("seqlen", [33, 64])
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(window=9), Mask(cu_seqlens=[0, 5, 5, 21, 33]), Mask(False), Mask(prefix=7)]
)
def test_ulysses_is_exact_at_any_length(pools, seqlen, mask):
    if mask.cu_seqlens:  # the last document ends where the sequence does
        mask = Mask(cu_seqlens=[*mask.cu_seqlens[:-1], seqlen])
    for errors, sent, predicted in pools(4).run(ulysses_and_oracle, seqlen, 4, mask):
        assert max(errors) < 1e-12
        assert sent == predicted


@pytest.mark.parametrize(
    ("seqlen", "kv_heads", "mask", "layout", "heads"),
    [
        (64, 2, Mask(), "zigzag", "auto"),
        (33, 2, Mask(), "zigzag", "auto"),
        (33, 4, Mask(window=9), "zigzag", 2),
        (33, 2, Mask(cu_seqlens=[0, 5, 5, 21, 33]), "zigzag", "auto"),
        (35, 2, Mask(False), "contiguous", "auto"),
        (35, 2, Mask(prefix=7), "zigzag", "auto"),
        (33, 1, Mask(), "zigzag", "auto"),  # no heads to exchange: a ring of all
        (33, 8, Mask(), "zigzag", "auto"),  # all tokens of some heads: a ring of one
    ],
)
def test_usp_is_exact_at_any_length(pools, seqlen, kv_heads, mask, layout, heads):
    for errors, sent, predicted in pools(4).run(usp_and_oracle, seqlen, kv_heads, mask, layout, heads):
        assert max(errors) < 1e-12
        assert sent == predicted


def test_usp_over_eight_ranks_as_threads():
    """A 2 x 4 mesh works over a transport that does not use torch.distributed."""

    def compared(group):
        engine = choose("usp", strategy=Strategy(ulysses_degree=2))
        plan = engine.plan(45, group=group)
        make = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(1, 4, 45, 8, generator=make, dtype=torch.float64) for _ in range(4))
        inputs = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = engine.attend(*inputs, plan)
        grads = torch.autograd.grad(out, inputs, plan.shard(dout, 2))
        right = attend(q, k, v, Mask(), dout=dout)
        expected = [plan.shard(x, 2) for x in (right.out, right.dq, right.dk, right.dv)]
        return max((x - y).abs().max().item() for x, y in zip((out, *grads), expected, strict=True))

    with local_world(8) as world:
        assert max(world.run(compared)) < 1e-13


def test_usp_sends_less_than_a_ring(pools):
    """A 2 x 2 mesh of 4 ranks saves two of three ring hops; the all-to-alls send less than these."""
    by_heads = [[sent for _, sent, _ in pools(4).run(usp_and_oracle, 64, 8, Mask(), "zigzag", u)] for u in (1, 2, 4)]
    ring, mesh, ulysses = map(sum, by_heads)
    assert ulysses < mesh < 0.7 * ring


@pytest.mark.parametrize(("world", "members"), [(8, 2), (8, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_neighbours_shards_together_are_a_shard_of_the_same_layout(layout, world, members):
    even, uneven = 16 * world, 16 * world + 5
    together, right = Slices.of(Layout(layout, even, world), members), Layout(layout, even, world // members)
    for rank in range(right.world):
        assert together.positions(rank).tolist() == right.positions(rank).tolist()
        assert len(together.segments(rank)) <= len(right.segments(rank)), "positions that go on are one segment"
    cut = Layout(layout, uneven, world)
    together = Slices.of(cut, members)
    for rank in range(together.world):
        held = [x for member in range(rank * members, (rank + 1) * members) for x in cut.positions(member).tolist()]
        assert together.positions(rank).tolist() == sorted(held)
    assert together.lengths == tuple(len(together.positions(rank)) for rank in range(together.world))


def test_usp_takes_the_most_neighbours_that_ranks_and_heads_have():
    auto = UspAttention()
    assert [auto.groups(*each) for each in ((8, 4), (8, 12), (2, 8), (1, 8), (6, 4), (3, 8))] == [4, 4, 2, 1, 2, 1]
    assert UspAttention(2).groups(8, 8) == 2


def test_whole_attention_in_windows_longer_than_one_call():
    make = torch.Generator().manual_seed(0)
    seqlen = 2500  # several calls of WINDOW_ROWS rows each
    q, k, v, dout = (torch.randn(1, heads, seqlen, 8, generator=make) for heads in (2, 1, 1, 2))
    mask = Mask(window=900, cu_seqlens=[0, 700, seqlen])  # a later call starts inside of its document
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = whole_attention(*inputs, single_rank_plan(seqlen, mask=mask))
    grads = torch.autograd.grad(out, inputs, dout)
    right = attend(q, k, v, mask, dout=dout)
    for x, y in zip((out, *grads), (right.out, right.dq, right.dk, right.dv), strict=True):
        assert relative_l2(x, y) < 1e-5


LLAMA = Heads(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)


@pytest.mark.parametrize(
    ("engine", "seq_len", "world", "reported"),
    [
        ("ulysses", 1024, 16, "8 key-value heads for 16 ranks"),
        ("ulysses", 1024, 3, "32 query heads for 3 ranks"),
        ("tensor", 1024, 16, "8 key-value heads"),
        ("tensor-sequence", 1023, 8, "1023 tokens"),
        ("tensor", 1023, 8, "1023 tokens"),
        ("single", 1024, 2, "--data-parallel"),
    ],
)
def test_what_an_engine_cannot_share_is_refused_by_name(engine, seq_len, world, reported):
    with pytest.raises(ValueError, match=reported) as refused:
        choose(engine).check(LLAMA, seq_len, world)
    assert f"--engine {engine}" in str(refused.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_can_share_is_not_refused(engine):
    choose(engine).check(LLAMA, 1024, 1)
    if engine != "single":
        choose(engine).check(LLAMA, 1024, 8)


def test_unknown_engines_layouts_and_routes_are_refused():
    for arguments, reported in (
        ({"name": "megatron"}, "'megatron' is unknown; choose one of burst"),
        ({"name": "ring", "strategy": Strategy(layout="striped")}, "--layout striped is not for --engine ring"),
        ({"name": "ulysses", "strategy": Strategy(layout="zigzag")}, "--layout zigzag is not for --engine ulysses"),
        ({"name": "usp", "strategy": Strategy(layout="striped")}, "--layout striped is not for --engine usp"),
        ({"name": "usp", "strategy": Strategy(route="direct")}, "--route direct is not for --engine usp"),
        ({"name": "ring", "strategy": Strategy(ulysses_degree=2)}, "--ulysses-degree 2 is not for --engine ring"),
        ({"name": "tensor", "strategy": Strategy(route="ring")}, "--route ring is not for --engine tensor"),
    ):
        with pytest.raises(ValueError, match=reported):
            choose(**arguments)


def refused_shape():
    plan = make_plan(16, strategy=Strategy(layout="contiguous"))
    heads = 4 if plan.rank else 3
    x = torch.randn(1, heads, plan.length, 8)
    try:
        ulysses_attention(x, x, x, plan)
    except ValueError as error:
        return str(error)
    return None


def refused_by_usp():
    """By one rank's tensors, then by all ranks' scale: nothing was sent."""
    engine = choose("usp")
    plan = engine.plan(16, group=None)
    reported = []
    for heads, scale in ((4 if plan.rank else 3, None), (4, float("nan"))):
        q, k = (torch.randn(1, n, plan.length, 8) for n in (heads, 2))
        try:
            engine.attend(q, k, k, plan, scale=scale)
        except ValueError as error:
            reported.append(str(error))
    return reported, plan.transport.sent


def test_usp_refuses_on_every_rank_before_anything_moves(pools):
    for (shapes, scale), sent in pools(2).run(refused_by_usp):
        assert "q has 3 heads, not a multiple of the 2" in shapes
        assert "scale=nan must be a finite number" in scale
        assert sent == 0


def test_usp_refuses_heads_that_do_not_divide():
    for world, heads in ((6, 4), (8, 16)):
        with pytest.raises(
            ValueError, match=f"--engine usp with --ulysses-degree {heads}: it must divide the {world} ranks"
        ):
            choose("usp", strategy=Strategy(ulysses_degree=heads)).check(LLAMA, 1024, world)


def test_ulysses_refuses_on_every_rank(pools):
    reported = pools(2).run(refused_shape)
    assert all(text and "3 query heads for 2 ranks" in text for text in reported)


@pytest.mark.parametrize("remat", ["none", "layer", "keep-attention"])
def test_an_engine_plans_for_what_is_recomputed(remat):
    with local_world(1) as ranks:
        (planned,) = ranks.run(lambda group: choose("burst", remat=remat).plan(64, group=group).planner.remat)
    assert planned == remat


def test_a_head_dim_of_its_own_is_read():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    for config, head_dim in ((Qwen3Config(**sizes, head_dim=32), 32), (Qwen2Config(**sizes), 16)):
        sizes_read = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "hidden": 64, "intermediate": 96}
        expected = Heads(**sizes_read, family=config.model_type)
        assert Heads.of(config) == expected


def test_a_subgroup_counts_what_it_sends_and_what_it_receives():
    """Ranks 2 and 0 of three, in this order; 2 sends three numbers and 0 sends five."""

    def exchange(group):
        whole = make_plan(6, group=group, timeout=20).transport
        if whole.rank == 1:
            return None
        part, before = Subgroup(whole, (2, 0)), (whole.sent, whole.received)
        mine, theirs = ((3, 5), (5, 3))[part.rank]
        arriving, peer = torch.empty(theirs), 1 - part.rank
        leaving = torch.full((mine,), float(whole.rank))
        part.wait(part.post([Send(peer, leaving)], [Receive(peer, arriving)], label="a test"))
        counted = whole.sent - before[0], whole.received - before[1]
        return arriving.tolist(), (part.sent, part.received), counted

    with local_world(3) as ranks:
        zero, _, two = ranks.run(exchange)
    assert two == ([0.0] * 5, (12, 20), (12, 20)) and zero == ([2.0] * 3, (20, 12), (20, 12))


def mesh_rows():
    mesh = make_mesh("cpu", data_parallel=2)
    return mesh["context"].mesh.tolist(), mesh["data"].mesh.tolist()


def test_neighbours_share_a_sequence(pools):
    rows = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert pools(4).run(mesh_rows) == rows
