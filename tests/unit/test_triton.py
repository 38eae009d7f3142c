"""Triton kernels in Triton's interpreter: all bands, grouped queries, odd lengths and dimensions, carried state."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from burst_attention import Mask
from burst_attention.kernels import choose, prove
from burst_attention.kernels.contract import BackwardInputs, blank_output, merge_
from burst_attention.kernels.reference import Reference
from burst_attention.plan.tile import Tile, Tiles
from burst_attention.testing import Case, check, local_world
from burst_attention.testing.check import relative_l2
from tests.support import tile_cases
from tests.support.tile_cases import BANDS, inputs

pytest.importorskip("triton")
kernel_module = pytest.importorskip("burst_attention.kernels.triton.kernel")
if not kernel_module.interpreted():
    pytest.skip("on a GPU tests/gpu runs the compiled kernels", allow_module_level=True)
from burst_attention.kernels.prove import Remembered  # noqa: E402
from burst_attention.kernels.triton.blocks import meetings  # noqa: E402
from burst_attention.kernels.triton.tuning import Sizes, Trial, Tuner, alike, candidates, fixed_sizes, kind_of  # noqa: E402


def compare(table, dim, value_dim, dtype, **options):
    tile_cases.compare(kernel_module.Triton(tuned=False), table, dim, value_dim, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.long
def test_every_band(dtype):
    for band in BANDS:
        compare(BANDS[band], 16, 16, dtype, batch=1, heads=(2, 1))


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 40), (96, 96), (128, 128), (24, 256)])
def test_head_dims(dim, value_dim):
    compare([(0, 37, 0, 37, 0, 36)], dim, value_dim, torch.float32, batch=1, heads=(2, 1))


@pytest.mark.parametrize(("softcap", "band"), [(0.4, "window"), (3.0, "both"), (0.4, "several")])
def test_soft_caps(softcap, band):
    kernel = kernel_module.Triton(tuned=False).capped(softcap)
    tile_cases.compare(kernel, BANDS[band], 16, 24, torch.float32, softcap=softcap, batch=1, heads=(2, 1))
    assert kernel.untuned().softcap == softcap


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.long
def test_any_tile_in_blocks_of_any_size(seed):
    """All of these affect how a block's keys are split into masked and unmasked steps."""
    dice = np.random.default_rng(seed)
    rows, columns = (int(n) for n in dice.integers(1, 150, 2))
    lo, hi = sorted(int(n) for n in dice.integers(-columns, rows, 2))
    tile = Tile(0, rows, 0, columns, -columns, rows).part((0, rows), (0, columns))
    tile = Tile(0, rows, 0, columns, lo, hi).part((0, rows), (0, columns)) or tile
    size = Sizes(int(dice.choice([16, 32, 64])), int(dice.choice([16, 32, 64])), 4, 1)
    kernel, tiles = kernel_module.Triton(tuned=False), Tiles(np.array([tile]))
    q, k, v, dout = inputs(rows, columns, 16, 16, torch.float32, batch=1, heads=(2, 1))
    judge = Reference()
    out, lse = judge.forward(q.double(), k.double(), v.double(), tiles, 0.3)
    mine = blank_output(q, v, rows, torch.float32)
    kernel.run_forward((q, k, v), mine, tiles, 0.3, size)
    lse_there = torch.where(lse == -torch.inf, torch.tensor(0.0).double(), lse)
    delta = (out * dout.double()).sum(-1)
    wide = (x.double() for x in (dout, q, k, v))
    right = (out, lse, *judge.backward(BackwardInputs(*wide, lse_there, delta, tiles, 0.3)))
    grads = [torch.empty(x.shape) for x in (q, k, v)]
    given = BackwardInputs(dout, q, k, v, lse_there.float(), delta.float(), tiles, 0.3)
    kernel.run_backward(given, tuple(grads[:1]), size, keys=False)
    kernel.run_backward(given, tuple(grads[1:]), size, keys=True)
    floor = 0.05 * dout.double().norm().item()
    for name, actual, expected in zip(("out", "lse", "dq", "dk", "dv"), (*mine, *grads), right, strict=True):
        assert relative_l2(actual, expected, floor=floor) < 1e-5, (name, tile, size)


