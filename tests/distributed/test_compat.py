"""Functions of ring-flash-attn and yunchang, over shapes of their tests and others, against dense fp64 attention."""

import gc
import importlib
import inspect
from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_attention import Mask
from burst_attention.compat import ring_flash_attn as compat
from burst_attention.compat.call import _PLANNED, MOST_PLANS
from burst_attention.compat.yunchang import LAYOUTS, LongContextAttention
from burst_attention.integrations import hf
from burst_attention.testing import attend, local_world
from burst_attention.testing.check import relative_l2
from tests.support.conditioning import greatest

BATCH = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
VARLEN = ("ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")


def places(name: str, borders: list[int], rank: int, world: int) -> torch.Tensor:
    """Which tokens the original's own tests give to a rank, written out from what they do."""
    tokens, parts = torch.arange(borders[-1]), [(0, borders[-1])]
    if name.startswith("stripe"):
        return tokens[rank::world]
    if name in VARLEN and not name.startswith("llama3"):
        parts = list(pairwise(borders))
    chunks = 2 * world if name.startswith("zigzag") else world
    mine = (rank, chunks - 1 - rank) if name.startswith("zigzag") else (rank,)
    return torch.cat([tokens[a:b].reshape(chunks, -1)[n] for a, b in parts for n in mine])


def inputs(seqlen: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, batch: int = 1) -> list[torch.Tensor]:
    """Global q, k, v, dout [B, S, H, D]."""
    torch.manual_seed(seqlen)
    query, key = heads
    return [torch.randn(batch, seqlen, h, dim, dtype=torch.float64).to(dtype) for h in (query, key, key, query)]


def expected(tensors: list[torch.Tensor], mask: Mask, scale: float | None = None) -> list[torch.Tensor]:
    """out, dq, dk, dv [B, S, H, D] and lse [B, H, S], dense and in fp64."""
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    answer = attend(q, k, v, mask, dout=dout, scale=scale)
    return [*(x.transpose(1, 2) for x in (answer.out, answer.dq, answer.dk, answer.dv)), answer.lse]


