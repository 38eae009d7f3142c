"""Rows of named cells as tables, in Markdown for the pages and for the terminal; a row may leave cells out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas
from rich.table import Table

Rows = Iterable[Mapping[str, Any]]


def markdown(rows: Rows) -> str:
    """Columns stand in the order in which the rows first name them; nothing for no rows."""
    frame = _frame(rows)
    return frame.to_markdown(index=False, tablefmt="github", disable_numparse=True) + "\n" if len(frame) else ""


def terminal(rows: Rows, **options: Any) -> Table:
    """The same for a rich console; ``options``: the table's."""
    frame = _frame(rows)
    table = Table(*frame.columns, **options)
    for cells in frame.itertuples(index=False):
        table.add_row(*cells)
    return table


def _frame(rows: Rows) -> pandas.DataFrame:
    return pandas.DataFrame(list(rows)).fillna("")
