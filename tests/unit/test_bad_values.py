"""Every flag of every command with invalid values: exit status 2, and one sentence that names the flag."""

import json

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
# Of each command, flags and the values that are refused; '': an empty string, -: no value at all.
TABLE = {
    "plan": """
        seq-len: 0 | 1 | -3 | HUGE | nan | 1e3 | '' | 1G | K | 1.5M | 9999999M ; ranks: 0 | HUGE
        nodes: 0 | 3 | 4 --ranks 9 | HUGE ; hardware: '' | h100 | h100-hgx+token-ring | theirs/no.toml
        model: '' | llama-9 | theirs | theirs/notes.json | text.txt ; batch: -1 ; documents: 0 | 65
        rope-scaling: dynamic:2 | yarn:2 --model tiny | yarn:2 --seq-len 16385
        remat: some ; mlp-chunks: 0 | HUGE ; attention-chunks: 0 | HUGE | 3 ; offload: all | disk: | ''
        peak-tflops: 0 | inf | -1 ; device-memory: 0 | nan ; json: '' | theirs | theirs/no/x.json
        strategy: zickzack | '' | circulate=by-car ; dtype: fp8 | float64 ; packing: most
    """,
    "check": """
        masks: - | causal causal | ring ; layouts: - | zigzag zigzag ; dtypes: - | float32 float32
        circulate: - | query query ; seq-len: 0 | HUGE | 100000 ; ranks: 0 | -1 | HUGE ; q-heads: 0 | 3
        kv-heads: 0 | HUGE ; head-dim: 0 | HUGE ; v-head-dim: 0 | -3 | HUGE ; seed: -1 | HUGE
        timeout: 0 | nan | inf | 1e300 ; kernel: '' | größer
    """,
    "calibrate": """
        ranks: 0 | -1 | HUGE ; out: '' | theirs | text.txt/rates.toml ; timeout: 0 | nan | inf
    """,
    "bench": """
        strategies: - | burst burst | '' | größer
        strategies: usp:0 | cache_qkv=perhaps | layout=around
        seq-lens: - | 0 | 64 64 | HUGE ; worlds: - | 0 | 2 2 | HUGE ; rounds: 0 | HUGE ; layers: -1 | HUGE
        heads: 0 | HUGE ; kv-heads: 0 ; head-dim: 0 | HUGE ; vocabulary: 0 | HUGE
        out: '' | text.txt | theirs | /sys/out
    """,
    "cluster": """
        link: - | '' | nan | none none | -5mbit ; cluster: '' | 0x1 | 2xHUGE | 2x2000
    """,
    "eval": """
        strategies: - | burst burst | größer ; model: '' | theirs | text.txt ; data: '' | nowhere | SURROGATE
        rope-scaling: yarn:0 | yarn:2 ; chat-loss: user
        tokenizer: '' | theirs ; seq-len: 1 | HUGE ; sequences: 0 | HUGE ; held-out: 0 | 1.5 | nan | inf
        ranks: 0 | HUGE ; seed: -1 | HUGE ; timeout: 0 | nan | inf
        json: '' | theirs | text.txt | text.txt --overwrite | theirs/no/x.json | /sys/x.json
    """,
    "train": """
        steps: 0 | HUGE | many ; seed: -1 | HUGE ; save-every: 0 | -3m | soon | 0m ; keep: 0
        eval-every: -1 | HUGE | 5 --held-out 0 ; deadline: 0 | nan ; step-timeout: -1 | 1e300
        profile: 0 | 9 --steps 8 | HUGE ; wandb: '' | SURROGATE ; on-nan: perhaps | '' ; global-batch: 0
        resume: theirs/no ; out: '' | theirs | text.txt | . | SURROGATE ; config: '' | theirs | text.txt
        model: '' | theirs | größer/größer ; data: '' | theirs/no ; tokenizer: '' | theirs ; seq-len: 1 | -5 | HUGE
        max-positions: 1 | 15 | HUGE ; rope-scaling: '' | yarn | yarn:1 | yarn:nan | yarn:1e9 | linear:2 | yarn:2
        ignore-memory: '' | 3 | 0GiB | -1GiB | nanGiB | GiB | 1e999GiB ; chat-loss: none
        lora: 0 | HUGE ; mlp-chunks: 0 | HUGE
        remat: keep-attention --strategy tensor | some
        offload: host | host --remat layer | activations --remat layer | disk:/x | disk: | all | ''
        attention-chunks: 0 | HUGE | 2 --strategy tensor | 2 --remat keep-attention ; optimizer-offload: -
        compile: --strategy tensor ; held-out: -1 | 1 | nan ; held-out-sequences: 0 | HUGE ; ranks: 0 | HUGE
        data-parallel: 0 | HUGE ; strategy: '' | usp:0 | usp:3 | ulysses_degree=0 | layout=around | größer
        timeout: 0 | inf ; peak-tflops: 0 | nan | inf ; lr: 0 | nan | 1e-400
        dtype: fp16 | bf16 ; min-lr: -1 | 2 | nan ; warmup: -1 | HUGE ; decay-steps: 0 | HUGE ; weight-decay: -1 | inf
        beta1: 1 | -1 ; beta2: nan ; eps: 0 | inf ; clip: -1 | nan ; batch: 0 | HUGE
        accumulate: 0 | HUGE
    """,
}
WORDS = {"''": [""], "-": []}


def bad(command: str) -> list[tuple[str, list[str]]]:
    """Return flags with the values of each."""
    rows = [row.split(": ", 1) for line in TABLE[command].strip().splitlines() for row in line.strip().split(" ; ")]
    return [("--" + flag, values.split(" | ")) for flag, values in rows]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with foreign files; starting ranks fails the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(bench, "_run", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "text.txt").write_text("0123456789" * 500)
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


@pytest.mark.parametrize("command", [*list(TABLE)[:-1], pytest.param("train", marks=pytest.mark.long)])
def test_values_that_can_not_be(folder, capsys, command):
    for flag, values in bad(command):
        for value in values:
            words = WORDS.get(value) if value in WORDS else value.replace("HUGE", HUGE).split()
            words = [word.replace("SURROGATE", "\udcff") for word in words]
            assert outcome([command, *GIVEN[command].split(), flag, *words]) == 2, (flag, value)
            reported = capsys.readouterr()
            assert flag in reported.err + reported.out, (flag, value, reported)
            assert "Traceback" not in reported.err
            if reported.err.startswith((f"burst {command}: ", f"{bench.CLUSTER}: ")):
                assert reported.err.count("\n") == 1, reported.err
            assert {path.name for path in folder.iterdir()} == {"text.txt", "theirs"}, (flag, value)
