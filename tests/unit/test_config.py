"""Flags, TOML and defaults form one configuration; invalid values are refused in one line before anything starts."""

import dataclasses
import itertools
import tomllib
from unittest import mock

import pytest
import torch

from burst_attention import cli
from burst_attention.launch import local as launch
from burst_train.cli.train import parse, resolve
from burst_train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    flag_names,
    read_toml,
    write_toml,
)
from burst_train.step.evaluation import EvalConfig, write_results
from burst_train.step.optim import make_optimizer, make_schedule


def write(folder, text):
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def plain_start(monkeypatch):
    """Remove torchrun's environment variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_defaults_are_the_trees():
    assert parse([]) == TrainConfig()


def test_names_are_unique_over_the_sections():
    sections = [getattr(TrainConfig(), field.name) for field in dataclasses.fields(TrainConfig)]
    assert len(flag_names()) == sum(len(dataclasses.fields(section)) for section in sections)


FLAGS = """
--steps 3 --seq-len 64 --out x --seed 7 --ranks 2 --strategy layout=striped --data hf:a --model llama-2-7b --lr 1e-4
--dtype bfloat16 --data-parallel 2 --accumulate 4 --pack none --batch 3 --overwrite
"""


def test_flags_are_flat():
    config = parse(FLAGS.split())
    assert config.run == RunConfig(steps=3, out="x", seed=7, overwrite=True)
    assert config.data == DataConfig(seq_len=64, data="hf:a", pack="none")
    assert config.model == ModelConfig(model="llama-2-7b", dtype="bfloat16")
    assert config.parallel == ParallelConfig(ranks=2, data_parallel=2, strategy="layout=striped")
    assert config.optim == OptimConfig(lr=1e-4, accumulate=4, batch=3)
    assert config.sequences_per_step == 24


def test_flags_beat_the_file_which_beats_the_defaults(tmp_path):
    text = 'steps = 5\nseq-len = 128\noverwrite = true\n[optim]\nlr = 0.5\n[data]\ndata = "--odd name"\n'
    config = parse(["--config", write(tmp_path, text), "--steps", "9", "--no-overwrite"])
    assert (config.run.steps, config.data.seq_len, config.optim.lr, config.data.data) == (9, 128, 0.5, "--odd name")
    assert config.run.overwrite is False
    assert config.run.seed == TrainConfig().run.seed


def test_what_is_written_reads_back(tmp_path):
    config = TrainConfig(
        run=RunConfig(steps=7, out='quo"te\\back\nline é', overwrite=True),
        data=DataConfig(held_out=0.0, tokenizer=None),
        optim=OptimConfig(lr=1e-05, eps=1e-10),
        parallel=ParallelConfig(ranks=None, strategy="layout=striped", timeout=1e300),
    )
    path = write(tmp_path, write_toml(config))
    assert set(tomllib.loads(write_toml(config))) == {"run", "data", "model", "parallel", "optim", "memory"}
    assert parse(["--config", path]) == config
    assert parse(["--config", write(tmp_path, write_toml(TrainConfig()))]) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seqlen = 3", "unknown setting 'seqlen'"),
        ("[data]\nlr = 3", r"unknown setting 'lr' in \[data\]"),
        ("[extra]\nlr = 3", "unknown setting 'extra'"),
        ("steps = [3]", r"config\.toml: 'steps' must be a valid integer, not \[3\]"),
        ("steps = ", "Invalid value"),
    ],
)
def test_a_file_with_a_stray_setting_is_refused_by_name(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        parse(["--config", write(tmp_path, text)])


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        read_toml(tmp_path / "nowhere.toml")


REFUSED = {  # beside those of tests/support/refusal_cases.py
    "--data nowhere": "--data 'nowhere': no such file",
    "--data short.txt --pack none --seq-len 64": "--pack none",
    "--data short.txt --seq-len 64": "leaves 3 tokens to evaluate, too few for a loss: it needs 100. Raise --held-out",
    "--data text.txt --seq-len 64 --held-out-sequences 1": "leaves 63 tokens to evaluate, too few for a loss",
    "--data text.txt --ranks 300 --seq-len 512": "leaves 251 tokens to evaluate, too few for a loss: it needs 300",
    "--out /sys/run": "--out '/sys/run' can't be written to",
    "--out new --data new/text.txt": "--data 'new/text.txt' lies in --out 'new'",
    "--out folder --config folder/config.toml": "--config 'folder/config.toml' lies in --out 'folder'",
    "--no-such-flag 3": "--no-such-flag",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_values_are_refused_before_a_worker_starts(tmp_path, plain_start, capsys, flags):
    plain_start.chdir(tmp_path)
    plain_start.setattr(launch, "launch", lambda *_, **__: pytest.fail("workers were launched"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.toml").write_text("")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "text.txt").write_text("mine")
    (tmp_path / "short.txt").write_text("0123456789" * 5)
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    try:
        status = cli.main(["train", "--device", "cpu", *flags.split()])
    except SystemExit as stopped:  # the parser's own way
        status = stopped.code
    reported = capsys.readouterr().err
    assert status == 2
    assert REFUSED[flags] in reported
    assert "Traceback" not in reported
    assert (tmp_path / "new" / "text.txt").read_text() == "mine"
    assert not (tmp_path / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("asks", "reported"),
    [
        ({"attention_dropout": 0.1}, "set attention_dropout=0.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "has rope type 'dynamic'"),
    ],
)
def test_a_model_that_asks_what_the_attention_can_not_give_starts_no_rank(
    tmp_path, plain_start, capsys, asks, reported
):
    from transformers import LlamaConfig

    plain_start.setattr(launch, "launch", lambda *_, **__: pytest.fail("workers were launched"))
    LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, **asks).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    shared = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert cli.main(["train", *shared, "--seq-len", "16", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"burst train: --model '{tmp_path}/model': ") and reported in error
    assert not (tmp_path / "out").exists()
    if "attention_dropout" not in asks:  # which an evaluation does not apply
        assert cli.main(["eval", *shared]) == 2
        assert reported in capsys.readouterr().err


def test_a_model_is_gone_through_once_before_the_ranks(tmp_path, plain_start):
    from transformers import LlamaConfig, LlamaForCausalLM

    from burst_attention.integrations import hf

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 258}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    plain_start.setattr(launch, "launch", lambda *_, **__: 0)
    shared = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/text.txt", "--device", "cpu", "--seq-len", "16"]
    shared += ["--tokenizer", "bytes"]
    for command in (["train", "--strategy", "ring", "--out", f"{tmp_path}/out"], ["eval"]):
        with mock.patch.object(hf, "check_config", wraps=hf.check_config) as asked:
            assert cli.main([*command, *shared, "--ranks", "2"]) == 0
        assert asked.call_count == 1


def test_an_evaluation_replaces_an_evaluation_only(tmp_path):
    path = tmp_path / "reported.json"
    config = EvalConfig(model="tiny", data="stdlib", json=path)
    config.check()
    write_results(path, config, [])
    with pytest.raises(ValueError, match="already exists; name another file or add --overwrite"):
        config.check()
    dataclasses.replace(config, overwrite=True).check()
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not an evaluation; name another file"):
        dataclasses.replace(config, overwrite=True).check()


def test_a_good_start_launches_the_workers_it_was_asked_for(tmp_path, plain_start, capsys):
    plain_start.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    started = []
    plain_start.setattr(launch, "launch", lambda *given, ranks, **_: started.append((given[2], ranks)) or 0)
    arguments = f"train --device cpu --ranks 3 --data {tmp_path}/text.txt --seq-len 16 --out new".split()
    assert cli.main(arguments) == 0, capsys.readouterr().err
    ((config, ranks),) = started
    assert ranks == config.parallel.ranks == 3
    assert (config.parallel.device, config.model.dtype, config.optim.lr) == ("cpu", "float32", 2e-3)
    assert not (tmp_path / "new").exists(), "nothing was written, so nothing is left"
    assert (
        "\n4,752 tokens in the training documents; 100 steps read 1,600, which is 0.34 epochs\n"
        in capsys.readouterr().out
    )


def test_a_gpu_for_every_rank_or_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    resolved = [resolve(TrainConfig(parallel=ParallelConfig(ranks=ranks)), None) for ranks in (None, 2, 3)]
    assert [(c.parallel.device, c.parallel.ranks, c.model.dtype) for c in resolved] == [
        ("cuda", 2, "bfloat16"),
        ("cuda", 2, "bfloat16"),
        ("cpu", 3, "float32"),
    ]
    assert resolve(TrainConfig(parallel=ParallelConfig(ranks=8)), (8, 2)).parallel.device == "cuda"
    with pytest.raises(ValueError, match="3 ranks need as many GPUs, this machine has 2"):
        resolve(TrainConfig(parallel=ParallelConfig(ranks=3, device="cuda")), None)


def test_ranks_that_contradict_torchrun_are_refused(plain_start):
    assert launch.torchrun_ranks(2) is None
    plain_start.setenv("RANK", "0")
    plain_start.setenv("WORLD_SIZE", "4")
    plain_start.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT are not"):
        launch.torchrun_ranks(None)
    plain_start.setenv("MASTER_ADDR", "127.0.0.1")
    plain_start.setenv("MASTER_PORT", "29500")
    assert launch.started_by_torchrun()
    assert launch.torchrun_ranks(None) == launch.torchrun_ranks(4) == (4, 2)
    with pytest.raises(ValueError, match=r"--ranks 2, but torchrun started 4"):
        launch.torchrun_ranks(2)


def test_the_command_names_its_commands(capsys):
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


def rates_of(config):
    """Return the learning rates of every step, for both groups of parameters."""
    model, rates = torch.nn.LayerNorm(3), []
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config)
    for _ in range(config.run.steps):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        rates.append(rate)
        optimizer.step()
        schedule.step()
    return rates


def test_the_learning_rate_rises_then_falls_by_a_cosine():
    config = TrainConfig(run=RunConfig(steps=110), optim=OptimConfig(lr=2.0, warmup=10, min_lr=0.25))
    rates = rates_of(config)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[59] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[-1] == pytest.approx(0.5)
    assert all(before > after for before, after in itertools.pairwise(rates[9:]))
    no_warmup = TrainConfig(run=RunConfig(steps=1), optim=OptimConfig(lr=1.0, warmup=0))
    assert rates_of(no_warmup) == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {1: 0.2, 10: 2.0, 60: 1.25, 110: 0.5}),
        ("linear", {1: 0.2, 10: 2.0, 60: 1.25, 110: 0.5}),
        ("constant", {1: 0.2, 10: 2.0, 60: 2.0, 110: 2.0}),
        ("warmup-stable-decay", {1: 0.2, 10: 2.0, 99: 2.0, 100: 2.0 - 1.5 / 11, 110: 0.5}),
    ],
)
def test_every_schedule_ends_at_its_decay_steps(schedule, expected):
    optim = OptimConfig(lr=2.0, warmup=10, min_lr=0.25, schedule=schedule)
    rates = rates_of(TrainConfig(run=RunConfig(steps=110), optim=optim))
    assert {step: rates[step - 1] for step in expected} == pytest.approx(expected)
    shorter = rates_of(TrainConfig(run=RunConfig(steps=130), optim=dataclasses.replace(optim, decay_steps=110)))
    assert shorter[:110] == rates and shorter[110:] == [rates[-1]] * 20


def test_a_preset_has_as_many_positions_as_the_sequence_needs():
    from burst_train.data.tokenizer import ByteTokenizer
    from burst_train.step.model import model_config

    lengths = {("tiny", 100): 100, ("llama-2-7b", 100): 4096, ("llama-2-7b", 100_000): 100_000}
    for (name, seq_len), positions in lengths.items():
        assert model_config(name, ByteTokenizer(), seq_len).max_position_embeddings == positions
