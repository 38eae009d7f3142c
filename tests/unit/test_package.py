"""The installed package: its version, its wheel, and the message about a missing extra."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import warnings
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import burst_attention
from burst_attention import cli
from burst_attention.integrations import hf
from burst_attention.integrations.hf import versions

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
        assert refused.stderr.endswith("is not installed: in the checkout, run pip install -e '.[hf]'\n")
    assert run(str(bare / "burst"), "bench", status=2).stderr.endswith("run pip install -e benchmarks\n")
    run(str(bare / "python"), *pip, "install", *pins, f"{wheel}[hf]")
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    train = ("train", "--data", "text.txt", "--ranks", "1", "--steps", "2", "--seq-len", "64", "--out", "out")
    assert "step 2/2" in run(str(bare / "burst"), *train).stdout
    assert (
        "Recommended"
        in run(str(bare / "burst"), "plan", "--seq-len", "64K", "--ranks", "8", "--hardware", "h100-hgx").stdout
    )


def test_the_tested_releases_include_the_pinned_ones():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, (first, last) in versions.TESTED.items():
        assert versions._release(first) <= versions._release(pins[name]) <= versions._release(last)
    assert versions._release(pins["transformers"]) == versions._release(versions.TESTED["transformers"][1])
    assert f"torch>={versions.TESTED['torch'][0]}" in PROJECT["dependencies"]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert all(f"{name} {first} to {last}" in readme for name, (first, last) in versions.TESTED.items())


def test_a_newer_release_than_the_tested_ones_warns_once_by_name_and_version(monkeypatch):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=2, **sizes)

    def warned() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            for _ in range(2):
                hf.parallelize(LlamaForCausalLM(config))
        return [str(each.message) for each in seen if "newer" in str(each.message)]

    assert warned() == []
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.1", "2.9"), "transformers": ("5.1", "99.0")})
    (text,) = warned()
    assert text.startswith(f"torch {torch.__version__} is newer than 2.9, the last release that")
    assert "pip install -c constraints.txt -e '.[hf]'" in text


def test_the_trainers_bridge_says_in_one_line_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "burst_attention.integrations.trainers", raising=False)
    wanted = re.escape("accelerate is not installed: in the checkout, run pip install -e '.[trainer]'")
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module("burst_attention.integrations.trainers")


def test_what_needs_transformers_says_in_one_line_what_to_install():
    said = run_python(
        "import importlib, sys\n"
        "sys.modules['transformers'] = None\n"
        "for name in ('integrations.hf', 'inference'):\n"
        "    try:\n"
        "        importlib.import_module(f'burst_attention.{name}')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    assert said.splitlines() == ["transformers is not installed: in the checkout, run pip install -e '.[hf]'"] * 2


def test_no_error_names_a_package_that_is_on_no_registry():
    sources = [path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    wrong = [path.name for path in sources if re.search(r"install ['\"]?burst-attention", path.read_text("utf-8"))]
    assert not wrong
