"""Recurrent layers and short convolutions over ranks: logits and all gradients equal those of one process."""

import copy
import functools
import inspect
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next

from burst_attention import ExchangeError, Mask, Strategy, make_plan
from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers import converted
from burst_attention.integrations.hf.reading import Kind, known, read, structure
from burst_attention.plan.layout import Layout
from burst_attention.recurrence import kernels
from burst_attention.recurrence.exchange import Past, RunExchange, _Scan
from burst_attention.recurrence.runs import runs_of
from burst_attention.testing import WorkerError, local_world
from tests.support.hybrid_models import (
    FAMILIES,
    apart,
    check_steps,
    make_hybrid,
    one_process,
    over_ranks,
    relative,
    tokens,
)
from tests.tools import families

DOCUMENTS = (0, 1, 2, 5, 31, 33, 61)  # shorter than a convolution, and longer than a rank's shard
KINDS = ("qwen3_next", "kimi_linear", "bamba", "jamba", "lfm2")  # one of each mechanism
HIDDEN, GRADIENTS = 1e-12, 1e-11


def check(family, world, documents, layout="auto", rows=2, prepare=None):
    how = {"rows": rows, "layout": layout, "prepare": prepare, "hidden": HIDDEN, "gradients": GRADIENTS}
    check_steps(make_hybrid(family), world, documents, **how)


@pytest.mark.parametrize(
    "family",
    [name if name in (*KINDS, "granitemoehybrid") else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES],
)
def test_packed_documents(family):
    check(family, 3, DOCUMENTS, "zigzag", rows=1)  # some documents have several runs, whose M so matters


@pytest.mark.parametrize(
    ("family", "world", "documents", "layout", "rows"),
    [
        *((family, 2, (0, 37), "auto", 2) for family in KINDS),
        ("bamba", 1, DOCUMENTS, "auto", 1),  # one rank keeps documents apart
        ("lfm2", 4, (0, 9), "auto", 2),  # shards shorter than the convolution
        ("lfm2", 4, (0, 5, 16), "contiguous", 1),  # a convolution starts again behind a short last run
        ("bamba", 4, DOCUMENTS, "zigzag-by-halves", 1),
        pytest.param("jamba", 4, (0, 9), "auto", 2, marks=pytest.mark.long),
        pytest.param("qwen3_next", 4, DOCUMENTS, "balanced", 1, marks=pytest.mark.long),
        pytest.param("kimi_linear", 4, DOCUMENTS, "zigzag-per-document", 1, marks=pytest.mark.long),
        pytest.param("jamba", 4, DOCUMENTS, "contiguous-per-document", 1, marks=pytest.mark.long),
    ],
)
def test_documents_and_layouts(family, world, documents, layout, rows):
    check(family, world, documents, layout, rows)


def checkpointed(model, *, use_reentrant=False):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


@pytest.mark.parametrize("family", ["kimi_linear", "jamba", "nemotron"])
def test_gradient_checkpointing(family):
    check(family, 2, DOCUMENTS, rows=1, prepare=checkpointed)


def rank_of_a_pool(family, how):
    torch.set_num_threads(1)
    model, ids, world = make_hybrid(family), tokens(DOCUMENTS[-1], 1), torch.distributed.get_world_size()

    def shard(parallel):
        parallel.train()
        for layer in parallel.base_model.layers:
            fully_shard(layer)
        fully_shard(parallel)

    prepare = {
        "reentrant": functools.partial(checkpointed, use_reentrant=True),
        "fully_shard": shard,
        "compile": torch.nn.Module.compile,
    }[how]
    found = over_ranks(model, ids, DOCUMENTS, torch.distributed.group.WORLD, prepare=prepare)
    for name, gradient in found[2].items():
        if how == "fully_shard":  # a mean over the ranks
            found[2][name] = gradient.full_tensor() * world
        else:
            torch.distributed.all_reduce(gradient)
    model.zero_grad()
    return apart([found], one_process(model, ids, DOCUMENTS))


