"""The attention as an operator: torch's own checks of it, compilers, and checkpointing that keeps its results."""

import ast
import gc
import hashlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from burst_attention import Mask, Strategy, burst_attention, make_plan
from burst_attention.attention import call as attention_call
from burst_attention.attention import passes
from burst_attention.attention.call import (
    FORMULA_VERSION,
    Settled,
    attend,
    attend_backward,
    keep_attention,
    split_heads,
)
from burst_attention.testing import local_world

MASKS = [Mask(), Mask(window=9), Mask(cu_seqlens=[0, 11, 11, 33])]


def shards(plan, *, dtype=torch.float64, kv_heads=2, grad=True):
    make = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, plan.seqlen, dim, generator=make, dtype=torch.float64).to(dtype)
        for heads, dim in ((4, 8), (kv_heads, 8), (kv_heads, 12))
    ]
    return [plan.shard(x, 2).requires_grad_(grad) for x in tensors]


@pytest.mark.parametrize(
    ("mask", "dtype"), [*zip(MASKS, [torch.float64, torch.float32, torch.bfloat16], strict=True)], ids=str
)
def test_opcheck(mask, dtype):
    plan = make_plan(33, mask=mask)
    q, k, v = shards(plan, dtype=dtype)
    more = ("auto", 1, 0, False)
    torch.library.opcheck(attend, (q, k, v, None, plan.handle, None, None, *more, 7, True, FORMULA_VERSION))
    sinks = torch.randn(4, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    torch.library.opcheck(attend, (q, k, v, sinks, plan.handle, None, 0.8, *more, 15, True, FORMULA_VERSION))
    out, lse, settled, *kept = attend(q, k, v, None, plan.handle, 0.5, None, *more, 7, True, FORMULA_VERSION)
    assert [x.shape for x in kept] == [(0,)] * 5
    assert Settled.unpack(settled) == Settled(0, 0, 0.5, of_lse=True)
    qkv, saved = [x.detach() for x in (q, k, v)], [x.detach() for x in (out, lse, settled)]
    dout, dlse = torch.randn_like(saved[0]), torch.randn_like(saved[1])
    # Second derivatives are not supported, so the gradients have no gradients.
    without = ("test_schema", "test_faketensor")
    for of_lse, given in ((dlse, None), (None, None), (dlse, sinks.detach())):
        arguments = (dout, of_lse, *qkv, given, *saved, plan.handle, 0, False, 2)
        torch.library.opcheck(attend_backward, arguments, test_utils=without)


def layer(q, k, v, plan, **options):
    out, lse = burst_attention(q * 1.5, k, v, plan, return_lse=True, **options)
    return (out.sin() * 2).sum() + lse.cos().sum()


def eager_and_compiled(group=None, backend="aot_eager", **cut):
    """(loss, gradients) of both, and how often the compiled call was traced."""
    plan = make_plan(33, mask=Mask(window=20), group=group, strategy=Strategy(**cut))
    results = []
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for function in (layer, compiled):
        inputs = shards(plan)
        loss = function(*inputs, plan, scale=0.3)
        results.append((loss.item(), torch.autograd.grad(loss, inputs)))
    return results


def assert_equal(results):
    (loss, grads), (compiled_loss, compiled_grads) = results
    assert compiled_loss == pytest.approx(loss, rel=1e-12)
    for mine, theirs in zip(compiled_grads, grads, strict=True):
        assert mine.abs().max() > 0
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.long
def test_compiled_alone(backend):
    torch._dynamo.reset()
    assert_equal(eager_and_compiled(backend=backend))


def test_a_compiled_graph_names_the_formula_so_that_one_on_disk_is_not_run_after_a_change():
    torch._dynamo.reset()
    named = []

    def backend(graph, _):
        named.extend(node.kwargs["formula_version"] for node in graph.graph.nodes if "attend" in str(node.target))
        return graph

    torch.compile(layer, fullgraph=True, backend=backend)(*shards(make_plan(33)), make_plan(33))
    assert named == [FORMULA_VERSION]


# The version, and the digest of the source of what a graph on disk may hold, as of the last change.
_PREPARED = (
    "Settled",
    "prepare_forward",
    "prepare_backward",
    "row_delta",
    "rounded_gradients",
    "lost_rows",
    "with_lost_rows",
    "with_sinks",
    "sink_gradient",
)
LAST = (23, "da0c1fb4ba4e")


def test_a_formula_that_changed_has_a_version_of_its_own():
    functions, texts = ("attend", "attend_backward", "_save", "_differentiate", *_PREPARED), []
    for module in (attention_call, passes):
        source = Path(module.__file__).read_text("utf-8")
        named = [x for x in ast.parse(source).body if getattr(x, "name", "") in functions]
        for each in named:
            undocumented = each.body[1:] if ast.get_docstring(each) else each.body
            texts.append("\n".join(map(ast.unparse, (*getattr(each, "decorator_list", ()), *undocumented))))
    assert len(texts) == len(functions)
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    assert (FORMULA_VERSION, digest) == LAST, (
        f"one of {', '.join(functions)} in attention/call.py or passes.py changed: add one to FORMULA_VERSION, so "
        "that no compiled graph that torch kept on disk from before is run. Set LAST here to that version and "
        f"{digest!r}"
    )


def refused_lse_gradient(group=None):
    """Call the backward of a call that cached its results with a gradient of lse; return the error's text."""
    plan = make_plan(33, group=group, strategy=Strategy(ulysses_degree=2, cache_qkv=True))
    q, k, v = shards(plan, grad=False)
    heads, rows = split_heads(q, k, v, plan)
    how = {"cached_rows": rows, "cached_results": True}
    more = {"heads": heads, "wanted": 7, "return_lse": False, "formula_version": FORMULA_VERSION}
    out, lse, settled, *kept = attend(q, k, v, None, plan.handle, None, None, "auto", **how, **more)
    saved, dlse = (*kept[:3], None, *kept[3:], settled, plan.handle), torch.ones_like(lse)
    assert attend_backward(out, None, *saved, **how, kv_heads=2)[0].abs().max() > 0
    with pytest.raises(ValueError, match="dlse is given, but with cached_results") as refused:
        attend_backward(out, dlse, *saved, **how, kv_heads=2)
    return str(refused.value)


def test_a_gradient_of_lse_is_refused_where_results_are_cached():
    with local_world(2) as ranks:
        texts = ranks.run(refused_lse_gradient)
    assert texts[0] == texts[1]


def scored(group=None):
    """The compiled and the eager gradients of q, k, v and sinks, with a soft cap."""
    plan = make_plan(33, group=group)
    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [*shards(plan), torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()]
        loss = function(*leaves[:3], plan, scale=0.3, softcap=0.7, sinks=leaves[3])
        found.append((loss.item(), torch.autograd.grad(loss, leaves)))
    return found


@pytest.mark.long
def test_compiled_over_ranks(pools):
    """What is kept with heads cut has known shapes, and is a result that nothing aliases."""
    cuts = [{}, *({"ulysses_degree": "auto", "cache_qkv": keep} for keep in (True, False))]
    for call in (scored, *(partial(eager_and_compiled, **cut) for cut in cuts)):
        for results in pools(2).run(call):
            assert_equal(results)


def eager_and_dynamic(keep, group=None):
    """(difference, most of the gradient) for batches of several sizes, which one graph with symbolic sizes serves."""
    torch._dynamo.reset()
    plan, graphs, seen = make_plan(33, group=group, strategy=Strategy(ulysses_degree=2, cache_qkv=keep)), [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for batch in (3, 5, 6):  # none is a number of heads: equal sizes are one to a compiler
        inputs = [x.detach().repeat(batch, 1, 1, 1).requires_grad_() for x in shards(plan)]
        mine, theirs = (torch.autograd.grad(call(*inputs, plan), inputs) for call in (compiled, layer))
        seen += [((a - b).abs().max().item(), b.abs().max().item()) for a, b in zip(mine, theirs, strict=True)]
    return len(graphs), seen


@pytest.mark.parametrize("keep", [True, False])
def test_compiled_over_ranks_for_any_batch_with_heads_cut(pools, keep):
    for graphs, seen in pools(2).run(eager_and_dynamic, keep):
        assert graphs == 1
        assert all(difference <= 1e-12 * most and most > 0 for difference, most in seen)


def test_another_plan_of_the_same_shapes_is_not_mistaken_for_the_first():
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for mask in MASKS:
        plan = make_plan(33, mask=mask)
        inputs = shards(plan, grad=False)
        assert compiled(*inputs, plan).item() == pytest.approx(layer(*inputs, plan).item(), rel=1e-12)


def test_a_graph_keeps_its_plan_and_a_lost_one_is_named():
    inputs = shards(make_plan(33))
    loss = layer(*inputs, make_plan(33))
    gc.collect()
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(loss, inputs))
    handle = make_plan(33).handle
    gc.collect()
    with pytest.raises(ValueError, match=f"the plan with handle {handle} was freed"):
        attend(*inputs, None, handle, None, None, "auto", 1, 0, False, 7, True, FORMULA_VERSION)


def checkpointed(group=None, keep=True, heads=1):
    """Gradients without and with checkpointing, and the bytes that its recomputation sent."""
    plan = make_plan(33, group=group, strategy=Strategy(ulysses_degree=heads))
    plain = shards(plan)
    expected = torch.autograd.grad(layer(*plain, plan), plain)
    inputs = shards(plan)
    options = {"context_fn": keep_attention} if keep else {}
    before = plan.transport.sent
    loss = checkpoint(layer, *inputs, plan, use_reentrant=False, **options)
    forward = plan.transport.sent - before
    grads = torch.autograd.grad(loss, inputs)
    traffic = plan.bytes(batch=1, q_heads=4, kv_heads=2, head_dim=8, v_head_dim=12, dtype=torch.float64, lse=True)
    assert forward == traffic.forward_sent
    again = plan.transport.sent - before - traffic.sent
    return expected, grads, again, traffic.forward_sent


@pytest.mark.parametrize(("world", "heads"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("keep", [True, False])
def test_checkpointing_may_keep_what_attention_gave(keep, world, heads):
    with local_world(world) as ranks:
        for expected, grads, again, forward in ranks.run(checkpointed, keep, heads):
            assert forward > 0
            assert again == (0 if keep else forward)
            for mine, theirs in zip(grads, expected, strict=True):
                assert torch.equal(mine, theirs)


def twice(group=None):
    """What a penalty on a gradient raises where a call caches its results."""
    plan = make_plan(33, group=group, strategy=Strategy(ulysses_degree=2, cache_qkv=True))
    inputs = shards(plan)
    (grad,) = torch.autograd.grad(burst_attention(*inputs, plan).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        (inputs[0].sum() + grad.pow(2).sum()).backward()


def test_second_derivatives_are_refused_where_results_are_cached():
    with local_world(2) as ranks:
        ranks.run(twice)


def files_of_a_warm_call(group):
    """Return the library's files that a third call and its backward enter."""
    plan = make_plan(64, group=group, strategy="burst-attention")
    q, k, v = (torch.randn(1, 4, plan.length, 16).requires_grad_() for _ in range(3))
    home, entered = Path(attention_call.__file__).parents[1], set()

    def call():
        out = burst_attention(q, k, v, plan)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def note(frame, *_):
        entered.add(Path(frame.f_code.co_filename))

    call(), call()
    sys.setprofile(note)
    call()
    sys.setprofile(None)
    return {path.relative_to(home).as_posix() for path in entered if path.is_relative_to(home)}


def test_the_architecture_page_lists_the_files_of_a_call():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
    section = page.split("## One call, file by file")[1].split("## ")[0]
    listed = re.findall(r"^\d+\. `(.+?)`", section, re.MULTILINE)
    with local_world(4) as ranks:
        for found in ranks.run(files_of_a_warm_call):
            assert found - {"comm/local.py"} == set(listed)  # that file is the exchange of threads
