"""Indexed attention on one pair of shards: the best keys of each query, and attention to chosen keys alone.

PyTorch's operators, on any device. Scores and sums are in fp32 (fp64 for fp64). Source: DeepSeek-V3.2, arXiv
2512.02556.

A candidate is a score and a position in one int64: the score's bits in the upper half, so that integers are ordered as
scores are, and the inverted position in the lower half. All candidates differ, so the best ones don't depend on the
order in which keys arrive: of equal scores, the lower position is greater.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..plan.indexed import DENSE, SCORE_ROWS
from ..plan.tile import Tile, Tiles
from .contract import accumulation_dtype, blank_output, finite_lse

NONE = torch.iinfo(torch.int64).min  # no candidate
_LOW = (1 << 32) - 1
_ROWS, _COLUMNS = SCORE_ROWS, 8192  # of a block of scores
_GATHERED = 1 << 24  # bytes of gathered keys and values of a block of queries
_DENSE = DENSE
_SCORES = 1 << 20  # scores of a block of queries and all keys

_Block: TypeAlias = tuple[slice, slice, Callable[[Tensor], Any]]  # queries, keys, and what hides some pairs' candidates


def candidates(scores: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Return candidates, int64 [..., n], of fp32 scores [..., n] at int64 positions [n]. A NaN ranks as infinity."""
    exact = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf)
    bits = exact.add_(0.0).view(torch.int32)  # of equal zeros, too: -0 + 0 is 0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return torch.add(_LOW - positions, bits, alpha=1 << 32, out=out)


def positions_of(found: Tensor) -> Tensor:
    """Return the positions of candidates, ascending along the last dim; -1, in front, for :data:`NONE`."""
    return torch.where(found == NONE, -1, _LOW - (found & _LOW)).sort(-1).values


def keys_of(blocks: Tensor, size: int) -> Tensor:
    """Return the positions of blocks' keys, [..., count size], from the blocks' numbers [..., count]; -1 for -1."""
    keys = blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    return keys.masked_fill_(blocks.unsqueeze(-1) < 0, -1).flatten(-2)


def best(found: Tensor, count: int) -> Tensor:
    """Return the ``count`` greatest candidates along the last dim, in any order, with NONE if there are fewer."""
    if found.shape[-1] > count:
        return found.topk(count, dim=-1, sorted=False).values
    return torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=NONE)


def choose(q: Tensor, k: Tensor, weights: Tensor, positions: Tensor, tiles: Tiles, count: int, scale: float) -> Tensor:
    """Return each query's best candidates among the keys that it sees, int64 [B, 1, Sq, count].

    The score of query t and key s is the sum over heads h of weights[t, h] relu(scale q[t, h] . k[s]).

    Args:
        q: [B, H, Sq, D], any floating point; it is widened to fp32.
        k: [B, 1, Sk, D]; positions: int64 [Sk], of its rows.
        weights: fp32 [B, H, Sq].
        tiles: which keys each query sees.
    """
    blocks = ((*_slices(tile), partial(_hide, tile=tile, value=NONE)) for tile in _blocks(tiles, _ROWS, _COLUMNS))
    return _best_of_blocks(q, k, weights, positions, blocks, count, scale)


def choose_between(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, stop: Tensor, count: int, scale: float
) -> Tensor:
    """As :func:`choose`, of the keys ``first`` to ``stop`` - 1 of each query. Their positions are their numbers.

    ``first``, ``stop``: int64 [Sq], on the CPU.
    """
    positions = torch.arange(k.shape[2], device=k.device)
    return _best_of_blocks(q, k, weights, positions, _blocks_between(first, stop, q.device), count, scale)