@pytest.mark.parametrize(
    "family, how",
    [
        pytest.param("qwen3_next", "reentrant", marks=pytest.mark.long),
        pytest.param("qwen3_next", "fully_shard", marks=pytest.mark.long),
        pytest.param("bamba", "compile", marks=pytest.mark.long),
    ],
)
def test_processes(pools, family, how):
    for hidden, loss, (gradient, name) in pools(2).run(rank_of_a_pool, family, how):
        assert hidden <= HIDDEN and loss <= HIDDEN and gradient <= GRADIENTS, (hidden, loss, gradient, name)


def in_bf16(group, layer, x, dy):
    plan = make_plan(x.shape[1], group=group, strategy=Strategy(layout="zigzag"))
    layer, x = copy.deepcopy(layer), plan.shard(x, 1).requires_grad_()
    out = converted.over_runs(layer, RunExchange(plan))(x)
    out.backward(plan.shard(dy, 1))
    return plan.positions, out.detach(), x.grad


def test_bf16_is_as_accurate_as_one_process():
    """R is rounded to bf16 before it multiplies S; that must not matter, at any number of ranks."""
    exact = make_hybrid("qwen3_next").model.layers[0].linear_attn
    layer = make_hybrid("qwen3_next", double=False).bfloat16().model.layers[0].linear_attn
    exact.load_state_dict({name: x.double() for name, x in layer.state_dict().items()})
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(1, 256, 32, generator=generator).bfloat16() for _ in range(2))

    def alone(module, *given):
        given = [each.clone().requires_grad_() for each in given]
        out = module(given[0])
        return out.detach(), torch.autograd.grad(out, given[0], given[1])[0]

    truth, one = alone(exact, x.double(), dy.double()), alone(layer, x, dy)
    allowed = [1.25 * relative(each.double(), true) for each, true in zip(one, truth, strict=True)]
    with local_world(8) as ranks:
        found = ranks.run(in_bf16, layer, x, dy)
    for n, (most, true) in enumerate(zip(allowed, truth, strict=True), 1):
        whole = torch.cat([part[n] for part in found], 1)[:, torch.cat([part[0] for part in found]).argsort()]
        assert relative(whole.double(), true) <= most


