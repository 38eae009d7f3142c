"""Compare predictions of ``burst plan`` with published training speeds, and write docs/results/published.md.

    burst bench published [--draw]

Nothing is run on a GPU. The published cells are those of UPipe (arXiv 2602.21196): Llama 3 8B on 8 H100, tokens per
second of each GPU, full recomputation with activations offloaded to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from burst_train.cli.plan import PlanArguments
from burst_train.forecast.forecast import forecast_of
from burst_train.forecast.machines import BANDWIDTH_EFFICIENCY
from burst_train.forecast.request import ForecastRequest

PAGE = Path(__file__).resolve().parents[4] / "docs" / "results" / "published.md"
K, M = 1 << 10, 1 << 20
# (scheme, the engine whose prediction stands for it, tokens, published tokens/s of each GPU)
CELLS = (
    ("ring", "ring", 128 * K, 2065),
    ("ring", "ring", M, 459),
    ("Ulysses", "ulysses", 128 * K, 2320),
    ("Ulysses", "ulysses", M, 475),
    ("UPipe", "ulysses", 128 * K, 2281),
    ("UPipe", "ulysses", M, 473),
    ("UPipe", "ulysses", 5 * M, 98),
    ("FPDT", "ulysses", M, 382),
)
HEAD = """# Predictions and published speeds

`burst bench published --draw` writes this page. Nothing on it was measured by this project.

Published: UPipe ([arXiv 2602.21196](https://arxiv.org/abs/2602.21196)), Llama 3 8B on 8 H100, tokens per second of each
GPU. Predicted: `burst plan --model llama-3-8b --ranks 8 --hardware h100-hgx --remat layer`, by data sheets.

UPipe and FPDT compute what Ulysses computes, by chunks of heads or of the sequence. So Ulysses' prediction stands for
them. Their copies to host memory are not predicted.

| scheme | predicted as | tokens | published | predicted | error |
|---|---|---|---|---|---|
"""
CAUSES = """
## Where the time goes

Ulysses at 128K, in microseconds per token and GPU. Matrix products reach {matmul:.0%} of the peak, element-wise
operations and AdamW {bandwidth:.0%} of the memory's bandwidth; both shares are estimates. A lower share of matrix
products alone would need {alone:.0%} to explain the published time.

| part | us |
|---|---|
"""


@dataclass(frozen=True)
class Published:
    """Print predictions next to published speeds."""

    draw: bool = False
    """Write docs/results/published.md."""


def step_of(tokens: int) -> ForecastRequest:
    """Return the step of a published cell."""
    return PlanArguments(seq_len=tokens, ranks=8, model="llama-3-8b", hardware="h100-hgx", remat="layer").request()


def page() -> str:
    """Return the text of the page."""
    text = HEAD
    for scheme, engine, tokens, published in CELLS:
        length = f"{tokens // M}M" if tokens >= M else f"{tokens // K}K"
        speed = forecast_of(engine, step_of(tokens)).tokens_per_second
        text += f"| {scheme} | {engine} | {length} | {published:,} | {speed:,.0f} | {speed / published - 1:+.0%} |\n"
    return text + causes(128 * K, 2320)


def causes(tokens: int, published: int) -> str:
    """Return the parts of the predicted time per token, and the time that they leave unexplained."""
    q = step_of(tokens)
    found, own = forecast_of("ulysses", q), tokens / q.cluster.ranks
    matrices = q.rest_flops("layer") / (q.cluster.ranks * q.matrix_rate)
    parts = {
        "attention, computing": found.attention - found.exposed,
        "exchange of attention that computing does not hide": found.exposed,
        "matrix products": matrices,
        "element-wise operations and AdamW": found.rest - matrices,
        "exchange of parameters that computing does not hide": found.parameters,
    }
    left = own / published - found.seconds
    alone = q.cluster.efficiency * matrices / (found.rest + left)
    head = CAUSES.format(matmul=q.cluster.efficiency, bandwidth=BANDWIDTH_EFFICIENCY, alone=alone)
    rows = {**parts, "not explained": left, "published": own / published}
    return head + "".join(f"| {name} | {1e6 * seconds / own:.0f} |\n" for name, seconds in rows.items())


def main(arguments: list[str]) -> None:
    """Run the command."""
    if tyro.cli(Published, prog="burst bench published", description=__doc__, args=arguments).draw:
        PAGE.write_text(page(), "utf-8")
    else:
        print(page())
