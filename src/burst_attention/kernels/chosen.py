"""Indexed attention on one pair of shards: the best keys of each query, and attention to chosen keys alone.

PyTorch's operators, on any device. Scores and sums are in fp32 (fp64 for fp64). Source: DeepSeek-V3.2, arXiv
2512.02556.

A candidate is a score and a position in one int64: the score's bits in the upper half, so that integers are ordered as
scores are, and the inverted position in the lower half. All candidates differ, so the best ones don't depend on the
order in which keys arrive: of equal scores, the lower position is greater.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..plan.tile import Tile, Tiles
from .contract import accumulation_dtype, band_seen, blank_output, finite_lse

NONE = torch.iinfo(torch.int64).min  # no candidate
_LOW = (1 << 32) - 1
_ROWS, _COLUMNS = 128, 8192  # of a block of scores
_GATHERED = 1 << 24  # bytes of gathered keys and values of a block of queries
_DENSE = 32  # up to this many keys for each chosen one, products with all keys take less time than a gather
_SCORES = 1 << 20  # scores of a block of queries and all keys


def candidates(scores: Tensor, positions: Tensor) -> Tensor:
    """Return candidates, int64 [..., n], of fp32 scores [..., n] at int64 positions [n]. A NaN ranks as infinity."""
    exact = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf)
    bits = exact.add_(0.0).view(torch.int32)  # of equal zeros, too: -0 + 0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(torch.int64).mul_(1 << 32).add_(_LOW - positions)


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
    found = q.new_full((q.shape[0], 1, q.shape[2], count), NONE, dtype=torch.int64)
    for tile in _blocks(tiles, _ROWS, _COLUMNS):
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        keys, total = k[:, 0, columns].float().mT, None
        for head in range(q.shape[1]):  # all heads at once would hold as many blocks of scores
            scores = torch.relu_((q[:, head, rows].float() @ keys).mul_(scale))
            scores.mul_(weights[:, head, rows, None])
            total = scores if total is None else total.add_(scores)
        assert total is not None
        each = candidates(total, positions[columns])
        if not tile.full:
            each.masked_fill_(~band_seen(tile, q.device), NONE)
        joined = torch.cat([found[:, 0, rows], each], -1)
        found[:, 0, rows] = best(joined, count)
    return found


def choose_of_one(
    q: Tensor, k: Tensor, weights: Tensor, positions: Tensor, tiles: Tiles, count: int, scale: float
) -> Tensor:
    """As :func:`choose`, of one query a row, as in decoding: all its heads together read the keys once."""
    found = q.new_full((q.shape[0], 1, 1, count), NONE, dtype=torch.int64)
    for tile in _blocks(tiles, 1, _COLUMNS):
        columns = slice(tile.k_start, tile.k_stop)
        scores = torch.relu_((q[:, :, 0].float() @ k[:, 0, columns].float().mT).mul_(scale))
        each = candidates(scores.mul_(weights).sum(1, keepdim=True), positions[columns])
        if not tile.full:
            each.masked_fill_(~band_seen(tile, q.device), NONE)
        found[:, 0] = best(torch.cat([found[:, 0], each], -1), count)
    return found


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
        rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        scores = q[:, :, rows].float() @ k[:, :, columns].float().mT
        if not tile.full:
            scores.masked_fill_(~band_seen(tile, q.device), -math.inf)
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


def forward(q: Tensor, k: Tensor, v: Tensor, at: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of each query over its chosen rows; 0 and -inf without any.

    q is [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; ``at`` is of :func:`rows_of`. out is [B, Hq, Sq, Dv] and
    lse [B, Hq, Sq], both in fp32 (fp64 for fp64).
    """
    out, lse = blank_output(q, v, q.shape[2], accumulation_dtype(q.dtype))
    if _is_dense(k, v, at):
        for each in _dense_blocks(q, k, v, at):
            scores = each.scores(scale)
            total = torch.logsumexp(scores, -1)
            p = scores.sub_(finite_lse(total).unsqueeze(-1)).exp_()
            with each.spread(p) as dense:
                out[each.queries] = (dense @ each.values).view(*each.shape, -1)
            lse[each.queries] = total.view(each.shape)
        return out, lse
    keys, values = _Gathered(k), _Gathered(v)
    for rows in _row_blocks(k, v, at):
        index = keys.index(at[:, :, rows])
        scores = _scores(_grouped(q, k, rows), keys.take(index), at[:, :, rows], scale)
        total = torch.logsumexp(scores, -1)
        p = scores.sub_(finite_lse(total).unsqueeze(-1)).exp_()
        lse[:, :, rows], out[:, :, rows] = _flat(total), _flat(p @ values.take(index))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, at: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of the chosen rows, in fp32 (fp64 for fp64), in the shapes of q, k, v.

    dout is [B, Hq, Sq, Dv]. lse and delta are those of whole rows, [B, Hq, Sq]; lse is 0 in rows that see nothing.
    """
    wide = accumulation_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    if _is_dense(k, v, at):
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for each in _dense_blocks(q, k, v, at):
            grads = dout[each.queries].to(wide).flatten(0, 1)
            sums, own = (x[each.queries].flatten().unsqueeze(-1) for x in (lse, delta))
            p = each.scores(scale).sub_(sums).exp_()
            ds = each.products(grads, each.values).sub_(own).mul_(p).mul_(scale)
            with each.spread(p) as dense:
                dv[each.keys_at].addmm_(dense.mT, grads)
            with each.spread(ds) as dense:
                dq[each.queries] = (dense @ each.keys).view(*each.shape, -1)
                dk[each.keys_at].addmm_(dense.mT, each.rows)
        return dq, dk, dv
    keys, values = _Gathered(k, sums=True), _Gathered(v, sums=True)
    for rows in _row_blocks(k, v, at):
        index = keys.index(at[:, :, rows])
        queries, grads, *stats = (_grouped(x, k, rows) for x in (q, dout, lse[..., None], delta[..., None]))
        chosen = keys.take(index)
        p = _scores(queries, chosen, at[:, :, rows], scale).sub_(stats[0]).exp_()
        ds = (grads @ values.take(index).mT).sub_(stats[1]).mul_(p).mul_(scale)
        dq[:, :, rows] = _flat(ds @ chosen)
        keys.add(index, ds.mT @ queries)
        values.add(index, p.mT @ grads)
    return dq, keys.sums(), values.sums()


def _is_dense(k: Tensor, v: Tensor, at: Tensor) -> bool:
    """Return whether to multiply by all keys: they are not many more than the chosen ones, and hold no infinity."""
    few = 0 < k.shape[2] <= _DENSE * at.shape[-1]
    return few and bool(torch.isfinite(k).all() & torch.isfinite(v).all())  # a weight of 0 doesn't hide others


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


def _dense_blocks(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Iterator[_DenseBlock]:
    """Yield blocks whose scores fit a core's cache."""
    wide, groups = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
    k, v = k.to(wide), v.to(wide)
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
            yield _DenseBlock(rows, k[batch, head, keys], v[batch, head, keys], own, hidden, *places, memory)


