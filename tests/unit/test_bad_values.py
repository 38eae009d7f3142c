"""Every flag of every command with invalid values: exit status 2, and one sentence that names the flag."""

from __future__ import annotations

import json
import re

import pytest
from burst_bench import command as bench

from burst_attention import cli
from burst_attention.launch import local as launch

HUGE = "99999999999999999999"
GIVEN = {
    "plan": "--seq-len 64 --ranks 2",
    "check": "--device cpu",
    "calibrate": "--device cpu",
    "bench": "attention --out out",
    "cluster": "attention --out out",
    "eval": "--model tiny --data text.txt --seq-len 16 --device cpu --ranks 1",
    "train": "--data text.txt --seq-len 16 --device cpu --ranks 1 --out out",
}
# A command, its flag, and the values that are refused; "": an empty string, (): no value at all.
BAD = [
    ("plan", "--seq-len", "0", "1", "-3", HUGE, "nan", "1e3", "", "1G", "K", "1.5M", "9999999M"),
    ("plan", "--ranks", "0", HUGE),
    ("plan", "--nodes", "0", "3", "4 --ranks 9", HUGE),
    ("plan", "--hardware", "", "h100", "h100-hgx+token-ring", "theirs/no.toml"),
    ("plan", "--model", "", "llama-9", "theirs", "theirs/notes.json", "text.txt"),
    ("plan", "--layers", "0 --q-heads 4", HUGE + " --q-heads 4", "4"),
    ("plan", "--batch", "-1"),
    ("plan", "--q-heads", "0", "3 --kv-heads 2", "4 --model llama-3-8b"),
    ("plan", "--kv-heads", "0", HUGE, "4", "8 --q-heads 4"),
    ("plan", "--head-dim", "0 --q-heads 4", "64"),
    ("plan", "--v-head-dim", "0 --q-heads 4", "-3 --q-heads 4", HUGE + " --q-heads 4", "64"),
    ("plan", "--documents", "0", "65"),
    ("plan", "--window", "0", "5 --no-causal --q-heads 4"),
    ("plan", "--ulysses-degree", "0", "3", HUGE),
    ("plan", "--remat", "some", "layer --q-heads 4"),
    ("plan", "--mlp-chunks", "0", HUGE, "2 --q-heads 4"),
    ("plan", "--attention-chunks", "0", HUGE, "3", "2 --q-heads 4"),
    ("plan", "--offload", "all", "disk:", "", "host --q-heads 4"),
    ("plan", "--link-rate", "0", "nan", "inf", "-1"),
    ("plan", "--disk-rate", "0", "nan", "inf", "-1"),
    ("plan", "--matmul-efficiency", "0", "1.1", "nan"),
    ("plan", "--peak-tflops", "0", "nan", "inf", "-1"),
    ("plan", "--device-memory", "0", "nan", "inf"),
    ("plan", "--json", "", "theirs", "theirs/no/x.json"),
    ("plan", "--html", "", "theirs", "theirs/no/x.html"),
    ("plan", "--layout", "zickzack", ""),
    ("plan", "--dtype", "fp8", "float64"),
    ("plan", "--circulate", "by-car"),
    ("check", "--masks", (), "causal causal", "ring"),
    ("check", "--layouts", (), "zigzag zigzag"),
    ("check", "--dtypes", (), "float32 float32"),
    ("check", "--circulate", (), "query query"),
    ("check", "--seq-len", "0", HUGE, "100000"),
    ("check", "--ranks", "0", "-1", HUGE),
    ("check", "--q-heads", "0", "3"),
    ("check", "--kv-heads", "0", HUGE),
    ("check", "--head-dim", "0", HUGE),
    ("check", "--v-head-dim", "0", "-3", HUGE),
    ("check", "--seed", "-1", HUGE),
    ("check", "--timeout", "0", "nan", "inf", "1e300"),
    ("check", "--kernel", "", "größer"),
    ("calibrate", "--ranks", "0", "-1", HUGE),
    ("calibrate", "--out", "", "theirs", "text.txt/rates.toml"),
    ("calibrate", "--timeout", "0", "nan", "inf"),
    (
        "bench",
        "--engines",
        (),
        "burst burst",
        "",
        "größer",
        "burst:ulysses_degree=0",
        "burst:cache_qkv=perhaps",
        "ring:ulysses_degree=2",
    ),
    ("bench", "--seq-lens", (), "0", "64 64", HUGE),
    ("bench", "--worlds", (), "0", "2 2", HUGE),
    ("cluster", "--link", (), "", "nan", "none none", "-5mbit"),
    ("cluster", "--cluster", "", "0x1", "2x" + HUGE, "2x2000"),
    ("bench", "--rounds", "0", HUGE),
    ("bench", "--layers", "-1", HUGE),
    ("bench", "--heads", "0", HUGE),
    ("bench", "--kv-heads", "0"),
    ("bench", "--head-dim", "0", HUGE),
    ("bench", "--vocabulary", "0", HUGE),
    ("bench", "--out", "", "text.txt", "theirs", "/sys/out"),
    ("eval", "--engines", (), "burst burst", "größer"),
    ("eval", "--model", "", "theirs", "text.txt"),
    ("eval", "--data", "", "nowhere", "\udcff"),
    ("eval", "--tokenizer", "", "theirs"),
    ("eval", "--seq-len", "1", HUGE),
    ("eval", "--sequences", "0", HUGE),
    ("eval", "--held-out", "0", "1.5", "nan", "inf"),
    ("eval", "--ranks", "0", HUGE),
    ("eval", "--seed", "-1", HUGE),
    ("eval", "--timeout", "0", "nan", "inf"),
    ("eval", "--json", "", "theirs", "text.txt", "text.txt --overwrite", "theirs/no/x.json", "/sys/x.json"),
    ("train", "--steps", "0", HUGE),
    ("train", "--seed", "-1", HUGE),
    ("train", "--save-every", "0", "-3m", "soon", "0m"),
    ("train", "--keep", "0", "-1"),
    ("train", "--eval-every", "-1", HUGE, "5 --held-out 0"),
    ("train", "--deadline", "-1", "0", "nan"),
    ("train", "--step-timeout", "0", "-1", "nan", "1e300"),
    ("train", "--profile", "0", "-1", "9 --steps 8", HUGE),
    ("train", "--wandb", "", "\udcff"),
    ("train", "--on-nan", "perhaps", ""),
    ("train", "--global-batch", "0", "-1"),
    ("train", "--resume", "theirs/no"),
    ("train", "--out", "", "theirs", "text.txt", ".", "\udcff"),
    ("train", "--config", "", "theirs", "text.txt"),
    ("train", "--model", "", "theirs", "größer/größer"),
    ("train", "--data", "", "theirs/no"),
    ("train", "--tokenizer", "", "theirs"),
    ("train", "--seq-len", "1", "-5", HUGE),
    ("train", "--max-positions", "1", "15", HUGE),
    ("train", "--lora", "0", "-1", HUGE),
    ("train", "--mlp-chunks", "0", "-1", HUGE),
    ("train", "--remat", "keep-attention --engine ulysses", "some"),
    ("train", "--offload", "host", "host --remat layer", "activations --remat layer", "disk:/x", "disk:", "all", ""),
    ("train", "--attention-chunks", "0", HUGE, "2 --engine ulysses", "2 --remat keep-attention"),
    ("train", "--optimizer-offload", ()),
    ("train", "--compile", "--engine tensor"),
    ("train", "--held-out", "-1", "1", "nan"),
    ("train", "--held-out-sequences", "0", HUGE),
    ("train", "--ranks", "0", HUGE),
    ("train", "--data-parallel", "0", HUGE),
    ("train", "--ulysses-degree", "0", "-1", "3", HUGE, "3 --engine usp", "2 --engine ring"),
    ("train", "--timeout", "0", "nan", "inf", "1e300"),
    ("train", "--peak-tflops", "0", "-1", "nan", "inf"),
    ("train", "--lr", "0", "-1", "nan", "inf", "1e-400"),
    ("train", "--min-lr", "-1", "2", "nan"),
    ("train", "--warmup", "-1", HUGE),
    ("train", "--decay-steps", "0", "-1", HUGE),
    ("train", "--weight-decay", "-1", "nan", "inf"),
    ("train", "--beta1", "1", "-1", "nan"),
    ("train", "--beta2", "1", "nan"),
    ("train", "--eps", "0", "inf", "nan"),
    ("train", "--clip", "-1", "nan", "inf"),
    ("train", "--batch", "0", HUGE),
    ("train", "--accumulate", "0", HUGE),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with foreign files; starting ranks fails the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(bench, "_run", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "text.txt").write_text("0123456789" * 50)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.json").write_text(json.dumps({"mine": True}))
    return tmp_path


def outcome(arguments):
    try:
        if arguments[0] == "cluster":
            return bench.compare(bench.CLUSTER, bench.ClusterArguments, arguments[1:])
        return cli.main(arguments)
    except SystemExit as stopped:  # the parser's own way
        return stopped.code


@pytest.mark.parametrize(("command", "flag", "values"), [(row[0], row[1], row[2:]) for row in BAD])
def test_values_that_can_not_be(folder, capsys, command, flag, values):
    for value in values:
        words = [] if value == () else [""] if value == "" else value.split()
        assert outcome([command, *GIVEN[command].split(), flag, *words]) == 2, value
        reported = capsys.readouterr()
        assert flag in reported.err + reported.out, (value, reported)
        assert "Traceback" not in reported.err
        if reported.err.startswith((f"burst {command}: ", f"{bench.CLUSTER}: ")):
            assert reported.err.count("\n") == 1, reported.err
        left = {path.name for path in folder.iterdir()}
        assert left == {"text.txt", "theirs"}, value


def test_every_flag_that_takes_a_value_is_tried(capsys):
    named = {"timeline", "calibrate", "overwrite", "causal", "ignore-memory", "compile"}  # yes or no
    named |= {"optimizer-offload"}
    named |= {"help", "nproc-per-node"}
    choices = {"pack", "dtype", "engine", "layout", "route", "device", "circulate"}  # one of a list, by the parser
    choices |= {"save-dtype", "optimizer", "schedule", "packing"}
    for command in GIVEN:
        outcome([command, *(["attention"] if command in ("bench", "cluster") else []), "--help"])
        flags = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
        tried = {row[1] for row in BAD if row[0] == command or (command, row[0]) == ("cluster", "bench")}
        missing = {flag[2:].removeprefix("no-") for flag in flags - tried} - named - choices
        assert len(flags) > 5
        assert not missing, (command, missing)
