"""``burst plan`` for users: its table, its files, its errors, and the number of ranks it simulates."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from burst_train.cli import plan, plan_page
from burst_train.cli.plan_words import headline, verdict
from burst_train.forecast import calls as forecast
from burst_train.forecast.forecast import Forecast, forecast_of, savings
from burst_train.forecast.machines import device_of
from burst_train.forecast.named import model_of
from burst_train.forecast.request import Cluster
from burst_train.forecast.timeline import Picture

from burst_attention.cli import main
from burst_attention.planner.presets import preset

HARDWARE = ["--hardware", "h100-hgx"]


def reported(capsys: Any, *arguments: str) -> str:
    assert main(["plan", *HARDWARE, *arguments]) == 0
    return capsys.readouterr().out


def test_a_million_tokens_on_32_ranks(capsys: Any) -> None:
    out = reported(capsys, "--model", "llama-3-8b", "--seq-len", "1M", "--ranks", "32", "--nodes", "4")
    assert "llama-3-8b, 1M tokens over 32 ranks on 4 nodes, h100-hgx+infiniband-400g" in out
    assert "8.03 billion parameters" in out and "Recommended: burst" in out and "It fits with --remat" in out
    start = "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    flags = "--model meta-llama/Meta-Llama-3-8B --seq-len 1048576 --max-positions 1048576 --engine"
    assert f"{start} -m burst_attention.cli train {flags}" in out and out.count("--data DATA --out runs/mine") >= 3
    # 4 D S^2 / 2 per head, 32 heads and layers, and 2 x 7.5 billion products a token; three times
    assert "912 PFLOP per step" in out
    assert "ulysses: not possible: --engine ulysses gives each rank whole heads" in out
    assert "usp, zigzag layout, all-to-all among 8 ranks, ring of 4: torchrun" in out
    assert "every figure here is a prediction" in out


@pytest.mark.long
def test_a_last_node_with_fewer_ranks_is_named(capsys: Any) -> None:
    out = reported(capsys, "--model", "llama-3-8b", "--seq-len", "64K", "--ranks", "12")
    assert "--nnodes 2 --nproc-per-node 8 " in out and "runs/mine  # on the last node: --nproc-per-node 4" in out


def test_numbers_are_read_as_people_write_them(capsys: Any) -> None:
    small = ["--ranks", "2", "--q-heads", "8", "--layers", "2"]
    assert "128K tokens" in " ".join(reported(capsys, "--seq-len", "128K", *small).split())
    assert "1,000,000 tokens" in " ".join(reported(capsys, "--seq-len=1000000", *small, "--window", "4K").split())


def test_other_commands_read_them_too(tmp_path: Any) -> None:
    from burst_train.cli.train import parse

    file = tmp_path / "config.toml"
    file.write_text('seq_len = "2K"\nsteps = 7\n')
    assert parse(["--seq-len", "128K"]).data.seq_len == 131072
    assert parse([f"--config={file}"]).data.seq_len == 2048 and parse([f"--config={file}"]).run.steps == 7


def test_attention_alone(capsys: Any) -> None:
    out = reported(capsys, "--seq-len", "64K", "--ranks", "4", "--q-heads", "8", "--head-dim", "64", "--layers", "2")
    assert "attention only, 8 query and 8 key-value heads of dimension 64, 2 layers" in out and "Attention only" in out
    assert "rest of the model" not in out and "cli train" not in out
    assert "tensor-sequence: not possible" in out
    more = [
        "--q-heads",
        "4",
        "--dtype",
        "float64",
        "--circulate",
        "nearest",
        "--layout",
        "contiguous",
        "--ulysses-degree",
        "1",
    ]
    assert "burst, contiguous layout, direct route, circulate='nearest', ulysses_degree=1" in reported(
        capsys, "--seq-len", "1K", "--ranks", "4", *more
    )


@pytest.mark.long
def test_packing_balanced_is_planned_as_burst_train_runs_it(capsys: Any, tmp_path: Any) -> None:
    asked = ["--seq-len", "32K", "--batch", "8", "--documents", "4", "--ranks", "8", "--packing", "balanced"]
    out = reported(capsys, *asked, "--json", f"{tmp_path}/plan.json")
    assert "llama-3-8b, 8 packed sequences of 32K tokens over 8 ranks" in out
    assert "--seq-len 32768 --max-positions 32768 --engine burst --layout balanced" in out
    assert "--packing balanced --batch 8 --data DATA" in out and "--pack none" not in out
    assert "ring: not possible: it has no layout balanced; leave --packing balanced out to see it" in out
    held = json.loads((tmp_path / "plan.json").read_text())
    assert (held["seq_len"], held["joined"]) == (32768, 8)
    ours = held["engines"][0]
    assert sum(ours["sent"]["attention"]) == 0, "32 equal documents stay whole on 8 ranks"
    # The same tokens as one document over all ranks.
    whole = forecast_of("burst", plan.PlanArguments(seq_len=8 << 15, ranks=8, hardware="h100-hgx").request())
    assert ours["attention"] < whole.attention / 16
    for wrong, message in ((["--batch", "1"], "--batch 1 leaves"), (["--layout", "zigzag"], "--layout zigzag is not")):
        assert main(["plan", *HARDWARE, *asked, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_what_does_not_fit_is_reported_with_what_would(capsys: Any) -> None:
    out = reported(capsys, "--seq-len", "4M", "--ranks", "8", "--no-causal", "--q-heads", "64", "--kv-heads", "8")
    assert "Recommended" in out
    out = reported(capsys, "--model", "llama-3-70b", "--seq-len", "1M", "--ranks", "8")
    assert "It does not fit" in out and "Recommended" not in out


@pytest.mark.long
def test_advice_is_not_what_was_done_already(capsys: Any) -> None:
    asked = ["--seq-len", "8M", "--ranks", "8"]
    assert "Use more ranks, the options below or a shorter --seq-len." in reported(capsys, *asked)
    assert "Use more ranks or a shorter --seq-len." in reported(capsys, *asked, "--remat", "layer", "--offload", "host")


def test_the_longest_sequence_grows_with_each_option_that_saves_memory() -> None:
    asked = plan.PlanArguments(seq_len=2**20, ranks=8, hardware="h100-hgx").request()
    names, found = zip(*savings(asked), strict=True)
    assert [name.split()[0] for name in names] == [
        "--remat",
        "--mlp-chunks",
        "--attention-chunks",
        "--offload",
        "--optimizer",
        "--optimizer-offload",
    ]
    longest = [each.longest or 0 for each in found]
    assert longest == sorted({*longest}) and longest[3] > 6_000_000 and longest[3] > 4 * longest[2]
    single = plan.PlanArguments(seq_len=2**16, ranks=1, hardware="h100-hgx").request()
    assert (savings(single)[-1][1].longest or 0) > 750_000
    assert "8" in names[2] and found[-1].flags.endswith("--optimizer-offload")
    assert not savings(plan.PlanArguments(seq_len=1024, ranks=2, q_heads=2).request())


def test_copies_take_time_only_where_computation_does_not_hide_them() -> None:
    asked = plan.PlanArguments(seq_len=2**17, ranks=8, hardware="h100-hgx", remat="layer", mlp_chunks=8)

    def seconds(**more: Any) -> float:
        return forecast_of("burst", replace(asked, **more).request()).seconds

    plain = seconds()
    assert seconds(offload="host") == plain
    slow, slower = (seconds(offload="disk:/scratch", disk_rate=rate) for rate in (0.2, 0.1))
    inputs = 2**17 / 8 * 4096 * 2 * 32
    assert plain < slow and slower - slow == pytest.approx(2 * (inputs / 0.1e9 - inputs / 0.2e9))


def test_a_faster_engine_within_the_tolerance_is_named() -> None:
    def engine(name: str, attention: float) -> Forecast:
        return Forecast(engine=name, way="a way", attention=attention, memory={"none": {"weights": 1}}, fits=None)

    asked = plan.PlanArguments(seq_len=1024, ranks=2, q_heads=2).request()
    said = verdict(asked, [engine("burst", 1.01), engine("ulysses", 1.0)])
    assert said.startswith(
        "Recommended: burst (a way), 1.01 s per step (ulysses is 1.0% faster, but a difference of up to 2%"
    )
    assert "faster" not in verdict(asked, [engine("burst", 1.0), engine("ulysses", 1.0)])
    assert verdict(asked, [engine("burst", 1.03), engine("ulysses", 1.0)]).startswith("Recommended: ulysses")


@pytest.mark.long
def test_a_narrow_terminal_gets_whole_words(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = reported(capsys, "--seq-len", "128K", "--ranks", "8")
    table = [line for line in out.splitlines() if line[:1] in "│┃┏┡└"]
    assert max(map(len, table)) <= 80
    names = [cell.strip() for line in table if line.startswith("┃") for cell in line.split("┃")]
    assert {"burst", "burst as published", "ring", "ulysses", "usp", "tensor-sequence"} <= set(names)


@pytest.mark.long
def test_speed_is_reported_per_rank_and_by_what_is_recomputed(capsys: Any, tmp_path: Any) -> None:
    written = tmp_path / "plan.json"
    out = reported(capsys, "--seq-len", "128K", "--ranks", "8", "--json", str(written))
    assert "tokens/s per rank" in out and "step time, --remat layer" in out
    for each in json.loads(written.read_text())["engines"]:
        if not each["refused"]:
            assert each["tokens_per_second"] == pytest.approx(131072 / (8 * each["seconds"]))
            assert each["steps"][each["remat"]] == pytest.approx(each["seconds"])
            assert each["steps"]["none"] <= each["steps"].get("keep-attention", 1e9) and each["steps"]["layer"] > 0


def test_a_b200_is_known(capsys: Any) -> None:
    assert main(["plan", "--hardware", "b200-hgx", "--seq-len", "128K", "--ranks", "2", "--q-heads", "8"]) == 0
    out = capsys.readouterr().out
    assert "2.25 PFLOP/s" in out and "180 GB" in out


def test_one_ranks_cells_are_coloured_by_step() -> None:
    nothing = np.zeros((4, 4))
    steps = np.arange(16).reshape(4, 4) % 2
    one = Picture(4, np.zeros((4, 4), np.int64), steps, nothing, [0], [[]])
    assert "in 2 steps, shown by colour" in plan_page._coloured(one)
    drawn = plan_page._cells(one, "forward")
    assert all(drawn.count(f'fill="{colour}"') == 8 for colour in plan_page.COLOURS[:2])
    several = Picture(4, np.arange(16).reshape(4, 4) % 4, steps, nothing, [0], [[]])
    assert "is the rank that computes it" in plan_page._coloured(several)


class Parsed(HTMLParser):
    """A parser that records all elements opened and closed, all URLs, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.counts, self.fetched = "", dict[str, int](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.long
def test_a_page_and_a_file_hold_the_same_figures(capsys: Any, tmp_path: Any) -> None:
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    reported(capsys, "--seq-len", "64K", "--ranks", "8", "--nodes", "2", "--html", str(page), "--json", str(figures))
    values, parsed = json.loads(figures.read_text()), Parsed(page.read_text("utf-8"))
    assert not parsed.open and not parsed.fetched and "<script" not in page.read_text("utf-8")
    assert parsed.counts["svg"] == 2 + 2 * 2 * 3 and parsed.counts["rect"] > 300  # of three engines two passes each
    able = {each["engine"]: each for each in values["engines"] if not each["refused"]}
    assert {"burst", "ring", "ulysses", "usp"} <= {*able} and values["recommended"] in able
    for each in able.values():
        assert each["seconds"] == pytest.approx(each["attention"] + each["rest"] + each["parameters"])
        assert f"-m burst_attention.cli train {each['flags']}" in parsed.text or not each["flags"]
        assert each["fits"] is (sum(each["memory"][each["remat"]].values()) <= 0.9 * 80e9)
    assert values["model"]["parameters"] == 8_030_261_248 and values["ranks_of_a_node"] == 4
    assert "estimated" in values["rates"]["source"] and len(values["assumptions"]) > 4


def test_many_ranks_are_never_all_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A plan over thousands of ranks takes no more time and memory than one over hundreds."""
    worlds, simulations = [], forecast.simulations
    monkeypatch.setattr(
        forecast, "simulations", lambda way, setting: worlds.append(setting.world) or simulations(way, setting)
    )
    monkeypatch.setattr(forecast, "MOST_SIMULATED", 64)
    out = reported(
        capsys,
        "--seq-len",
        "16M",
        "--ranks",
        "4096",
        "--layout",
        "zigzag",
        "--q-heads",
        "8",
        "--ulysses-degree",
        "1",
        "--route",
        "direct",
    )
    assert max(worlds) == 64 and len(worlds) == 8
    assert "burst is not simulated over all 4,096 ranks: it is extrapolated from simulations of 32 and 64 ranks" in out
    assert "burst as published, ring is not simulated" in out


@pytest.mark.slow
def test_a_hundred_million_tokens_on_4096_ranks(capsys: Any) -> None:
    out = reported(capsys, "--seq-len", "100M", "--ranks", "4096")
    assert "100M tokens over 4,096 ranks on 512 nodes" in out and "Recommended: burst" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "has a mixture of experts (MixtralExperts), whose work is not predicted"),
        ({"model_type": "unheard-of"}, "is of model_type 'unheard-of', which the installed transformers does not know"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_key_value_heads": 3}, "has 4 query heads, which is not a multiple of its 3"),
        ({"vocab_size": -1}, "has vocab_size -1"),
        ({"attention_bias": True}, "has attention_bias"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "not a multiple of its 3 heads, and no head_dim"),
        ({"model_type": "mistral", "sliding_window": 0}, "has sliding_window 0"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": []}, "has 0 layer_types for 2 layers"),
    ],
)
def test_configurations_that_can_not_be_counted(change: dict[str, Any], message: str, tmp_path: Any) -> None:
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert model_of(str(file)).kv_heads == 4
    file.write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match="--model") as error:
        model_of(str(tmp_path))
    assert message in str(error.value)


def test_windows_are_read_as_transformers_reads_them(tmp_path: Any) -> None:
    from transformers import MistralConfig, Qwen2Config

    from burst_attention.integrations import hf

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for config in (
        MistralConfig(**sizes, sliding_window=8),
        MistralConfig(**sizes, sliding_window=None),
        Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        Qwen2Config(**sizes, use_sliding_window=False, sliding_window=8),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        model = model_of(str(tmp_path))
        assert list(model.windows or (None,) * 4) == hf.layer_windows(config)
        assert sum(model.windows_by_count.values()) == 4


@pytest.mark.long
def test_it_needs_no_library_of_models() -> None:
    code = (
        "import sys\n"
        "for name in ('transformers', 'datasets', 'safetensors', 'matplotlib'):\n    sys.modules[name] = None\n"
        "from burst_attention.cli import main\n"
        "sys.exit(main('plan --seq-len 4K --ranks 8 --hardware a100-nvlink'.split()))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Recommended" in result.stdout, result.stderr


@pytest.mark.parametrize(("ranks", "nodes"), [(8, "1 node,"), (12, "2 nodes,"), (16, "2 nodes,"), (17, "3 nodes,")])
def test_a_node_that_is_not_full_is_counted(ranks: int, nodes: str) -> None:
    rates = preset("h100-hgx")
    cluster = Cluster(ranks=ranks, per_node=8, rates=rates, device=device_of(rates))
    heads = {"q_heads": 8, "kv_heads": 8, "head_dim": 64, "layers": 2, "joined": 1}
    request: Any = SimpleNamespace(cluster=cluster, model=None, seq_len=65536, dtype=torch.bfloat16, **heads)
    assert f"{ranks} ranks on {nodes}" in headline(request)
