"""Made-up results of ``burst bench``: rows that passed, one that was wrong, one refused, one without figures."""

from typing import Any

from burst_bench.harness.results import Results, Row, Span

TIMELINE = tuple(
    (
        Span("compute", 0.0, 0.4, "hop 0 <b>of</b> the forward"),
        Span("exchange", 0.05, 0.3 + rank / 10),
        Span("wait", 0.4, 0.5 + rank / 10, "for hop 1"),
    )
    for rank in range(2)
)


def right(strategy: str, seq_len: int, **own: Any) -> Row:
    """A row that passed its check."""
    seconds = seq_len / 1e4
    figures: dict[str, Any] = {
        "world": 2,
        "seconds": (seconds, 0.9 * seconds, 1.3 * seconds),
        "tokens_per_second": 10_000.0,
        "flops_per_second": 1.25e9,
        "bytes_counted": 1e3 * seq_len,
        "bytes_predicted": 1e3 * seq_len,
        "peak_memory": 5_000 * seq_len,
        "error": 1e-6,
        "bound": 1e-5,
    }
    return Row(strategy=strategy, seq_len=seq_len, **figures | own)


WRONG = right("tensor", 4096, error=0.25, bound=1e-5, seconds=(7.77,), bytes_counted=777e6, timeline=TIMELINE)
REFUSED = Row(strategy="ulysses", seq_len=4096, world=2, refused="needs Hkv >= world: 1 < 2 </script>")
BARE = Row(strategy="bare", seq_len=4096, world=2, error=0.0, bound=1e-5)
RESULTS = Results(
    task="train",
    command="burst bench train --strategy burst && echo <done>",
    date="2026-03-01T12:00:00+00:00",
    machine="2 cores, <fast>",
    setting={"heads": 8, "dtype": "bfloat16"},
    rows=[
        right("burst", 4096, timeline=TIMELINE),
        right("burst", 8192, link=200e6, bytes_wire=9e6, bytes_counted=8e6, nodes=2, timeline=TIMELINE),
        right("burst", 8192),
        right("ring:zig<i>zag</i>", 4096, timeline=TIMELINE),
        right("ring:zig<i>zag</i>", 8192),
        right("single", 4096, world=1, bytes_counted=0),
        WRONG,
        REFUSED,
        BARE,
    ],
)
