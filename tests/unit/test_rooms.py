"""The arrows between the rooms, as docs/architecture.md draws them, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import burst_attention

ROOT = Path(burst_attention.__file__).parent
OUTER = ("engines", "training", "integrations", "bench", "cli")
NEVER = {  # a room or file -> what it must not import
    "plan": ("torch", "burst_attention.kernels", "burst_attention.comm", "burst_attention.sweep"),
    "comm": ("burst_attention.plan", "burst_attention.kernels", "burst_attention.sweep"),
    "kernels": (
        "torch.distributed",
        "burst_attention.comm",
        "burst_attention.sweep",
        *(f"burst_attention.plan.{n}" for n in ("layout", "route", "program", "schedule", "assignment", "mask")),
    ),
    "kernels/reference.py": ("burst_attention.kernels.aten", "burst_attention.kernels.pieces"),
    "kernels/aten.py": ("burst_attention.kernels.reference",),
    **{
        file: tuple(f"burst_attention.{room}" for room in OUTER)
        for file in (
            "sweep.py",
            "attention.py",
            "call.py",
            "op.py",
            "remat.py",
            "planning.py",
            "resharding.py",
            "derivatives.py",
            "scalars.py",
            "loss.py",
            "loss_checks.py",
        )
    },
    "engines": (
        "burst_attention.training",
        "burst_attention.bench",
        "burst_attention.cli",
        "burst_attention.kernels.reference",
        "burst_attention.kernels.aten",
    ),
    "bench": ("burst_attention.cli",),
    "integrations": ("burst_attention.kernels.reference", "burst_attention.kernels.aten", "burst_attention.cli"),
    "training": (
        "burst_attention.kernels.reference",
        "burst_attention.kernels.aten",
        "burst_attention.cli",
        "burst_attention.bench",
    ),
}


def imports(path: Path) -> set[str]:
    module = ("burst_attention", *path.relative_to(ROOT).with_suffix("").parts)
    package = module[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found |= {base, *(f"{base}.{name.name}" for name in node.names)}
    return found


def crossings(room: str, forbidden: tuple[str, ...]) -> list[str]:
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room} is empty"
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        for prefix in forbidden
        if name == prefix or name.startswith(prefix + ".")
    ]


@pytest.mark.parametrize("room", list(NEVER))
def test_arrows(room: str) -> None:
    assert not crossings(room, NEVER[room])


def test_only_the_command_line_and_the_comparison_import_testing() -> None:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in ("testing", "cli", "bench"):
            assert not any(name.startswith("burst_attention.testing") for name in imports(path)), path


def test_transformers_is_imported_in_few_places() -> None:
    users = {
        str(path.relative_to(ROOT).parent)
        for path in ROOT.rglob("*.py")
        if any(name.split(".")[0] == "transformers" for name in imports(path))
    }
    assert users <= {"integrations", "training", "bench"}


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_library_needs_torch_and_numpy_only() -> None:
    """A fresh interpreter with everything optional blocked still computes."""
    run_python(
        "import sys\n"
        "for name in ('transformers', 'datasets', 'safetensors', 'matplotlib', 'tensorboard', 'tyro', 'triton',"
        " 'flash_attn', 'hypothesis', 'pytest'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from burst_attention import Mask, burst_attention, make_plan\n"
        "from burst_attention import loss, testing\n"
        "q = torch.randn(1, 2, 9, 4, requires_grad=True)\n"
        "burst_attention(q, q, q, make_plan(9, mask=Mask(window=3))).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_importing_the_library_imports_nothing_heavy() -> None:
    heavy = run_python(
        "import sys, burst_attention\n"
        "print([n for n in ('transformers', 'datasets', 'matplotlib', 'triton', 'tyro') if n in sys.modules])\n"
    )
    assert heavy.strip() == "[]"
