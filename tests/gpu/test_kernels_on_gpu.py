"""Every kernel that this GPU can run, against the fp64 reference on it."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from burst_bench.claims.gpu import WAITS, packed_batches, waits_of_a_step, wrong_far_below_zero

from burst_attention import Mask, burst_attention, make_plan
from burst_attention.kernels import KERNELS, choose, explain
from burst_attention.kernels.contract import BackwardInputs
from burst_attention.kernels.prove import Remembered, check_against_reference
from burst_attention.kernels.triton.tuning import Trial, Tuner, alike, candidates, fixed_key
from burst_attention.plan.layout import Layout
from burst_attention.plan.tile import Tile, Tiles
from burst_attention.testing import Case, check, local_world
from burst_attention.testing.check import relative_l2
from tests.support.schedules import pair_tiles
from tests.support.tile_cases import BANDS, LARGE, compare, inputs

triton = pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources  # noqa: E402

if not torch.cuda.is_available():  # one skip, not one for each of hundreds of cases
    pytest.skip("needs a GPU", allow_module_level=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ON_GPU = [name for name in KERNELS if name not in ("aten", "aten-fp32")]
# Two runs give the same bits under torch's deterministic algorithms.
FIXED_ORDER = [name for name in ON_GPU if name not in ("cudnn", "aten-cudnn", "aten-efficient")]


@pytest.fixture
def ordered() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # the reference's products have an order here as they are
    yield
    torch.use_deterministic_algorithms(False)


def chosen(name, dtype, head_dims=(64, 64)):
    """The kernel, or a skip that tells why it can't be had here. Triton's with its fixed sizes: compiled once."""
    try:
        kernel = choose(name, device=torch.device("cuda"), dtype=dtype, head_dims=head_dims)
    except ValueError as error:
        pytest.skip(str(error))
    return kernel.untuned()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("band", [*BANDS, *LARGE])
def test_every_band(band, name, dtype):
    compare(chosen(name, dtype), (BANDS | LARGE)[band], 64, 64, dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("dlse", [False, True])
def test_shards_that_came_over_a_wire(dlse, name, dtype):
    """[B, H, S, D] in memory; with a gradient of the lse alone, too."""
    compare(chosen(name, dtype), BANDS["several"], 64, 64, dtype, device="cuda", heads_first=True, dlse=dlse)


@pytest.mark.parametrize("name", ON_GPU)
def test_what_auto_would_prove(name):
    for dtype in (torch.bfloat16, torch.float16):
        kernel = chosen(name, dtype, (128, 64))
        check_against_reference(kernel, torch.device("cuda"), dtype, (128, 64), fixed_order=False)


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("name", FIXED_ORDER)
def test_what_auto_would_prove_of_a_fixed_order(name):
    for dtype in (torch.bfloat16, torch.float16):
        check_against_reference(chosen(name, dtype, (128, 64)), torch.device("cuda"), dtype, (128, 64))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", ON_GPU)
def test_scores_far_below_zero_give_no_nan(name, dtype):
    """Exponentials of padding overflow where lse is below -88.7."""
    assert not list(wrong_far_below_zero(chosen(name, dtype), torch.device("cuda"), dtype))


def test_packed_documents_build_no_graph_for_each_length():
    _, graphs = packed_batches(torch.device("cuda"), 300)
    assert graphs == 0
    for banded in (False, True):
        kernel = choose("auto", device=torch.device("cuda"), dtype=torch.bfloat16, documents=20, banded=banded)
        assert "cudnn" not in kernel.name, "torch's operator builds graphs, too"


def test_the_host_hardly_waits_in_a_step():
    waits = waits_of_a_step(torch.device("cuda"))
    assert len(waits) <= WAITS, "\n".join(waits)


def test_every_size_that_is_measured_gives_the_same(tmp_path):
    kernel, tuner = chosen("triton", torch.bfloat16), Tuner(Remembered("sizes.json", tmp_path))
    q, _, v, _ = inputs(256, 256, 64, 64, torch.bfloat16, device="cuda")
    for program in ("forward", "backward_queries", "backward_keys"):
        trial, sizes = Trial(kernel, program, q, v, "banded", 1000), candidates(*fixed_key(program, q, v))
        right, run = trial.results(sizes[0]), 1
        for each in sizes[1:]:
            try:
                results = trial.results(each)
            except OutOfResources:
                continue
            assert alike(results, right), (program, each)
            run += 1
        assert run > 1, "a choice of one"
        assert tuner.measure(kernel, program, q, v, "banded") in sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(16, 40), (40, 16), (96, 96), (128, 128), (80, 128), (192, 128), (192, 192)]
)
def test_head_dims(dim, value_dim, name, dtype):
    compare(chosen(name, dtype, (dim, value_dim)), [(0, 337, 0, 337, 0, 336)], dim, value_dim, dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("name", ["triton", "aten-efficient", "aten-flash", "flash2", "flash3", "flash4", "cudnn"])
def test_the_widest_heads(name, dlse, dtype):
    compare(
        chosen(name, dtype, (256, 256)),
        [(0, 200, 0, 200, 0, 199)],
        256,
        256,
        dtype,
        dlse=dlse,
        device="cuda",
        heads=(2, 1),
    )


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1)])
def test_grouped_queries(heads, name):
    compare(chosen(name, torch.bfloat16), BANDS["causal"], 64, 64, torch.bfloat16, device="cuda", heads=heads)


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("length", [1, 17, 127, 128, 129, 1000])
def test_odd_lengths(length, name):
    compare(
        chosen(name, torch.bfloat16), [(0, length, 0, length, 0, length - 1)], 64, 64, torch.bfloat16, device="cuda"
    )


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("name", FIXED_ORDER)
def test_two_runs_give_the_same_bits(name):
    kernel, tiles = chosen(name, torch.bfloat16), Tiles(np.array([Tile(0, 3000, 0, 3000, 0, 2999)]))
    q, k, v, dout = inputs(3000, 3000, 64, 64, torch.bfloat16, device="cuda")
    lse, delta = torch.full((2, 2, 4, 3000), 5.0, device="cuda")
    given = BackwardInputs(dout, q, k, v, lse, delta, tiles, 0.1)
    runs = [(*kernel.forward(q, k, v, tiles, 0.1), *kernel.backward(given)) for _ in "ab"]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ON_GPU)
def test_thousands_of_documents(name):
    """In one launch of the Triton kernel; the others take one for each."""
    kernel, seqlen = chosen(name, torch.float16), 16384
    layout, mask = Layout("contiguous", seqlen, 1), Mask(cu_seqlens=range(0, seqlen + 1, 8))
    tiles = pair_tiles(layout, layout, mask.regions(seqlen), [0], [0])[0, 0]
    assert len(tiles) == 2048
    q, k, v, _ = inputs(seqlen, seqlen, 32, 32, torch.float16, batch=1, heads=(2, 1), device="cuda")
    out, _ = kernel.forward(q, k, v, tiles, 0.2)
    folded = [x.unflatten(2, (-1, 8)).transpose(1, 2).flatten(0, 1).float() for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*folded, is_causal=True, scale=0.2, enable_gqa=True)
    right = right.unflatten(0, (1, -1)).transpose(1, 2).flatten(2, 3)
    assert relative_l2(out, right) < 6e-3


def test_offsets_beyond_two_to_the_31():
    """q has 2^31 + 2^21 elements: the last head is compared with the same head alone."""
    kernel = chosen("triton", torch.bfloat16)
    heads, rows, dim = 1025, 16384, 128
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    q = torch.randn(1, heads, rows, dim, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 1, 64, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    tiles = Tiles(np.array([Tile(0, rows, 0, 64, -63, rows - 1)]))
    out, lse = kernel.forward(q, k, v, tiles, 0.1)
    alone, lse_alone = kernel.forward(q[:, -1:].clone(), k, v, tiles, 0.1)
    assert torch.equal(out[:, -1:], alone) and torch.equal(lse[:, -1:], lse_alone)


def test_auto_tells_what_it_took():
    for dtype in DTYPES:
        reported = explain(device=torch.device("cuda"), dtype=dtype)
        taken = choose("auto", device=torch.device("cuda"), dtype=dtype).name
        assert reported.startswith(f"auto takes {taken} for {dtype} on cuda")


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize(
    ("mask", "layout", "circulate"),
    [
        (Mask(), "zigzag", "query"),
        (Mask(window=100), "striped", "key-value"),
        (Mask(window=250), "zigzag", "query"),  # tall tiles, limited at one side
        (Mask(), "contiguous", "nearest"),
    ],
)
def test_the_distributed_algorithm(mask, layout, circulate, world, name):
    chosen(name, torch.bfloat16)
    shape = {"seqlen": 515, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    case = Case(**shape, mask=mask, layout=layout, circulate=circulate, kernel=name)
    with local_world(world, timeout=600.0) as ranks:  # the first call compiles
        for report in ranks.run(lambda group: check(case, group=group)):
            assert report.passed, report


def shard(plan, dim=64, heads=(4, 2)):
    make = torch.Generator().manual_seed(plan.rank)
    return [
        torch.randn(1, h, plan.length, dim, generator=make).to("cuda", torch.bfloat16).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]


def test_a_compiled_call_gives_what_an_eager_one_does():
    plan = make_plan(777)
    q, k, v = shard(plan)

    def loss(q, k, v):
        return burst_attention(q * 1.0, k, v, plan).float().square().mean()

    eager = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v), (q, k, v))
    for mine, right in zip(compiled, eager, strict=True):
        assert relative_l2(mine, right) < 1e-2


def test_a_captured_graph_gives_what_an_eager_call_does():
    chosen("triton", torch.bfloat16)
    plan = make_plan(1024)
    q, k, v = (x.detach() for x in shard(plan))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # programs are compiled and tables made before the capture
        eager = burst_attention(q, k, v, plan, kernel="triton")
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = burst_attention(q, k, v, plan, kernel="triton")
    q.copy_(q.flip(2).clone())
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(out, eager)
    assert torch.equal(out, burst_attention(q, k, v, plan, kernel="triton"))


def test_memory_is_that_of_inputs_outputs_and_gradients():
    """128K tokens, H = 32, D = 128: the peak of forward and backward within 1.15 x what the caller gets to see."""
    chosen("triton", torch.bfloat16)
    seqlen, heads, dim = 131072, 32, 128
    tensor = seqlen * heads * dim * 2
    if torch.cuda.mem_get_info()[0] < 14 * tensor:
        pytest.skip(f"needs {14 * tensor / 2**30:.0f} GiB of GPU memory")
    plan = make_plan(seqlen)
    small = make_plan(4096)
    for p, measured in ((small, False), (plan, True)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        q, k, v = (
            torch.randn(1, heads, p.length, dim, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "qkv"
        )
        out = burst_attention(q, k, v, p, kernel="triton")
        out.backward(torch.ones_like(out))
        peak = torch.cuda.max_memory_allocated() - before
        if measured:
            assert peak <= 1.15 * 8 * tensor, f"{peak / tensor:.2f} tensors"  # q, k, v, out, dout, dq, dk, dv
        del q, k, v, out
