"""Tables in Markdown and for the terminal.

A row maps column names to cells; it may leave cells out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas
from rich.table import Table

Rows = Iterable[Mapping[str, Any]]


def markdown(rows: Rows) -> str:
    """Return a Markdown table, or an empty string without rows.

    The columns have the order in which the rows first name them.
    """
    frame = _frame(rows)
    return frame.to_markdown(index=False, tablefmt="github", disable_numparse=True) + "\n" if len(frame) else ""


def terminal(rows: Rows, **options: Any) -> Table:
    """Return the table for a rich console; ``options`` go to :class:`rich.table.Table`."""
    frame = _frame(rows)
    table = Table(*frame.columns, **options)
    for cells in frame.itertuples(index=False):
        table.add_row(*cells)
    return table


def _frame(rows: Rows) -> pandas.DataFrame:
    return pandas.DataFrame(list(rows)).fillna("")
