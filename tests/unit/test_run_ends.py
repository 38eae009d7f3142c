"""Messages at a run's end, settings that a restart may change, and what `make demo` prints before training."""

import io
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from burst_attention.cli.flags import flag
from burst_train.checkpoint.snapshot import check_same_run, settings_of
from burst_train.cli.screen import Screen
from burst_train.cli.train import after_restart, what_is_kept
from burst_train.config import ParallelConfig, TrainConfig, flag_names
from burst_train.run.folder import name_of
from burst_train.run.lock import claimed
from burst_train.run.metrics import Summary

ROOT = Path(__file__).resolve().parents[2]
# By hand, so that a setting can't be left out of the code's own list unnoticed: another value for each.
MUST_LAST = {"model": "llama-2-7b", "lora": 4, "dtype": "float64", "data": "other.txt", "tokenizer": "bytes"}
MUST_LAST |= {"seq_len": 64, "pack": "none", "held_out": 0.3, "seed": 1, "lr": 0.5, "min_lr": 0.5}
MUST_LAST |= {"schedule": "linear", "warmup": 3, "decay_steps": 7, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.5}
MUST_LAST |= {
    "rope_scaling": "yarn:2",
    "chat_loss": "all",
    "eps": 0.5,
    "clip": 0.5,
    "optimizer": "adamw-8bit",
    "global_batch": 2,
}
MAY_CHANGE = {"steps": 9, "out": "elsewhere", "overwrite": True, "save_every": "3", "keep": 7, "eval_every": 3}
MAY_CHANGE |= {"resume": "newest", "deadline": 3.0, "step_timeout": 3.0, "profile": 3, "wandb": "project"}
MAY_CHANGE |= {"on_nan": "skip", "deterministic": False, "held_out_sequences": 3, "save_dtype": "float16"}
MAY_CHANGE |= {"max_positions": 8192, "ranks": 4, "data_parallel": 2, "packing": "balanced", "strategy": "ring"}
MAY_CHANGE |= {"device": "cpu", "timeout": 3.0, "peak_tflops": 3.0, "tensor_parallel": 2, "batch": 2, "accumulate": 2}
MAY_CHANGE |= {"remat": "layer", "offload": "host", "attention_chunks": 3, "mlp_chunks": 3, "optimizer_offload": True}
MAY_CHANGE |= {"compile": True, "ignore_memory": "9GiB"}


def with_setting(config, name, value):
    section = flag_names()[name]
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


@pytest.fixture
def whole():
    """Return a configuration with the two numbers set that are otherwise derived."""
    return with_setting(with_setting(TrainConfig(), "global_batch", 4), "decay_steps", 100)


def test_every_setting_either_lasts_or_may_change():
    assert MUST_LAST.keys() | MAY_CHANGE.keys() == flag_names().keys()
    assert not MUST_LAST.keys() & MAY_CHANGE.keys()


@pytest.mark.parametrize("name", MUST_LAST)
def test_a_setting_that_must_last_is_refused_by_name(whole, name):
    saved = settings_of(whole)
    check_same_run(whole, saved)
    with pytest.raises(ValueError, match=rf"^{flag(name)} .* differs from the checkpoint state\.json, which .*remove"):
        check_same_run(with_setting(whole, name, MUST_LAST[name]), saved)


def test_a_setting_that_came_after_a_checkpoint_had_its_default(whole):
    saved = settings_of(whole)
    del saved["data"]["chat_loss"], saved["model"]["rope_scaling"]
    check_same_run(whole, saved)
    with pytest.raises(ValueError, match=r"^--chat-loss all differs from the checkpoint .*, which has assistant;"):
        check_same_run(with_setting(whole, "chat_loss", "all"), saved)


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_a_setting_that_may_change_is_not_refused(whole, name):
    check_same_run(with_setting(whole, name, MAY_CHANGE[name]), settings_of(whole))


def shown(summary, config):
    text = io.StringIO()
    screen = Screen(Console(file=text, width=400, highlight=False))
    screen.config = config
    screen.finish(summary)
    return text.getvalue()


@pytest.fixture
def summary():
    return Summary(8, 2.5, 1.5, None, 0, 10.0, 0, [2**20], [4.0], [4.0])


