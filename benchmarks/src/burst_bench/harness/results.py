"""Results of ``burst bench``: rows of figures, stored as JSON.

The report and the tables need nothing else.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .turns import ratios

TASKS = ("attention", "train", "prefill")
KINDS = ("compute", "wait", "exchange")


@dataclass(frozen=True)
class Span:
    """An interval of one rank's time, in seconds since all ranks started."""

    # ``wait`` (the rank only waits for activations), ``compute`` (everything else, including waits for FSDP2's
    # parameters) or ``exchange`` (messages on the wire). ``wait`` and ``compute`` together fill the rank's time;
    # ``exchange`` overlaps them.
    kind: str
    start: float
    end: float
    label: str = ""  # description, such as ``hop 3 of the forward``


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy at one sequence length, world and link rate."""

    strategy: str  # its name, such as ``burst``
    seq_len: int  # tokens of the whole sequence
    world: int  # number of ranks
    link: float | None = None  # rate of each node's link in bits per second; None for no limit
    chosen: str | None = None  # description of what ``auto`` chose for this link; None for other strategies
    refused: str | None = None  # reason why the strategy can't run this; every figure is then None or empty
    seconds: Sequence[float] = ()  # the slowest rank's wall time in each round
    # Rates in the median round. FLOPs count the model's work; recomputation doesn't count.
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    # Bytes of activations sent per rank and call, as the transport counted; mean over ranks.
    bytes_counted: float | None = None
    bytes_predicted: float | None = None  # the same bytes, predicted before the run
    bytes_wire: float | None = None  # bytes per rank on the interfaces of the emulated cluster; None without a cluster
    nodes: int | None = None  # number of nodes of the emulated cluster
    # Peak bytes of the highest rank, minus the bytes resident before the strategy was built.
    peak_memory: int | None = None
    peak_resident: int | None = None  # peak bytes of the highest rank, everything resident included
    # Relative error against fp64 of the tensor closest to its ``bound``, at 512 tokens. For attention, also the error
    # in random rows at this length.
    error: float | None = None
    bound: float | None = None  # largest allowed ``error``
    timeline: Sequence[Sequence[Span]] = ()  # spans of one call, for each rank

    @property
    def passed(self) -> bool:
        """Whether its result was right; wrong results get no figures."""
        return self.error is not None and self.bound is not None and self.error <= self.bound

    @property
    def median(self) -> float | None:
        """Return the seconds of the median round."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def bytes_uncounted(self) -> float | None:
        """Return the bytes on the wire that the transport did not count.

        They are parameters, their gradients, headers, and gloo's overhead. The result is None if nodes have several
        ranks: the transport counts messages between them, and the interface doesn't.
        """
        if self.bytes_wire is None or self.bytes_counted is None or self.nodes != self.world:
            return None
        return self.bytes_wire - self.bytes_counted


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True)
class Results:
    """A run of ``burst bench``."""

    task: str  # one of :data:`TASKS`
    command: str  # command that repeats the run
    date: str  # date in ISO 8601
    machine: str  # one-line description of the machine
    # Sizes that all rows share, such as ``{"layers": 1, "heads": 8, "head_dim": 32, "dtype": "bfloat16"}``.
    setting: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    revision: str = ""  # git revision of the code
    versions: dict[str, str] = field(default_factory=dict)  # versions of the libraries, by name

    def ratios_to_first(self, row: Row) -> list[float]:
        """Return ``row``'s time divided by the first strategy's, for each round.

        Both have the same length, ranks and link. The list is empty for the first strategy itself, or if that
        was wrong or refused, and without rounds.
        """
        place = (row.seq_len, row.world, row.link)
        first = next(other for other in self.rows if (other.seq_len, other.world, other.link) == place)
        return ratios(first.seconds, row.seconds) if first is not row and first.passed and row.seconds else []

    def write(self, path: Path) -> None:
        """Write the results as JSON."""
        content = asdict(self)
        for fields, row in zip(content["rows"], self.rows, strict=True):
            fields["bytes_uncounted"] = row.bytes_uncounted
        write_json(path, content)
