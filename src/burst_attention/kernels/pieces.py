"""Cut tiles into shapes that a stock flash kernel supports: full, top-left causal and small masked rectangles.

Works on integers only. A window costs about what it covers, and thousands of tiny documents need few launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan.tile import Tile, Tiles

SMALL = 256  # up to this many rows and columns, a masked rectangle is cheaper than several launches


@dataclass(frozen=True)
class Piece:
    """Rows x columns of a pair for one launch. Neither ``causal`` nor ``masked``: everything is visible."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    reverse: bool = False  # read rows and columns backwards, which turns a window's start into a causal triangle
    masked: tuple[Tile, ...] = ()  # only the entries of these tiles are visible


def split_into_pieces(tiles: Tiles) -> Iterator[Piece]:
    """Cut tiles into disjoint pieces that cover them."""
    small: list[Tile] = []
    if len(tiles) == 1 and _one_sided(only := next(iter(tiles))):
        yield from _cut_band(only)
        return
    for tile in tiles:
        if small and not _fits((*small, tile)):
            yield from _gathered(small)
            small = []
        if _fits((tile,)):
            small.append(tile)
        else:
            yield from _cut_band(tile)
    yield from _gathered(small)


def _hull(tiles: tuple[Tile, ...]) -> tuple[int, int, int, int]:
    starts = min(t.q_start for t in tiles), min(t.k_start for t in tiles)
    stops = max(t.q_stop for t in tiles), max(t.k_stop for t in tiles)
    return starts[0], stops[0], starts[1], stops[1]


def _fits(tiles: tuple[Tile, ...]) -> bool:
    q_start, q_stop, k_start, k_stop = _hull(tiles)
    return q_stop - q_start <= SMALL and k_stop - k_start <= SMALL


def _gathered(small: list[Tile]) -> Iterator[Piece]:
    if len(small) == 1 and _one_sided(small[0]):
        yield from _cut_band(small[0])
    elif small:
        yield _masked(*small)


def _cut_band(tile: Tile) -> Iterator[Piece]:
    corners = (tile.q_start, tile.q_stop, tile.k_start, tile.k_stop)
    if tile.full:
        yield Piece(*corners)
    elif not tile.bounded_below:
        # Every row sees the first -lo columns. The causal triangle starts after them.
        edge = tile.k_start - tile.lo
        if edge > tile.k_start:
            yield Piece(tile.q_start, tile.q_stop, tile.k_start, edge)
        yield Piece(tile.q_start, tile.q_stop, edge, tile.k_stop, causal=True)
    elif not tile.bounded_above:
        # The mirror image: every row sees the last columns, and the triangle ends before them.
        edge = tile.k_stop - (tile.hi - (tile.rows - tile.columns))
        if edge < tile.k_stop:
            yield Piece(tile.q_start, tile.q_stop, edge, tile.k_stop)
        yield Piece(tile.q_start, tile.q_stop, tile.k_start, edge, causal=True, reverse=True)
    else:
        yield from _cut_window(tile)


def _cut_window(tile: Tile) -> Iterator[Piece]:
    """Cut a band limited on both sides into row blocks: masked rectangles or, for wide bands, two triangles each."""
    width = tile.hi - tile.lo + 1
    height = width if width >= SMALL else SMALL // 2
    for top in range(0, tile.rows, height):
        rows = (top, min(top + height, tile.rows))
        edge = min(max(0, top - tile.lo + 1), tile.columns)  # first column that the block's first row does not see
        halves = [(0, edge), (edge, tile.columns)] if width >= SMALL else [(0, tile.columns)]
        for columns in halves:
            part = tile.part(rows, columns)
            if part is not None:
                yield from _cut_band(part) if _one_sided(part) else [_masked(part)]


def _one_sided(tile: Tile) -> bool:
    return not (tile.bounded_below and tile.bounded_above)


def _masked(*tiles: Tile) -> Piece:
    return Piece(*_hull(tiles), masked=tiles)
