"""Compare predictions of ``burst plan`` with published training speeds, and write docs/results/published.md.

    python benchmarks/published.py [--draw]

Nothing is run on a GPU. The published cells are those of UPipe (arXiv 2602.21196): Llama 3 8B on 8 H100, tokens per
second of each GPU, full recomputation with activations offloaded to the host. Engines that the library does not have
are listed without a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from burst_train.cli.plan import PlanArguments
from burst_train.forecast.forecast import forecast_of

PAGE = Path(__file__).resolve().parents[4] / "docs" / "results" / "published.md"
K, M = 1 << 10, 1 << 20
# (scheme, engine of ours or None, tokens, published tokens/s of each GPU)
CELLS = (
    ("ring", "ring", 128 * K, 2065),
    ("ring", "ring", M, 459),
    ("Ulysses", "ulysses", 128 * K, 2320),
    ("Ulysses", "ulysses", M, 475),
    ("UPipe", None, 128 * K, 2281),
    ("UPipe", None, M, 473),
    ("UPipe", None, 5 * M, 98),
    ("FPDT", None, M, 382),
)
HEAD = """# Predictions and published speeds

`python benchmarks/published.py --draw` writes this page. Nothing on it was measured by this project.

Published: UPipe ([arXiv 2602.21196](https://arxiv.org/abs/2602.21196)), Llama 3 8B on 8 H100, tokens per second of each
GPU. Predicted: `burst plan --model llama-3-8b --ranks 8 --hardware h100-hgx --remat layer`, by data sheets.

The prediction assumes that the rest of the model reaches {efficiency:.0%} of the matrix units' peak. That share is
fitted: 60 % is 19 % too fast for Ulysses at 128K, where the rest of the model matters most. At 1M attention dominates.
The prediction leaves out the time of offloading and of the optimizer.

| scheme | tokens | published | predicted | error |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Published:
    """Print predictions next to published speeds."""

    draw: bool = False
    """Write docs/results/published.md."""


def page() -> str:
    """Return the text of the page."""
    text = HEAD.format(efficiency=PlanArguments.matmul_efficiency)
    for scheme, engine, tokens, published in CELLS:
        length = f"{tokens // M}M" if tokens >= M else f"{tokens // K}K"
        found = "not modelled | -"
        if engine is not None:
            given = PlanArguments(seq_len=tokens, ranks=8, model="llama-3-8b", hardware="h100-hgx", remat="layer")
            speed = forecast_of(engine, given.question()).tokens_per_second
            found = f"{speed:,.0f} | {speed / published - 1:+.0%}"
        text += f"| {scheme} | {length} | {published:,} | {found} |\n"
    return text


def main() -> None:
    """Run the command."""
    if tyro.cli(Published, description=__doc__).draw:
        PAGE.write_text(page(), "utf-8")
    else:
        print(page())
