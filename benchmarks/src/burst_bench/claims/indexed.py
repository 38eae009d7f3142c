"""A step of a DeepSeek V3.2 layer, against stock or predictions.

Both run in one process each, with the same threads, and take turns. The layer is small: hidden 512, 8 heads, 8 index
heads, 256 chosen keys, a dense MLP of 64, a vocabulary of 128, in fp32 with random weights. A step is a forward and a
backward. A first step is not timed: it compares the losses and counts peak memory, the most resident bytes minus those
before. --ours lists lengths that stock is not run at. With --experts, a mixture of that many experts, of which a token
uses two and a shared one, each as wide as a quarter of the hidden states, takes the place of the MLP.

With --cluster, ours over its ranks takes turns with ours in one process, each rank with one thread. Rates are measured
first, as burst calibrate does, with unlimited links; these time none of the steps. Then seconds and bytes of a step are
predicted from them, as burst plan does, and compared with those measured and counted. It needs root and iproute2.

    burst bench indexed [--seq-lens 4096 8192] [--ours 16384] [--threads 2] [--rounds 3]
    burst bench indexed --cluster 2x1 [--link 1gbit] [--seq-lens 4096 8192] [--experts 8]"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config

from burst_attention.cli.tables import console_of_tables, print_table
from burst_attention.integrations import hf
from burst_attention.planner.rates import Rates
from burst_train.forecast.forecast import forecast_of
from burst_train.forecast.models import Model
from burst_train.forecast.request import Cluster, Device, ForecastRequest

from ..arguments import WrittenArguments, asked
from ..cluster import Cluster as EmulatedCluster
from ..cluster import parse_cluster, parse_rate
from ..harness.calibration import calibrated, limited
from ..harness.memory import give_back, peak_during, resident
from ..harness.turns import ratios, seconds_of, take_turns
from ..pool import WorkerPool
from ..tables import mebibytes, spread

TIMEOUT = 3600.0  # seconds
STRATEGY = "burst"
APART = 1e-3  # of the losses: keys with nearly equal scores may be chosen otherwise
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "mlp_layer_types": ["dense"],
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 32,
    "index_topk": 256,
    "index_head_dim": 64,
    "index_n_heads": 8,
    "max_position_embeddings": 1 << 20,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class IndexedArguments(WrittenArguments):
    seq_lens: tuple[int, ...] = (4096, 8192)
    """Tokens of the sequence."""
    ours: tuple[int, ...] = (16384,)
    """Lengths at which only ours is run."""
    threads: int = 2
    rounds: int = 3
    cluster: str | None = None
    """NODESxRANKS of an emulated cluster: compare predictions over its ranks with a step. Else stock against ours."""
    link: str = "1gbit"
    """Rate of each node's link; none: no limit."""
    experts: int = 0
    """Experts of the feed-forward layer; 0: it is dense."""


def sizes_of(experts: int) -> dict[str, Any]:
    """Return the configuration's entries; 0 experts: the layer is dense."""
    mixture = {"mlp_layer_types": ["sparse"], "n_routed_experts": experts, "num_experts_per_tok": 2}
    mixture |= {
        "n_shared_experts": 1,
        "moe_intermediate_size": SIZES["hidden_size"] // 4,
        "n_group": 1,
        "topk_group": 1,
    }
    return SIZES | mixture if experts else SIZES


@cache
def _model(parallel: bool, experts: int) -> Any:
    torch.manual_seed(0)
    config = DeepseekV32Config(**sizes_of(experts))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return hf.parallelize(model, strategy=STRATEGY) if parallel else model


def _step(parallel: bool, experts: int, threads: int, length: int) -> float:
    """Run on a rank: one step; return the loss."""
    torch.set_num_threads(threads)
    model = _model(parallel, experts)
    ids = torch.randint(1, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **({} if parallel else {"use_cache": False})).loss
    loss.backward()
    return float(loss.item())


def _timed(parallel: bool, experts: int, threads: int, length: int) -> float:
    return seconds_of(partial(_step, parallel, experts, threads, length))


