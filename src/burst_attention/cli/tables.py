"""Print tables whose cells stay whole on a narrow terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 160  # columns where the output is not a terminal


def console_of_tables() -> Console:
    """Return a console for tables; its lines are longer where no terminal limits them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def print_table(
    console: Console,
    rows: Iterable[Mapping[str, str]],
    *,
    title: str = "",
    legend: Mapping[str, str] | None = None,
    keys: int = 1,
    right: Sequence[str] = (),
) -> None:
    """Print a table; columns that don't fit beside the others follow in further tables.

    Args:
        console: its width is the limit. Only a cell that is wider by itself is folded.
        rows: cells by column, as rich markup. A row may leave some out. Columns have the order of their first use.
        title: a line above, as rich markup.
        legend: what columns mean, by name; a line below says it of those that the rows have.
        keys: the number of first columns that each of the tables repeats.
        right: the columns that are aligned to the right.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if title:
        console.print(f"[bold]{title}[/]", highlight=False)
    notes: list[str] = []
    if not _fits(console, _table(rows, names, right)):
        rows, notes = _with_notes(rows, names[:keys], most=console.width // 3)
    leading, rest = names[:keys], names[keys:]
    while True:
        count = next((n for n in range(len(rest), 1, -1) if _fits(console, _table(rows, leading + rest[:n], right))), 1)
        console.print(_table(rows, leading + rest[:count], right))
        rest = rest[count:]
        if not rest:
            break
        console.print()
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    notes = [f"{name}: {meaning}" for name, meaning in (legend or {}).items() if name in names]
    if notes:
        console.print("; ".join(notes), highlight=False, markup=False, soft_wrap=True)


def _with_notes(
    rows: list[Mapping[str, str]], names: Sequence[str], most: int
) -> tuple[list[Mapping[str, str]], list[str]]:
    """Replace cells that are wider than ``most`` by numbers; return the rows, and a line for each number."""
    long = dict.fromkeys(row[name] for row in rows for name in names if len(row.get(name, "")) > most)
    marks = {text: f"({n})" for n, text in enumerate(long, 1)}
    made = [{name: marks.get(text, text) if name in names else text for name, text in row.items()} for row in rows]
    return list(made), [f"{mark} {text}" for text, mark in marks.items()]


def _table(rows: list[Mapping[str, str]], names: list[str], right: Sequence[str]) -> Table:
    """Return a table of some columns, without a frame, which takes a fifth of a narrow line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    return table


def _fits(console: Console, table: Table) -> bool:
    unlimited = console.options.update(width=100_000)
    return console.measure(table, options=unlimited).maximum <= console.width
