"""Compile Triton programs to machine code for GPUs that may be absent; the interpreter does not check types."""

import json
import os
import subprocess
import sys

import pytest
import torch
from burst_bench.claims.compiled import inner_loop

from burst_attention.kernels.triton.tuning import fixed_sizes

pytest.importorskip("triton")

COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from burst_attention.kernels.triton import programs
from burst_attention.kernels.triton.kernel import OPTIONS

settings = {"80": (80, "fp16", True, True), "90": (90, "bf16", False, False)}
capability, io, carry, capped = settings[sys.argv[1]]
constants = {"D": 72, "E": 64, "BLOCK_D": 128, "BLOCK_E": 64, "M": 64, "N": 32, "CARRY": carry, "CAPPED": capped}
constants |= {"EVEN": False, "SAME": False, "TMA": False}
constants["PRECISION"] = "ieee" if io == "fp32" else "tf32"
types = dict.fromkeys(("Q", "K", "V", "dOut"), f"*{io}") | dict.fromkeys(("Tiles", "Offsets", "Ids"), "*i64")
types |= dict.fromkeys(("Out", "Lse", "Delta", "dQ", "dK", "dV"), "*fp32") | {"scale": "fp32", "cap": "fp32"}
for name in ("forward", "backward_queries", "backward_keys"):
    program = getattr(programs, name)
    signature = {n: "constexpr" if n in constants else types.get(n, "i64") for n in program.arg_names}
    given = {(k,): constants[n] for k, n in enumerate(program.arg_names) if n in constants}
    target = GPUTarget("cuda", capability, 32)
    source = ASTSource(program, signature, given)
    made = compile(source, target=target, options={"num_warps": 4, "num_stages": 2, **OPTIONS})
    assert made.asm["cubin"] and "fma.rn.f32" in made.asm["ptx"], name
    print(name, len(made.asm["cubin"]))
"""


@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.slow)])
@pytest.mark.long
def test_programs_compile(tmp_path, capability) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # the default from Triton 3.10 on, which our options override
    command = [sys.executable, "-c", COMPILE, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


BENCH = "import sys; from burst_bench.command import main; sys.exit(main(['compiled', *sys.argv[1:]]))"


def figures(tmp_path, *flags: str) -> list[dict[str, str]]:
    """Return the rows of ``burst bench compiled``."""
    file = tmp_path / "compiled.json"
    command = [sys.executable, "-c", BENCH, *flags, "--json", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["programs"]


@pytest.mark.parametrize(
    ("capability", "flags", "count"),
    [
        ("90", ("--head-dims", "128", "--programs", "backward_keys"), 1),
        ("90", ("--head-dims", "128", "--programs", "backward_keys", "--tokens", "16383"), 1),
        # Tensors of 2 GiB and more, which no descriptor describes.
        pytest.param("90", ("--head-dims", "64", "96", "128", "--tokens", f"{2**20}"), 9, marks=pytest.mark.long),
        pytest.param("90", (), 15, marks=pytest.mark.long),
        pytest.param("100", (), 15, marks=pytest.mark.long),
    ],
)
def test_programs_fit_the_gpu(tmp_path, capability, flags, count) -> None:
    """For head dimensions 64, 96, 128, (192, 128) and 256, and for a length that no block divides."""
    rows = figures(tmp_path, "--capabilities", capability, *flags)
    assert len(rows) == count
    unit = {"90": "wgmma", "100": "tcgen05"}[capability]
    for row in rows:
        assert int(row[unit]) > 0 and int(row["mma.sync"]) == 0, row
        assert int(row["stack"]) <= 128 and float(row["shared"]) <= 227, row
        if capability == "90" and row["D"] == "128, 128" and row["program"] != "forward":
            assert int(row["stack"]) <= (8 if "--tokens" in flags else 0) and float(row["per product"]) <= 55, row
        dims = tuple(int(n) for n in row["D"].split(", "))
        sizes = fixed_sizes(row["program"], dims, torch.bfloat16, int(capability) // 10)
        assert (int(row["TMA"]) > 0) == (sizes.tma and f"{2**20}" not in flags), row


SASS = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4 ;
        /*0030*/              @!P1 BRA P2, 0x60 ;
        /*0040*/                   FSEL R4, R4, RZ, P0 ;
        /*0050*/                   FSEL R5, R5, RZ, P0 ;
        /*0060*/                   FMUL R4, R4, R5 ;
        /*0070*/               @P0 BRA 0x10 ;
        /*0080*/                   FADD R1, R1, R2 ;
        /*0090*/               @P0 BRA 0x80 ;
        /*00a0*/               @P3 BRA 0x0 ;
        /*00b0*/                   BRA 0x20 ;
"""


def test_instructions_of_the_inner_loop_are_counted_without_the_mask() -> None:
    assert inner_loop(SASS) == 5
    assert inner_loop(SASS.replace("HGMMA", "MOV")) == 0
