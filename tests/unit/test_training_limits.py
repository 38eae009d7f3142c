"""A machine's resources, the settings refused because of them, and a run's first lines."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, GPT2Config, LlamaConfig

from burst_attention import cli
from burst_attention.launch import local as launch
from burst_train.cli import preflight
from burst_train.config import read_toml
from burst_train.data.tokenizer import ByteTokenizer
from burst_train.memory import MemoryConfig, check_fits, free_memory
from burst_train.step.evaluation import EvalConfig
from burst_train.step.export import saved_dtype
from burst_train.step.positions import set_positions

GIB = 2**30


def write_machine(root, *, limit="max", used=0):
    """Write the system files of a machine with 8 GiB, with a lower limit in an outer control group."""
    group = root / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (group.parent / "memory.max").write_text(f"{limit}\n")
    (group.parent / "memory.current").write_text(f"{used}\n")
    return root


def test_what_is_free_is_the_least_of_what_limits_it(tmp_path):
    assert free_memory(write_machine(tmp_path / "one")) == (8 * GIB, "memory available")
    limited = write_machine(tmp_path / "two", limit=3 * GIB, used=GIB)
    assert free_memory(limited) == (2 * GIB, "left of the control group's limit")
    assert free_memory(write_machine(tmp_path / "three", limit=30 * GIB))[0] == 8 * GIB
    assert free_memory(write_machine(tmp_path / "four", limit=GIB, used=2 * GIB))[0] == 0
    assert free_memory(tmp_path / "nowhere") is None
    assert free_memory()[0] > 0, "of this one"


def test_what_does_not_fit_is_refused_with_what_would_lower_it():
    parts, free = {"weights": GIB, "activations": 2 * GIB, "loss": 0}, (8 * GIB, "memory available")
    check_fits(parts, free, MemoryConfig(), seq_len=64, ranks=2)
    check_fits(parts, None, MemoryConfig(), seq_len=64, ranks=9)
    warned = check_fits(parts, free, MemoryConfig(ignore_memory="9GiB"), seq_len=64, ranks=3)
    assert warned.startswith("--ignore-memory 9GiB: the run will allocate 3 GiB per rank (weights 1 GiB, act")
    assert "9 GiB for 3 ranks here; there is only 8 GiB memory available" in warned
    assert not check_fits(parts, free, MemoryConfig(ignore_memory="9GiB"), seq_len=64, ranks=2), "it fits"
    with pytest.raises(ValueError, match=r"--ignore-memory 8.9GiB is less than that\. .*--ignore-memory 9GiB$"):
        check_fits(parts, free, MemoryConfig(ignore_memory="8.9GiB"), seq_len=64, ranks=3)
    with pytest.raises(
        ValueError, match=r"^--seq-len 64 is predicted to need 3 GiB per rank .*weights 1 GiB, act"
    ) as reported:
        check_fits(parts, free, MemoryConfig(), seq_len=64, ranks=3)
    named = (
        "9 GiB for 3 ranks here; there is only 8 GiB memory available",
        "--remat layer, --mlp-chunks 8",
        "start anyway by naming the amount: --ignore-memory 9GiB",
    )
    assert all(part in str(reported.value) for part in named), reported.value
    with pytest.raises(ValueError) as reported:
        check_fits(parts, free, MemoryConfig(remat="layer", mlp_chunks=2), seq_len=64, ranks=3)
    assert "--remat" not in str(reported.value) and "--mlp-chunks" not in str(reported.value)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return ``started(*flags)``, which gives (exit status, arguments of the ranks) without starting ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    given = []
    monkeypatch.setattr(launch, "launch", lambda *words, **_: given.append(words[2]) or 0)

    def start(*flags):
        given.clear()
        shared = ["train", "--data", "text.txt", "--device", "cpu", "--ranks", "2", "--out", "out"]
        return cli.main([*shared, "--seq-len", "64", *flags]), list(given)

    return start


def test_the_first_line_tells_the_memory_and_what_is_not_there_starts_no_rank(started, monkeypatch, capsys):
    assert started("--remat", "layer")[0] == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("predicted peak memory of the tensors of a rank: ") and "weights 3.07 MiB" in first
    assert first.endswith("; not included: PyTorch and Python themselves, about 500 MiB")
    assert second == "model tiny with random weights, tokenizer bytes, data text.txt, strategy auto, kernel aten"
    single = ("--strategy", "single", "--data-parallel", "2")
    assert started(*single)[0] == 0
    unknown = (
        "memory is not predicted for this model and these flags; a rank holds at least weights 3.07 MiB, gradients"
    )
    assert unknown in capsys.readouterr().out
    monkeypatch.setattr(preflight, "free_memory", lambda: (10 * 2**20, "memory available"))
    assert started("--remat", "layer") == (2, [])
    reported = capsys.readouterr().err
    assert (
        "--seq-len 64 is predicted to need" in reported
        and "10 MiB memory available" in reported
        and reported.count("\n") == 1
    )
    assert started(*single) == (2, []), "weights, gradients and moments alone are too much"
    assert "(weights 3.07 MiB, gradients 3.07 MiB, AdamW 6.13 MiB)" in capsys.readouterr().err
    asked = reported.rsplit(" ", 1)[1].strip()
    assert started("--remat", "layer", "--ignore-memory", "20MiB") == (2, [])
    assert "--ignore-memory 20MiB is less than that" in capsys.readouterr().err
    assert started("--remat", "layer", "--ignore-memory", asked)[0] == 0
    assert f"--ignore-memory {asked}: the run will allocate" in capsys.readouterr().out


def test_a_setting_from_when_it_named_no_amount_is_left_out(tmp_path):
    (tmp_path / "config.toml").write_text('ignore_memory = true\nremat = "layer"\n')
    assert read_toml(tmp_path / "config.toml") == {"remat": "layer"}


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 5000}
    config = LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=48)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_model_that_only_one_rank_runs_is_sent_to_hf_parallelize(started, tmp_path, capsys, ranks):
    BloomConfig(hidden_size=32, n_head=4, n_layer=1, vocab_size=300).save_pretrained(tmp_path / "bloom")
    assert started("--model", str(tmp_path / "bloom"), "--tokenizer", "bytes", "--ranks", ranks) == (2, [])
    reported = capsys.readouterr().err
    assert "(BloomAttention) adds biases by distance (ALiBi)" in reported
    assert reported.endswith("; run it by hf.parallelize on one rank, where it sees the whole sequence\n")


def test_positions_are_raised_by_a_flag_alone(started, folder, capsys):
    flags = ("--model", str(folder), "--tokenizer", "bytes")
    assert started(*flags) == (2, [])
    assert "exceeds the 48 positions" in (reported := capsys.readouterr().err) and "give --max-positions 64" in reported
    assert started(*flags, "--max-positions", "100")[0] == 0
    assert (
        "max_position_embeddings 100, in place of 48; RoPE as in the model's configuration" in capsys.readouterr().out
    )
    assert started(*flags, "--max-positions", "63") == (2, [])
    capsys.readouterr()
    assert started(*flags, "--max-positions", "47", "--seq-len", "32") == (2, [])
    assert "--max-positions 47 would lower the 48 positions of --model" in capsys.readouterr().err
    assert started(*flags, "--rope-scaling", "yarn:1.5")[0] == 0
    printed = capsys.readouterr().out
    assert "max_position_embeddings 72, in place of 48; RoPE {" in printed and "'factor': 1.5" in printed
    for more, said in (
        (("yarn:1.25",), "60 positions, and --seq-len 64 exceeds them; give yarn:2, or lower --seq-len"),
        (("yarn:2", "--max-positions", "96"), "--max-positions 96 and --rope-scaling yarn:2 both set the number"),
        (("yarn:2", "--model", "tiny"), "--model 'tiny' takes its positions from --seq-len"),
        (("dynamic:2",), "'dynamic:2' must be yarn:FACTOR with a factor above 1, as in yarn:4 (dynamic and longrope"),
    ):
        assert started(*flags, "--rope-scaling", *more) == (2, [])
        assert said in capsys.readouterr().err


def test_positions_that_are_learned_or_scaled_are_not_scaled(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 258}
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 48}
    for config, max_positions, said in (
        (GPT2Config(n_positions=48, n_embd=32, n_head=4, n_layer=1, vocab_size=258), None, "has no rope_parameters"),
        (GPT2Config(n_positions=48, n_embd=32, n_head=4, n_layer=1, vocab_size=258), 96, "are learned weights"),
        (LlamaConfig(**sizes, rope_parameters=yarn), None, "has {'rope_type': 'yarn', 'factor': 2.0"),
        (Gemma3TextConfig(**sizes, head_dim=8), None, "has several RoPE settings, by kind of layer"),
    ):
        scaling = {"max_positions": max_positions} if max_positions else {"rope_scaling": "yarn:2"}
        with pytest.raises(ValueError, match=re.escape(said)):
            set_positions(config, "a-model", 40, **scaling)


def test_another_models_tokenizer_is_refused(started, folder, tmp_path, capsys):
    flags = ("--model", str(folder), "--max-positions", "64")
    assert started(*flags) == (2, [])
    assert "the folder holds no tokenizer" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    ByteTokenizer().save(tmp_path / "other")
    assert started(*flags, "--tokenizer", "other") == (2, [])
    assert (
        "--tokenizer 'other' has 258 ids, but --model" in (reported := capsys.readouterr().err) and "5000" in reported
    )
    assert started(*flags, "--tokenizer", "bytes")[0] == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 258 + 1024}))  # padded
    assert started(*flags, "--tokenizer", "other")[0] == 0
    assert "tokenizer other," in capsys.readouterr().out


def test_evaluation_refuses_another_models_tokenizer(folder, tmp_path):
    ByteTokenizer().save(tmp_path / "other")
    (tmp_path / "text.txt").write_text("0123456789" * 50)
    own = {"model": str(folder), "data": str(tmp_path / "text.txt"), "seq_len": 40}
    with pytest.raises(ValueError, match=r"has 258 ids, but --model .* so its ids mean other tokens"):
        preflight.check_evaluation(EvalConfig(**own, tokenizer=str(tmp_path / "other")), 1)
    preflight.check_evaluation(EvalConfig(**own, tokenizer="bytes"), 1)


def test_weights_are_saved_in_the_dtype_of_the_model_or_in_that_which_is_asked_for():
    short, long = LlamaConfig(dtype="bfloat16"), LlamaConfig()
    assert saved_dtype(short) == saved_dtype(long, "bfloat16") == torch.bfloat16
    assert saved_dtype(short, "float32") == torch.float32
    assert saved_dtype(long) is None
