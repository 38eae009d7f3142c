"""Choosing keys and attending to them over ranks: against dense attention in fp64, and a stable sort."""

import math

import pytest
import torch

from burst_attention import Mask, Strategy, make_plan
from burst_attention.attention import choose_blocks, choose_keys, chosen_attention
from burst_attention.comm.agreement import DisagreementError
from burst_attention.kernels import chosen as kernel
from burst_attention.testing import WorkerError, local_world
from tests.support.conditioning import bounds_of, error_of, half_an_ulp_away

SEQLEN, COUNT, SCALE = 60, 7, 0.5
MASKS = {
    "causal": Mask(),
    "packed": Mask(cu_seqlens=(0, 3, 5, 30, 60)),  # documents with fewer keys than are chosen
    "window": Mask(window=11),
    "bidirectional": Mask(causal=False),
}
LAYOUTS = ("zigzag", "contiguous", "striped")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indexer(ties=False, seqlen=SEQLEN, dtype=torch.float64):
    """q [2, 4, S, 6], k [2, 1, S, 6] and weights [2, 4, S]; with ties, small integers, whose scores are often equal."""
    q, k, weights = (
        normal(*shape, seed=n) for n, shape in enumerate([(2, 4, seqlen, 6), (2, 1, seqlen, 6), (2, 4, seqlen)])
    )
    if ties:
        q, k, weights = (x.sign() * (x.abs() > 0.8) for x in (q, k, weights))
    return q.to(dtype), k.to(dtype), weights.float()


def sorted_choice(q, k, weights, mask, count=COUNT, scale=SCALE):
    """The choice by a stable sort of all scores."""
    scores = torch.relu(q.float() @ k.float().mT * scale).mul(weights[..., None]).sum(1)
    scores = scores.masked_fill(~torch.from_numpy(mask.dense(q.shape[2])), -math.inf)
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    found = order[..., :count].masked_fill(values[..., :count] == -math.inf, -1)
    return torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=-1).sort(-1).values


def over_ranks(world, function, *, seqlen=SEQLEN, mask=None, **strategy):
    """What the ranks return for their plans; ``function`` also gets a function that cuts a tensor's dim 2."""

    def rank(group):
        plan = make_plan(seqlen, group=group, mask=mask or Mask(), strategy=Strategy(**strategy))
        return function(plan, lambda x: plan.shard(x, 2))

    with local_world(world) as ranks:
        return ranks.run(rank)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("world", "layout"), [(1, "auto"), (2, "zigzag"), (3, "striped"), (4, "contiguous")])
def test_the_choice_is_that_of_a_stable_sort(world, layout, mask, ties):
    q, k, weights = indexer(ties)
    expected = sorted_choice(q, k, weights, MASKS[mask])
    if ties:  # or the lower position has nothing to decide
        assert not torch.equal(expected, sorted_choice(q.flip(2), k.flip(2), weights.flip(2), MASKS[mask]))

    def choose(plan, cut):
        found = choose_keys(cut(q), cut(k), cut(weights), plan, count=COUNT, scale=SCALE)
        assert (found == plan.positions[:, None]).any()  # a query may see itself
        return plan.unshard(found, 1)

    for found in over_ranks(world, choose, mask=MASKS[mask], layout=layout):
        assert torch.equal(found, expected)


def choosing(q, k, weights, count=COUNT):
    """A function that returns the choice for the whole sequence."""

    def run(plan, cut):
        return plan.unshard(choose_keys(cut(q), cut(k), cut(weights), plan, count=count, scale=SCALE), 1)

    return run


@pytest.mark.parametrize("route", ["direct", "ring-attention", "all-gather"])
def test_the_choice_is_the_same_by_every_route(route):
    q, k, weights = indexer(ties=True)
    how = (
        {"route": "direct", "gather_kv": True, "circulate": "key-value"} if route == "all-gather" else {"route": route}
    )
    run = choosing(q, k, weights)
    for found in over_ranks(4, run, layout="zigzag", ulysses_degree=1, **how):
        assert torch.equal(found, sorted_choice(q, k, weights, Mask()))


