"""``burst plan --generate``: its arithmetic by hand, what it prints, and what it refuses."""

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig

from burst_attention.cli import main
from burst_attention.planner.presets import preset
from burst_attention.planner.rates import Link, Rates
from burst_attention.planner.timing import Wire
from burst_attention.planner.traffic import Messages
from burst_train.cli.plan import PlanArguments
from burst_train.forecast.models import Model
from burst_train.forecast.request import Cluster, Device, ForecastRequest
from burst_train.forecast.serving import HOST_LAYER, HOST_STEP, Serving, exchange, served

SIZES: dict[str, Any] = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
SLOW = Link(latency=1.0, bytes_per_second=10.0)


def rates_of(inside: Link = SLOW, across: Link = SLOW, read: float = 1000.0) -> Rates:
    known = preset("cpu")
    return replace(known, inside=inside, across=across, overhead=replace(known.overhead, read=read))


def request_of(ranks: int = 2, *, seq_len: int = 129, config: Any = None, **more: Any) -> ForecastRequest:
    options: dict[str, Any] = {"rates": rates_of(), "device": Device(), "per_node": 8} | more
    return ForecastRequest(
        seq_len=seq_len,
        cluster=Cluster(ranks=ranks, **options),
        model=Model.read(config or LlamaConfig(**SIZES), "small"),
        dtype=torch.float32,
        strategy="layout=zigzag,ulysses_degree=1",
    )


