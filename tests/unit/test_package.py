"""The installed package: its version, its wheel, and the message about a missing extra."""

import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import burst_attention
from burst_attention import cli

ROOT = Path(__file__).resolve().parents[2]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_version_is_the_installed_packages(capsys):
    assert burst_attention.__version__ == version("burst-attention")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"burst-attention {burst_attention.__version__}, torch ")


def test_the_trainers_extra_brings_what_their_bridge_imports():
    names = {line.split(">")[0] for line in PROJECT["optional-dependencies"]["trainer"]}
    assert {"transformers", "accelerate"} <= names


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_library_needs_torch_and_numpy_only() -> None:
    """A fresh interpreter with everything else blocked still computes."""
    run_python(
        "import sys\n"
        "for name in ('transformers', 'datasets', 'safetensors', 'matplotlib', 'tensorboard', 'tyro', 'rich', 'triton',"
        " 'flash_attn', 'hypothesis', 'pytest'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from burst_attention import Mask, burst_attention, make_plan\n"
        "from burst_attention import loss, testing\n"
        "from burst_attention.compat import ring_flash_attn, yunchang\n"
        "q = torch.randn(1, 2, 9, 4, requires_grad=True)\n"
        "burst_attention(q, q, q, make_plan(9, mask=Mask(window=3))).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_importing_the_library_loads_only_what_a_call_needs() -> None:
    """No other package but torch and numpy either; importing DTensor alone takes half a second."""
    loaded = run_python("import sys, burst_attention\nprint(*sys.modules)\n").split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("burst_attention.")}
    assert rooms == {"plan", "planner", "comm", "kernels", "attention"}
    heavy = {"transformers", "datasets", "matplotlib", "triton", "tyro", "rich", "torch.distributed.tensor"}
    assert not {"burst_train", "burst_bench", *heavy} & set(loaded)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_in_an_empty_environment_checks_itself_and_names_the_extra_of_the_rest(tmp_path):
    """Install only the wheel and the tested version of torch; this needs pip's index."""
    pip, pins = ("-m", "pip", "--disable-pip-version-check", "--quiet"), ("-c", str(ROOT / "constraints.txt"))

    def run(*words: str, status: int = 0, where: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(words, capture_output=True, text=True, timeout=1200, cwd=where, env=environment)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("burst_attention-*.whl")
    held = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert held == {"burst_attention", "burst_train", f"burst_attention-{PROJECT['version']}.dist-info"}
    run(sys.executable, "-m", "venv", str(tmp_path / "bare"))
    bare = tmp_path / "bare" / "bin"
    run(str(bare / "python"), *pip, "install", *pins, "torch", str(wheel))
    reported = run(str(bare / "burst"), "--version").stdout
    assert reported.startswith(f"burst-attention {PROJECT['version']}, torch ")
    run(str(bare / "burst"), "check", "--ranks", "2", "--device", "cpu")
    for name in ("train", "plan", "eval", "export"):
        refused = run(str(bare / "burst"), name, status=2)
        assert refused.stdout == "" and refused.stderr.count("\n") == 1
        assert refused.stderr.endswith("is not installed: pip install 'burst-attention[hf]'\n")
    assert run(str(bare / "burst"), "bench", status=2).stderr.endswith("in a checkout: pip install -e benchmarks\n")
    run(str(bare / "python"), *pip, "install", *pins, f"{wheel}[hf]")
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    train = ("train", "--data", "text.txt", "--ranks", "1", "--steps", "2", "--seq-len", "64", "--out", "out")
    assert "step 2/2" in run(str(bare / "burst"), *train).stdout
    assert (
        "Recommended"
        in run(str(bare / "burst"), "plan", "--seq-len", "64K", "--ranks", "8", "--hardware", "h100-hgx").stdout
    )


def test_the_trainers_bridge_says_in_one_line_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "burst_attention.integrations.trainers", raising=False)
    with pytest.raises(ImportError, match=r"accelerate is not installed: pip install 'burst-attention\[trainer\]'"):
        importlib.import_module("burst_attention.integrations.trainers")


def test_hugging_faces_bridge_says_in_one_line_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "burst_attention.integrations.hf", raising=False)
    with pytest.raises(ImportError, match=r"transformers is not installed: pip install 'burst-attention\[hf\]'"):
        importlib.import_module("burst_attention.integrations.hf")
