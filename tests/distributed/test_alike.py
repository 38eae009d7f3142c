"""What one rank of a call does otherwise: every rank raises a named error, or has the right numbers.

``OTHERWISE`` has an entry for each field of the record that ranks compare; a test fails for a field without one.
"""

import contextlib
import copy
import functools
import itertools
import random
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from burst_bench.pool import WorkerPool
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from burst_attention import DisagreementError, ExchangeError, PeerError
from burst_attention.integrations import hf
from burst_attention.integrations.hf.call import run
from tests.distributed.test_mesh import (
    NAMES,
    apart,
    batch_of,
    mesh_of,
    meshed,
    model_of,
    ready_for_a_loss,
    stock_loss,
    whole_gradients,
)
from tests.support.equal import Alone, check
from tests.support.hf_models import WHOLE_HEADS

SIZES = [(1, 1, 2), (1, 2, 1), (1, 2, 2)]
BY_NAME = (DisagreementError, ExchangeError, PeerError)
ROWS = ("input_ids", "labels")
PATIENCE = 10.0  # seconds of the other ranks after one has failed
ROUTED = {"router_aux_loss_coef": 0.3}


@contextlib.contextmanager
def set_to(owner, **values):
    """Give an object other attributes inside this context."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


@contextlib.contextmanager
def frozen(weight):
    weight.requires_grad_(False)
    yield
    weight.requires_grad_(True)


@contextlib.contextmanager
def rounded(weight):
    before, weight.data = weight.data, weight.data.float()
    yield
    weight.data = before


@contextlib.contextmanager
def evaluated(model):
    model.eval()
    yield
    model.train()


@contextlib.contextmanager
def hooked(part):
    handle = part.register_forward_hook(hf.token_wise(lambda module, given, out: 2 * out))
    yield
    handle.remove()


@contextlib.contextmanager
def another_class(part):
    before = type(part)
    part.__class__ = type("Louder", (before,), {"forward": lambda self, x: 2 * before.forward(self, x)})
    hf.token_wise(type(part))
    yield
    part.__class__ = before


@contextlib.contextmanager
def with_its_own_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.double().sin().mean()
    yield
    del model._loss_function


@contextlib.contextmanager
def changed(weight):
    local = getattr(weight, "_local_tensor", weight).detach()  # which counts writes, as a buffer needs
    before = local.clone()
    local.mul_(1.5)
    yield
    local.copy_(before)


def given(**changes):
    """Return a change of the batch: of an argument, or by a function of it."""

    def change(model, other, batch):
        batch.update({name: value(batch) if callable(value) else value for name, value in changes.items()})
        return contextlib.nullcontext()

    return change


def attention_of(model):
    return model.model.layers[1].self_attn


# By what a rank does otherwise: how, as a context, with a second model and its batch; and the field that names it.
OTHERWISE = {
    "tokens": (given(input_ids=lambda b: b["input_ids"].roll(1, 1)), "the digest of input_ids"),
    "labels": (given(labels=lambda b: b["labels"].roll(1, 1)), "the digest of labels"),
    "padding": (
        given(
            attention_mask=lambda b: (torch.arange(37) < 30).long().expand(2, -1),
            labels=lambda b: b["labels"].masked_fill(torch.arange(37) >= 30, -100),
        ),
        "the digest of attention_mask",
    ),
    "rows": (given(**{name: lambda b, name=name: b[name].repeat(2, 1) for name in ROWS}), "the digest of input_ids"),
    "documents": (given(position_ids=lambda b: (torch.arange(37) % 20).expand(2, -1)), "documents"),
    "count": (given(num_items_in_batch=50), "num_items_in_batch"),
    "fused": (given(fused_lm_head=True), "fused_lm_head"),
    "kept logits": (given(logits_to_keep=2), "logits_to_keep"),
    "logits": (given(logits="gather"), "logits"),
    "states": (given(output_hidden_states=True), "output_hidden_states"),
    "router": (given(output_router_logits=True), "output_router_logits"),
    "no gradients": (lambda *_: torch.no_grad(), "gradients are wanted"),
    "autocast": (lambda *_: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "loss": (lambda model, *_: with_its_own_loss(model), "a forward or a loss of the model's own"),
    "weights": (lambda model, *_: changed(model.model.norm.weight), "a sample of the weights"),
    "parts": (lambda model, *_: changed(model.lm_head.weight), "a sample of this rank's parts of the weights"),
    "another model": (lambda model, other, _: set_to(model, _burst=other._burst), "which model"),
    "layout": (lambda model, other, _: set_to(model._burst, plans=other._burst.plans), "the plan"),
    "frozen": (lambda model, *_: frozen(model.model.norm.weight), "which parameters need a gradient"),
    "dtype": (lambda model, *_: rounded(model.model.norm.weight), "dtypes and shapes of the weights"),
    "buffers": (lambda model, *_: changed(model.model.rotary_emb.inv_freq), "a sample of the buffers (model.rotary"),
    **{
        name: (change, f"settings of the model's parts ({what}")
        for name, change, what in (
            ("scaling", lambda model, *_: set_to(attention_of(model), scaling=0.5), "scaling of model.layers.1.self_"),
            ("eps", lambda model, *_: set_to(model.model.norm, variance_epsilon=0.1), "variance_epsilon of model.norm"),
            ("router's", lambda model, *_: set_to(model.model.layers[0].mlp.gate, top_k=1), "top_k of model.layers.0."),
            ("factor", lambda model, *_: set_to(model, router_aux_loss_coef=0.5), "router_aux_loss_coef of the model"),
            (
                "config",
                lambda model, *_: set_to(model.config, router_aux_loss_coef=0.5),
                "router_aux_loss_coef of config",
            ),
            ("mode", lambda model, *_: evaluated(model), "training of the model"),
            ("hook", lambda model, *_: hooked(model.model.layers[0].input_layernorm), "hooks of model.layers.0.input"),
            ("class", lambda model, *_: another_class(model.model.norm), "the class of model.norm"),
            (
                "recomputed",
                lambda model, *_: set_to(model.model.layers[0], gradient_checkpointing=True),
                "gradient_checkpointing of model.layers.0",
            ),
        )
    },
}
OF_THE_MODEL = re.compile(r"the model( \(over the ranks of the axis tp\))?: the ranks disagree on ")
FIRST = ("weights", "parts")  # compared until a call of the model has passed
OF_AXIS = ("parts", "layout")  # need a tensor-parallel axis


def alone_on(odd, name, model, other):
    """Return this rank's error of a call that the rank ``odd`` makes otherwise, as ``OTHERWISE`` has it by name."""
    batch = batch_of("plain", 0)
    with OTHERWISE[name][0](model, other, batch) if dist.get_rank() == odd else contextlib.nullcontext():
        try:
            model(**batch)
        except DisagreementError as error:
            return str(error)
    raise AssertionError(f"{name}: the ranks did not notice")  # at once: later calls would wait for the deadline