@pytest.mark.parametrize("program", ["backward_queries", "backward_keys"])
@pytest.mark.parametrize("rows", [64, 61])
def test_blocks_by_descriptors_equal_those_by_addresses(program, rows):
    """With the tensor memory accelerator: also a last block that rows don't fill, and a narrow D."""
    kernel, asked = kernel_module.Triton(tuned=False), []
    kernel.launch = lambda *a, **constants: (asked.append(constants["TMA"]), kernel_module._launch(*a, **constants))
    for dim, value_dim, reachable in ((32, 72, True), (72, 32, True), (24, 72, False)):
        q, k, v, dout = inputs(rows, rows, dim, value_dim, torch.float16, batch=2, heads=(2, 1))
        lse, delta = torch.randn(2, 2, 2, rows).unbind(0)
        tiles = Tiles(np.array([[0, 20, 0, rows, 0, 19], [20, rows, 3, 50, -5, 40]]))
        given = BackwardInputs(dout, q, k, v, lse.abs() + 3, delta, tiles, dim**-0.5)
        like = (q,) if program == "backward_queries" else (k, v)
        results = []
        for tma in (False, True):
            results.append([torch.empty(x.shape) for x in like])
            kernel.run_backward(given, tuple(results[-1]), Sizes(32, 32, 4, 1, tma), keys=len(like) == 2)
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        assert all(x.isfinite().all() and x.any() for x in results[0])
        assert asked[-2:] == [False, reachable]


def test_descriptors_are_left_where_the_accelerator_cannot_load():
    whole = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    describable = kernel_module.describable
    assert describable(whole, 128) and describable(whole[..., :32], 64) and describable(whole[:, :, 3:], 64)
    assert not describable(whole, 256), "fewer rows than a block"
    assert not describable(whole[..., :48], 64) and not describable(whole[..., :24], 64), "narrower than a box"
    odd = torch.empty(2, 128, 4, 100, dtype=torch.bfloat16).transpose(1, 2)
    assert not describable(odd, 64), "strides"
    assert not describable(torch.empty(2, 4, 128, 128, dtype=torch.bfloat16)[..., :100], 64), "a D that is not proved"
    assert not describable(torch.empty(2 * 128 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 2, 128, 64), 64), "address"
    assert not describable(whole[:, :1].expand(2, 4, 128, 64), 64), "heads at one place"
    assert not describable(whole[:, :, :0], 64) and not describable(whole[:0], 64), "empty"
    for rows, right in ((2**16 - 1, True), (2**16 + 1, False)):  # two GiB
        assert describable(torch.empty(1, rows, 128, 128, dtype=torch.bfloat16, device="meta"), 64) is right


def test_the_proof_loads_by_descriptors_and_by_addresses(monkeypatch):
    """On a device, ``auto`` refuses wrong results of either."""
    seen = []
    record = lambda program, grid, *_, TMA, **__: seen.append((program.__name__, TMA))  # noqa: E731

    def check(kernel, judge, device, tensors, dlse, fixed_order, table):
        (dout, q, k, v), stats = tensors, torch.ones(tensors[0].shape[:3])
        given = BackwardInputs(dout, q, k, v, stats, stats, Tiles(np.array(table)), 0.1)
        for program in ("backward_queries", "backward_keys"):
            sizes = fixed_sizes(program, (q.shape[3], v.shape[3]), q.dtype, 9)._replace(tma=True)
            kernel.run_backward(given, (), sizes, keys=program == "backward_keys")

    monkeypatch.setattr(prove, "_check", check)
    for head_dims in ((64, 64), (96, 96), (128, 128), (128, 64)):
        seen.clear()
        prove.check_against_reference(
            kernel_module.Triton(launch=record), torch.device("cpu"), torch.bfloat16, head_dims
        )
        assert set(seen) == {(name, tma) for name in ("backward_queries", "backward_keys") for tma in (False, True)}


def test_blocks_that_fill_the_tensors():
    """64 rows and 64 columns: blocks load without bounds, also where several tiles meet one block."""
    for table in ([(0, 61, 0, 59, -10, 60)], [(0, 20, 0, 20, 0, 19), (20, 61, 20, 59, -5, 40)]):
        compare(table, 16, 24, torch.float32, batch=1, heads=(2, 1))


def test_rows_that_lie_far_apart_are_copied():
    near, far = (torch.empty(1, device="meta").as_strided((1, 2, 3, 16), (0, 16, n, 1)) for n in (2**20, 2**23))
    assert kernel_module.in_reach(near) is near
    assert kernel_module.in_reach(far).stride() == (96, 48, 16, 1)