def _row_blocks(k: Tensor, v: Tensor, at: Tensor) -> Iterator[slice]:
    """Yield slices of the queries, so that their gathered keys and values take little memory."""
    each = k.shape[0] * k.shape[1] * at.shape[-1] * (k.shape[3] + v.shape[3])
    size = max(1, _GATHERED // max(1, each * accumulation_dtype(k.dtype).itemsize))
    for first in range(0, at.shape[2] if at.shape[-1] else 0, size):
        yield slice(first, min(first + size, at.shape[2]))


def _grouped(x: Tensor, k: Tensor, rows: slice) -> Tensor:
    """Return rows of [B, Hq, Sq, ...] as [B, Hkv, rows, Hq / Hkv, ...], widened."""
    return x[:, :, rows].to(accumulation_dtype(x.dtype)).unflatten(1, (k.shape[1], -1)).transpose(2, 3)


def _flat(x: Tensor) -> Tensor:
    """Return [B, Hkv, rows, Hq / Hkv, ...] as [B, Hq, rows, ...]."""
    return x.transpose(2, 3).flatten(1, 2)


def _scores(queries: Tensor, chosen: Tensor, at: Tensor, scale: float) -> Tensor:
    """Return scaled scores [B, Hkv, rows, Hq / Hkv, m], -inf where nothing is chosen."""
    return (queries @ chosen.mT).mul_(scale).masked_fill_((at < 0).unsqueeze(3), -math.inf)


class _Gathered:
    """Rows of keys or values [B, H, Sk, D] by index, and sums of their gradients."""

    def __init__(self, x: Tensor, *, sums: bool = False) -> None:
        # A row of zeros stands for no key: a zero weight times an infinity would be NaN.
        self._rows = torch.nn.functional.pad(x, (0, 0, 0, 1)).flatten(0, 2)
        self._shape = x.shape
        self._sums = torch.zeros_like(self._rows, dtype=accumulation_dtype(x.dtype)) if sums else x.new_empty(0)

    def index(self, at: Tensor) -> Tensor:
        """Return the indices of rows [B, C, rows, m] for all heads, [B, H, rows, m]."""
        batch, heads, count, _ = self._shape
        first = torch.arange(batch * heads, device=at.device).view(batch, heads, 1, 1) * (count + 1)
        return torch.where(at < 0, count, at) + first

    def take(self, index: Tensor) -> Tensor:
        """Return the rows, widened: [B, H, rows, m, D]."""
        taken = self._rows.index_select(0, index.flatten())
        return taken.to(accumulation_dtype(taken.dtype)).unflatten(0, index.shape)

    def add(self, index: Tensor, grads: Tensor) -> None:
        """Add gradients [B, H, rows, m, D] to their rows."""
        self._sums.index_add_(0, index.flatten(), grads.flatten(0, 3))

    def sums(self) -> Tensor:
        """Return the sums of gradients, [B, H, Sk, D]."""
        return self._sums.unflatten(0, (*self._shape[:2], -1))[:, :, :-1]