def otherwise(seed, sizes):
    """Let ranks drawn by chance do what ``OTHERWISE`` lists, in an order drawn by chance.

    Return what came of each, the fields of the record, and how far a step behind it is from one process's.
    """
    draw, fields = random.Random(f"{seed} {sizes}"), set()
    model, mesh = meshed("mixtral", sizes, **ROUTED)
    other = hf.tensor_parallel(model_of("mixtral", **ROUTED), mesh["tp"])
    hf.parallelize(other, mesh["cp"], strategy=replace(WHOLE_HEADS, layout="striped"), timeout=30)
    model.model.layers[0]._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def listed(*args):
        found = fields_of(*args)
        fields.update(*found)
        return found

    found, fields_of = {}, run._fields
    with mock.patch.object(run, "_fields", listed):
        for name in sorted(OTHERWISE, key=lambda name: (name not in FIRST, draw.random())):
            if name not in OF_AXIS or (sizes[2] > 1 and (name != "parts" or sizes[1] > 1)):
                found[name] = alone_on(draw.randrange(dist.get_world_size()), name, model, other)
    return found, fields, apart(model_of("mixtral", **ROUTED), model, mesh, batch_of("plain", 1))


@pytest.mark.parametrize(
    ("sizes", "seed"),
    [((1, 2, 2), 0), *(pytest.param(x, seed, marks=pytest.mark.long) for x in SIZES for seed in range(1, 5))],
)
def test_what_one_rank_does_otherwise_is_named_by_all(pools, sizes, seed):
    for found, fields, step in pools(sizes[1] * sizes[2]).run(otherwise, seed, sizes, patience=PATIENCE):
        for name, text in found.items():
            assert OTHERWISE[name][1] in text, (name, text)
            assert OF_THE_MODEL.search(text), (name, text)  # before a loss or a layer compares what it gets
            assert "samplers" in text or not OTHERWISE[name][1].startswith(("the digest of", "documents")), text
            assert "samplers" not in text or name not in ("count", "no gradients"), text
        check(step)
        if sizes == (1, 2, 2):
            named = [field for _, field in OTHERWISE.values()]
            assert not [field for field in fields if not any(text.startswith(field) for text in named)]


EVERY_STEP = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]


