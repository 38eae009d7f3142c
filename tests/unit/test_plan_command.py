"""``burst plan`` for users: its table, files and errors, the ranks it simulates, and any family of transformers."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burst_attention.cli import main
from burst_attention.planner.presets import preset
from burst_train.cli import plan
from burst_train.forecast import attention as forecast
from burst_train.forecast.forecast import Forecast, forecast_of, savings
from burst_train.forecast.models import model_of
from burst_train.forecast.request import Cluster, device_of
from burst_train.memory import Saving
from tests.tools.families import model_class, tiny_config

HARDWARE = ["--hardware", "h100-hgx"]


def reported(capsys: Any, *arguments: str) -> str:
    assert main(["plan", *HARDWARE, *arguments]) == 0
    return capsys.readouterr().out


def test_a_million_tokens_on_32_ranks(capsys: Any) -> None:
    asked = ["--model", "llama-3-8b", "--seq-len", "1M", "--ranks", "32", "--nodes", "4"]
    short = reported(capsys, *asked)
    assert "llama-3-8b, 1M tokens over 32 ranks on 4 nodes, h100-hgx+infiniband-400g" in short
    assert "Recommended: auto" in short and "It fits with --remat" in short and len(short.splitlines()) <= 20
    start = "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    flags = "--model llama-3-8b --seq-len 1048576 --strategy layout="
    assert f"{start} -m burst_attention.cli train {flags}" in short
    assert short.count("--data DATA --out runs/mine") == 1
    assert "every figure here is a prediction" in short


def test_the_command_fits_as_printed(capsys: Any) -> None:
    """If no strategy fits by itself, the options that it needs are added one by one."""
    out = reported(capsys, "--model", "llama-3-8b", "--seq-len", "1M", "--ranks", "8")
    assert out.count("too large") == 9 and "It fits with --remat layer --mlp-chunks 32: " in out
    words = out.split("cli train ")[1].split(" --data")[0].split()
    given = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    seq_len, saving = int(given.pop("seq_len")), Saving(mlp_chunks=int(given.pop("mlp_chunks")))
    asked = plan.PlanArguments(ranks=8, hardware="h100-hgx", seq_len=seq_len, saving=saving, **given)
    assert forecast_of(asked.strategy, asked.request()).fits


def asked_of(**given: Any) -> Any:
    return plan.PlanArguments(**{"seq_len": 2**20, "ranks": 16, "hardware": "h100-hgx", **given}).request()


def test_auto_caches_nothing_if_a_step_that_fits_is_then_shorter() -> None:
    """With its cache of q, k and v, what keep-attention saves is too large for 80 GB, and all must be recomputed."""
    request = asked_of(tensor_parallel=1)
    found = {name: forecast_of(name, request) for name in ("auto", "burst", "ulysses_degree=8,cache_qkv=True")}
    cached = found.pop("ulysses_degree=8,cache_qkv=True")
    assert cached.fits and cached.remat == "layer"
    assert found["auto"].fits and found["auto"].remat == "keep-attention" and "cache_qkv=False" in found["auto"].flags
    assert found["auto"].seconds <= min(each.seconds for each in (*found.values(), cached))
    roomy = forecast_of("auto", asked_of(tensor_parallel=1, device_memory=140.0))
    assert roomy.remat == "keep-attention" and "cache_qkv=True" in roomy.flags, "the planner's own choice"


def test_positions_are_printed_only_if_the_model_has_fewer(tmp_path: Any, capsys: Any) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=8192).save_pretrained(tmp_path)
    small: dict[str, Any] = {"model": str(tmp_path), "ranks": 2}
    assert "--max-positions" not in forecast_of("burst", asked_of(**small, seq_len=8192)).flags
    longer = asked_of(**small, seq_len=20_000)
    assert " --seq-len 20000 --max-positions 20000 " in forecast_of("burst", longer).flags
    (note,) = (note for note in plan.notes(longer, []) if "longer" in note)
    assert "the 8,192 positions that" in note and "give --rope-scaling yarn:3" in note
    scaled = asked_of(**small, seq_len=20_000, rope_scaling="yarn:3")
    assert " --seq-len 20000 --rope-scaling yarn:3 --strategy" in forecast_of("burst", scaled).flags
    assert not [note for note in plan.notes(scaled, []) if "longer" in note]
    asked = ["plan", *HARDWARE, "--model", str(tmp_path), "--ranks", "2", "--seq-len", "20000"]
    assert main([*asked, "--rope-scaling", "yarn:2"]) == 2
    assert "exceeds them; give yarn:3, or lower --seq-len" in capsys.readouterr().err
    assert "--max-positions" not in forecast_of("burst", asked_of(ranks=2, seq_len=20_000)).flags, (
        "a preset has random weights"
    )


def test_what_nobody_asked_for_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--seq-len", "65", "--ranks", "2", "--model", "tiny", "--tensor-parallel", "1"]) == 0
    out = capsys.readouterr().out
    assert (
        "No --hardware was given: this plans for ranks on CPUs, because this machine has no GPU. Presets: cpu," in out
    )
    assert "tiny is a preset: the command below trains random weights, on bytes unless --tokenizer" in out
    refused = "tensor-sequence: not possible: it shares 65 tokens (--seq-len) equally, but 2 ranks don't divide them; "
    assert f"{refused}use a number of ranks that does, or another strategy" in out
    assert "--strategy" not in out.split("torchrun")[0], "which was not given"
    assert "step: time of a training step; tokens/s: of all ranks; memory: of a rank at its peak; --remat: " in out
    unknown = "unknown, as cpu+ethernet-25g names no memory: give a rank's in GB by --device-memory"
    assert unknown in out.replace("\n", " ")
    assert "unknown, as" not in reported(capsys, "--seq-len", "65", "--ranks", "2", "--model", "tiny")
    assert "No --hardware" not in reported(capsys, "--seq-len", "65", "--ranks", "2", "--model", "tiny")


def test_an_option_that_the_strategy_refuses_is_not_advised(capsys: Any) -> None:
    """Eight chunks of heads can't be cut by a Ulysses degree of 8; the others still help."""
    asked = ("--model", "llama-3-8b", "--seq-len", "1M", "--ranks", "8", "--strategy", "ulysses", "--all")
    out = reported(capsys, *asked)
    assert "It fits with --remat layer --mlp-chunks 32: " in out and "--attention-chunks" not in out