def test_more_keys_are_wanted_than_there_are():
    q, k, weights = indexer(seqlen=5)
    run = choosing(q, k, weights, count=9)
    for found in over_ranks(4, run, seqlen=5):
        assert torch.equal(found, sorted_choice(q, k, weights, Mask(), count=9))
        assert found[0, 1].tolist() == [-1] * 7 + [0, 1]


def test_half_precision_is_scored_in_fp32():
    q, k, weights = indexer(dtype=torch.bfloat16)
    run = choosing(q, k, weights)
    for found in over_ranks(3, run):
        assert torch.equal(found, sorted_choice(q, k, weights, Mask()))


def test_candidates_are_ordered_as_scores_are():
    scores = torch.tensor([0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, 3.0, -3.0, math.nan, 3.0, -math.nan])
    found = kernel.candidates(scores, torch.arange(len(scores)) + 5)
    order = found.argsort(descending=True).tolist()
    assert order == [4, 8, 10, 6, 9, 2, 0, 1, 3, 7, 5]  # a NaN counts as infinity, and -0 as 0
    assert (found > kernel.NONE).all()
    best = kernel.positions_of(kernel.best(found, 3))
    assert best.tolist() == [9, 13, 15]
    assert kernel.positions_of(kernel.best(found[:2], 4)).tolist() == [-1, -1, 5, 6]


def test_scores_in_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "_ROWS", 7)
    monkeypatch.setattr(kernel, "_COLUMNS", 5)
    q, k, weights = indexer(ties=True)
    run = choosing(q, k, weights)
    for found in over_ranks(2, run, mask=MASKS["packed"]):
        assert torch.equal(found, sorted_choice(q, k, weights, MASKS["packed"]))


def dense_blocks(q, k, mask, count, size, local):
    """The choice of blocks by a stable sort: positions of their keys, -1 for none."""
    seqlen = q.shape[2]
    scores = (q.float() @ k.float().mT).masked_fill(~torch.from_numpy(mask.dense(seqlen)), -math.inf)
    pooled = torch.nn.functional.pad(scores, (0, -seqlen % size), value=-math.inf).unflatten(3, (-1, size)).amax(-1)
    own, numbers = torch.arange(seqlen)[:, None] // size, torch.arange(pooled.shape[-1])
    near = (numbers <= own) & (numbers > own - local)
    pooled = pooled.masked_fill(near & (pooled > -math.inf), math.inf)
    values, order = pooled.sort(dim=-1, descending=True, stable=True)
    found = order[..., :count].masked_fill(values[..., :count] == -math.inf, -1).sort(-1).values
    return (found[..., None] * size + torch.arange(size)).masked_fill(found[..., None] < 0, -1).flatten(3)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("mask", ["causal", "window", "bidirectional"])
@pytest.mark.parametrize(("world", "layout"), [(1, "auto"), (2, "zigzag"), (3, "striped"), (4, "contiguous")])
def test_chosen_blocks(world, layout, mask, ties):
    """Ranks hold parts of a block, whose score is the greatest of all."""
    q, k, _ = indexer(ties)
    sizes = {"count": 3, "size": 7, "local": 2}
    expected = dense_blocks(q, k, MASKS[mask], **sizes)

    def choose(plan, cut):
        return plan.unshard(choose_blocks(cut(q), cut(k), plan, **sizes), 2)

    for found in over_ranks(world, choose, mask=MASKS[mask], layout=layout):
        assert torch.equal(found, expected)


def test_blocks_that_are_refused():
    q, k, _ = indexer()
    plan = make_plan(SEQLEN)
    with pytest.raises(ValueError, match="size=0 must be an int of at least 1"):
        choose_blocks(q, k, plan, count=1, size=0)
    with pytest.raises(ValueError, match="local=-1 must be an int of at least 0"):
        choose_blocks(q, k, plan, count=1, size=2, local=-1)