def test_what_the_peak_of_memory_counts_is_said(summary):
    on = {device: replace(TrainConfig(), parallel=ParallelConfig(device=device)) for device in ("cpu", "cuda")}
    assert "(whole process: tensors, PyTorch and Python)" in shown(summary, on["cpu"])
    assert "(tensors on its GPU)" in shown(summary, on["cuda"])


def test_a_start_without_a_step_shows_no_figures(summary):
    none = replace(summary, tokens_per_second=None, bytes_sent=[None], bytes_predicted=[None])
    lines = shown(none, with_setting(TrainConfig(), "device", "cpu")).splitlines()
    for row in ("tokens/s", "activations sent", "predicted for attention"):
        (line,) = [line for line in lines if row in line]
        assert line.split("│")[2].strip() == "-"


def test_missing_checkpoints_are_the_last_that_is_shown(summary, tmp_path):
    config = with_setting(with_setting(TrainConfig(), "device", "cpu"), "out", str(tmp_path))
    assert "could not be written" not in shown(summary, config)
    (tmp_path / "checkpoints" / name_of(6)).mkdir(parents=True)
    last = shown(replace(summary, missing_checkpoints=[8]), config).splitlines()[-1]
    kept = f"the newest saved checkpoint is {tmp_path}/checkpoints/{name_of(6)}"
    assert last == (
        f"burst train: checkpoint after step 8 could not be written; {kept}. "
        "Training is finished; the exit status is 74"
    )


def test_a_failed_start_names_what_it_saved_itself(tmp_path):
    older, newer = (tmp_path / "checkpoints" / name_of(step) for step in (4, 6))
    older.mkdir(parents=True)
    assert what_is_kept(str(tmp_path), [older], interrupted=False) == ""
    assert f"newest checkpoint: {older}; to resume" in what_is_kept(str(tmp_path), [older], interrupted=True)
    newer.mkdir()
    assert f"newest checkpoint: {newer}; to resume" in what_is_kept(str(tmp_path), [older], interrupted=False)


def test_a_run_that_torchrun_restarted_goes_on_by_itself(tmp_path):
    config, again = with_setting(TrainConfig(), "out", str(tmp_path)), {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert after_restart(config, again) == config, "no run of this job was here"
    with claimed(str(tmp_path), by="burst train", overwrite=False, writes=("new.txt",)) as marker:
        marker.add("new.txt")
        (tmp_path / "new.txt").write_text("of a run")
    assert after_restart(config, again) == with_setting(config, "overwrite", True), "killed before it had saved"
    (tmp_path / "checkpoints" / name_of(3)).mkdir(parents=True)
    assert after_restart(config, again) == with_setting(config, "resume", "newest")
    assert after_restart(config, {}) == config
    (tmp_path / "summary.json").touch()
    assert after_restart(config, again) == config, "finished"


FAKE = """#!{python}
import os, shutil, sys
from pathlib import Path
words = sys.argv[1:]
if words[:2] == ["-m", "venv"]:
    Path(words[2], "bin").mkdir(parents=True)
    for name in ("python", "burst"):
        shutil.copy(sys.argv[0], Path(words[2], "bin", name))
print(Path(sys.argv[0]).name, *words, flush=True)
"""


def test_make_demo_says_what_it_does_and_how_long_that_takes(tmp_path):
    python = tmp_path / "fake-python"
    python.write_text(FAKE.replace("{python}", sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    words = ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), f"VENV={tmp_path}/venv", f"PYTHON={python}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    made = subprocess.run([*words, "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    pips = [n for n, line in enumerate(lines) if line.startswith("python -m pip install")]
    (trains,) = [n for n, line in enumerate(lines) if line.startswith("burst train")]
    assert pips and "--quiet" not in lines[pips[-1]], "downloads show that something happens"
    assert "1 to 4 minutes" in lines[0] and all(f"make: {n} of 2" in made.stdout for n in (1, 2))
    assert all(lines[n - 1].startswith("make: ") for n in pips)
    assert "minutes" in "".join(lines[pips[-1] : trains])
    assert lines[-1].startswith("burst generate --model runs/demo/model"), "a sample comes last"
