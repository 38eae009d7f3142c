"""Models whose indexers choose keys, over ranks: logits, loss, all gradients and choices equal those of one process."""

import copy
import functools

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from burst_attention import Mask, Strategy
from burst_attention.attention.footprint import LiveBytes
from burst_attention.integrations import hf
from burst_attention.integrations.hf.layers import indexed
from burst_attention.integrations.hf.layers.attention_chunks import attend_in_chunks
from burst_attention.integrations.hf.reading import known
from burst_attention.kernels import chosen as kernel
from burst_attention.testing import local_world
from tests.distributed.test_mesh import mesh_of, whole_gradients
from tests.support import vision_models
from tests.support.conditioning import certain, margin_of_choices
from tests.support.hybrid_models import apart, certain_tokens, one_process, tokens
from tests.support.indexed_models import (
    CACHED,
    COUNT,
    FAMILIES,
    HEADS,
    LATENTS,
    SHARING,
    Choices,
    Sent,
    make_indexed,
    noting_choices,
)
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

BLOCKS = "minimax_m3_vl"
EVERYDAY = ("deepseek_v32", "deepseek_v32" + HEADS, "glm_moe_dsa", BLOCKS, SHARING)
sharing = pytest.mark.skipif(SHARING not in FAMILIES, reason="of transformers 5.24")


def families_but(*left_out):
    """The families as parameters; some are of the long tests."""
    marks = {True: (), False: pytest.mark.long}
    both = [*FAMILIES, *(family + HEADS for family in LATENTS)]
    return [pytest.param(x, marks=marks[x in EVERYDAY]) for x in both if x not in left_out]


@pytest.mark.parametrize("family", families_but())
@pytest.mark.parametrize(("world", "layout"), [(1, "auto"), (2, "contiguous"), (3, "zigzag"), (4, "auto")])
def test_one_sequence(family, world, layout):
    check(make_indexed(family), world, (0, 97), rows=2, layout=layout)


@pytest.mark.parametrize("family", families_but(BLOCKS))
def test_latents_are_sent_if_they_are_smaller(family, monkeypatch):
    model, sent = make_indexed(family), Sent(monkeypatch)
    with local_world(2) as ranks:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group)(input_ids=tokens(48)) and None)
    parts = [part for part in of_latents(model) if known.is_indexed(part)]  # the others have windows
    latents = {(1, part.kv_lora_rank + part.qk_rope_head_dim, part.kv_lora_rank) for part in parts}
    assert sent.found == ({(4, parts[0].qk_head_dim, 0)} if family.endswith(HEADS) else latents)


def twice(_, __, out):
    return 2 * out


class Twice(ModelHook):
    def post_forward(self, module, output):
        return 2 * output


def adapt(part):
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["kv_b_proj"], init_lora_weights=False), part)


ATTACHED = {
    "a hook": lambda part: part.kv_b_proj.register_forward_hook(hf.token_wise(twice)),
    "a forward": lambda part: add_hook_to_module(part.kv_b_proj, Twice()),
    "a bias": lambda part: part.kv_b_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(64).double())),
    "an adapter": adapt,
}


@pytest.mark.parametrize("attached", ATTACHED)
def test_what_is_attached_to_the_up_projection_is_applied(attached, monkeypatch):
    """Heads are sent then, since a latent's attention uses the weight alone."""

    model = make_indexed("glm_moe_dsa")
    plain = model(tokens(48)).logits
    for part in of_latents(model):
        ATTACHED[attached](part)
    assert (model(tokens(48)).logits - plain).norm() > 1e-3 * plain.norm()
    sent = Sent(monkeypatch)
    check(model, 2, (0, 48))
    assert sent.found == {(4, 12, 0)}


@pytest.mark.parametrize("chunks", [1, 2])
def test_latents_under_autocast(chunks):
    """Its roundings are no worse than those of one process; all keys are chosen, so that no choice differs."""
    model, ids = make_indexed("deepseek_v32", index_topk=64), tokens(60)
    exact = one_process(model, ids, (0, 60))
    model.zero_grad()

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def error(gradients):
        return max(((gradients[name] - x).norm() / x.norm()).item() for name, x in exact[2].items())

    def rank(group):
        memory = hf.Memory(attention_chunks=chunks)
        return step(hf.parallelize(copy.deepcopy(model).float(), group, gradients="sum", memory=memory))

    with local_world(2) as ranks:
        ours = ranks.run(rank)
    summed = {name: sum(found[name].double() for found in ours) for name in exact[2]}
    assert 0 < error(summed) <= 1.5 * error(step(copy.deepcopy(model).float()))


