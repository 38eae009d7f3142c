"""The device programs: FlashAttention-2's algorithms (arXiv 2307.08691) over lists of banded tiles.

Shapes: M query rows and N keys per block; D is the head dimension of q and k, E that of v. A tile is six integers
(q_start, q_stop, k_start, k_stop, lo, hi). Row i sees column j, both counted from the tile's corner, if
lo <= i - j <= hi. ``Offsets`` and ``Ids`` list the tiles that intersect each block. Blocks inside a band run without a
mask; blocks outside it are skipped. Scores are in base 2: ``sharp`` is the scale times log2(e). If CAPPED, ``sharp`` is
scale / cap, and a score is cap tanh(sharp Q K').
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(Base, batch, head, stride_b, stride_h, stride_s, at, dims, seen, DIM: tl.constexpr):
    """Load [rows, DIM] of a [B, H, S, DIM] tensor; zeros where not ``seen`` and beyond DIM. 64-bit offsets."""
    start = Base + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    where = start + at.to(tl.int64)[:, None] * stride_s + dims[None, :]
    return tl.load(where, mask=seen[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _numbers(Base, batch, head, stride_b, stride_h, stride_s, at, seen, other):
    """Load [rows] of a [B, H, S] tensor."""
    start = Base + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return tl.load(start + at.to(tl.int64) * stride_s, mask=seen, other=other)


@triton.jit
def _store(Base, batch, head, heads, length, at, dims, seen, value, DIM: tl.constexpr):
    """Write [rows, DIM] into a contiguous [B, H, S, DIM] tensor."""
    start = Base + (batch.to(tl.int64) * heads + head) * length * DIM
    tl.store(start + at.to(tl.int64)[:, None] * DIM + dims[None, :], value, mask=seen[:, None] & (dims < DIM)[None, :])


@triton.jit
def _tile(Tiles, Ids, n):
    """Load the six integers of the n-th listed tile."""
    tile = Tiles + tl.load(Ids + n) * 6
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)


@triton.jit
def _whole(x):
    """Return [rows, DIM] with non-finite rows set to 0, and a mask of these rows."""
    lost = tl.max((x - x != 0).to(tl.int32), 1) != 0
    return tl.where(lost[:, None], 0.0, x), lost


@triton.jit
def _tanh(x):
    """Return tanh; the absolute error is one rounding of 1, so a score's is one of the cap."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _unmasked(first, stop, seen, unseen, whole, STEP: tl.constexpr):
    """Return the part of a tile's ``first`` to ``stop`` that needs no mask, in full steps; else (stop, stop).

    The whole block sees ``seen`` to ``unseen``; ``whole``: it lies in the tile.
    """
    left = first + (seen - first + STEP - 1) // STEP * STEP
    right = left + tl.maximum(0, unseen - left) // STEP * STEP
    whole = whole & (right > left)
    return tl.where(whole, left, stop), tl.where(whole, right, stop)