def called(group, name, packing, tensors, borders, causal, window=(-1, -1), scale=None):
    """out, dq, dk, dv and lse of this rank's tokens, as global tensors' rows; and which tokens they are."""
    rank, world = (group.rank(), group.size()) if group else (0, 1)
    where = places(name, borders, rank, world)
    q, k, v, dout = (x[:, where] for x in tensors)
    if name in VARLEN:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
    dim = q.ndim - 2
    packed = {
        "func": [q, k, v],
        "kvpacked_func": [q, torch.stack([k, v], dim)],
        "qkvpacked_func": [torch.stack([q, k, v], dim)] if q.shape == k.shape else None,
    }[packing]
    leaves = [x.clone().requires_grad_() for x in packed]
    own = []
    if name in VARLEN:
        border = torch.tensor(borders, dtype=torch.int32)
        own = [border // world, max(b - a for a, b in pairwise(borders)) // world]
        if name.startswith("llama3"):
            *own, keys = compat.llama3_flash_attn_prepare_cu_seqlens(border, causal, rank, world)
            own += [1, keys]
    function = getattr(compat, f"{name}_{packing}")
    out, lse, nothing = function(
        *leaves, *own, 0.0, scale, causal, window_size=window, return_attn_probs=True, deterministic=True, group=group
    )
    assert nothing is None and out.is_contiguous()
    out.backward(dout)
    grads = [x.grad for x in leaves]
    if len(grads) < 3:
        grads = [*grads[:-1], *grads[-1].unbind(dim)]
    found = [out.detach(), *grads, lse.detach()]
    return where, [x.unsqueeze(0) for x in found] if name in VARLEN else found


def worst(group, name, packing, tensors, borders, causal, right, *more):
    """The largest relative error of out, dq, dk, dv, lse on this rank."""
    where, found = called(group, name, packing, tensors, borders, causal, *more)
    shards = [y.index_select(2 if n == 4 else 1, where) for n, y in enumerate(right)]
    return greatest(map(relative_l2, found, shards))


def small(world: int, name: str) -> list[int]:
    """Borders of documents: an empty one, a short one, and of llama3's one that no rank begins or ends with."""
    if name not in VARLEN:
        return [0, 12 * world]
    unit = 1 if name.startswith("llama3") else 2 * world
    inner = [0, 1, 1, 4, 9] if unit > 1 else [0, 3, 3, 4, 5 * world]
    return [*(unit * border for border in inner), unit * 12 if unit > 1 else 12 * world]


EVERY = [("func", *mask) for mask in ((True, (-1, -1)), (False, (-1, -1)), (True, (4, 0)), (False, (5, 0)))]
EVERY += [(packing, True, (-1, -1)) for packing in ("kvpacked_func", "qkvpacked_func")]  # unpacked before the mask


@pytest.mark.parametrize("world", [2, 3])
def test_every_function_is_dense_attention(world: int) -> None:
    for name, (packing, causal, window) in product((*BATCH, *VARLEN), EVERY):
        borders = small(world, name)
        heads = (4, 4) if packing == "qkvpacked_func" else (4, 2)
        tensors = inputs(borders[-1], heads, 8, torch.float64, batch=1 if name in VARLEN else 2)
        cut = {"window": window[0] + 1 if window[0] >= 0 else None, "cu_seqlens": borders if name in VARLEN else None}
        right = expected(tensors, Mask(causal=causal or window[1] == 0, **cut))
        with local_world(world) as ranks:
            found = ranks.run(worst, name, packing, tensors, borders, causal, right, window)
        assert greatest(found) <= 1e-12, (name, packing, causal, window)


def test_one_rank_needs_no_process_group() -> None:
    for name in (*BATCH, *VARLEN):
        borders = [0, 4, 4, 12] if name in VARLEN else [0, 12]
        tensors = inputs(12, (2, 2), 4, torch.float64)
        right = expected(tensors, Mask(cu_seqlens=borders), scale=0.3)
        assert worst(None, name, "func", tensors, borders, True, right, (-1, -1), 0.3) <= 1e-12, name


def test_published_borders_of_eight_ranks() -> None:
    """cu_seqlens [0, 7, 14, 16] over 8 ranks: what each sees, by hand."""
    wanted = {
        0: ([0, 2], [0, 2], slice(0, 2)),
        3: ([0, 1, 2], [0, 7, 8], slice(0, 8)),
        6: ([0, 2], [0, 7], slice(7, 14)),
        7: ([0, 2], [0, 2], slice(14, 16)),
    }
    borders = torch.tensor([0, 7, 14, 16], dtype=torch.int32)
    for rank, right in wanted.items():
        q, k, longest_q, longest_k, keys = compat.llama3_flash_attn_prepare_cu_seqlens(borders, True, rank, 8)
        assert (q.tolist(), k.tolist(), keys) == right and q.dtype == torch.int32
        assert (longest_q, longest_k) == (q.diff().max(), k.diff().max())
    q, k, _, _, keys = compat.llama3_flash_attn_prepare_cu_seqlens(borders, False, 3, 8)
    assert (q.tolist(), k.tolist(), keys) == ([0, 1, 2], [0, 7, 14], slice(0, 14))


def test_arguments_go_by_place_and_by_name() -> None:
    options = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic"]
    options += ["return_attn_probs", "group"]
    assert list(inspect.signature(compat.zigzag_ring_flash_attn_func).parameters) == ["q", "k", "v", *options]
    own = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    llama3 = inspect.signature(compat.llama3_flash_attn_varlen_kvpacked_func)
    assert list(llama3.parameters) == ["q", "kv", *own, *options]
    q = torch.randn(1, 6, 2, 4)
    by_place = compat.ring_flash_attn_func(q, q, q, 0.0, 0.5, True)
    assert torch.equal(by_place, compat.ring_flash_attn_func(v=q, k=q, q=q, causal=True, softmax_scale=0.5))
    assert not torch.allclose(by_place, compat.ring_flash_attn_func(q, q, q, softmax_scale=0.5))  # not causal unasked
    with pytest.raises(TypeError, match="softcap"):
        compat.ring_flash_attn_func(q, q, q, softcap=30.0)


def test_all_ranks_refuse_what_one_asks_for() -> None:
    def rank(group):
        q = torch.randn(1, 6, 2, 4)
        options = {"window_size": (3, 4)} if group.rank() == 1 else {}
        with pytest.raises(ValueError, match="both sides must be equal"):
            compat.ring_flash_attn_func(q, q, q, group=group, **options)
        return compat.ring_flash_attn_func(q, q, q, group=group).shape  # the group is as good as before

    with local_world(2, timeout=20) as ranks:
        assert ranks.run(rank) == [(1, 6, 2, 4)] * 2


def test_plans_are_made_once_and_forgotten_with_their_group() -> None:
    def rank(group):
        q = torch.randn(1, 4, 2, 4)
        for length in (4, 4, 2, 4):
            compat.ring_flash_attn_func(*[q[:, :length]] * 3, group=group)
        schedules = [schedule for schedule, *_ in _PLANNED[group].values()]
        compat.ring_flash_attn_func(q, q, q, group=group)
        assert [schedule for schedule, *_ in _PLANNED[group].values()] == schedules and len(schedules) == 2
        for window in range(MOST_PLANS + 3):
            compat.ring_flash_attn_func(q, q, q, causal=True, window_size=(window, 0), group=group)
        assert len(_PLANNED[group]) == MOST_PLANS

    before = len(_PLANNED)
    with local_world(2, timeout=20) as ranks:
        ranks.run(rank)
    gc.collect()
    assert len(_PLANNED) == before


BATCHES, STEPS = ([0, 10, 11, 26, 32], [0, 30, 48]), 6
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
}