def orders_of(draw):
    """Return the steps of two models, and those of a rank that runs them in another order, fewer or more."""
    places = itertools.permutations(EVERY_STEP)
    orders = [x for x in places if all(x.index(("forward", n)) < x.index(("backward", n)) for n in (0, 1))]
    usual = draw.choice(orders)
    return usual, draw.choice([draw.choice(orders), draw.choice(orders), usual[:-1], (*usual, usual[0])])


def mesh_of_its_own(sizes):
    """Return a mesh of new groups: ``init_device_mesh`` would take the default group for an axis of all ranks."""
    ranks = torch.arange(sizes[0] * sizes[1] * sizes[2]).view(sizes)
    lines = [ranks.movedim(n, -1).reshape(-1, size).tolist() for n, size in enumerate(sizes)]
    groups = [dist.new_subgroups_by_enumeration(line)[0] for line in lines]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=NAMES)


def scaled(n):
    one = model_of("llama")
    for x in one.parameters():
        x.data *= 1 + n / 10
    return one


def stepped(sizes, steps):
    """Run the steps of two models that differ in their weights alone; return this rank's error, or how far both are."""
    mesh = mesh_of_its_own(sizes)  # a group that has failed is of no use to a later draw
    models = [hf.tensor_parallel(scaled(n), mesh["tp"]) for n in (0, 1)]
    for model in models:  # over a context alone, ranks wait for the deadline
        hf.parallelize(model, mesh["cp"], strategy=WHOLE_HEADS, timeout=2 if sizes[2] == 1 else 30)
    batch, losses = batch_of("plain", 0), {}
    try:
        for step, n in steps:
            if step == "forward":
                losses[n] = models[n](**batch).loss
            else:
                losses[n].backward()
        models[0](**batch_of("plain", 1))  # who made fewer steps, or more, meets the others here: no step equals it
    except BY_NAME as error:
        return str(error)
    references = [Alone(scaled(n), batch, stock_loss) for n in (0, 1)]
    gradients = [whole_gradients(model, mesh, shards=False) for model in models]
    return [references[n].apart([losses[n].item()], gradients[n]) for n in (0, 1)]


def steps_drawn(seed, sizes, draws):
    """Let a rank drawn by chance run other steps than the others; return (whether they are other, the outcome)."""
    draw, found = random.Random(f"{seed} {sizes}"), []
    for _ in range(draws):
        usual, other = orders_of(draw)
        mine = other if dist.get_rank() == draw.randrange(dist.get_world_size()) else usual
        found.append((other != usual, stepped(sizes, mine)))
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("sizes", "seed", "draws"),
    [
        ((1, 2, 2), 0, 5),
        ((1, 2, 1), 0, 2),
        *(pytest.param(x, seed, 12, marks=pytest.mark.long) for x in SIZES for seed in (1, 2)),
    ],
)
def test_models_and_backwards_in_other_orders_never_mix(sizes, seed, draws):
    """Teacher and student, of one configuration and over one group: losses of neither, gradients of both."""
    with WorkerPool(sizes[1] * sizes[2]) as pool:  # DTensor keeps the groups of a mesh for later ones that equal it
        outcomes = pool.run(steps_drawn, seed, sizes, draws, patience=PATIENCE)
    for drawn in zip(*outcomes, strict=True):
        assert len({type(outcome) for _, outcome in drawn}) == 1, drawn  # an error on every rank, or on none
        for other, outcome in drawn:
            assert isinstance(outcome, str) == other, drawn
            if not other:
                check(*outcome)


def copied(odd):
    """Call a model and two copies of it, whose weights are equal; one rank swaps the copies."""
    model, _ = meshed("llama", (1, 2, 1))
    copies = [copy.deepcopy(model) for _ in range(2)]
    for each in copies[::-1] if dist.get_rank() == odd else copies:
        try:
            each(**batch_of("plain", 0))
        except DisagreementError as error:
            return str(error)
    return "nothing"


def test_copies_of_a_model_are_other_models(pools):
    for text in pools(2).run(copied, 1):
        assert "the ranks disagree on which model: " in text


def losses_in_another_order(odd):
    """The loss of a head that is cut, without a model around it, sums gradients over the axis too."""
    model, hidden, plan, labels = ready_for_a_loss()
    losses = [hf.next_token_loss(model, (n * hidden).requires_grad_(), labels, plan) for n in (1, 2)]
    for loss in losses[::-1] if dist.get_rank() == odd else losses:
        try:
            loss.backward()
        except DisagreementError as error:
            return str(error)
    return "nothing"


