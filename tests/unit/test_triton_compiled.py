"""Compile Triton programs to machine code for GPUs that may be absent; the interpreter does not check types."""

import os
import subprocess
import sys

import pytest

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