@triton.jit
def _attend(
    acc, top, total, q, K, V, batch, head, kb, kh, ks, vb, vh, vs, i, inside, k0, first, stop, columns, lo, hi,
    sharp, cap, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update a block's running (acc, top, total) with the keys ``first`` to ``stop`` of a tile, N at a time."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for j0 in range(first, stop, N):
        j = j0 + tl.arange(0, N)
        held = j < columns
        k = _rows(K, batch, head, kb, kh, ks, k0 + j, d, held, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * sharp
        if CAPPED:
            scores = _tanh(scores) * (cap * LOG2_E)
        if MASKED:
            apart = i[:, None] - j[None, :]
            seen = inside[:, None] & held[None, :] & (apart >= lo) & (apart <= hi)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
        p = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        v = _rows(V, batch, head, vb, vh, vs, k0 + j, e, held, E)
        total = total * shrink + tl.sum(p, 1)
        if MASKED:  # p is 0 for masked keys, but 0 * NaN would be NaN
            v, lost = _whole(v)
            p = tl.where(seen & lost[None, :], float("nan"), p)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = highest
    return acc, top, total


@triton.jit
def forward(
    Q, K, V, Out, Lse, Tiles, Offsets, Ids, scale, cap, heads, group, length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CARRY: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute (out, lse) of one block of query rows of one head: arXiv 2307.08691, algorithm 1.

    Writes ``Out`` fp32 [B, Hq, Sq, E] and ``Lse`` fp32 [B, Hq, Sq]. With CARRY, it first reads the running state of
    earlier tiles from them and extends it. A row that sees nothing gets out 0 and lse -inf.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * M + tl.arange(0, M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    exists = rows < length
    q = _rows(Q, batch, head, qb, qh, qs, rows, d, exists, D)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sharp = scale / cap if CAPPED else scale * LOG2_E
    if CARRY:
        acc = _rows(Out, batch, head, ob, oh, os, rows, e, exists, E)
        top = _numbers(Lse, batch, head, lb, lh, ls, rows, exists, float("-inf")) * LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    for n in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
        q0, q1, k0, k1, lo, hi = _tile(Tiles, Ids, n)
        i, columns = rows - q0, k1 - k0
        inside = (rows >= q0) & (rows < q1)
        above, below = tl.maximum(block * M, q0) - q0, tl.minimum(block * M + M, q1) - 1 - q0
        first, stop = tl.maximum(0, above - hi), tl.minimum(columns, below - lo + 1)
        whole = (block * M >= q0) & (block * M + M <= q1)
        seen, unseen = tl.maximum(first, below - hi), tl.minimum(columns, above - lo + 1)
        left, right = _unmasked(first, stop, seen, unseen, whole, N)
        acc, top, total = _attend(
            acc, top, total, q, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, first, left,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, True, CAPPED, PRECISION,
        )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, q, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, left, right,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, False, CAPPED, PRECISION,
        )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, q, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, right, stop,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, True, CAPPED, PRECISION,
        )  # fmt: skip
    some = total != 0  # NaN counts as nonzero
    out = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN_2, float("-inf"))
    start = Out + batch.to(tl.int64) * ob + head.to(tl.int64) * oh
    where = start + rows.to(tl.int64)[:, None] * os + e[None, :]
    tl.store(where, out, mask=exists[:, None] & (e < E)[None, :])
    tl.store(Lse + batch.to(tl.int64) * lb + head.to(tl.int64) * lh + rows.to(tl.int64) * ls, lse, mask=exists)


@triton.jit
def _add_queries(
    dq, q, dout, lse, delta, K, V, batch, head, kb, kh, ks, vb, vh, vs, i, inside, k0, first, stop, columns, lo, hi,
    sharp, cap, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to a block's dQ what the keys ``first`` to ``stop`` of a tile give, N at a time."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for j0 in range(first, stop, N):
        j = j0 + tl.arange(0, N)
        held = j < columns
        k = _rows(K, batch, head, kb, kh, ks, k0 + j, d, held, D)
        v = _rows(V, batch, head, vb, vh, vs, k0 + j, e, held, E)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * sharp
        slope = 1.0
        if CAPPED:
            part = _tanh(scores)
            scores, slope = part * (cap * LOG2_E), 1.0 - part * part
        p = tl.exp2(scores - lse[:, None])
        ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * slope
        if MASKED:
            # Masked entries must be 0, even if they hold a NaN (0 * NaN is NaN). A visible NaN is in lse or delta.
            apart = i[:, None] - j[None, :]
            ds = tl.where(inside[:, None] & held[None, :] & (apart >= lo) & (apart <= hi), ds, 0.0)
            k, _ = _whole(k)
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    return dq


@triton.jit
def backward_queries(
    Q, K, V, dOut, Lse, Delta, dQ, Tiles, Offsets, Ids, scale, cap, heads, group, length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls, eb, eh, es,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ = scale dS K of one block of query rows of one head, in the tiles' order and without atomics.

    P = e^(scale Q K' - lse), dS = P * (dO V' - delta), with lse and delta of the whole row.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * M + tl.arange(0, M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    exists = rows < length
    q = _rows(Q, batch, head, qb, qh, qs, rows, d, exists, D)
    dout = _rows(dOut, batch, head, ob, oh, os, rows, e, exists, E)
    lse = _numbers(Lse, batch, head, lb, lh, ls, rows, exists, 0.0) * LOG2_E
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = _numbers(Delta, batch, head, eb, eh, es, rows, exists, 0.0)
    dq = tl.zeros([M, BLOCK_D], tl.float32)
    sharp = scale / cap if CAPPED else scale * LOG2_E
    for n in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
        q0, q1, k0, k1, lo, hi = _tile(Tiles, Ids, n)
        i, columns = rows - q0, k1 - k0
        inside = (rows >= q0) & (rows < q1)
        above, below = tl.maximum(block * M, q0) - q0, tl.minimum(block * M + M, q1) - 1 - q0
        first, stop = tl.maximum(0, above - hi), tl.minimum(columns, below - lo + 1)
        whole = (block * M >= q0) & (block * M + M <= q1)
        seen, unseen = tl.maximum(first, below - hi), tl.minimum(columns, above - lo + 1)
        left, right = _unmasked(first, stop, seen, unseen, whole, N)
        dq = _add_queries(
            dq, q, dout, lse, delta, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, first, left,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, True, CAPPED, PRECISION,
        )  # fmt: skip
        dq = _add_queries(
            dq, q, dout, lse, delta, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, left, right,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, False, CAPPED, PRECISION,
        )  # fmt: skip
        dq = _add_queries(
            dq, q, dout, lse, delta, K, V, batch, head // group, kb, kh, ks, vb, vh, vs, i, inside, k0, right, stop,
            columns, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, N, True, CAPPED, PRECISION,
        )  # fmt: skip
    _store(dQ, batch, head, heads, length, rows, d, exists, dq * scale, D)


@triton.jit
def _add_keys(
    dk, dv, k, v, Q, dOut, Lse, Delta, batch, head, qb, qh, qs, ob, oh, os, lb, lh, ls, eb, eh, es,
    j, inside, q0, first, stop, rows, lo, hi,
    sharp, cap, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to a block's dK and dV what the queries ``first`` to ``stop`` of a tile give, M at a time."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for i0 in range(first, stop, M):
        i = i0 + tl.arange(0, M)
        held = i < rows
        q = _rows(Q, batch, head, qb, qh, qs, q0 + i, d, held, D)
        dout = _rows(dOut, batch, head, ob, oh, os, q0 + i, e, held, E)
        lse = _numbers(Lse, batch, head, lb, lh, ls, q0 + i, held, 0.0) * LOG2_E
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        delta = _numbers(Delta, batch, head, eb, eh, es, q0 + i, held, 0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * sharp
        slope = 1.0
        if CAPPED:
            part = _tanh(scores)
            scores, slope = part * (cap * LOG2_E), 1.0 - part * part
        p = tl.exp2(scores - lse[None, :])
        ds = p * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :]) * slope
        if MASKED:
            apart = i[None, :] - j[:, None]
            seen = inside[:, None] & held[None, :] & (apart >= lo) & (apart <= hi)
            # As for dQ. dV does not use delta, and masked rows of dO must not reach it.
            ds = tl.where(seen, ds, 0.0)
            q, _ = _whole(q)
            dout, lost = _whole(dout)
            p = tl.where(seen, tl.where(lost[None, :], float("nan"), p), 0.0)
        dv += tl.dot(p.to(dout.dtype), dout, input_precision=PRECISION)
        dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    return dk, dv


@triton.jit
def backward_keys(
    Q, K, V, dOut, Lse, Delta, dK, dV, Tiles, Offsets, Ids, scale, cap, heads, group, length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls, eb, eh, es,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK = scale dS' Q and dV = P' dO of a block of keys of one key-value head, over its query heads.

    Here, ``heads`` and ``length`` are those of the keys. Products are transposed: rows are keys.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    columns = block * N + tl.arange(0, N)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    exists = columns < length
    k = _rows(K, batch, head, kb, kh, ks, columns, d, exists, D)
    v = _rows(V, batch, head, vb, vh, vs, columns, e, exists, E)
    dk = tl.zeros([N, BLOCK_D], tl.float32)
    dv = tl.zeros([N, BLOCK_E], tl.float32)
    sharp = scale / cap if CAPPED else scale * LOG2_E
    for member in range(group):
        q_head = head * group + member
        for n in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
            q0, q1, k0, k1, lo, hi = _tile(Tiles, Ids, n)
            j, rows = columns - k0, q1 - q0
            inside = (columns >= k0) & (columns < k1)
            left, right = tl.maximum(block * N, k0) - k0, tl.minimum(block * N + N, k1) - 1 - k0
            first, stop = tl.maximum(0, left + lo), tl.minimum(rows, right + hi + 1)
            whole = (block * N >= k0) & (block * N + N <= k1)
            seen, unseen = tl.maximum(first, right + lo), tl.minimum(rows, left + hi + 1)
            top, end = _unmasked(first, stop, seen, unseen, whole, M)
            dk, dv = _add_keys(
                dk, dv, k, v, Q, dOut, Lse, Delta, batch, q_head, qb, qh, qs, ob, oh, os, lb, lh, ls, eb, eh, es,
                j, inside, q0, first, top, rows, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, M, True, CAPPED, PRECISION,
            )  # fmt: skip
            dk, dv = _add_keys(
                dk, dv, k, v, Q, dOut, Lse, Delta, batch, q_head, qb, qh, qs, ob, oh, os, lb, lh, ls, eb, eh, es,
                j, inside, q0, top, end, rows, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, M, False, CAPPED, PRECISION,
            )  # fmt: skip
            dk, dv = _add_keys(
                dk, dv, k, v, Q, dOut, Lse, Delta, batch, q_head, qb, qh, qs, ob, oh, os, lb, lh, ls, eb, eh, es,
                j, inside, q0, end, stop, rows, lo, hi, sharp, cap, D, E, BLOCK_D, BLOCK_E, M, True, CAPPED, PRECISION,
            )  # fmt: skip
    _store(dK, batch, head, heads, length, columns, d, exists, dk * scale, D)
    _store(dV, batch, head, heads, length, columns, e, exists, dv, E)


@triton.jit
def carry(
    dOut, Delta, Out, heads, length, dout_b, dout_h, dout_s, delta_b, delta_h, delta_s,
    most, E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Write out' with rowsum(dOut * out') = Delta in two columns: :mod:`burst_attention.kernels.stock`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    at, dims = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BLOCK_E)
    seen = at < length
    x = _rows(dOut, batch, head, dout_b, dout_h, dout_s, at, dims, seen, E).to(tl.float32)
    delta = _numbers(Delta, batch, head, delta_b, delta_h, delta_s, at, seen, 0.0)
    size = tl.where((dims < E)[None, :], tl.abs(x), -1.0)
    first = dims[None, :] == tl.argmax(size, 1)[:, None]
    second = dims[None, :] == tl.argmax(tl.where(first, -1.0, size), 1)[:, None]
    a, b = tl.sum(tl.where(first, x, 0.0), 1), tl.sum(tl.where(second, x, 0.0), 1)
    a, b = tl.where(a == 0, 1.0, a), tl.where(b == 0, 1.0, b)
    high = (delta / a).to(Out.dtype.element_ty).to(tl.float32)
    low = tl.minimum(tl.maximum((delta - high * a) / b, -most), most)
    value = tl.where(first, high[:, None], tl.where(second, low[:, None], 0.0))
    _store(Out, batch, head, heads, length, at, dims, seen, value, E)