def _peaked(parallel: bool, experts: int, threads: int, length: int) -> tuple[float, int]:
    """Run on a rank: a step; return the loss, and the peak resident bytes minus those before."""
    _step(parallel, experts, threads, 512)  # in the first step libraries also allocate what they keep
    give_back()
    before = resident()
    loss, peak = peak_during(partial(_step, parallel, experts, threads, length))
    return loss, peak - before


def measured(pools: list[WorkerPool], length: int, a: IndexedArguments) -> dict[str, Any]:
    """Return seconds by round and peaks, of stock and ours; raise SystemExit if the losses differ."""
    sides = [(parallel, pool) for parallel, pool in zip((False, True), pools, strict=True)]
    sides = [(parallel, pool) for parallel, pool in sides if parallel or length in a.seq_lens]
    found = [pool.run(_peaked, parallel, a.experts, a.threads, length, timeout=TIMEOUT)[0] for parallel, pool in sides]
    losses, peaks = zip(*found, strict=True)
    if abs(losses[0] / losses[-1] - 1) > APART:
        raise SystemExit(f"{length} tokens: the loss is {losses[-1]}, stock's {losses[0]}; nothing is reported")
    calls = [
        partial(pool.run, _timed, parallel, a.experts, a.threads, length, timeout=TIMEOUT) for parallel, pool in sides
    ]
    seconds = [[by_rank[0] for by_rank in side] for side in take_turns(calls, a.rounds)]
    return {"tokens": length, "seconds": seconds, "peak": peaks, "losses": losses}


def main(arguments: list[str]) -> None:
    a = asked(IndexedArguments(), __doc__, "burst bench indexed", arguments)
    if a.cluster is not None:
        over_ranks(a, a.cluster)
        return
    with WorkerPool(1, timeout=TIMEOUT) as stock, WorkerPool(1, timeout=TIMEOUT) as ours:
        rows = [measured([stock, ours], length, a) for length in (*a.seq_lens, *a.ours)]
    title = (
        f"a step of a DeepSeek V3.2 layer{of_experts(a)}, fp32, one process x {a.threads} threads; rounds: {a.rounds}"
    )
    print_table(console_of_tables(), [line(row) for row in rows], title=title, legend=LEGEND)
    a.write(model=sizes_of(a.experts), rows=rows)


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    """A step over the ranks of a pool."""

    pool: WorkerPool
    per_node: int
    rates: Rates
    experts: int

    def predicted(self, length: int) -> tuple[float, list[int]]:
        """Return the predicted seconds of a step, and the bytes that each rank sends."""
        world = self.pool.world
        cluster = Cluster(ranks=world, per_node=self.per_node, rates=self.rates, device=Device())
        model = Model.read(DeepseekV32Config(**sizes_of(self.experts)), "a layer")
        request = ForecastRequest(
            seq_len=length, cluster=cluster, model=model, dtype=torch.float32, remat="none", strategy=STRATEGY
        )
        step, (kind, *_) = forecast_of(STRATEGY, request), request.kinds
        (way,), setting = step.ways, request.setting(*kind)
        traffic = (setting.schedule(way.strategy, n).indexed_traffic(kind[1], setting.shape) for n in range(world))
        return step.attention + step.rest, [each.sent for each in traffic]  # weights are whole: none are exchanged

    def seconds(self, length: int) -> float:
        """Return the seconds of a step of the slowest rank."""
        return max(self.pool.run(_timed_on_shards, self.experts, length, timeout=TIMEOUT))

    def sent(self, length: int) -> list[int]:
        """Return the bytes that each rank's attention sends in a step."""
        return self.pool.run(_on_shards, self.experts, length, timeout=TIMEOUT)