@contextmanager
def own_registry():
    """The ranks of a pool serve other tests, too, which want transformers' registry as it was."""
    hf.register()
    names = ("burst", "flash_attention_2")
    before = [ALL_ATTENTION_FUNCTIONS[name] for name in names]
    try:
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            AttentionInterface.register(name, function)


def make_model(family: str, implementation: str):
    torch.manual_seed(0)
    model_class, config_class, own = FAMILIES[family]
    config = config_class(**SMALL, **own, num_key_value_heads=2, pad_token_id=0, attn_implementation="sdpa")
    model = model_class(config)
    # As it is after model_class.from_pretrained(..., attn_implementation=...) where flash-attn is installed.
    model.config._attn_implementation = implementation
    return model.train()


@own_registry()
def trained(family: str, implementation: str, module: str | None) -> list[float]:
    """A training script as it is written for the package that ``module`` names; None: one process, not sharded."""
    rank, world, group = 0, 1, None
    if module:
        library, group = importlib.import_module(module), dist.group.WORLD
        rank, world = dist.get_rank(), dist.get_world_size()
        library.substitute_hf_flash_attn(group, heads_k_stride=1)
    model = make_model(family, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        documents = BATCHES[step % 2]
        total = documents[-1]
        torch.manual_seed(total)
        ids = torch.randint(64, (1, total))
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(documents)])[None]
        targets = ids.roll(-1, 1)
        targets[:, [b - 1 for b in documents[1:]]] = -100
        here = slice(rank * total // world, (rank + 1) * total // world)
        if module:
            library.update_ring_flash_attn_params(torch.tensor(documents, dtype=torch.int32), group)
        logits = model(ids[:, here], position_ids=positions[:, here], use_cache=False).logits
        summed = torch.nn.functional.cross_entropy(logits[0].float(), targets[0, here], reduction="sum")
        loss = summed / (targets != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if module:
            dist.all_reduce(loss)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("family", "implementation"), [("llama", "burst"), ("mistral", "flash_attention_2")])
def test_a_script_trains_the_same(pools, family: str, implementation: str) -> None:
    alone = trained(family, "sdpa", None)
    assert alone[-2] < alone[0] - 0.1 and alone[-1] < alone[1] - 0.1
    for losses in pools(2).run(trained, family, implementation, "burst_attention.compat.ring_flash_attn"):
        assert losses == pytest.approx(alone, abs=1e-5)


@own_registry()
def refusals() -> list[str]:
    """Return the errors that a rank gets for unsupported calls."""
    group, found = dist.group.WORLD, []

    def reported(call):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("nothing was refused")

    borders = torch.tensor([0, 8])
    reported(lambda: compat.update_ring_flash_attn_params(borders, group))
    compat.substitute_hf_flash_attn(group, 1)
    model, ids = make_model("llama", "flash_attention_2"), torch.zeros(1, 4, dtype=torch.int64)
    positions = torch.arange(4)[None] + 4 * dist.get_rank()
    reported(lambda: model(ids, position_ids=positions, use_cache=False))
    reported(lambda: compat.update_ring_flash_attn_params(torch.tensor([0, 7]), group))
    reported(lambda: compat.update_ring_flash_attn_params(borders, dist.new_group([0, 1])))
    compat.update_ring_flash_attn_params(borders, group)
    reported(lambda: model(ids, position_ids=torch.arange(4)[None], use_cache=False))
    reported(lambda: model(ids[:, :3], position_ids=positions[:, :3], use_cache=False))
    model(ids, position_ids=positions, use_cache=False)
    mixed = make_model("llama", "flash_attention_2")
    mixed.model.layers[1].self_attn.config = make_model("llama", "sdpa").config
    reported(lambda: mixed(ids, position_ids=positions, use_cache=False))
    return found


def test_models_that_would_go_wrong_are_refused(pools) -> None:
    wanted = [
        "call substitute_hf_flash_attn",
        "call update_ring_flash_attn_params before",
        "ends at 7, which is not a multiple of 2 ranks",
        "is not the group given to substitute_hf_flash_attn",
        "position_ids differ from the positions of the plan's tokens",
        "input_ids has 3 tokens",
        "attn_implementation='sdpa'",
    ]
    for found in pools(2).run(refusals):
        for text, said in zip(wanted, found, strict=True):
            assert text in said


ORIGINAL = {"basic": "ring", "zigzag": "zigzag", "strip": "stripe"}


@pytest.mark.parametrize(
    ("kind", "causal", "softcap"), [*((kind, True, 0.9) for kind in LAYOUTS), ("zigzag", False, 0.0)]
)
def test_equals_dense_attention(kind: str, causal: bool, softcap: float) -> None:
    q, k, v, dout = (torch.randn(2, 24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    right = attend(
        *(x.transpose(1, 2) for x in (q, k, v)), Mask(causal=causal), dout=dout.transpose(1, 2), softcap=softcap or None
    )

    def rank(group):
        where = places(ORIGINAL[kind], [0, 24], group.rank(), 4)
        leaves = [x[:, where].requires_grad_() for x in (q, k, v)]
        attention = LongContextAttention(ring_impl_type=kind, ulysses_degree=1, group=group)
        out = attention(*leaves, causal=causal, softcap=softcap, return_attn_probs=True)
        out.backward(dout[:, where])
        found = [out, *(x.grad for x in leaves)]
        wanted = [x.transpose(1, 2)[:, where] for x in (right.out, right.dq, right.dk, right.dv)]
        return greatest(map(relative_l2, found, wanted))

    with local_world(4, timeout=20) as ranks:
        assert greatest(ranks.run(rank)) <= 1e-12