def inputs(heads=2, dtype=torch.float64, *, inside=False):
    """q [2, 4, S, 6], k [2, H, S, 6], v [2, H, S, 5] or 5: the first numbers of k; sinks [4], dout, dlse."""
    shapes = [(2, 4, SEQLEN, 6), (2, heads, SEQLEN, 6), (2, heads, SEQLEN, 5), (4,), (2, 4, SEQLEN, 5), (2, 4, SEQLEN)]
    made = [normal(*shape, seed=10 + n, dtype=dtype) for n, shape in enumerate(shapes)]
    return [*made[:2], 5, *made[3:]] if inside else made


def leaves_of(q, k, v, sinks, of_sinks):
    """Copies that want a gradient, by the gradients' names; and the values."""
    given = {"dq": q, "dk": k, "dv": v, "sinks": sinks if of_sinks else None}
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if torch.is_tensor(x)}
    return leaves, leaves["dv"] if "dv" in leaves else leaves["dk"][..., :v]


def some_keys(*batch, count=COUNT):
    """Positions that a causal mask partly hides, and some -1."""
    scores = torch.rand(*batch, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(3))
    found = scores.argsort(-1)[..., :count]
    return found.masked_fill(found % 5 == 0, -1)


def dense(q, k, v, sinks, dout, dlse, indices, mask, *, of_sinks=True):
    """out, lse and gradients of dense attention in the tensors' dtype."""
    seen = torch.zeros(*indices.shape[:-1], SEQLEN + 1, dtype=torch.bool)
    seen = seen.scatter_(-1, indices.where(indices >= 0, SEQLEN), True)[..., :-1] & torch.from_numpy(mask.dense(SEQLEN))
    seen = seen[:, None] if seen.dim() == 3 else seen.repeat_interleave(4 // k.shape[1], 1)
    leaves, values = leaves_of(q, k, v, sinks, of_sinks)
    keys, values = (x.repeat_interleave(4 // k.shape[1], 1) for x in (leaves["dk"], values))
    scores = (leaves["dq"] @ keys.mT * SCALE).masked_fill(~seen, -math.inf)
    none = scores.new_full((4,), -1e30)
    column = leaves.get("sinks", none)[:, None, None].expand(2, 4, SEQLEN, 1)
    scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    out = torch.softmax(scores, -1)[..., :-1] @ values
    loss = (out * dout).sum() + (lse * dlse).masked_fill(lse < -1e29, 0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def sparse(plan, cut, given, indices, *, of_sinks=True):
    """The same over ranks."""
    *shards, sinks, dout, dlse = (cut(x) if torch.is_tensor(x) and x.dim() > 1 else x for x in given)
    leaves, _ = leaves_of(*shards, sinks, of_sinks)
    q, k, v = leaves["dq"], leaves["dk"], leaves.get("dv", shards[2])
    options = {"sinks": leaves["sinks"]} if of_sinks else {}
    out, lse = chosen_attention(q, k, v, plan.shard(indices, indices.dim() - 2), plan, scale=SCALE, **options)
    loss = (out * dout).sum() + lse.masked_fill(lse == -math.inf, 0).mul(dlse).sum()
    found = {"out": out, "lse": lse, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))}
    return {name: x if name == "sinks" else plan.unshard(x.detach(), 2) for name, x in found.items()}


@pytest.fixture(params=["dense", "gathered"])
def how(request, monkeypatch):
    """Products with all keys, or with chosen ones alone."""
    monkeypatch.setattr(kernel, "_DENSE", 0 if request.param == "gathered" else 1 << 20)


@pytest.mark.parametrize(("heads", "inside"), [(2, False), (1, True), (2, True)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("world", "layout"), [(1, "auto"), (2, "zigzag"), (3, "striped"), (4, "contiguous")])
def test_attention_to_chosen_keys_equals_dense_attention(how, world, layout, mask, heads, inside):
    given, indices = inputs(heads, inside=inside), some_keys(2)
    expected = dense(*given, indices, MASKS[mask])
    results = over_ranks(world, lambda p, cut: sparse(p, cut, given, indices), mask=MASKS[mask], layout=layout)
    sinks = sum(found["sinks"] for found in results)
    for found in results:
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert error_of(sinks if name == "sinks" else found[name], x) < 1e-13, name


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_each_key_head_may_have_its_own_choice(how, heads, inside):
    given, indices = inputs(heads, inside=inside), some_keys(2, heads).int()
    expected = dense(*given, indices.long(), Mask(), of_sinks=False)
    for found in over_ranks(3, lambda plan, cut: sparse(plan, cut, given, indices, of_sinks=False)):
        blind = found["lse"] == -math.inf
        assert blind.any()
        assert not found["out"][blind].any() and not found["dq"][blind].any()
        found["lse"] = found["lse"].where(~blind, expected["lse"])
        for name, x in expected.items():
            assert error_of(found[name], x) < 1e-13, name


@pytest.mark.parametrize("inside", [False, True])
def test_shards_of_one_key(how, inside):
    """A single row of [dk | dv] is contiguous in each part, and an operator's outputs must not share memory."""
    q, k, v, dout = (normal(1, heads, 3, 6, seed=n) for n, heads in enumerate((4, 1, 1, 4)))
    leaves = [x.requires_grad_() for x in ((q, k) if inside else (q, k, v))]
    keys, values = (x.expand(-1, 4, -1, -1) for x in (k, k if inside else v))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=SCALE)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]

    def attend(plan, cut):
        own = [cut(x.detach()).clone().requires_grad_() for x in leaves]
        indices = torch.tensor([[[0, 1, 2]]]).expand(1, plan.length, 3)
        out = chosen_attention(*own[:2], 6 if inside else own[2], indices, plan, scale=SCALE)[0]
        return [plan.unshard(x.detach(), 2) for x in (out, *torch.autograd.grad(out, own, cut(dout)))]

    for found in over_ranks(3, attend, seqlen=3, layout="contiguous"):
        for x, right in zip(found, expected, strict=True):
            assert error_of(x, right) < 1e-13


@pytest.mark.parametrize("inside", [False, True])
def test_queries_in_blocks(how, inside, monkeypatch):
    monkeypatch.setattr(kernel, "_SCORES", 1)
    monkeypatch.setattr(kernel, "_GATHERED", 10_000)
    given, indices = inputs(inside=inside), some_keys(2)
    expected = dense(*given, indices, Mask())
    for found in over_ranks(2, lambda plan, cut: sparse(plan, cut, given, indices)):
        for name in expected.keys() - {"sinks"}:
            assert error_of(found[name], expected[name]) < 1e-13, name


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounds_once(how, dtype, inside):
    """Errors are those of one rounding of inputs and results: dense attention of inputs moved by half an ulp."""
    given, indices = [x.to(dtype) if torch.is_tensor(x) else x for x in inputs(inside=inside)], some_keys(2)
    exact = [x.double() if torch.is_tensor(x) else x for x in given]
    away = iter(half_an_ulp_away([x for x in exact if torch.is_tensor(x)], dtype))
    expected, names = dense(*exact, indices, Mask()), ("out", "dq", "dk", *(() if inside else ("dv",)))
    moved = dense(*(next(away) if torch.is_tensor(x) else x for x in exact), indices, Mask())
    bounds = bounds_of({n: expected[n] for n in names}, {n: moved[n] for n in names})
    for found in over_ranks(4, lambda plan, cut: sparse(plan, cut, given, indices)):
        assert found["out"].dtype == found["dk"].dtype == dtype
        for name in names:
            assert error_of(found[name].double(), expected[name]) <= bounds[name], name


def test_an_infinity_that_nobody_chose_is_not_seen(how):
    given, indices = inputs(), some_keys(2).masked_fill(some_keys(2) == 7, -1)
    for x in given[1:3]:
        x[:, :, 7] = math.inf
        x[:, :, 0] = math.nan  # some_keys never has it
    for found in over_ranks(2, lambda plan, cut: sparse(plan, cut, given, indices)):
        assert all(found[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


def test_a_nan_in_a_query_shows(how):
    given, indices = inputs(), some_keys(2)
    given[0][0, 1, 33] = math.nan
    for found in over_ranks(2, lambda plan, cut: sparse(plan, cut, given, indices)):
        assert found["out"][0, 1, 33].isnan().all()
        assert found["out"].isnan().sum() == 5


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"k": torch.zeros(2, 2, 20, 6)}, ValueError, "k has shape"),
        ({"weights": torch.zeros(2, 4, 20).int()}, TypeError, "weights is torch.int32"),
        ({"weights": torch.zeros(2, 3, 20)}, ValueError, "weights has shape"),
        ({"count": 0}, ValueError, "count=0 must be at least 1"),
        ({"count": 2.0}, TypeError, "count=2.0 must be an int"),
        ({"scale": None}, ValueError, "scale=None must be a number"),
    ],
)
def test_a_choice_that_is_refused(change, kind, text):
    q, k, weights = indexer(dtype=torch.float32)

    def choose(plan, cut):
        given = {"q": cut(q), "k": cut(k), "weights": cut(weights), "count": 3, "scale": 1.0}
        return choose_keys(plan=plan, **given | (change if plan.rank == 1 else {}))

    with pytest.raises(WorkerError) as caught:
        over_ranks(3, choose)
    assert all(type(error) is kind and text in str(error) for error in caught.value.errors.values())
    assert len(caught.value.errors) == 3