def _blocks_between(first: Tensor, stop: Tensor, device: torch.device) -> Iterator[_Block]:
    """Yield blocks of the keys that some query sees, cut as :func:`_blocks` cuts them."""
    for at in range(0, len(first), _ROWS):
        rows = slice(at, min(at + _ROWS, len(first)))
        low, high = (x[rows].to(device, non_blocking=True).unsqueeze(1) for x in (first, stop))
        last = int(stop[rows].max())
        for column in range(int(first[rows].min()), last, _COLUMNS):
            columns = slice(column, min(column + _COLUMNS, last))
            places = torch.arange(columns.start, columns.stop, device=device)
            hidden = (places < low) | (places >= high)
            yield rows, columns, partial(Tensor.masked_fill_, mask=hidden, value=NONE)


def _best_of_blocks(
    q: Tensor, k: Tensor, weights: Tensor, positions: Tensor, blocks: Iterable[_Block], count: int, scale: float
) -> Tensor:
    found = q.new_full((q.shape[0], 1, q.shape[2], count), NONE, dtype=torch.int64)
    keys, room = k[:, 0].float().mT, q.new_empty(2, 0, dtype=torch.float32)
    for rows, columns, hide in blocks:
        shape = q.shape[0], rows.stop - rows.start, columns.stop - columns.start
        if room.shape[1] < math.prod(shape):
            room = room.new_empty(2, math.prod(shape))
        scores, total = room[:, : math.prod(shape)].view(2, *shape)
        for head in range(q.shape[1]):  # all heads at once would hold as many blocks of scores
            scores.baddbmm_(q[:, head, rows].float(), keys[..., columns], beta=0, alpha=scale).relu_()
            factor = weights[:, head, rows, None]
            total = torch.mul(scores, factor, out=total) if head == 0 else total.addcmul_(scores, factor)
        joined = found.new_empty(*shape[:2], count + shape[2])
        joined[..., :count] = found[:, 0, rows]
        hide(candidates(total, positions[columns], out=joined[..., count:]))
        found[:, 0, rows] = best(joined, count)
    return found


def choose_of_one(
    q: Tensor, k: Tensor, weights: Tensor, positions: Tensor, tiles: Tiles, count: int, scale: float
) -> Tensor:
    """As :func:`choose`, of one query a row, as in decoding: all its heads together read the keys once."""
    found = q.new_full((q.shape[0], 1, 1, count), NONE, dtype=torch.int64)
    for tile in _blocks(tiles, 1, _COLUMNS):
        columns = _slices(tile)[1]
        scores = torch.relu_((q[:, :, 0].float() @ k[:, 0, columns].float().mT).mul_(scale))
        each = candidates(scores.mul_(weights).sum(1, keepdim=True), positions[columns])
        _hide(each, tile, NONE)
        found[:, 0] = best(torch.cat([found[:, 0], each], -1), count)
    return found


def _hide(x: Tensor, tile: Tile, value: float) -> None:
    """Write ``value`` to entries [..., rows, columns] of a tile where a query does not see a key."""
    first = max(0, tile.rows - 1 - tile.hi)
    last = max(first, 1 - tile.lo)  # all queries see the columns between
    for columns in (slice(0, first), slice(last, tile.columns)):
        edge = x[..., columns]
        if edge.numel():
            places = torch.arange(columns.start, columns.stop, device=x.device)
            distance = torch.arange(tile.rows, device=x.device).unsqueeze(1) - places
            edge.masked_fill_((distance < tile.lo) | (distance > tile.hi), value)


def _slices(tile: Tile) -> tuple[slice, slice]:
    """Return a tile's rows and columns."""
    return slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)