@pytest.mark.parametrize("heads", [(6, 2), (5, 1)])
def test_grouped_queries(heads):
    compare(BANDS["causal"], 16, 16, torch.float32, heads=heads, batch=1)


def test_odd_lengths():
    for length in (1, 15, 17, 64, 129):
        compare([(0, length, 0, length, 0, length - 1)], 16, 16, torch.float32, heads=(2, 2), batch=1)


def test_a_running_state_is_continued_in_place_where_it_lies():
    q, k, v, _ = inputs(50, 70, 16, 16, torch.float32, heads=(2, 1))
    first, second = (Tiles(np.array(BANDS["several"][part], np.int64)) for part in (slice(0, 2), slice(2, 3)))
    kernel = kernel_module.Triton(tuned=False)
    whole = kernel.forward(q, k, v, Tiles(np.array(BANDS["several"])), 0.3)
    # A view of a larger total, as the sweep hands it over.
    out, lse = torch.full((2, 2, 60, 16), 7.0), torch.full((2, 2, 60), 7.0)
    out[:, :, 5:55], lse[:, :, 5:55] = kernel.forward(q, k, v, first, 0.3)
    kernel.extend(q, k, v, second, 0.3, out[:, :, 5:55], lse[:, :, 5:55])
    assert relative_l2(out[:, :, 5:55], whole[0]) < 1e-6
    assert relative_l2(lse[:, :, 5:55], whole[1]) < 1e-6
    assert (out[:, :, :5] == 7).all() and (out[:, :, 55:] == 7).all() and (lse[:, :, 55:] == 7).all()
    merged = kernel.forward(q, k, v, first, 0.3)
    merge_(*merged, *kernel.forward(q, k, v, second, 0.3))
    assert relative_l2(out[:, :, 5:55], merged[0]) < 1e-6


@pytest.mark.parametrize(
    ("mask", "layout"), [(Mask(window=15), "zigzag"), (Mask(cu_seqlens=[0, 15, 38, 65]), "striped")]
)
def test_the_sweep_over_ranks_with_our_kernel(mask, layout):
    """Ranks as threads: the interpreter patches Triton's language for all threads while it runs a program."""
    case = Case(seqlen=65, mask=mask, layout=layout, kernel="triton", q_heads=2, kv_heads=1, head_dim=16)
    with local_world(3) as ranks:
        for report in ranks.run(lambda group: check(case, group=group)):
            assert report.passed, report