def test_backwards_of_losses_in_another_order(pools):
    found = pools(4).run(losses_in_another_order, 1)
    assert all("the ranks disagree on the call whose backward begins" in text for text in found[:2])
    assert found[2:] == ["nothing"] * 2  # the ranks of another axis, which exchange nothing with these here


def agreements_of_a_step():
    """Count the agreements of a second step of a model, by group: the axis "tp", and the context."""
    model, _ = meshed("llama", (1, 2, 2))
    meeting = model._burst.meeting
    for _ in range(2):
        before = [each.count for each in (meeting.inner, meeting.outer)]
        loss = model(**batch_of("plain", 0)).loss
        middle = [each.count for each in (meeting.inner, meeting.outer)]
        loss.backward()
    after = [each.count for each in (meeting.inner, meeting.outer)]
    return [y - x for x, y in zip(before, middle, strict=True)], [y - x for x, y in zip(middle, after, strict=True)]


def test_a_backward_takes_one_agreement(pools):
    """In a forward: the model's call, and that of the loss (over the context: its sums)."""
    assert pools(4).run(agreements_of_a_step) == [([2, 2], [1, 1])] * 4


def stopped(odd, phase, after):
    """Let one rank of an axis raise inside a pass; return the error of this rank, and that of a later call."""
    mesh, batch, errors = mesh_of(1, 1, 2), batch_of("plain", 0), []
    model = hf.tensor_parallel(model_of("llama"), mesh["tp"])
    hf.parallelize(model, mesh["cp"], strategy=WHOLE_HEADS, timeout=2)
    count = itertools.count()

    def failing(x):
        if next(count) == after:
            raise MemoryError("no memory on this rank")
        return x

    hooks = {"forward": (failing, lambda x: x), "backward": (lambda x: x, failing)}[phase]
    mine = torch.autograd.graph.saved_tensors_hooks(*hooks) if dist.get_rank() == odd else contextlib.nullcontext()
    for context in (mine, contextlib.nullcontext()):
        try:
            with context:
                model(**batch).loss.backward()
        except (MemoryError, ExchangeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize(
    ("phase", "after", "label"),
    [
        ("forward", 2, "a sum of layer outputs over a tensor-parallel axis"),
        ("backward", 9, "a sum of gradients over a tensor-parallel axis, in a backward"),
    ],
)
def test_a_rank_that_stops_inside_a_pass_is_named_by_its_axis(phase, after, label):
    with WorkerPool(2, timeout=15) as pool:  # as above
        found = pool.run(stopped, 1, phase, after)
    first, later = found[0]
    assert found[1][0] == "MemoryError: no memory on this rank"
    assert first.startswith(f"ExchangeError: rank 0 could not finish {label} after "), first
    assert "A rank of its group (ranks 0, 1 of the job) has stopped, or made another call" in first
    assert "this process group failed before" in later


class Factor:
    """A hook, or a loss, that holds a number."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, module, given, out):
        return self.factor * out

    def loss(self, logits, labels, **_):
        return self.factor * logits.double().square().mean()


def times(factor, module, given, out):
    return factor * out


def with_weight(factor):
    """Return a hook that holds a module."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64).requires_grad_(False)
    layer.weight.fill_(factor)
    return lambda module, given, out: out * layer(torch.ones(1, dtype=torch.float64))


HOLDERS = {
    "a closure": lambda factor: lambda module, given, out: times(factor, module, given, out),
    "a default": lambda factor: lambda module, given, out, by=factor: by * out,
    "a partial": lambda factor: functools.partial(times, factor),
    "an object": Factor,
    "a method": lambda factor: Factor(factor).__call__,
    "a tensor": lambda factor: Factor(torch.tensor(factor, dtype=torch.float64)),
    "a module": with_weight,
}


def held(odd, what):
    """Attach hooks, or a loss, of one name that hold another number on the rank ``odd``; return this rank's error."""
    model, _ = meshed("llama", (1, 2, 1))
    factor = 2.0 if dist.get_rank() == odd else 1.0
    if what == "a loss":
        model.loss_function = Factor(factor).loss
    else:
        model.model.norm.register_forward_hook(hf.token_wise(HOLDERS[what](factor)))
    try:
        model(**batch_of("plain", 0))
    except DisagreementError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", [*HOLDERS, "a loss"])
def test_numbers_that_hooks_and_losses_hold_are_compared(pools, what):
    for text in pools(2).run(held, 1, what):
        assert "the ranks disagree on settings of the model's parts (" in text
        assert ("_loss_function of the model" if what == "a loss" else "hooks of model.norm") in text
        assert "rank 0 has " in text
        assert what in ("a tensor", "a module") or ("1.0" in text and "2.0" in text)  # of these two a digest is shown