@pytest.mark.parametrize("chunks", [1, 2])
def test_latents_of_a_compiled_model(chunks, monkeypatch):
    model, sent = make_indexed("deepseek_v32"), Sent(monkeypatch)
    ids = certain_tokens(model, (0, 48))
    _, loss, gradients = one_process(model, ids, (0, 48))
    ours = hf.parallelize(copy.deepcopy(model), gradients="sum", memory=hf.Memory(attention_chunks=chunks))
    ours.zero_grad()
    compiled = torch.compile(ours, backend="aot_eager")
    logits = compiled(input_ids=ids).logits
    found = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found.backward()
    assert abs(found.item() / loss - 1) <= HIDDEN and sent.found == {(1, 20, 16)}
    for name, gradient in gradients.items():
        assert (ours.get_parameter(name).grad - gradient).norm() <= GRADIENTS * gradient.norm(), name


@pytest.mark.parametrize("family", families_but(BLOCKS))
@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), (3, "balanced"), (4, "contiguous")])
def test_packed_documents(family, world, layout):
    check(make_indexed(family), world, DOCUMENTS, layout=layout)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", families_but())
def test_padding(family, side):
    if side == "left" and family in (BLOCKS, SHARING, SHARING + HEADS):
        pytest.skip("refused: test_blocks_are_counted_from_the_start_of_a_row, test_scales_that_grow_with_the_position")
    model = make_indexed(family)
    draws = (padded(tokens(70, seed=seed), side) for seed in range(5, 13))
    batch = certain(draws, lambda batch: margin_of_choices(model, lambda moved: moved(**batch, use_cache=False)))

    def rank(group):
        return stepped(hf.parallelize(copy.deepcopy(model), group, gradients="sum"), batch)

    with local_world(3) as ranks:
        found = ranks.run(rank)
    loss, gradients = stepped(model, batch, use_cache=False)
    assert abs(found[0][0] / loss - 1) <= 1e-6  # transformers' loss is in fp32
    for name, gradient in gradients.items():
        ours = sum(result[1][name] for result in found)
        assert (ours - gradient).norm() <= 2e-6 * gradient.norm(), name


def choices_of(model, seqlen, world, monkeypatch, **options):
    """What the indexers choose over ranks, and in one process."""
    alone, ids = copy.deepcopy(model), certain_tokens(model, (0, seqlen))
    expected = noting_choices(alone)
    alone(ids, use_cache=False)
    choices = Choices(monkeypatch)
    with local_world(world) as ranks:
        ranks.run(lambda group: hf.parallelize(copy.deepcopy(model), group, **options)(input_ids=ids))
    return choices.found, expected


@pytest.mark.parametrize("family", families_but(BLOCKS))
def test_choices_equal_one_process_index_by_index(family, monkeypatch):
    found, expected = choices_of(make_indexed(family), 120, 3, monkeypatch)
    assert len(found) == len(expected) >= 2
    for ours, theirs in zip(found, expected, strict=True):
        few = torch.arange(120) < COUNT - 1  # where a query sees fewer, stock also names keys that its mask hides
        assert torch.equal(ours[:, ~few], theirs[:, ~few].sort(-1).values)
        for n in range(COUNT - 1):
            assert (ours[:, n] == torch.tensor([-1] * (COUNT - 1 - n) + list(range(n + 1)))).all()


