"""Table cells of a row of results, for both the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..harness.results import Results, Row
from ..texts import bytes_text, link_text, number_text, spread


class Column(NamedTuple):
    """A column: its header, its text for a row, and its meaning."""

    header: str
    text: Callable[[Row], str]
    meaning: str = ""


PLACE = (
    Column("engine", lambda row: row.engine),
    Column("tokens", lambda row: f"{row.seq_len:,}", "of the sequence, over all ranks"),
    Column("ranks", lambda row: str(row.world)),
    Column("link", lambda row: link_text(row.link), "rate of each node's link"),
)
NEAREST = "against fp64 at 512 tokens, for the tensor closest to its bound; for attention also in rows at this length"
CHECK = (
    Column("error", lambda row: "-" if row.error is None else f"{row.error:.2e}", NEAREST),
    Column("bound", lambda row: "-" if row.bound is None else f"{row.bound:.2e}", "largest allowed error"),
)
WIRE = "on the interfaces of the emulated cluster, per rank"
BEYOND = "on the wire but not counted: parameters, their gradients, protocol headers, gloo's overhead"
PEAK = "the highest rank's, minus the memory resident before the engine was built"


def measured(results: Results) -> tuple[Column, ...]:
    """Return the columns with measured figures, between those of ``PLACE`` and ``CHECK``."""

    def ends(row: Row) -> str:
        return " to ".join(number_text(end(row.seconds)) for end in (min, max)) if row.seconds else "-"

    def to_first(row: Row) -> str:
        return spread(results.ratios_to_first(row))

    def gflops(row: Row) -> str:
        return number_text(None if row.flops_per_second is None else row.flops_per_second / 1e9)

    return (
        Column("median s", lambda row: number_text(row.median), "wall time of the median round, the slowest rank's"),
        Column("min to max s", ends, "least and greatest round"),
        Column(
            "/ first's",
            to_first,
            "time divided by the first engine's; each ratio comes from one round: median and range",
        ),
        Column("tokens/s", lambda row: number_text(row.tokens_per_second), "by the median round"),
        Column("GFLOP/s", gflops, "of the model, by the median round; recomputation does not count"),
        Column("bytes counted", lambda row: bytes_text(row.bytes_counted), "sent per rank and call: activations"),
        Column("bytes predicted", lambda row: bytes_text(row.bytes_predicted), "the same, predicted before the run"),
        Column("bytes on the wire", lambda row: bytes_text(row.bytes_wire), WIRE),
        Column("bytes uncounted", lambda row: bytes_text(row.bytes_uncounted), BEYOND),
        Column("peak memory", lambda row: bytes_text(row.peak_memory), PEAK),
    )


def state(row: Row) -> str:
    """Return ``right``, ``wrong``, ``refused`` or ``unchecked``."""
    if row.refused is not None:
        return "refused"
    if row.error is None or row.bound is None:
        return "unchecked"
    return "right" if row.passed else "wrong"


def cells(row: Row, columns: tuple[Column, ...]) -> list[tuple[str, int]]:
    """Return (text, column span) of each cell from left to right.

    Args:
        row: The row.
        columns: Columns with measured figures.
    """
    place, check = ([(column.text(row), 1) for column in some] for some in (PLACE, CHECK))
    match state(row):
        case "right":
            return [*place, *((column.text(row), 1) for column in columns), *check]
        case "refused":
            return [*place, (f"refused: {row.refused}", len(columns) + len(CHECK))]
        case "wrong":
            return [*place, ("WRONG", len(columns)), *check]
    return [*place, ("not checked, so no figures", len(columns)), *check]