@torch.no_grad()
def in_pieces(group, layer, x, cuts, layout):
    """(positions, outputs) of one rank's tokens, and what the layer keeps."""
    past, found, plan = Past(), [], None
    for start, stop in itertools.pairwise(cuts):
        if plan is None:
            plan = make_plan(stop, group=group, strategy=Strategy(layout=layout))
        else:
            plan = plan.following(
                stop - start, first=start, mask=Mask(), held=[[range(start)], *[[]] * (plan.world - 1)]
            )
        out = converted.over_runs(layer, RunExchange(plan, past=past))(plan.shard(x[:, start:stop], 1))
        out = out[0] if isinstance(out, tuple) else out
        found.append((plan.positions, out))
    positions, outs = zip(*found, strict=True)
    return torch.cat(positions), torch.cat(outs, 1), past


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [*((family, 3, "zigzag") for family in KINDS), ("bamba", 1, "zigzag"), ("jamba", 4, "contiguous")],
)
def test_pieces_continue_the_state(family, world, layout):
    """Some pieces have runs shorter than the convolution. What is kept is what transformers' own cache keeps."""
    model, cuts = make_hybrid(family), (0, 5, 37, 42, 61)
    layer = read(model).of(Kind.MIXER)[0].module
    x = torch.randn(2, cuts[-1], 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cache = DynamicCache(config=model.config)
    names = {*known.CACHES} & inspect.signature(layer.forward).parameters.keys()
    with torch.no_grad():
        expected = layer(x, **dict.fromkeys(names, cache))
    with local_world(world) as ranks:
        found = ranks.run(in_pieces, layer, x, cuts, layout)
    whole = torch.cat([out for _, out, *_ in found], 1)[:, torch.cat([at for at, *_ in found]).argsort()]
    assert relative(whole, expected[0] if isinstance(expected, tuple) else expected) <= HIDDEN
    for *_, past in found:
        assert relative(past.columns, cache.get_conv_state(layer.layer_idx)) <= HIDDEN
        if past.state is not None:
            assert relative(past.state, cache.get_recurrent_state(layer.layer_idx)) <= HIDDEN
        for name in ("columns", "state"):
            own, first = getattr(past, name), getattr(found[0][2], name)
            assert own is first is None or torch.equal(own, first), "ranks keep other bits"


def chain_of_states(pairs, runs, zero, multiply):
    """The state before each run, run by run."""
    states, state = [], zero
    for run, pair in zip(runs.every, pairs, strict=True):
        states.append(zero if run.begins else state)
        state = multiply(pair[0], states[-1]) + pair[1]
    return states


def scanned(group, layout, documents, diagonal, shapes):
    """(states, gradients of the own pairs, [bytes predicted], [bytes counted]) of one rank."""
    plan = make_plan(documents[-1], group=group, mask=Mask(cu_seqlens=documents), strategy=Strategy(layout=layout))
    exchange = RunExchange(plan)
    runs, transport = exchange.runs, plan.transport
    pairs = pairs_of(runs, *shapes)
    zero = torch.zeros(shapes[1], dtype=torch.float64, requires_grad=True)
    before = transport.sent, transport.received
    states = exchange.states([pairs[n] for n in runs.givers], zero, shapes[0], diagonal=diagonal)
    between = transport.sent, transport.received
    sum(((n + 1) * state.square()).sum() for n, state in zip(runs.own, states, strict=True)).backward()
    after = transport.sent, transport.received
    sizes = [8 * torch.Size(shape).numel() for shape in shapes]
    predicted = [runs.state_bytes(*sizes), runs.state_bytes(*sizes, backward=True)]
    counted = [(b[0] - a[0], b[1] - a[1]) for a, b in ((before, between), (between, after))]
    return dict(zip(runs.own, states, strict=True)), {n: pairs[n] for n in runs.givers}, predicted, counted


def pairs_of(runs, *shapes):
    generator = torch.Generator().manual_seed(3)

    def drawn(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.4).requires_grad_()

    return [tuple(map(drawn, shapes)) for _ in runs.every]


@pytest.mark.parametrize(
    "world, layout, documents",
    [
        (2, "zigzag", (0, 9)),
        (3, "contiguous", (0, 40)),
        (4, "zigzag", (0, 41)),
        (4, "zigzag", DOCUMENTS),
        (5, "zigzag-by-halves", (0, 3, 70, 91)),
        (3, "zigzag-per-document", (0, 20, 61)),
        (6, "balanced", (0, 4, 90, 95)),
    ],
)
@pytest.mark.parametrize("diagonal", [False, True])
def test_states_and_gradients_are_those_of_a_chain(world, layout, documents, diagonal):
    shapes = ((2, 3, 3), (2, 3, 4)) if not diagonal else ((2, 1, 1), (2, 3, 4))
    with local_world(world) as ranks:
        found = ranks.run(scanned, layout, documents, diagonal, shapes)
    runs = runs_of(
        Layout(layout, documents[-1], world).cut_for(Mask(cu_seqlens=documents), documents[-1]), documents, 0
    )
    pairs = pairs_of(runs, *shapes)
    states = chain_of_states(pairs, runs, torch.zeros(shapes[1]).double(), torch.mul if diagonal else torch.matmul)
    sum(((n + 1) * state.square()).sum() for n, state in enumerate(states)).backward()
    assert any(runs.chains)
    for own, given, predicted, counted in found:
        assert predicted == counted
        for n, state in own.items():
            assert relative(state, states[n]) <= HIDDEN
        for n, pair in given.items():
            assert relative(pair[1].grad, pairs[n][1].grad) <= HIDDEN
            if not runs.every[n].begins:
                assert relative(pair[0].grad, pairs[n][0].grad) <= HIDDEN


def shard_of_kernels(group, mixed):
    """Results of each kernel function over one rank's runs, with stand-ins for kernels that take the state as it is."""
    plan = make_plan(41, group=group, strategy=Strategy(layout="zigzag"))
    draw = torch.Generator().manual_seed(5)

    def own(*shape, dim=1):
        return plan.shard(torch.randn(*shape, generator=draw), dim)

    def delta(q, k, v, *, g, beta, initial_state, output_final_state):
        return q.sum(-1, keepdim=True) * v + initial_state.sum(2)[:, None], initial_state * 0.5 + v.sum(1)[:, :, None]

    def chunk(x, t, A, b, c, **_):
        return x.clone(), x.sum(1)[..., None] * b.sum(1).mean(1)[:, None, None]

    def selective(x, t, A, b, c, **_):
        return x.clone(), x.sum(-1)[..., None] * b.sum(-1)[:, None]

    def exchange():
        return RunExchange(plan)

    rates = torch.tensor([0.02, 0.1])[:, None, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        q, k, v = (own(1, 41, 2, 4) for _ in range(3))
        found = [kernels.delta_rule(delta, exchange(), q, k, v, own(1, 41, 2), own(1, 41, 2))[0]]
        x, dt, B, C = own(1, 41, 2, 4), own(1, 41, 2).sigmoid(), own(1, 41, 1, 3), own(1, 41, 1, 3)
        found.append(kernels.mamba2(chunk, exchange(), x, dt, torch.tensor([-0.1, -0.2]), B, C))
        x, dt, B, C = own(1, 5, 41, dim=2), own(1, 5, 41, dim=2).sigmoid(), own(1, 3, 41, dim=2), own(1, 3, 41, dim=2)
        found.append(kernels.mamba1(selective, exchange(), x, dt, -torch.full((5, 3), 0.1), B, C))
        q, k, v = (own(1, 2, 41, 4, dim=2) for _ in range(3))
        found.append(kernels.lightning(exchange(), q, k, v, rates, block=4))
    return found


def test_autocast_does_not_round_what_is_read_of_states():
    with local_world(4) as ranks:
        for mixed, exact in zip(ranks.run(shard_of_kernels, True), ranks.run(shard_of_kernels, False), strict=True):
            for name, found, expected in zip(("delta", "mamba2", "mamba1", "lightning"), mixed, exact, strict=True):
                assert found.dtype == torch.float32 and torch.equal(found, expected), name


@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_training_the_steps_bias_alone(family):
    """Only the bias then makes states need a gradient, on ranks without a run that goes on too."""
    model, ids = make_hybrid(family), tokens(31, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("dt_bias", "dt_proj.bias")) and ".0." in name)
    expected = one_process(model, ids, (0, 31))
    model.zero_grad()
    with local_world(2, timeout=20) as ranks:
        found = ranks.run(lambda group: over_ranks(model, ids, (0, 31), group, layout="contiguous"))
    hidden, loss, (gradient, name) = apart(found, expected)
    assert hidden <= HIDDEN and loss <= HIDDEN and gradient <= GRADIENTS, (hidden, loss, gradient, name)


def test_a_rank_that_fails_in_a_scan_ends_its_group(monkeypatch):
    """The others wait for its messages, so it can't go on with the group."""
    joined = _Scan.joined

    def full(self, *pair):
        if threading.current_thread().name == "rank 1":
            raise MemoryError("no room")
        return joined(self, *pair)

    def rank(group):
        reports = []
        for _ in range(2):
            try:
                scanned(group, "contiguous", (0, 40), False, ((3, 3), (3, 4)))
            except Exception as error:
                reports.append(error)
        return reports

    monkeypatch.setattr(_Scan, "joined", full)
    with local_world(3, timeout=3) as ranks:
        _, (first, second), last = ranks.run(rank)
    assert type(first) is MemoryError and type(second) is ExchangeError
    assert "this process group failed before (recurrent states: MemoryError" in str(second)
    assert all(type(error) is ExchangeError for error in last)


def test_a_rank_that_has_lost_a_state_raises_and_is_named_at_the_deadline():
    def attempt(group):
        def unpack(x):
            if group.rank() == 1 and x.shape == (2, 3, 3):  # M; the loss of the test saves states
                raise MemoryError("no room")
            return x

        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                scanned(group, "contiguous", (0, 40), False, ((2, 3, 3), (2, 3, 4)))
        except Exception as error:
            return error

    with local_world(3, timeout=2) as ranks:
        first, second, third = ranks.run(attempt)
    assert type(second) is MemoryError
    assert [type(x) for x in (first, third)] == [ExchangeError] * 2, (first, third)
    assert "rank 1 in recurrent states, backward" in f"{first} {third}"


def test_bytes_grow_with_the_logarithm_of_the_ranks():
    """With the states of Qwen3-Next-80B a factor and a state have 2 MiB each; here both have 8 bytes."""
    most = {}
    for world in (4, 8, 16):
        with local_world(world) as ranks:
            found = ranks.run(scanned, "zigzag", (0, 4 * world), False, ((1, 1), (1, 1)))
        for *_, predicted, counted in found:
            assert predicted == counted
        for direction in (0, 1):
            most[direction, world] = max(predicted[direction][0] for *_, predicted, _ in found)
    assert [most[0, world] // 8 for world in (4, 8, 16)] == [7, 13, 17]  # 4 more each time that W doubles
    assert all(most[0, world] == most[1, world] for world in (4, 8, 16))


@pytest.mark.parametrize("width", [1, 3, 8])  # with 8 several runs need a token
def test_borders_come_from_the_runs_before(width):
    documents = (0, 1, 2, 5, 31, 33, 61)

    def rank(group):
        plan = make_plan(61, group=group, mask=Mask(cu_seqlens=documents), strategy=Strategy(layout="zigzag"))
        exchange = RunExchange(plan)
        x = plan.positions.double()[:, None].requires_grad_()
        counted = plan.transport.sent
        before = exchange.before(x, width)
        counted = plan.transport.sent - counted
        (before * torch.arange(1.0, width + 1)[None, :, None]).sum().backward()
        return (
            exchange.own,
            before[..., 0],
            (plan.positions, x.grad[:, 0]),
            counted,
            exchange.runs.border_bytes(width, 8),
        )

    expected = torch.zeros(61, dtype=torch.float64)
    with local_world(5) as ranks:
        found = ranks.run(rank)
    for own, before, _, counted, predicted in found:
        assert counted == predicted[0]
        for run, seen in zip(own, before.tolist(), strict=True):
            wanted = range(run.first - width, run.first)
            assert seen == [token if token >= run.start else 0 for token in wanted]
            for n, token in enumerate(wanted):
                if token >= run.start:
                    expected[token] += n + 1
    for *_, (positions, grad), _, _ in found:
        assert torch.equal(grad, expected[positions])


def test_kernels_are_looked_up_at_each_call(monkeypatch):
    """A hub kernel or fla may replace a kernel later; the fused kernels, which take no state, are never called."""
    module, called = families.double_module("bamba"), []

    def fused(*args, **kwargs):
        raise AssertionError("the fused kernel takes no state")

    def counted(*args, _kernel=module.mamba2_chunk_scan, **kwargs):
        called.append(True)
        return _kernel(*args, **kwargs)

    def prepare(model):
        model.train()
        monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", fused)
        monkeypatch.setattr(module, "mamba2_chunk_scan", counted)

    model, ids = make_hybrid("bamba"), tokens(37)
    expected = one_process(model, ids, (0, 37))
    model.zero_grad()
    with local_world(2) as ranks:
        found = ranks.run(lambda group: over_ranks(model, ids, (0, 37), group, prepare=prepare))
    assert apart(found, expected)[0] <= HIDDEN
    assert called


def test_a_gate_inside_of_mamba_2_is_refused():
    with pytest.raises(ValueError, match="z: a gate"):
        kernels.mamba2(None, None, *[torch.zeros(1, 2, 3, 4)] * 5, z=torch.zeros(1))


def test_unparallelize_restores_every_class_and_generate_runs_alone():
    model, ids = make_hybrid("qwen3_next"), tokens(7)
    classes = [type(module) for module in model.modules()]
    logits = model(ids, use_cache=False).logits
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)

    def rank(group):
        parallel = copy.deepcopy(model)
        hf.parallelize(parallel, group)
        assert torch.equal(parallel.generate(ids, max_new_tokens=3, do_sample=False), expected)
        assert [type(module) for module in parallel.modules()] != classes
        hf.unparallelize(parallel)
        assert [type(module) for module in parallel.modules()] == classes
        assert torch.equal(parallel(ids, use_cache=False).logits, logits)

    with local_world(2) as ranks:
        ranks.run(rank)


def refusal(model, call):
    """The text of the refusal that all ranks raise."""
    with local_world(2) as ranks, pytest.raises(WorkerError) as error:
        ranks.run(lambda group: call(copy.deepcopy(model), group))
    assert all(type(each) is ValueError for each in error.value.errors.values())
    assert len(error.value.errors) == 2
    return str(error.value.errors[0])


def test_striped_is_refused():
    text = refusal(make_hybrid("lfm2"), lambda m, group: hf.parallelize(m, group, strategy=Strategy(layout="striped")))
    assert "layout='striped' of the strategy separates neighbouring tokens" in text
    with pytest.raises(ValueError, match="layout='striped' separates neighbouring tokens"):
        runs_of(make_plan(8, strategy=Strategy(layout="striped")).schedule.layout.__class__("striped", 8, 2), None, 0)


def test_a_layer_without_a_plan_raises():
    model = make_hybrid("mamba")

    def body_alone(parallel, group):
        hf.parallelize(parallel, group)
        parallel.base_model(tokens(12), use_cache=False)

    assert "plan did not reach MambaMixer" in refusal(model, body_alone)


def test_a_mixer_that_calls_other_kernels_is_refused():
    class Qwen3NextGatedDeltaNet(modeling_qwen3_next.Qwen3NextGatedDeltaNet):
        def forward(self, hidden_states, **kwargs):
            x = hidden_states.mT
            return modeling_qwen3_next.causal_conv1d_fn(x.cumsum(-1), x.new_ones(x.shape[1], 2)).mT

    Qwen3NextGatedDeltaNet.__module__ = "transformers_modules.other"
    model = make_hybrid("qwen3_next", double=False)
    model.model.layers[0].linear_attn.__class__ = Qwen3NextGatedDeltaNet
    assert "(Qwen3NextGatedDeltaNet) is not known to treat each token" in refusal(model, hf.parallelize)


class WaveMixer(nn.Module):
    """Mixes tokens, and no name of the library's knows it."""

    def forward(self, hidden_states, **kwargs):
        return torch.fft.fft(hidden_states, dim=1).real


class RenamedDeltaNet(modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    """The known mixer under another name: what else its author changed is unknown."""


@pytest.mark.parametrize("kind, place", [(WaveMixer, "mlp"), (RenamedDeltaNet, "linear_attn")])
def test_unknown_mixers_are_refused(kind, place):
    model = make_hybrid("qwen3_next", double=False)
    layer = model.model.layers[0]
    mixer = copy.deepcopy(layer.linear_attn) if kind is RenamedDeltaNet else kind()
    if kind is RenamedDeltaNet:
        mixer.__class__ = kind
    setattr(layer, place, mixer)
    assert f"({kind.__name__}) is not known to treat each token" in refusal(model, hf.parallelize)
    with pytest.raises(ValueError, match=rf"\({kind.__name__}\) is not known to treat each token"):
        structure.check_structure(read(model))  # as check_model does


def test_a_part_in_place_of_a_mixer_is_refused():
    class ScalingLayer(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return 2 * hidden_states

    ScalingLayer.__module__ = "transformers_modules.other"
    model = make_hybrid("qwen3_next", double=False)
    model.model.layers[0].linear_attn = ScalingLayer()
    assert "has 'linear_attention' 2 times, but Qwen3NextModel has 1 token mixers" in refusal(model, hf.parallelize)


class Leak(nn.Module):
    """Claims to treat each token for itself, and does not."""

    def forward(self, x):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def test_check_model_measures_what_a_hybrid_mixes():
    hf.register()
    model = make_hybrid("qwen3_next", "burst", double=False)

    def checked(each, group):
        hf.check_model(each, make_plan(16, group=group))
        assert not any(hasattr(module, "stock_class") for module in each.modules())
        raise ValueError("nothing is wrong")

    assert refusal(model, checked) == "nothing is wrong"
    hf.token_wise(Leak)
    model.model.layers[1].mlp = Leak()
    assert "depend on other tokens" in refusal(
        model, lambda each, group: hf.check_model(each, make_plan(16, group=group))
    )