@pytest.mark.long
def test_a_last_node_with_fewer_ranks_is_named(capsys: Any) -> None:
    out = reported(capsys, "--model", "llama-3-8b", "--seq-len", "64K", "--ranks", "12")
    assert "--nnodes 2 --nproc-per-node 8 " in out and "runs/mine  # on the last node: --nproc-per-node 4" in out


def test_numbers_are_read_as_people_write_them(capsys: Any) -> None:
    small = ["--ranks", "2", "--model", "tiny"]
    assert "128K tokens" in " ".join(reported(capsys, "--seq-len", "128K", *small).split())
    assert "1,000,000 tokens" in " ".join(reported(capsys, "--seq-len=1000000", *small).split())


def test_other_commands_read_them_too(tmp_path: Any) -> None:
    from burst_train.cli.train import parse

    file = tmp_path / "config.toml"
    file.write_text('seq_len = "2K"\nsteps = 7\n')
    assert parse(["--seq-len", "128K"]).data.seq_len == 131072
    assert parse([f"--config={file}"]).data.seq_len == 2048 and parse([f"--config={file}"]).run.steps == 7


@pytest.mark.long
def test_packing_balanced_is_planned_as_burst_train_runs_it(capsys: Any, tmp_path: Any) -> None:
    asked = ["--seq-len", "32K", "--batch", "8", "--documents", "4", "--ranks", "8", "--packing", "balanced"]
    out = reported(capsys, *asked, "--all", "--json", f"{tmp_path}/plan.json")
    assert "llama-3-8b, 8 packed sequences of 32K tokens over 8 ranks" in out
    assert "--seq-len 32768 --dtype" in out
    assert "--packing balanced --batch 8 --data DATA" in out and "--pack none" not in out
    assert "zigzag-ring: not possible: it has no layout balanced; leave --packing balanced out to see it" in out
    text = (tmp_path / "plan.json").read_text()
    assert out.endswith(text)
    held = json.loads(text)
    assert (held["seq_len"], held["joined"]) == (32768, 8)
    ours = held["strategies"][0]
    assert sum(ours["sent"]["attention"]) == 0, "32 equal documents stay whole on 8 ranks"
    # The same tokens as one document over all ranks.
    whole = forecast_of("auto", plan.PlanArguments(seq_len=8 << 15, ranks=8, hardware="h100-hgx").request())
    assert ours["attention"] < whole.attention / 16
    for wrong, message in (
        (["--batch", "1"], "--batch 1 leaves"),
        (["--strategy", "layout=zigzag"], "has no layout balanced"),
    ):
        assert main(["plan", *HARDWARE, *asked, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_what_does_not_fit_is_reported_with_what_would(capsys: Any) -> None:
    out = reported(capsys, "--model", "llama-3-70b", "--seq-len", "8M", "--ranks", "8")
    assert "It does not fit" in out and "Recommended" not in out


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
    assert not savings(plan.PlanArguments(seq_len=1024, ranks=2, hardware="cpu").request())


def test_copies_take_time_only_where_computation_does_not_hide_them() -> None:
    given: dict[str, Any] = {"seq_len": 2**17, "ranks": 8, "hardware": "h100-hgx", "remat": "layer"}
    asked = plan.PlanArguments(**given, saving=Saving(mlp_chunks=8)).request()

    def seconds(offload: str, disk: float = 3e9) -> float:
        device = replace(asked.cluster.device, disk=disk)
        return forecast_of(
            "auto",
            replace(
                asked, saving=replace(asked.saving, offload=offload), cluster=replace(asked.cluster, device=device)
            ),
        ).seconds

    plain = seconds("none")
    assert seconds("host") == plain
    slow, slower = (seconds("disk:/scratch", rate) for rate in (0.2e9, 0.1e9))
    inputs = 2**17 / 8 * 4096 * 2 * 32
    assert plain < slow and slower - slow == pytest.approx(2 * (inputs / 0.1e9 - inputs / 0.2e9))


def test_a_faster_strategy_within_the_tolerance_is_named() -> None:
    def forecast(name: str, attention: float) -> Forecast:
        return Forecast(strategy=name, way="a way", attention=attention, memory={"none": {"weights": 1}}, fits=None)

    asked = plan.PlanArguments(seq_len=1024, ranks=2, model="tiny", hardware="cpu").request()
    said = plan.verdict(asked, [forecast("burst", 1.01), forecast("ulysses", 1.0)], [])
    assert said.startswith(
        "Recommended: burst (a way), 1.01 s per step (ulysses is 1.0% faster, but a difference of up to 5%"
    )
    assert "faster" not in plan.verdict(asked, [forecast("burst", 1.0), forecast("ulysses", 1.0)], [])
    slower = plan.verdict(asked, [forecast("burst", 1.06), forecast("ulysses", 1.0)], [])
    assert slower.startswith("Recommended: ulysses")


@pytest.mark.long
def test_a_file_holds_the_figures(capsys: Any, tmp_path: Any) -> None:
    figures = tmp_path / "plan.json"
    reported(capsys, "--seq-len", "64K", "--ranks", "8", "--nodes", "2", "--json", str(figures))
    values = json.loads(figures.read_text())
    able = {each["strategy"]: each for each in values["strategies"] if not each["refused"]}
    assert {"auto", "burst", "zigzag-ring", "ulysses", "usp"} <= {*able} and values["recommended"] in able
    for each in able.values():
        assert each["seconds"] == pytest.approx(
            sum(each[part] for part in ("attention", "rest", "parameters", "tensor"))
        )
        assert each["fits"] is (sum(each["memory"][each["remat"]].values()) <= 0.9 * 80e9)
        assert each["tokens_per_second"] == pytest.approx(65536 / (8 * each["seconds"])), "of a rank"
        assert each["steps"][each["remat"]] == pytest.approx(each["seconds"])
        assert each["steps"]["none"] <= each["steps"].get("keep-attention", 1e9) and each["steps"]["layer"] > 0
    assert values["model"]["parameters"] == 8_030_261_248 and values["ranks_of_a_node"] == 4
    notes = "rates", "positions", "preset"
    assert "estimated" in values["rates"]["source"] and len(values["notes"]) == len(notes)


def test_many_ranks_are_never_all_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A plan over thousands of ranks takes no more time and memory than one over hundreds."""
    worlds, simulations = [], forecast.simulations
    monkeypatch.setattr(
        forecast, "simulations", lambda way, setting: worlds.append(setting.world) or simulations(way, setting)
    )
    monkeypatch.setattr(forecast, "MOST_SIMULATED", 64)
    burst = "layout=zigzag,route=direct,circulate=query,ulysses_degree=1"
    monkeypatch.setattr(plan, "forecasts", lambda request: [forecast_of(burst, request)])
    out = reported(capsys, "--seq-len", "16M", "--ranks", "4096", "--model", "tiny")
    assert worlds == [32, 64]
    assert (
        f"{burst} is not simulated over all 4,096 ranks: it is extrapolated from simulations of 32 and 64 ranks" in out
    )


@pytest.mark.slow
def test_a_hundred_million_tokens_on_4096_ranks(capsys: Any) -> None:
    out = reported(capsys, "--seq-len", "100M", "--ranks", "4096")
    assert "100M tokens over 4,096 ranks on 512 nodes" in out and "Recommended: burst" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral", "quantization_config": {"quant_method": "fp8"}}, "has quantised experts"),
        ({"model_type": "unheard-of"}, "can't be loaded"),
    ],
)
def test_models_that_can_not_be_counted(change: dict[str, Any], message: str, tmp_path: Any) -> None:
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "attention_bias": True}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = model_of(str(tmp_path))
    assert model.kv_heads == 4 and model.size == 2 * (64 * 100) + 64 + 2 * (4 * 64 * 65 + 3 * 64 * 128 + 2 * 64)
    file.write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match="--model") as error:
        model_of(str(tmp_path))
    assert message in str(error.value)


def test_windows_are_read_as_transformers_reads_them(tmp_path: Any) -> None:
    from transformers import MistralConfig, Qwen2Config

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for config, windows in (
        (MistralConfig(**sizes, sliding_window=8), {8: 4}),
        (MistralConfig(**sizes, sliding_window=None), {None: 4}),
        (Qwen2Config(**sizes, use_sliding_window=True, sliding_window=8, max_window_layers=1), {None: 1, 8: 3}),
    ):
        config.save_pretrained(tmp_path)
        assert model_of(str(tmp_path)).windows_by_count == windows


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        (8, "1 node,"),
        (12, "2 nodes (the last with 4 of 8),"),
        (16, "2 nodes,"),
        (17, "3 nodes (the last with 1 of 8),"),
    ],
)
def test_a_node_that_is_not_full_is_counted(ranks: int, nodes: str) -> None:
    rates = preset("h100-hgx")
    cluster = Cluster(ranks=ranks, per_node=8, rates=rates, device=device_of(rates))
    model: Any = SimpleNamespace(name="a-model")
    request: Any = SimpleNamespace(cluster=cluster, model=model, seq_len=65536, dtype=torch.bfloat16, joined=1)
    assert f"{ranks} ranks on {nodes}" in plan.headline(request)


# Attention layers by window; multiplications per token in the four layers' states and convolutions.
FAMILIES = {
    "gemma2": ({5: 2, None: 2}, 0),
    "glm4": ({None: 4}, 0),
    "qwen3_5_text": ({None: 1}, 3 * (3 * 4 * 16 * (16 + 16) + 128 * 4)),
    "bamba": ({None: 2}, 2 * (2 * 4 * 32 * 16 + (128 + 2 * 16) * 4)),
}


def folder_of(model_type, folder):
    config = tiny_config(model_type)
    config.save_pretrained(folder)
    return config, str(folder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes_are_those_of_transformers(model_type, tmp_path):
    config, folder = folder_of(model_type, tmp_path)
    found, (windows, states) = model_of(folder), FAMILIES[model_type]
    with torch.device("meta"):
        model = model_class(model_type)(config)
    assert found.size == sum(p.numel() for p in model.parameters())
    assert found.windows_by_count == windows
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert found.products == sum(m.weight.numel() for m in linear) + states


@pytest.mark.long
def test_a_hybrid_is_planned_and_what_is_not_predicted_is_refused(tmp_path, capsys):
    _, folder = folder_of("bamba", tmp_path / "bamba")
    asked = ["--seq-len", "1K", "--ranks", "2", "--hardware", "h100-hgx", "--json", str(tmp_path / "plan.json")]
    assert plan.main(["--model", folder, *asked]) == 0
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["model"]["parameters"] == model_of(folder).size
    found = {each["strategy"]: each for each in written["strategies"]}
    assert found["burst"]["memory"] == {} and found["burst"]["fits"] is None and found["burst"]["attention"] > 0
    assert "can't share the projections of a bamba" in found["tensor-sequence"]["refused"]
    assert "No formula gives its memory: try one step." in capsys.readouterr().out
    for model_type, why in (
        ("llama4_text", "has a mixture of experts (Llama4TextExperts), whose work is not predicted"),
        ("mamba2", "has no attention layer with known heads"),
    ):
        _, folder = folder_of(model_type, tmp_path / model_type)
        assert plan.main(["--model", folder, *asked]) == 2
        assert why in capsys.readouterr().err.replace("\n", " ")


def test_strategies_without_a_cap_are_refused(tmp_path):
    _, folder = folder_of("gemma2", tmp_path)
    assert model_of(folder).options == ("softcap",)
    assert model_of("llama-3-8b").options == ()