def choose_blocks(
    q: Tensor, k: Tensor, places: Tensor, positions: Tensor, tiles: Tiles, count: int, size: int, local: int
) -> Tensor:
    """Return the best blocks of each query and head, as candidates whose position is a block's number.

    A block holds ``size`` positions. Its score is the greatest q . k of its keys that the query sees. The ``local``
    blocks up to a query's own are always among the best (MiniMax M3).

    Args:
        q: [B, H, Sq, D], k: [B, 1, Sk, D], any floating point; they are widened to fp32.
        places: int64 [Sq], positions of the queries; positions: int64 [Sk], those of the keys.

    Returns:
        int64 [B, H, Sq, count]
    """
    found = q.new_full((*q.shape[:3], count), NONE, dtype=torch.int64)
    for tile in _blocks(tiles, _ROWS, _COLUMNS):
        rows, columns = _slices(tile)
        scores = q[:, :, rows].float() @ k[:, :, columns].float().mT
        _hide(scores, tile, -math.inf)
        numbers, at = torch.unique(positions[columns] // size, return_inverse=True)
        pooled = scores.new_full((*scores.shape[:3], len(numbers)), -math.inf)
        pooled.scatter_reduce_(-1, at.expand_as(scores), scores, "amax")
        seen, before = pooled > -math.inf, places[rows, None] // size - numbers
        pooled.masked_fill_((before >= 0) & (before < local), math.inf)
        each = candidates(pooled, numbers).masked_fill_(~seen, NONE)
        found[:, :, rows] = best(_distinct(torch.cat([found[:, :, rows], each], -1)), count)
    return found


def _distinct(found: Tensor) -> Tensor:
    """Return candidates with NONE in place of all but the greatest of each position."""
    found = found.sort(-1, descending=True).values
    places, order = (found & _LOW).sort(dim=-1, stable=True)
    found = found.gather(-1, order)
    again = places[..., 1:] == places[..., :-1]
    return torch.cat([found[..., :1], found[..., 1:].masked_fill(again, NONE)], -1)


def join_(total: Tensor, part: Tensor, *, distinct: bool = True) -> None:
    """Keep in ``total`` the best candidates of both, in place. ``distinct``: they have no position in common."""
    both = torch.cat([total, part], -1)
    total.copy_(best(both if distinct else _distinct(both), total.shape[-1]))


def _blocks(tiles: Tiles, rows: int, columns: int) -> Iterator[Tile]:
    """Yield the tiles, cut into blocks of at most so many rows and columns."""
    for tile in tiles:
        for i in range(0, tile.rows, rows):
            for j in range(0, tile.columns, columns):
                ends = (i, min(i + rows, tile.rows)), (j, min(j + columns, tile.columns))
                if (part := tile.part(*ends)) is not None:
                    yield part


def rows_of(indices: Tensor, positions: Tensor, tiles: Tiles, span: int) -> Tensor:
    """Return which rows of a key shard each query has chosen and sees, int64 [B, C, Sq, m], -1 behind them.

    Args:
        indices: int64 [B, C, Sq, count], distinct positions, negative for none; C is 1 or the number of key heads.
        positions: int64 [Sk], of the shard's rows, each below ``span``.
        tiles: which keys each query sees.
    """
    table = positions.new_full((span + 1,), -1)  # the last entry is that of no position
    table[positions] = torch.arange(len(positions), device=positions.device)
    return seen_rows(table[indices.clamp(-1, span)], tiles)


def seen_rows(at: Tensor, tiles: Tiles) -> Tensor:
    """Return those of chosen rows, int64 [B, C, Sq, count], that each query sees, as :func:`rows_of` does."""
    seen = torch.zeros_like(at, dtype=torch.bool)
    for tile in tiles:
        rows = slice(tile.q_start, tile.q_stop)
        column = at[:, :, rows] - tile.k_start
        inside = (column >= 0) & (column < tile.columns)
        if not tile.full:
            distance = torch.arange(tile.rows, device=at.device)[:, None] - column
            inside &= (distance >= tile.lo) & (distance <= tile.hi)
        seen[:, :, rows] |= inside
    at = at.masked_fill(~seen, -1)
    most = int(seen.sum(-1).max()) if seen.numel() else 0
    return at if most == at.shape[-1] else at.sort(-1, descending=True).values[..., :most]


def forward(
    q: Tensor, k: Tensor, v: Tensor | int, at: Tensor, scale: float, *, dense: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of each query over its chosen rows; 0 and -inf without any.

    q is [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; ``at`` is of :func:`rows_of`. An int ``v`` is Dv: the
    value is the first Dv numbers of its key. out is [B, Hq, Sq, Dv] and lse [B, Hq, Sq], both in fp32 (fp64 for fp64).
    ``dense``: whether to multiply by all keys; None: if that is faster.
    """
    out, lse = blank_output(q, _values(k, v), q.shape[2], accumulation_dtype(q.dtype))
    if _is_dense(q, k, v, at) if dense is None else dense:
        for each in _dense_blocks(q, k, v, at):
            scores = each.scores(scale)
            total = torch.logsumexp(scores, -1)
            p = scores.sub_(finite_lse(total).unsqueeze(-1)).exp_()
            with each.spread(p) as whole:
                out[each.queries] = (whole @ each.values).view(*each.shape, -1)
            lse[each.queries] = total.view(each.shape)
        return out, lse
    held = _Gathered(k, v, at)
    for block in held.blocks():
        scores = held.hide((held.grouped(q, block) * scale) @ held.keys.mT)
        total = torch.logsumexp(scores, -1)
        p = scores.sub_(finite_lse(total).unsqueeze(-1)).exp_()
        lse[:, :, block], out[:, :, block] = held.flat(total), held.flat(p @ held.values)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | int,
    lse: Tensor,
    delta: Tensor,
    at: Tensor,
    scale: float,
    *,
    dense: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv) of the chosen rows, in fp32 (fp64 for fp64), in the shapes of q, k, v.

    dout is [B, Hq, Sq, Dv]. lse and delta are those of whole rows, [B, Hq, Sq]; lse is 0 in rows that see nothing. If
    ``v`` is an int, dk is the gradient of the rows, and there is no dv. ``dense``: as for :func:`forward`.
    """
    wide = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    if _is_dense(q, k, v, at) if dense is None else dense:
        dk = torch.zeros(k.shape, dtype=wide, device=k.device)
        dv = dk[..., :v] if isinstance(v, int) else torch.zeros(v.shape, dtype=wide, device=v.device)
        for each in _dense_blocks(q, k, v, at):
            grads = dout[each.queries].to(wide).flatten(0, 1)
            sums, own = (x[each.queries].flatten().unsqueeze(-1) for x in (lse, delta))
            p = each.scores(scale).sub_(sums).exp_()
            ds = each.products(grads, each.values).sub_(own).mul_(p).mul_(scale)
            with each.spread(p) as whole:
                dv[each.keys_at].addmm_(whole.mT, grads)
            with each.spread(ds) as whole:
                dq[each.queries] = (whole @ each.keys).view(*each.shape, -1)
                dk[each.keys_at].addmm_(whole.mT, each.rows)
        return (dq, dk) if isinstance(v, int) else (dq, dk, dv)
    held = _Gathered(k, v, at, sums=True)
    for block in held.blocks():
        queries, grads, *stats = (held.grouped(x, block) for x in (q, dout, lse[..., None], delta[..., None]))
        stacked = held.stacked(queries * scale, grads)
        scores, ds = held.products(stacked).chunk(2, 1)
        p = held.hide(scores).sub_(stats[0]).exp_()
        ds = ds.sub_(stats[1]).mul_(p)
        dq[:, :, block] = held.flat((ds @ held.keys) * scale)
        held.add(torch.cat([ds, p], 1), stacked)
    return dq, *held.sums()


def _values(k: Tensor, v: Tensor | int) -> Tensor:
    """Return the values [B, Hkv, Sk, Dv]; if ``v`` is an int, the first numbers of the keys."""
    return k[..., :v] if isinstance(v, int) else v


def _is_dense(q: Tensor, k: Tensor, v: Tensor | int, at: Tensor) -> bool:
    """Return whether to multiply by all keys: they are not many more than the chosen ones, and hold no infinity.

    The queries of a group share what they gather, so a gather pays earlier for a large group.
    """
    groups = q.shape[1] // k.shape[1]
    few = 0 < k.shape[2] <= _DENSE / groups * at.shape[-1]
    return few and all(bool(torch.isfinite(x).all()) for x in (k, _values(k, v)))  # a weight of 0 doesn't hide others


@dataclass(frozen=True, eq=False)
class _DenseBlock:
    """Queries of one key-value head [N, D], widened, and the keys from the first to the last that they chose.

    ``queries``: their places in [B, Hq, Sq, ...], of the ``shape`` (groups, rows); ``keys_at``: those of the keys in
    [B, Hkv, Sk, ...]. ``at``: int64 [N, m], which keys they chose; for none the number of keys.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    at: Tensor
    none: Tensor  # bool [N, m]
    queries: tuple[int, slice, slice]
    shape: tuple[int, int]
    keys_at: tuple[int, int, slice]
    memory: tuple[Tensor, Tensor]  # for products, and zeros: fresh memory would cost as much time as a product

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x [N, D] times y [n, D], of the chosen keys: [N, m]."""
        whole = self.memory[0][: len(x) * (len(y) + 1)].view(len(x), -1)
        torch.mm(x, y.mT, out=whole[:, :-1])
        return whole.gather(-1, self.at)

    def scores(self, scale: float) -> Tensor:
        """Return scaled scores of the chosen keys, [N, m], -inf for none."""
        return self.products(self.rows, self.keys).mul_(scale).masked_fill_(self.none, -math.inf)

    @contextmanager
    def spread(self, x: Tensor) -> Iterator[Tensor]:
        """Give [N, n] of zeros, with the entries [N, m] of the chosen keys."""
        whole = self.memory[1][: len(x) * (len(self.keys) + 1)].view(len(x), -1)
        yield whole.scatter_(-1, self.at, x)[:, :-1]
        whole.scatter_(-1, self.at, 0.0)


def _dense_blocks(q: Tensor, k: Tensor, v: Tensor | int, at: Tensor) -> Iterator[_DenseBlock]:
    """Yield blocks whose scores fit a core's cache."""
    wide, groups = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
    k, values = k.to(wide), _values(k, v).to(wide)
    size = min(at.shape[2], max(16, _SCORES // (groups * k.shape[2])))
    room = groups * size * (k.shape[2] + 1)
    memory = k.new_empty(room), k.new_zeros(room)
    for first in range(0, at.shape[2], size):
        queries = slice(first, min(first + size, at.shape[2]))
        chosen = at[:, :, queries]
        last = int(chosen.max()) + 1
        if not last:
            continue
        none = chosen < 0
        keys = slice(int(chosen.masked_fill(none, last).min()), last)
        chosen = chosen.sub(keys.start).masked_fill_(none, last - keys.start)
        for batch, head in product(range(k.shape[0]), range(k.shape[1])):
            heads, shape = slice(head * groups, (head + 1) * groups), (groups, chosen.shape[2])
            own, hidden = (x[batch, head % x.shape[1]].expand(groups, -1, -1).flatten(0, 1) for x in (chosen, none))
            rows = q[batch, heads, queries].to(wide).flatten(0, 1)
            places = (batch, heads, queries), shape, (batch, head, keys)
            yield _DenseBlock(rows, k[batch, head, keys], values[batch, head, keys], own, hidden, *places, memory)


class _Gathered:
    """Rows [key | value] gathered for blocks of queries, and sums of their gradients.

    N counts the queries of a block times B Hkv, G = Hq / Hkv, m the chosen rows, W the numbers of a row. All blocks use
    the same memory: fresh memory would cost more time than the gather.
    """

    def __init__(self, k: Tensor, v: Tensor | int, at: Tensor, *, sums: bool = False) -> None:
        width, each = k.shape[3], k.shape[0] * k.shape[1] * at.shape[-1]
        rows = k if isinstance(v, int) else torch.cat([k, v], -1)
        self._joint, self._at, self._shape = isinstance(v, int), at, k.shape
        self._of_keys, self._of_values = slice(width), slice(v) if isinstance(v, int) else slice(width, None)
        # A row of zeros stands for no key: a zero weight times an infinity would be NaN.
        self._rows = torch.nn.functional.pad(rows.to(accumulation_dtype(k.dtype)), (0, 0, 0, 1)).flatten(0, 2)
        self._sums = torch.zeros_like(self._rows) if sums else self._rows
        self._size = min(at.shape[2], max(1, _GATHERED // max(1, each * rows.shape[3] * self._rows.itemsize)))
        self._memory = self._rows.new_empty(each * self._size, rows.shape[3])

    def blocks(self) -> Iterator[slice]:
        """Gather rows for block after block of queries; yield which queries."""
        batch, heads, none, _ = self._shape
        first = torch.arange(batch * heads, device=self._at.device).view(batch, heads, 1, 1) * (none + 1)
        for start in range(0, self._at.shape[2] if self._at.shape[-1] else 0, self._size):
            block = slice(start, min(start + self._size, self._at.shape[2]))
            at = self._at[:, :, block]
            self._hidden = (at < 0).expand(-1, heads, -1, -1).flatten(0, 2).unsqueeze(1)
            self._index = torch.where(at < 0, none, at).add(first).flatten()
            taken = torch.index_select(self._rows, 0, self._index, out=self._memory[: len(self._index)])
            self._taken = taken.unflatten(0, (-1, at.shape[-1]))
            yield block

    @property
    def keys(self) -> Tensor:
        """The gathered keys [N, m, D]."""
        return self._taken[..., self._of_keys]

    @property
    def values(self) -> Tensor:
        """The gathered values [N, m, Dv]."""
        return self._taken[..., self._of_values]

    def grouped(self, x: Tensor, block: slice) -> Tensor:
        """Return rows of [B, Hq, Sq, ...] as [N, G, ...], widened."""
        x = x[:, :, block].to(self._rows.dtype)
        return x.unflatten(1, (self._shape[1], -1)).transpose(2, 3).flatten(0, 2)

    def flat(self, x: Tensor) -> Tensor:
        """Return [N, G, ...] as [B, Hq, rows, ...]."""
        return x.unflatten(0, (*self._shape[:2], -1)).transpose(2, 3).flatten(1, 2)

    def stacked(self, queries: Tensor, grads: Tensor) -> Tensor:
        """Return [N, 2 G, W], whose products with rows are those of queries with keys, then of grads with values."""
        whole = queries.new_zeros(len(queries), 2, queries.shape[1], self._rows.shape[1])
        whole[:, 0, :, self._of_keys], whole[:, 1, :, self._of_values] = queries, grads
        return whole.flatten(1, 2)

    def products(self, x: Tensor) -> Tensor:
        """Return x [N, ..., W] times the gathered rows."""
        return x @ self._taken.mT

    def hide(self, scores: Tensor) -> Tensor:
        """Write -inf to scores [N, G, m] where nothing is chosen."""
        return scores.masked_fill_(self._hidden, -math.inf)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add x [N, 2 G, m] transposed times y [N, 2 G, W] to the sums of the gathered rows. Overwrites the rows."""
        torch.bmm(x.mT, y, out=self._taken)
        self._sums.index_add_(0, self._index, self._taken.flatten(0, 1))

    def sums(self) -> tuple[Tensor, ...]:
        """Return the sums of gradients [B, Hkv, Sk, ...]: of keys and of values; of keys alone if values are inside.

        They share no memory, as an operator's outputs must not: parts of a single row would be contiguous as they are.
        """
        whole = self._sums.unflatten(0, (*self._shape[:2], -1))[:, :, :-1]
        if self._joint:
            return (whole,)
        return tuple(
            whole[..., x].clone(memory_format=torch.contiguous_format) for x in (self._of_keys, self._of_values)
        )
