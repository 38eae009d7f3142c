"""What ``burst bench`` measured: rows of figures, as JSON. The report and the tables are made from these alone."""

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
    """One stretch of one rank's time, in seconds since the ranks started together.

    Attributes:
        kind: ``wait`` (the rank does nothing but wait for activations) and ``compute`` (all else; waiting for FSDP2's
            parameters too) share the rank's time between them; ``exchange`` (messages on the wire) runs beside them.
        label: what it was, such as ``hop 3 of the forward``.
    """

    kind: str
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine at one sequence length, world and link rate.

    Attributes:
        engine: its name, such as ``burst`` or ``ring:contiguous``.
        seq_len: tokens of the sequence, over all ranks.
        world: ranks.
        link: rate of each node's link in bits per second; None for no limit.
        chosen: what burst planned for this link, in words; None of other engines.
        refused: why the engine can't run this; every figure is then None or empty.
        seconds: wall time of each round, the slowest rank's.
        tokens_per_second, flops_per_second: by the median round; the model's work, not the work done twice.
        bytes_counted: sent per rank and call as the transport counted, activations only; mean over ranks.
        bytes_predicted: the same, predicted before the run.
        bytes_wire: on the interfaces of the emulated cluster, per rank; None without one.
        nodes: of the emulated cluster.
        peak_memory: bytes, the highest rank's, above what was resident before the engine was built.
        peak_resident: bytes, the highest rank's, all that was resident at its peak.
        error: relative, against fp64: of the tensor that comes closest to its ``bound``, at 512 tokens; of attention
            also in rows drawn at this length.
        bound: what ``error`` may be.
        timeline: for each rank, what it did in one call.
    """

    engine: str
    seq_len: int
    world: int
    link: float | None = None
    chosen: str | None = None
    refused: str | None = None
    seconds: Sequence[float] = ()
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    bytes_counted: float | None = None
    bytes_predicted: float | None = None
    bytes_wire: float | None = None
    nodes: int | None = None
    peak_memory: int | None = None
    peak_resident: int | None = None
    error: float | None = None
    bound: float | None = None
    timeline: Sequence[Sequence[Span]] = ()

    @property
    def passed(self) -> bool:
        """Whether its result was right; nothing else of it is told if not."""
        return self.error is not None and self.bound is not None and self.error <= self.bound

    @property
    def median(self) -> float | None:
        """Seconds of the median round."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def bytes_uncounted(self) -> float | None:
        """On the wire beyond what was counted: parameters, their gradients, headers, and what gloo sends too much.

        None where a node has several ranks: what those send each other is counted, but not by the interface.
        """
        if self.bytes_wire is None or self.bytes_counted is None or self.nodes != self.world:
            return None
        return self.bytes_wire - self.bytes_counted


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As JSON with a line for each row of each table: what changed can be read in a diff."""

    def lines(value: Any, depth: int) -> str:
        inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
        if isinstance(value, dict) and depth < 2:
            entries = (f"{json.dumps(key)}: {lines(each, depth + 1)}" for key, each in value.items())
            return "{" + inner + f",{inner}".join(entries) + outer + "}"
        if isinstance(value, list) and value and isinstance(value[0], dict | list | tuple):
            return "[" + inner + f",{inner}".join(map(json.dumps, value)) + outer + "]"
        return json.dumps(value)

    path.write_text(lines(content, 0) + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True)
class Results:
    """A run of ``burst bench``.

    Attributes:
        task: one of :data:`TASKS`.
        command: that makes it again.
        date: ISO 8601.
        machine: what it ran on, in a line.
        revision: of the code, as git names it.
        versions: of the libraries, by name.
        setting: sizes that all rows share, such as ``{"layers": 1, "heads": 8, "head_dim": 32, "dtype": "bfloat16"}``.
    """

    task: str
    command: str
    date: str
    machine: str
    setting: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    revision: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def ratios_to_first(self, row: Row) -> list[float]:
        """By round: ``row``'s time by the first engine's at the same length, ranks and link.

        Empty for the first engine itself, where that one was wrong or refused, and without rounds.
        """
        place = (row.seq_len, row.world, row.link)
        first = next(other for other in self.rows if (other.seq_len, other.world, other.link) == place)
        return ratios(first.seconds, row.seconds) if first is not row and first.passed and row.seconds else []

    def write(self, path: Path) -> None:
        """As JSON."""
        content = asdict(self)
        for fields, row in zip(content["rows"], self.rows, strict=True):
            fields["bytes_uncounted"] = row.bytes_uncounted
        write_json(path, content)

    @classmethod
    def read(cls, path: Path) -> Results:
        """What :meth:`write` wrote."""
        return cls.of(json.loads(path.read_text("utf-8")))

    @classmethod
    def of(cls, content: dict[str, Any]) -> Results:
        """From its fields as JSON has them."""
        content, rows = dict(content), []
        for row in content.pop("rows"):
            row = {name: value for name, value in row.items() if name != "bytes_uncounted"}  # follows from the others
            rows.append(
                Row(**row | {"timeline": [[Span(**span) for span in rank] for rank in row.get("timeline", ())]})
            )
        return cls(rows=rows, **content)