def test_two_runs_give_the_same_bits():
    tiles = Tiles(np.array(BANDS["several"]))
    q, k, v, dout = inputs(50, 70, 16, 16, torch.float16, batch=1, heads=(2, 1))
    kernel, stats = kernel_module.Triton(tuned=False), torch.ones(1, 2, 50)
    given = BackwardInputs(dout, q, k, v, stats, stats, tiles, 0.3)
    runs = [(*kernel.forward(q, k, v, tiles, 0.3), *kernel.backward(given)) for _ in "ab"]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_every_tile_meets_its_blocks():
    make = np.random.default_rng(0)
    for length, size in itertools.product((1, 16, 50, 64), (16, 32)):
        starts = make.integers(0, length, 9)
        stops = starts + make.integers(1, length - starts + 1)
        offsets, ids = meetings(starts, stops, size, length)
        for block in range(-(-length // size)):
            expected = [n for n in range(9) if starts[n] < (block + 1) * size and stops[n] > block * size]
            assert ids[offsets[block] : offsets[block + 1]].tolist() == expected
        assert offsets[-1] == len(ids)


@pytest.mark.parametrize(
    ("dtype", "reported"), [(torch.bfloat16, "bf16"), (torch.float64, "does not take torch.float64")]
)
def test_dtypes_without_a_program_are_refused(dtype, reported):
    with pytest.raises(ValueError, match=reported):
        choose("triton", device=torch.device("cpu"), dtype=dtype)


def test_widths_without_registers_are_refused():
    with pytest.raises(ValueError, match="kernel='triton' takes head dims up to 256, not 264"):
        choose("triton", device=torch.device("cpu"), dtype=torch.float32, head_dims=(264, 16))


def test_sizes_are_remembered_on_disk_and_a_broken_file_is_no_trouble(tmp_path):
    file = Remembered("sizes.json", tmp_path / "new")
    assert Tuner(file).read() == {}
    for key, sizes in (("some key", Sizes(64, 32, 4, 2)), ("another", Sizes(16, 16, 4, 1))):
        file.add({key: sizes._asdict()})
    assert Tuner(file).read() == {"some key": Sizes(64, 32, 4, 2), "another": Sizes(16, 16, 4, 1)}
    for broken in ("{broken", "[]", '{"a": {"m": 1, "surprise": 2}}'):
        file.path.write_text(broken)
        assert Tuner(file).read() == {}


def test_sizes_are_measured_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(Tuner, "key", lambda self, program, q, v, kind: f"{program} {kind}")
    monkeypatch.setattr(Tuner, "measure", lambda self, kernel, program, *_: Sizes(16, 16, 4, len(program)))
    q, _, v, _ = inputs(8, 8, 16, 16)
    tiles = Tiles(np.array(BANDS["causal"]))
    tuner = Tuner(Remembered("sizes.json", tmp_path))
    assert tuner.sizes("forward", q, v, tiles) == fixed_sizes("forward", (16, 16), torch.float32, 0)
    tuner.measure_all(kernel_module.Triton(), q, v)
    later = Tuner(Remembered("sizes.json", tmp_path))
    assert tuner.sizes("forward", q, v, tiles) == later.sizes("forward", q, v, tiles) == Sizes(16, 16, 4, 7)
    assert len(later.read()) == 9


@pytest.mark.parametrize("program", ["forward", "backward_queries", "backward_keys"])
def test_a_size_with_different_results_is_rejected(program):
    q, _, v, _ = inputs(8, 8, 16, 24, batch=1, heads=(2, 1))
    state = torch.random.get_rng_state()
    trial = Trial(kernel_module.Triton(tuned=False), program, q, v, "banded", 48)
    assert torch.equal(torch.random.get_rng_state(), state), "a measurement draws nothing from the user's generator"
    right = trial.results(Sizes(16, 16, 4, 1))
    assert len(right) == {"forward": 4, "backward_queries": 1, "backward_keys": 2}[program]
    assert alike(trial.results(Sizes(32, 16, 4, 1)), right)
    trial.inputs = replace(trial.inputs, tiles=Tiles(np.array([[0, 48, 0, 48, -5, 47]])))
    assert not alike(trial.results(Sizes(16, 16, 4, 1)), right)
    assert not alike([x * float("nan") for x in right], right)


def test_every_launch_asks_for_fused_multiply_and_add(monkeypatch):
    """Triton's default differs by version."""
    asked = {}

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, enable_fp_fusion=None, **__: asked.__setitem__(self.name, enable_fp_fusion)

    names = ("forward", "backward_queries", "backward_keys", "carry")
    for name in names:
        monkeypatch.setattr(kernel_module.programs, name, Recorder(name))
    q, k, v, dout = inputs(8, 8, 16, 16)
    tiles, kernel = Tiles(np.array([[0, 8, 0, 8, 0, 7]])), kernel_module.Triton(tuned=False)
    kernel.forward(q, k, v, tiles, 1.0)
    lse = delta = torch.zeros(q.shape[:3])
    kernel.backward(BackwardInputs(dout, q, k, v, lse, delta, tiles, 1.0))
    kernel_module.carried(dout.half(), delta)
    assert asked == dict.fromkeys(names, True)


def test_sizes_are_fixed_where_determinism_is_asked_for(monkeypatch):
    kernel = kernel_module.Triton()
    q, _, v, _ = inputs(8, 8, 16, 16)
    monkeypatch.setattr(kernel_module, "interpreted", lambda: False)
    monkeypatch.setattr(Tuner, "sizes", lambda *_: "measured")
    tiles = Tiles(np.array([[0, 8, 0, 8, 0, 7]]))
    for asked, expected in ((False, "measured"), (True, fixed_sizes("forward", (16, 16), torch.float32, 0))):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=asked: asked)
        assert kernel._sizes("forward", q, v, tiles) == expected


def test_the_fixed_choice_is_among_the_candidates():
    for width, dtype, major in itertools.product((16, 64, 96, 128, 256), (torch.float32, torch.bfloat16), (0, 9, 10)):
        fixed = fixed_sizes("forward", (width, width), dtype, major)
        assert fixed in candidates("forward", (width, width), dtype, major) and min(fixed.m, fixed.n) >= 16


def test_kinds_of_tiles():
    assert kind_of(Tiles(np.array(BANDS["full"]))) == "full"
    assert kind_of(Tiles(np.array(BANDS["several"]))) == "banded"
    assert kind_of(Tiles(np.array([Tile(n, n + 1, n, n + 1, 0, 0) for n in range(20)]))) == "many"
