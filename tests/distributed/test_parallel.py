"""Every strategy trains the same model to the same loss; what a strategy can't do it refuses by name."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from burst_attention import Mask, Strategy
from burst_attention.integrations import hf
from burst_attention.launch.join import make_mesh
from burst_attention.plan.strategy import ALIASES, NAMED, strategy_of, text_of
from burst_attention.testing import attend, local_world
from burst_attention.testing.check import relative_l2
from burst_train.data.sequences import TokenSequence
from burst_train.step.compare import whole_attention
from burst_train.step.loop import train
from burst_train.step.model import batch_of, build_model, model_in
from burst_train.strategies import STRATEGIES, Heads, choose
from tests.support.training import config_of, losses, norms

STEPS = 8
EVERY = [
    ("burst", 2, {}),
    *(
        pytest.param(*row, marks=pytest.mark.long)
        for row in (("tensor-sequence", 2, {}), ("usp:2", 4, {}), ("tensor", 2, {"accumulate": 2}))
    ),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("ulysses", 2, {}),
            ("ring", 2, {}),
            ("layout=striped", 4, {}),
            ("tensor-sequence", 4, {"data_parallel": 2}),
            ("single", 2, {"data_parallel": 2}),
        )
    ),
]


@pytest.fixture(scope="module")
def expected(pools, corpus, tmp_path_factory):
    """Losses and gradient norms of a single rank, by how many sequences a step has."""
    known = {}

    def get(sequences):
        if sequences not in known:
            out = tmp_path_factory.mktemp("single")
            changes = {"strategy": "single", "seq_len": 96, "steps": STEPS, "accumulate": sequences}
            pools(1).run(train, config_of(corpus, out, **changes))
            known[sequences] = losses(out), norms(out)
        return known[sequences]

    return get


@pytest.mark.parametrize(("strategy", "world", "changes"), EVERY)
def test_every_strategy_trains_as_a_single_rank(pools, corpus, tmp_path, expected, strategy, world, changes):
    settings = {"strategy": strategy, "seq_len": 96, "steps": STEPS, **changes}
    pools(world).run(train, config_of(corpus, tmp_path, **settings))
    right, right_norms = expected(changes.get("data_parallel", 1) * changes.get("accumulate", 1))
    assert right[-1] < right[0] - 0.3, "it learns"
    assert losses(tmp_path) == pytest.approx(right, abs=1e-4)
    assert norms(tmp_path) == pytest.approx(right_norms, rel=1e-3)


SIZES = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "initializer_range": 0.1}
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "grouped and tied": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "norms of heads": lambda: Qwen3Config(**SIZES),
    "biases and windows": lambda: Qwen2Config(
        **SIZES | {"num_key_value_heads": 2}, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
}


def parameter_gradients(name, kind="llama"):
    """Whole fp64 gradients by name on this rank, of one packed sequence."""
    shared, world = choose(name), torch.distributed.get_world_size()
    mesh, everyone = make_mesh("cpu"), init_device_mesh("cpu", (world,))
    config = MODELS[kind]()
    shared.check(Heads.of(config), 64, world)
    dtype = torch.float64
    plan = shared.plan(64, group=mesh["context"])
    model = build_model("tiny", config, shared, plan, dtype=dtype, mesh=mesh, everyone=everyone, seed=3)
    ids = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(5))
    batch = batch_of([TokenSequence(ids.int().numpy(), (0, 11, 40, 64))], torch.device("cpu"))
    with CommDebugMode() as counter:
        loss = model(**batch, num_items_in_batch=61).loss
        forward = dict(counter.get_comm_counts())
        loss.backward()
    grads = {}
    for name, parameter in model_in(model).named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        grads[name] = parameter.grad.full_tensor()
    counts = ({str(k): n for k, n in c.items()} for c in (forward, counter.get_comm_counts()))
    return loss.item(), grads, list(counts)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("burst", 4), ("ring", 4), ("ulysses", 4), ("usp:2", 4), ("tensor", 4), ("tensor-sequence", 4), ("tensor", 2)],
)
@pytest.mark.long
def test_every_gradient_is_the_single_ranks(pools, strategy, world):
    ((loss, expected, _),) = pools(1).run(parameter_gradients, "single")
    for rank, (own_loss, grads, _) in enumerate(pools(world).run(parameter_gradients, strategy)):
        assert_same(rank, own_loss, grads, loss, expected)


def assert_same(rank, own_loss, grads, loss, expected):
    assert own_loss == pytest.approx(loss, abs=1e-12)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert expected[name].abs().max() > 0, name
        assert relative_l2(grad, expected[name]) < 1e-11, (rank, name)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "llama"])
@pytest.mark.parametrize("strategy", ["auto", "tensor", "tensor-sequence"])
@pytest.mark.long
def test_other_models_gradients_are_the_single_ranks_too(pools, strategy, kind):
    ((loss, expected, _),) = pools(1).run(parameter_gradients, "single", kind)
    if kind == "biases and windows":
        assert len(set(hf.layer_windows(MODELS[kind]()))) == 2
    for rank, (own_loss, grads, _) in enumerate(pools(2).run(parameter_gradients, strategy, kind)):
        assert_same(rank, own_loss, grads, loss, expected)


def test_tensor_parallelism_exchanges_no_more_than_megatron(pools):
    """Per block and pass: two sums, or, with sequence parallelism, two gathers and two scatters."""
    layers = 2
    _, _, (forward, both) = pools(2).run(parameter_gradients, "tensor")[0]
    sums = "c10d_functional.all_reduce"
    assert forward[sums] == 2 * layers
    # Of the head's gradient there is one more sum; all else is computed alike on every rank.
    assert both[sums] == 4 * layers + 1
    _, _, (forward, both) = pools(2).run(parameter_gradients, "tensor-sequence")[0]
    gather, scatter = "c10d_functional.all_gather_into_tensor", "c10d_functional.reduce_scatter_tensor"
    assert (forward[gather], forward[scatter]) == (2 * layers, 2 * layers)
    assert (both[gather], both[scatter]) == (4 * layers, 4 * layers)


def test_whole_attention_in_windows_longer_than_one_call():
    make = torch.Generator().manual_seed(0)
    seqlen = 2500  # several calls of WINDOW_ROWS rows each
    q, k, v, dout = (torch.randn(1, heads, seqlen, 8, generator=make) for heads in (2, 1, 1, 2))
    mask = Mask(window=900, cu_seqlens=[0, 700, seqlen])  # a later call starts inside of its document
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = whole_attention(*inputs, mask.cu_seqlens, window=mask.window)
    grads = torch.autograd.grad(out, inputs, dout)
    right = attend(q, k, v, mask, dout=dout)
    for x, y in zip((out, *grads), (right.out, right.dq, right.dk, right.dv), strict=True):
        assert relative_l2(x, y) < 1e-5


LLAMA = Heads(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_strategy_can_share_is_not_refused(strategy):
    choose(strategy).check(LLAMA, 1024, 1)
    if strategy != "single":
        choose(strategy).check(LLAMA, 1024, 8)


def test_a_strategy_is_read_as_it_is_written():
    assert choose("usp:4").strategy == Strategy(
        layout="zigzag", route="direct", circulate="key-value", ulysses_degree=4, cache_qkv=True, chunks=1
    )
    assert choose("layout=zigzag,ulysses_degree=2,cache_qkv=False").strategy == Strategy(
        layout="zigzag", ulysses_degree=2, cache_qkv=False
    )
    for name, strategy in NAMED.items():
        assert choose(name).strategy == strategy and text_of(strategy) == name
    assert strategy_of(text := text_of(choose("usp:4").strategy)) == choose("usp:4").strategy and "=" in text
    for old, new in ALIASES.items():
        assert strategy_of(old) == NAMED[new]
    assert choose("auto", balanced=True).strategy == Strategy(layout="balanced")


@pytest.mark.parametrize("remat", ["none", "layer", "keep-attention"])
def test_a_strategy_plans_for_what_is_recomputed(remat):
    with local_world(1) as ranks:
        (planned,) = ranks.run(lambda group: choose("auto", remat=remat).plan(64, group=group).planner.remat)
    assert planned == remat


def test_a_head_dim_of_its_own_is_read():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    for config, head_dim in ((Qwen3Config(**sizes, head_dim=32), 32), (Qwen2Config(**sizes), 16)):
        sizes_read = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim, "hidden": 64, "intermediate": 96}
        expected = Heads(**sizes_read, family=config.model_type)
        assert Heads.of(config) == expected


def mesh_rows():
    mesh = make_mesh("cpu", data_parallel=2)
    return mesh["context"].mesh.tolist(), mesh["data"].mesh.tolist()


def test_neighbours_share_a_sequence(pools):
    rows = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert pools(4).run(mesh_rows) == rows