def test_a_token_by_hand() -> None:
    """128 tokens of the prompt over 2 ranks, and the last on rank 0, which has page 2."""
    whole, sharded = served(request_of())
    layer, vectors, head = 64 + 32 + 32 + 64 + 3 * 128, 16, 80
    assert whole.memory["weights"] == 4 * (2 * (layer + vectors) + 2 * head + 8)
    assert sharded.memory["weights"] == 4 * (2 * (layer // 2 + vectors) + head + 8)
    token = 2 * 4 * 4  # bytes of a layer's key and value
    assert whole.memory["cache"] == sharded.memory["cache"] == 2 * token * (65 + 64), "the last token's page has room"
    host = HOST_STEP + 2 * HOST_LAYER
    partial = 2 * (4 + 1) * 4  # out and lse of 2 heads
    assert (whole.sent, whole.exchanges) == (2 * partial, 2)
    expected = {"weights": 4 * (2 * (layer + vectors) + head) / 1000, "cache": 2 * token * 65 / 1000, "host": host}
    assert whole.step == pytest.approx(expected | {"exchange": 1 + 2 * (1 + partial / 10)})
    columns = [4 * (4 + 2 + 2), 4 * 4, 4 * (8 + 8), 4 * 4]  # q, k, v; o; gate, up; down
    sent = 2 * (partial + sum(columns)) + 4 * 8 + 8  # a row of the embedding; the greatest logit and its token
    assert (sharded.sent, sharded.exchanges) == (sent, 2 * 5 + 2)
    expected["weights"] = 4 * (2 * (layer // 2 + vectors) + head // 2) / 1000
    assert sharded.step == pytest.approx(expected | {"exchange": 1 + 12 + sent / 10})
    for each in (whole, sharded):
        assert each.token == pytest.approx(sum(each.step.values())) and each.first > each.token
    assert sharded.prompt == whole.prompt, "CPUs of one host read weights in place"
    assert sharded.memory["work"] == whole.memory["work"]
    apart, gathering = served(request_of(per_node=1))
    assert gathering.prompt > apart.prompt and gathering.memory["work"] > apart.memory["work"], "others gather them"


def test_rows_that_ranks_do_not_divide_count_on_the_fullest() -> None:
    sharded = served(request_of(3))[1]
    layer = 8 * 3 + 2 * 8 * 2 + 8 * 3 + 2 * 8 * 6 + 16 * 3 + 16
    assert sharded.memory["weights"] == 4 * (2 * layer + 2 * 8 * 4 + 8)
    assert sharded.sent == 2 * ((2 * (2 * 5 + 3 + 2 + 2 + 3 + 6 + 6 + 3) + 8) * 4 + 8)


def test_products_count_where_they_take_longer_than_reading() -> None:
    rates = rates_of(read=1e12)
    slow = replace(rates, single=replace(rates.single, forward=100.0))
    whole, _ = served(replace(request_of(rates=slow), batch=3))
    weights = 2 * (64 + 32 + 32 + 64 + 3 * 128 + 16) + 80
    assert whole.step["weights"] == pytest.approx(2 * 3 * weights / 100)
    assert whole.step["cache"] == pytest.approx(2 * 3 * 2 * (4 + 4) * 2 * 65 / 100)


def test_a_window_leaves_what_the_last_token_sees() -> None:
    config = MistralConfig(**SIZES, sliding_window=20, head_dim=4)
    request = replace(request_of(config=config), layout="contiguous")
    prompt = Serving(q=request, prompt=None, shared=False, host=0.0)  # type: ignore[arg-type]
    assert prompt.held(2) == {20: [1, 19]}, "the first rank's shard is out of sight; it has page 2"
    assert replace(prompt, q=replace(request, layout="zigzag")).held(2) == {20: [20, 0]}


def test_ranks_that_share_cores_read_in_turn() -> None:
    rates = rates_of()
    shared = replace(rates, overhead=replace(rates.overhead, at_once=1.0))
    alone, turns = (served(request_of(rates=each))[0].step for each in (rates, shared))
    assert turns["weights"] == pytest.approx(2 * alone["weights"])
    assert turns["host"] == pytest.approx(2 * alone["host"]), "the host's work shares the cores too"


def test_what_was_measured_stands_for_estimates() -> None:
    """The host's seconds, and the latency between products; idle ranks' latency holds where nothing else is known."""
    busy = rates_of(inside=replace(SLOW, busy=3.0))
    for idle, each in zip(served(request_of()), served(request_of(rates=busy), 7.0), strict=True):
        assert each.step["host"] == 7.0
        assert each.step["exchange"] - idle.step["exchange"] == pytest.approx(2.0 * (each.exchanges + 1))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 4), (4, 4), (6, 2), (8, 4)])
def test_an_exchange_takes_its_busiest_port(ranks: int, per_node: int, shared: bool) -> None:
    rates = rates_of(Link(latency=2.0, bytes_per_second=50.0), Link(latency=1.0, bytes_per_second=20.0, shared=shared))
    pairs = np.array([*permutations(range(ranks), 2)], np.int64).reshape(-1, 2)
    zeros, size = np.zeros(len(pairs), np.int64), np.full(len(pairs), 100)
    messages = Messages(step=zeros, source=pairs[:, 0], target=pairs[:, 1], size=size, kind=zeros)
    wire = Wire(rates, np.arange(ranks) // per_node)
    cluster = Cluster(ranks=ranks, per_node=per_node, rates=rates, device=Device())
    assert exchange(100, cluster) == pytest.approx(wire.least(messages))


SERVED = ("--generate", "--seq-len", "1M", "--hardware", "h100-hgx")


def test_the_fewest_ranks_hold_it_and_one_less_does_not() -> None:
    asked = PlanArguments(generate=True, seq_len=2**20, ranks=4, hardware="h100-hgx", model="llama-3-8b").request()
    limit = asked.limit
    assert limit is not None
    for each in served(asked):
        assert each.ranks is not None and each.fits is (each.ranks <= 4) is (each.bytes <= limit)
    whole, _ = served(replace(asked, cluster=replace(asked.cluster, device=Device(memory=15e9, bandwidth=1e12))))
    assert whole.ranks is None, "the weights alone have 16 GB"
    unknown = served(replace(asked, cluster=replace(asked.cluster, device=Device(bandwidth=1e12))))
    assert {(each.fits, each.ranks) for each in unknown} == {(None, None)}


def test_a_gpu_waits_for_the_host_or_the_host_for_it() -> None:
    asked = PlanArguments(generate=True, seq_len=2**20, ranks=8, hardware="h100-hgx").request()
    for each in served(asked):
        *device, host = each.step.values()
        assert each.token == max(host, sum(device))


def test_what_is_printed(capsys: Any, tmp_path: Any) -> None:
    figures = tmp_path / "plan.json"
    assert main(["plan", *SERVED, "--ranks", "8", "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "Generation, llama-3-8b, 1M tokens over 8 ranks on 1 node" in out
    assert "whole, 16.1 GB" in out and "sharded, 2.01 GB" in out and out.count("fits ") >= 2
    assert "Recommended: whole weights, first token in " in out and "A GPU waits for the host" in out
    start = "torchrun --nnodes 1 --nproc-per-node 8 -m burst_attention.cli generate"
    assert f"{start} --model FOLDER --prompt FILE\n" in out and "burst_attention.cli train" not in out
    held = json.loads(figures.read_text())
    assert [each["weights"] for each in held["generation"]] == ["whole", "sharded"]
    for each in held["generation"]:
        assert each["first"] == pytest.approx(each["prompt"] + each["token"])


def test_what_does_not_fit(capsys: Any) -> None:
    assert main(["plan", *SERVED, "--ranks", "2", "--model", "llama-3-70b"]) == 0
    out = capsys.readouterr().out
    assert out.count("too large") == 2 and "It does not fit: sharded weights need " in out
    assert "With whole weights, no number of ranks up to 65,536 holds it. With sharded weights, " in out
    assert "Recommended" not in out and "torchrun" not in out


def test_a_model_whose_steps_are_not_predicted_is_refused(tmp_path: Any, capsys: Any) -> None:
    Gemma2Config(**SIZES, head_dim=4).save_pretrained(tmp_path)
    assert main(["plan", "--generate", "--seq-len", "1K", "--ranks", "2", "--model", str(tmp_path)]) == 2
    assert "is of the family gemma2; --generate predicts llama, mistral, qwen2, qwen3" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"don't say how fast memory is read; measure them again with burst calib"):
        served(request_of(rates=rates_of(read=0.0)))