def _on_shards(experts: int, length: int) -> int:
    """Run on a rank: one step on its shard; return the bytes that its layers sent."""
    torch.set_num_threads(1)
    model = _model(True, experts)
    ids = torch.randint(1, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    with hf.shards(model, {"input_ids": ids, "labels": ids}) as shard:
        before = shard.plan.transport.sent
        hidden = model.model(**shard)[0]
        loss = hf.next_token_loss(model, hidden, shard.labels, shard.plan)
    loss.backward()
    return shard.plan.transport.sent - before


def _timed_on_shards(experts: int, length: int) -> float:
    return seconds_of(partial(_on_shards, experts, length))


def over_ranks(a: IndexedArguments, cluster: str) -> None:
    """Print predicted and measured seconds and bytes of a step in one process, and over the ranks of a cluster."""
    (nodes, ranks), link, rows = parse_cluster(cluster), parse_rate(a.link), list[dict[str, Any]]()
    with (
        EmulatedCluster(nodes, ranks) as network,
        WorkerPool(network.world, entries=network.entries(), timeout=TIMEOUT) as many,
        WorkerPool(1, timeout=TIMEOUT) as one,
    ):
        rates = limited(calibrated(many), link)
        network.set_rate(link)
        shared: dict[str, Any] = {"rates": rates, "experts": a.experts}
        sides = OverRanks(pool=one, per_node=1, **shared), OverRanks(pool=many, per_node=ranks, **shared)
        for length in a.seq_lens:
            counted = [side.sent(length) for side in sides]
            took = take_turns([partial(side.seconds, length) for side in sides], a.rounds)
            for side, sent, seconds in zip(sides, counted, took, strict=True):
                predicted, bytes_predicted = side.predicted(length)
                row = {"tokens": length, "ranks": side.pool.world, "predicted": predicted, "seconds": seconds}
                rows.append(row | {"bytes_predicted": bytes_predicted, "bytes": sent})
            rows[-1]["ratios"] = ratios(took[1], took[0])
            rows[-1]["ratio_predicted"] = rows[-2]["predicted"] / rows[-1]["predicted"]
    what = f"a step of a DeepSeek V3.2 layer{of_experts(a)}, fp32"
    title = f"{what}, {cluster} ranks of a thread, {a.link}; rounds: {a.rounds}"
    print_table(console_of_tables(), [line_of_ranks(row) for row in rows], title=title, legend=LEGEND_OF_RANKS)
    a.write(model=sizes_of(a.experts), rates=rates.as_dict(), rows=rows)


def of_experts(a: IndexedArguments) -> str:
    return f" with {a.experts} experts" * bool(a.experts)


LEGEND_OF_RANKS = {
    "predicted s": "by burst plan, from the measured rates",
    "seconds": "a forward and a backward of the slowest rank, median and range of the rounds",
    "bytes predicted": "that the layer's exchanges send, on the rank with the most",
    "bytes": "the same, counted",
    "one process": "its time divided by the ranks', round by round",
    "ratio predicted": "the same, of predicted seconds",
}


def line_of_ranks(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one length and number of ranks."""
    cells = {"tokens": f"{row['tokens']:,}", "ranks": str(row["ranks"]), "predicted s": f"{row['predicted']:.3g}"}
    cells |= {"seconds": spread(row["seconds"])}
    cells |= {"bytes predicted": f"{max(row['bytes_predicted']):,}", "bytes": f"{max(row['bytes']):,}"}
    several = "ratios" in row
    cells["one process"] = spread(row["ratios"]) if several else "-"
    return cells | {"ratio predicted": f"{row['ratio_predicted']:.2f}" if several else "-"}


LEGEND = {
    "seconds": "a forward and a backward, median and range of the rounds",
    "ratio": "stock's time divided by ours, round by round",
    "peak": "the most resident memory, without that before the step",
    "share": "our peak divided by stock's",
}


def line(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one length."""
    *stock, ours = row["seconds"]
    *stock_peak, peak = row["peak"]
    cells = {"tokens": f"{row['tokens']:,}", "stock's seconds": spread(stock[0]) if stock else "not run"}
    cells |= {"seconds": spread(ours), "ratio": spread(ratios(ours, stock[0])) if stock else "-"}
    cells |= {"stock's peak": mebibytes(stock_peak[0]) if stock else "not run", "peak": mebibytes(peak)}
    return cells | {"share": f"{peak / stock_peak[0]:.2f}" if stock else "-"}