def test_chosen_blocks_equal_one_process(monkeypatch):
    model = make_indexed(BLOCKS)
    found, expected = choices_of(model, 63, 4, monkeypatch, strategy="burst")
    size = model.config.index_block_size
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        keys = ours.unflatten(3, (-1, size))
        assert torch.equal(keys[..., 0].where(keys[..., 0] < 0, keys[..., 0] // size), theirs.sort(-1).values)
        assert (ours[:, :, -1] // size == 12).any(-1).all() and (ours[:, :, -1] // size == 11).any(-1).all()  # local


def test_blocks_are_counted_from_the_start_of_a_row():
    model, ids = make_indexed(BLOCKS), tokens(48)
    positions, mask = torch.arange(48).remainder(20)[None].expand(2, -1), torch.ones_like(ids)
    mask[0, :5] = 0

    def call(memory=None, **batch):
        return lambda group: hf.parallelize(copy.deepcopy(model), group, memory=memory)(input_ids=ids, **batch)

    for memory in (None, hf.Memory(attention_chunks=2)):
        assert "counts blocks from the start of a row" in refused(call(memory, position_ids=positions))

    def prefixed(group):
        ours = hf.parallelize(copy.deepcopy(model), group)
        with hf.shards(ours, {"input_ids": ids}, mask=Mask(prefix=9)) as shard:
            ours.model(**shard)

    assert "lets queries see later keys" in refused(prefixed)
    assert "padding in front" in refused(call(attention_mask=mask))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", families_but(BLOCKS))
def test_recomputation_makes_the_same_choice_or_keeps_it(family, keep, monkeypatch):
    model, choose, calls = make_indexed(family), kernel.choose, []
    monkeypatch.setattr(kernel, "choose", lambda *given: calls.append(given) or choose(*given))
    choices = Choices(monkeypatch)
    check(model, 2, (0, 90), layout="contiguous", prepare=functools.partial(checkpointed, keep=keep))
    full = sum(type(part).__name__.endswith("Indexer") for part in model.modules())
    first, again = choices.found[:full], choices.found[full:]
    assert len(again) == full
    assert len(calls) == full * 3 * (1 if keep else 2)  # rank 0 visits its own shard, rank 1 both
    for one, other in zip(reversed(first), again, strict=True):
        assert torch.equal(one, other)


def step_of(model, ids):
    """(logits, loss, gradients) of a parallelized model, the loss in the logits' dtype."""
    out = model(input_ids=ids, logits="gather")
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), loss.item(), gradients


def is_one_process(found, expected):
    hidden, loss, (gradient, name) = apart(found, expected)
    assert hidden <= HIDDEN and loss <= HIDDEN and gradient <= GRADIENTS, (hidden, loss, gradient, name)


def check_memory(model, world, memory, *, seqlen=64):
    ids = certain_tokens(model, (0, seqlen))
    expected = one_process(model, ids, (0, seqlen))
    model.zero_grad()

    def rank(group):
        return step_of(hf.parallelize(copy.deepcopy(model).train(), group, gradients="sum", memory=memory), ids)

    with local_world(world) as ranks:
        is_one_process(ranks.run(rank), expected)


@pytest.mark.parametrize("recompute", ["layer", "keep-attention"])
@pytest.mark.parametrize("family", ["glm_moe_dsa", BLOCKS, pytest.param(SHARING, marks=sharing)])
def test_memory_options(family, recompute):
    check_memory(make_indexed(family), 2, hf.Memory(recompute=recompute, mlp_chunks=2))


def with_heads(family, heads, key_heads=None):
    """A model with this number of heads in all layers. The number of key heads matters to blocks alone."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads or heads}
    if family.removesuffix(HEADS) == "dots3_note":
        sizes |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": heads}
    return make_indexed(family, **sizes | ({"index_n_heads": key_heads} if key_heads else {}))


CHUNKED = [  # heads, and those of keys of the family with blocks
    *((family, 6, None, chunks) for family in (*LATENTS, *(x + HEADS for x in LATENTS)) for chunks in (2, 3)),
    *((BLOCKS, 6, 3, 3), (BLOCKS, 8, 2, 2), (BLOCKS, 8, 2, 4)),
]


@pytest.mark.parametrize(
    ("world", "recompute"),
    [
        (2, "none"),
        (3, "layer"),
        (2, "keep-attention"),
        pytest.param(1, "layer", marks=pytest.mark.long),
        pytest.param(1, "keep-attention", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("family", "heads", "key_heads", "chunks"),
    [pytest.param(*x, marks=() if x[0] in EVERYDAY and x[3] != 2 else pytest.mark.long) for x in CHUNKED],
)
def test_chunks_of_heads(family, heads, key_heads, chunks, world, recompute):
    memory = hf.Memory(attention_chunks=chunks, recompute=recompute)
    check_memory(with_heads(family, heads, key_heads), world, memory, seqlen=97)


@pytest.mark.parametrize("recompute", ["none", "layer", "keep-attention"])
def test_chunks_share_one_choice_and_repeat_no_exchange(recompute, monkeypatch):
    model, calls = with_heads("glm_moe_dsa", 6), {"choose": 0, "forward": 0, "backward": 0}

    def counted(name, function, *given, **how):
        calls[name] += 1
        return function(*given, **how)

    for name in calls:
        monkeypatch.setattr(kernel, name, functools.partial(counted, name, getattr(kernel, name)))
    ids = tokens(64)
    ours = hf.parallelize(model.train(), memory=hf.Memory(attention_chunks=3, recompute=recompute))
    step_of(ours, ids)
    again = 2 if recompute == "layer" else 1
    assert calls == {"choose": 2 * again, "forward": 9 * again, "backward": 9}


def kept_by_a_forward(memory):
    """Bytes for each query and head that are alive after a forward: of tensors as wide as a row, and as a latent."""
    latent, rotary, alive = 26, 4, {}
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "kv_lora_rank": latent, "num_hidden_layers": 1}
    model = make_indexed("deepseek_v32", **sizes)

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **kwargs or {})
            for x in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[1] > 1 and x.shape[2] == 64:
                    storage = x.untyped_storage()
                    alive[storage._cdata] = StorageWeakRef(storage), x.shape[3], storage.nbytes()
            return found

    ours = hf.parallelize(model.train(), memory=memory)
    with Noting():
        loss = ours(input_ids=tokens(64), labels=tokens(64)).loss
    left = [(width, size) for ref, width, size in alive.values() if not ref.expired()]
    loss.backward()
    return [sum(size for each, size in left if each == width) / (2 * 64 * 6) for width in (latent + rotary, latent)]


def test_chunks_keep_outputs_of_latents_and_no_queries():
    assert kept_by_a_forward(None) == [8 * 30, 8 * 26]
    assert kept_by_a_forward(hf.Memory(attention_chunks=3)) == [0, 8 * 26]


def test_gradients_of_keys_that_chunks_share_are_rounded_once():
    """In bf16, 256 + 0.5 is 256; of all four chunks the sum is 257.5, which rounds to 258."""
    q, k = torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    out = attend_in_chunks(lambda q, k, v, plan: q + k, 4, None, q, k.requires_grad_(), k.detach(), None)
    out.backward(torch.tensor([256, 0.5, 0.5, 0.5], dtype=torch.bfloat16).view(1, 4, 1, 1))
    assert k.grad.item() == 258


def peak_of_step(memory):
    sizes = {"num_hidden_layers": 1, "kv_lora_rank": 64, "num_experts_per_tok": 1}
    model = make_indexed("deepseek_v32", num_attention_heads=12, num_key_value_heads=12, **sizes)
    ours = hf.parallelize(model.train(), memory=memory)
    with LiveBytes(*ours.parameters()) as live:
        ours(input_ids=tokens(256), labels=tokens(256)).loss.backward()
    return live.most


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_chunks_take_less_memory_at_the_peak(recompute):
    whole, chunked = (peak_of_step(hf.Memory(attention_chunks=n, recompute=recompute)) for n in (1, 4))
    assert chunked < 0.75 * whole, (chunked, whole)


def of_mesh(family, sizes, memory, by_context, other_choices, shards):
    """Take a step over a mesh, which must be one process's; return what indexers chose, and one process's.

    ``other_choices``: all but the first rank of a tensor-parallel axis choose the worst keys. ``shards``: by
    FSDP2 over the context.
    """
    mesh, model = mesh_of(1, *sizes), with_heads(family, 4, 2 if family == BLOCKS else None)
    ids = certain_tokens(model, (0, 96))
    noted = noting_choices(alone := copy.deepcopy(model))
    expected, theirs = one_process(alone, ids, (0, 96)), [x.sort(-1).values for x in noted]
    experts = mesh["cp", "tp"]._flatten("ep") if by_context else None
    hf.tensor_parallel(model.train(), mesh["tp"], experts=experts)
    hf.parallelize(model, mesh["cp"], memory=memory, timeout=60)
    for part in (*model.model.layers, model) if shards else ():
        fully_shard(part, mesh=mesh["dp", "cp"]._flatten("fsdp"))
    with pytest.MonkeyPatch.context() as patch:
        ours, choose = Choices(patch), indexed.choose_keys
        if other_choices and mesh["tp"].get_local_rank():
            patch.setattr(
                indexed, "choose_keys", lambda q, k, weights, *more, **how: choose(q, k, -weights, *more, **how)
            )
        *results, _ = step_of(model, ids)
    is_one_process([(*results, whole_gradients(model, mesh, shards=shards))], expected)
    size = model.config.index_block_size if family == BLOCKS else None
    return ours.found, theirs, size


LAYER, KEEP = hf.Memory(recompute="layer"), hf.Memory(recompute="keep-attention", mlp_chunks=2)
HALVES = hf.Memory(recompute="layer", attention_chunks=2)
MESHES = [
    ("deepseek_v32", (2, 2), None, False),
    ("deepseek_v32" + HEADS, (2, 2), LAYER, False),
    ("glm_moe_dsa", (1, 2), HALVES, False),
    ("glm_moe_dsa", (2, 2), KEEP, False),
    ("hy_v4", (2, 2), None, False),
    (BLOCKS, (2, 2), LAYER, True),
    *(
        pytest.param(family, sizes, memory, by_context, marks=pytest.mark.long)
        for family in (*CACHED, *(x + HEADS for x in LATENTS if x != SHARING))
        for sizes, memory, by_context in (
            ((2, 2), None, True),
            ((1, 2), LAYER, False),
            ((2, 2), HALVES, False),
            ((2, 2), KEEP, False),
        )
    ),
]


def check_mesh(pools, family, sizes, memory, by_context, *, other_choices=False, shards=False):
    asked = (family, sizes, memory, by_context, other_choices, shards)
    found = pools(sizes[0] * sizes[1]).run(of_mesh, *asked)
    assert [bool(ours) for ours, _, _ in found] == [rank < sizes[1] for rank in range(len(found))]  # noted once
    for ours, theirs, size in found[: sizes[1]]:
        for one, other in zip(ours, theirs, strict=False):  # a recomputed layer makes its choice again
            if size is not None:
                keys = one.unflatten(3, (-1, size))[..., 0]
                assert torch.equal(keys.where(keys < 0, keys // size), other)
            else:
                few = torch.arange(96) < COUNT - 1
                assert torch.equal(one[:, ~few], other[:, ~few])
        assert len(ours) >= len(theirs) >= 2


@pytest.mark.parametrize(("family", "sizes", "memory", "by_context"), MESHES)
def test_a_step_over_a_tensor_parallel_axis(pools, family, sizes, memory, by_context):
    check_mesh(pools, family, sizes, memory, by_context)


def test_weights_sharded_over_the_context_too(pools):
    check_mesh(pools, "deepseek_v32", (2, 2), HALVES, False, shards=True)


def test_ranks_of_a_tensor_parallel_axis_take_the_choice_of_the_first(pools):
    check_mesh(pools, "glm_moe_dsa", (2, 2), LAYER, False, other_choices=True)


def test_what_is_refused_by_name():
    model, ids = make_indexed("glm_moe_dsa"), tokens(48)

    def chunks(group):
        hf.parallelize(copy.deepcopy(model), group, memory=hf.Memory(attention_chunks=3))

    def keys(group):
        hf.parallelize(make_indexed(BLOCKS), group, memory=hf.Memory(attention_chunks=3))

    def split(group):
        hf.parallelize(copy.deepcopy(model), group, strategy=Strategy(ulysses_degree=2))(input_ids=ids)

    several = "attention_chunks=3) can't split the 4 query heads"
    assert f"{several} of GlmMoeDsaAttention evenly; choose a divisor of 4" in refused(chunks)
    more = "and 2 key-value heads of MiniMaxM3VLAttention evenly; choose a divisor of 2, or a multiple of it"
    assert f"{several} {more}" in refused(keys)
    assert "ulysses_degree=2 of the strategy splits heads" in refused(split)


@sharing
def test_gradients_of_shared_latents_and_learned_angles_are_there():
    """So that all cases above would fail without them: of layers that reuse latents, and of scales and angles."""
    model = make_indexed(SHARING)
    _, _, gradients = one_process(model, tokens(48), (0, 48))
    for name, gradient in gradients.items():
        assert not name.endswith(("alpha", "scaling.scale", "scaling.bias")) or (gradient.abs() > 1e-4).all(), name
    modes = model.config.kv_sharing_modes
    assert modes == ["store", "reuse", "store", "reuse_but_indexer", "store", "reuse_but_indexer"]
    sources = {n for n, mode in enumerate(modes) if mode == "store"}
    assert {n for n in range(6) if f"model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight" in gradients} == sources


@sharing
def test_scales_that_grow_with_the_position():
    """A row that does not begin at position 0 has other results, so it is refused."""
    model, ids = make_indexed(SHARING), tokens(48)
    mask, later = torch.ones_like(ids), torch.arange(7, 55)[None]
    mask[0, :5] = 0
    assert (model(ids, position_ids=later).logits - model(ids).logits).norm() > 1
    for batch in ({"attention_mask": mask}, {"position_ids": later}):
        call = lambda group, batch=batch: hf.parallelize(copy.deepcopy(model), group)(input_ids=ids, **batch)  # noqa: E731
        assert "move a row's first token away from position 0" in refused(call)


@sharing
def test_reentrant_checkpointing_is_refused():
    """It loses gradients of what layers get from one another, latents and angles, also without the library."""
    ids, own = tokens(48), {"kv_source_layers": [*range(6)]}

    def checkpointed(group, **changes):
        model = hf.parallelize(make_indexed(SHARING, **changes).train(), group)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model(input_ids=ids, labels=ids)

    assert "layers.1.self_attn (MistralLarge4TextAttention) has keys and values of another" in refused(checkpointed)
    assert "rotary_emb (MistralLarge4TextRotaryEmbedding) has learned weights" in refused(
        lambda group: checkpointed(group, **own)
    )


def test_sizes_are_read_inside_of_a_vision_language_model():
    """Layers that take the choice of the layer before have no indexer, and its number of keys."""
    for name in {"hy_v4_vl", SHARING}.intersection(CONFIG_MAPPING):
        model = vision_models.build(name)
        types, found = model.config.get_text_config().indexer_types, hf.indexed_layers(model)
        assert [each.chooses for each in found] == [kind == "full" for kind in types]
        assert {(each.count, each.head_dim, each.inside) for each in found} == {(8, 40, True)}


def test_blocks_that_are_not_certain_are_refused_when_parallelized():
    """More blocks that are always chosen than are chosen: their scores are equal, and stock's order decides."""
    many, heads = make_indexed(BLOCKS, index_local_blocks=4), make_indexed(BLOCKS, index_n_heads=4)
    both = make_indexed(BLOCKS, is_causal=False)  # its indexer hides later keys, whatever the configuration says

    def parallelized(model):
        return refused(lambda group: hf.parallelize(copy.deepcopy(model), group) and None)

    assert "index_local_blocks=4 of the configuration is more than index_topk_blocks=3" in parallelized(many)
    assert "index_n_heads=4 of the configuration is not num_key_value_heads=2" in parallelized(heads)
    assert "is_causal=False of the configuration lets queries see later keys" in parallelized(both)


def test_generation_on_one_rank_and_back():
    model, ids = make_indexed("glm_moe_dsa"), tokens(48)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)

    def rank(group):
        ours = hf.parallelize(copy.deepcopy(model), group)
        tokens_made = ours.generate(ids, max_new_tokens=4, do_sample=False)
        again = hf.unparallelize(ours)
        assert all(not hasattr(part, "stock_class") for part in again.modules())
        return tokens_made

    with local_world(2) as ranks:
        assert all(torch.equal(made, expected) for made in ranks.run(rank))