def test_attention_that_is_refused():
    q, k, v, *_ = inputs()
    indices = some_keys(2)

    def attend(change):
        def run(plan, cut):
            given = {"q": cut(q), "k": cut(k), "v": cut(v), "indices": plan.shard(indices, 1)}
            return chosen_attention(plan=plan, **given | (change if plan.rank == 1 else {}))

        with pytest.raises(WorkerError) as caught:
            over_ranks(2, run, layout="contiguous", ulysses_degree=1)
        assert len(caught.value.errors) == 2
        return caught.value.errors[0]

    assert "indices has shape [2, 1, 7]; it must be [2, 30, count]" in str(attend({"indices": indices[:, :1]}))
    assert "indices is torch.float32" in str(attend({"indices": indices[:, :30].float()}))
    assert "sinks has shape [3]" in str(attend({"sinks": torch.zeros(3)}))
    assert "v=7 must be from 1 to 6, the numbers of a key" in str(attend({"v": 7}))
    assert "v is a bool, not a tensor" in str(attend({"v": True}))
    assert type(attend({"v": 5})) is DisagreementError
    assert type(attend({"indices": indices[:, :30, :5]})) is DisagreementError


def test_values_inside_of_keys_are_not_sent():
    """DeepSeek V3's dimensions over 4 ranks: rows of 576 numbers, beside 128 heads of 192 and 128."""

    def sent(plan, q, k, v):
        before = plan.transport.sent
        q, k = (x.to(torch.bfloat16).requires_grad_() for x in (q, k))
        v = v if isinstance(v, int) else v.to(torch.bfloat16).requires_grad_()
        indices = plan.positions[:, None].expand(1, -1, 1)
        out, _ = chosen_attention(q, k, v, indices, plan)
        middle = plan.transport.sent
        out.sum().backward()
        return torch.tensor([middle - before, plan.transport.sent - middle])

    def rank(plan, _):
        rows = plan.length
        latent = sent(plan, torch.ones(1, 128, rows, 576), torch.ones(1, 1, rows, 576), 512)
        heads = torch.ones(1, 128, rows, 192)
        return torch.stack([latent, sent(plan, heads, heads, torch.ones(1, 128, rows, 128))])

    found = sum(over_ranks(4, rank, seqlen=32, layout="contiguous", ulysses_degree=1))
    latent, whole = found[:, 0].tolist()
    keys = 8 * (3 + 2 + 1)  # each rank's are sent to those behind it
    assert (latent, whole) == (keys * (2 * 576 + 8), keys * (2 * 128 * (192 + 128) + 8))
    assert (found[0] <= 0.02 * found[1]).all()


def test_a_second_derivative_is_refused():
    given, indices = inputs(), some_keys(2)
    q = given[0].requires_grad_()
    plan = make_plan(SEQLEN)
    out, _ = chosen_attention(q, *given[1:3], indices, plan)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="chosen_attention can be differentiated once"):
        grad.sum().backward()
