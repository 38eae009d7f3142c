"""The device programs: FlashAttention-2's algorithms (arXiv 2307.08691) over lists of banded tiles.

Shapes: M query rows and N keys per block; D is the head dimension of q and k, E that of v. A tile is six integers
(q_start, q_stop, k_start, k_stop, lo, hi). Row i sees column j, both counted from the tile's corner, if
lo <= i - j <= hi. ``Offsets`` and ``Ids`` list the tiles that intersect each block. Blocks inside a band run without a
mask; blocks outside it are skipped. Blocks are aligned to the tensors, not to the tiles. EVEN: they fill the tensors.
SAME: rows of k and v lie equally far apart and are padded to one width. TMA: the two tensors that the inner loop reads
are descriptors of blocks, for the tensor memory accelerator. A masked entry counts as 0, so a NaN in a row
that it multiplies spreads over the block. Scores are in base 2: ``sharp`` is the scale times log2(e). If CAPPED,
``sharp`` is scale / cap, and a score is cap tanh(sharp Q K').
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
def _keys(Tiles, Ids, n, start, rows, M: tl.constexpr):
    """Return what the M query ``rows`` from ``start`` on see of the n-th listed tile, as columns of the tensors.

    (first, stop): those that some row sees; (seen, unseen): those that all see; (left, right): of each row, with ends.
    """
    q0, q1, k0, k1, lo, hi = _tile(Tiles, Ids, n)
    above, below = tl.maximum(start, q0) - q0, tl.minimum(start + M, q1) - 1 - q0
    first, stop = k0 + tl.maximum(0, above - hi), tl.minimum(k1, k0 + below - lo + 1)
    seen, unseen = k0 + tl.maximum(0, below - hi), tl.minimum(k1, k0 + above - lo + 1)
    unseen = tl.where((start >= q0) & (start + M <= q1), unseen, 0)
    i = rows - q0 + k0
    left = tl.where((rows >= q0) & (rows < q1), tl.maximum(i - hi, k0), k1)
    right = tl.minimum(i - lo, k1 - 1)
    return first, stop, seen, unseen, left, right


@triton.jit
def _tanh(x):
    """Return tanh; the absolute error is one rounding of 1, so a score's is one of the cap."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _block(Base, within, at, length, dims, DIM: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load [rows, DIM]: ``Base`` is the address of the first row, ``within`` holds 32-bit offsets of the elements.

    Zeros beyond DIM, and unless EVEN where the rows ``at`` are beyond ``length``.
    """
    if EVEN:
        return tl.load(Base + within) if DIM == WIDTH else tl.load(Base + within, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(Base + within, mask=(at < length)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _head(Base, batch, head, stride_b, stride_h, TMA: tl.constexpr):
    """Return the address of a head's first row, or with TMA the descriptor ``Base``."""
    return Base if TMA else Base + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def _described(Base, batch, head, at, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load [ROWS, WIDTH] from row ``at`` on by a descriptor of a [B, H, S, DIM] tensor; zeros beyond the tensor."""
    return Base.load([batch, head, at, 0]).reshape(ROWS, WIDTH)


@triton.jit
def forward(
    Q, K, V, Out, Lse, Tiles, Offsets, Ids, scale, cap, heads, group, length, k_length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, SAME: tl.constexpr, CARRY: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute (out, lse) of one block of query rows of one head: arXiv 2307.08691, algorithm 1.

    Writes ``Out`` fp32 [B, Hq, Sq, E] and ``Lse`` fp32 [B, Hq, Sq]. With CARRY, it first reads the running state of
    earlier tiles from them and extends it. A row that sees nothing gets out 0 and lse -inf.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * M + tl.arange(0, M)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, N)
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
    K += batch.to(tl.int64) * kb + (head // group).to(tl.int64) * kh
    V += batch.to(tl.int64) * vb + (head // group).to(tl.int64) * vh
    k_at = n[:, None] * ks + d[None, :]
    v_at = k_at if SAME else n[:, None] * vs + e[None, :]  # fewer registers
    for t in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
        first, stop, seen, unseen, left, right = _keys(Tiles, Ids, t, block * M, rows, M)
        begin = first // N * N
        k_next, v_next = K + begin.to(tl.int64) * ks, V + begin.to(tl.int64) * vs
        for j0 in range(begin, stop, N):
            k = _block(k_next, k_at, j0 + n, k_length, d, D, BLOCK_D, EVEN)
            v = _block(v_next, v_at, j0 + n, k_length, e, E, BLOCK_E, EVEN)
            k_next += N * ks
            v_next += N * vs
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if CAPPED:
                scores = _tanh(scores * sharp) * (cap * LOG2_E)
            unit = 1.0 if CAPPED else sharp
            if (j0 < seen) | (j0 + N > unseen):
                j = (j0 + n)[None, :]
                scores = tl.where((j >= left[:, None]) & (j <= right[:, None]), scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1) * unit)
            level = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
            p = tl.exp2(scores * unit - level[:, None])
            shrink = tl.exp2(top - level)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = highest
    some = total != 0  # NaN counts as nonzero
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)  # a masked NaN may be in acc
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN_2, float("-inf"))
    start = Out + batch.to(tl.int64) * ob + head.to(tl.int64) * oh
    where = start + rows.to(tl.int64)[:, None] * os + e[None, :]
    tl.store(where, out, mask=exists[:, None] & (e < E)[None, :])
    tl.store(Lse + batch.to(tl.int64) * lb + head.to(tl.int64) * lh + rows.to(tl.int64) * ls, lse, mask=exists)


@triton.jit
def backward_queries(
    Q, K, V, dOut, Lse, Delta, dQ, Tiles, Offsets, Ids, scale, cap, heads, group, length, k_length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls, eb, eh, es,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, SAME: tl.constexpr, CAPPED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ = scale dS K of one block of query rows of one head, in the tiles' order and without atomics.

    P = e^(scale Q K' - lse), dS = P * (dO V' - delta), with lse and delta of the whole row.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * M + tl.arange(0, M)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, N)
    exists = rows < length
    q = _rows(Q, batch, head, qb, qh, qs, rows, d, exists, D)
    dout = _rows(dOut, batch, head, ob, oh, os, rows, e, exists, E)
    lse = _numbers(Lse, batch, head, lb, lh, ls, rows, exists, 0.0) * LOG2_E
    delta = _numbers(Delta, batch, head, eb, eh, es, rows, exists, 0.0)
    dq = tl.zeros([M, BLOCK_D], tl.float32)
    sharp = scale / cap if CAPPED else scale * LOG2_E
    kv_head = head // group
    K, V = _head(K, batch, kv_head, kb, kh, TMA), _head(V, batch, kv_head, vb, vh, TMA)
    k_at = n[:, None] * ks + d[None, :]
    v_at = k_at if SAME else n[:, None] * vs + e[None, :]  # fewer registers
    for t in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
        first, stop, seen, unseen, left, right = _keys(Tiles, Ids, t, block * M, rows, M)
        begin = first // N * N
        if not TMA:
            k_next, v_next = K + begin.to(tl.int64) * ks, V + begin.to(tl.int64) * vs
        for j0 in range(begin, stop, N):
            if TMA:
                k = _described(K, batch, kv_head, j0, N, BLOCK_D)
                v = _described(V, batch, kv_head, j0, N, BLOCK_E)
            else:
                k = _block(k_next, k_at, j0 + n, k_length, d, D, BLOCK_D, EVEN)
                v = _block(v_next, v_at, j0 + n, k_length, e, E, BLOCK_E, EVEN)
                k_next += N * ks
                v_next += N * vs
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * sharp
            slope = 1.0
            if CAPPED:
                part = _tanh(scores)
                scores, slope = part * (cap * LOG2_E), 1.0 - part * part
            p = tl.exp2(scores - lse[:, None])
            ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * slope
            if (j0 < seen) | (j0 > unseen - N):
                j = (j0 + n)[None, :]
                ds = tl.where((j >= left[:, None]) & (j <= right[:, None]), ds, 0.0)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    _store(dQ, batch, head, heads, length, rows, d, exists, dq * scale, D)


@triton.jit
def backward_keys(
    Q, K, V, dOut, Lse, Delta, dK, dV, Tiles, Offsets, Ids, scale, cap, heads, group, length, q_length,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os, lb, lh, ls, eb, eh, es,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, CAPPED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK = scale dS' Q and dV = P' dO of a block of keys of one key-value head, over its query heads.

    Here, ``heads`` and ``length`` are those of the keys. ``Lse`` is in base 2; it and ``Delta`` fill their last block.
    With TMA, they are the two columns of one dense tensor. Products are transposed.
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    columns = block * N + tl.arange(0, N)
    d, e, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, M)
    exists = columns < length
    k = _rows(K, batch, head, kb, kh, ks, columns, d, exists, D)
    v = _rows(V, batch, head, vb, vh, vs, columns, e, exists, E)
    dk = tl.zeros([N, BLOCK_D], tl.float32)
    dv = tl.zeros([N, BLOCK_E], tl.float32)
    sharp = scale / cap if CAPPED else scale * LOG2_E
    q_at, dout_at = m[:, None] * qs + d[None, :], m[:, None] * os + e[None, :]
    for member in range(group):
        q_head = head * group + member
        Q_h, dOut_h = _head(Q, batch, q_head, qb, qh, TMA), _head(dOut, batch, q_head, ob, oh, TMA)
        Lse_h, Delta_h = _head(Lse, batch, q_head, lb, lh, False), _head(Delta, batch, q_head, eb, eh, False)
        for t in range(tl.load(Offsets + block), tl.load(Offsets + block + 1)):
            q0, q1, k0, k1, lo, hi = _tile(Tiles, Ids, t)
            j, rows = columns - k0, q1 - q0
            left, right = tl.maximum(block * N, k0) - k0, tl.minimum(block * N + N, k1) - 1 - k0
            first, stop = q0 + tl.maximum(0, left + lo), q0 + tl.minimum(rows, right + hi + 1)
            seen, unseen = q0 + tl.maximum(0, right + lo), q0 + tl.minimum(rows, left + hi + 1)
            unseen = tl.where((block * N >= k0) & (block * N + N <= k1), unseen, 0)
            top = tl.where((columns >= k0) & (columns < k1), q0 + tl.maximum(0, j + lo), q1)
            end = q0 + tl.minimum(j + hi, rows - 1)
            inside = tl.maximum(unseen - M + 1 - seen, 0).to(tl.uint32)  # unsigned, so one comparison serves both ends
            begin = first // M * M
            start = begin.to(tl.int64)
            lse_next, delta_next = Lse_h + start * ls, Delta_h + start * es
            if not TMA:
                q_next, dout_next = Q_h + start * qs, dOut_h + start * os
            for i0 in range(begin, stop, M):
                i = i0 + m
                if TMA:
                    q = _described(Q, batch, q_head, i0, M, BLOCK_D)
                    dout = _described(dOut, batch, q_head, i0, M, BLOCK_E)
                else:
                    q = _block(q_next, q_at, i, q_length, d, D, BLOCK_D, EVEN)
                    dout = _block(dout_next, dout_at, i, q_length, e, E, BLOCK_E, EVEN)
                    q_next += M * qs
                    dout_next += M * os
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * sharp
                slope = 1.0
                if CAPPED:
                    part = _tanh(scores)
                    scores, slope = part * (cap * LOG2_E), 1.0 - part * part
                if TMA:
                    lse, delta = tl.split(tl.load(lse_next + m[:, None] * 2 + tl.arange(0, 2)[None, :]))
                else:
                    lse = tl.load(lse_next + m * ls)
                p = tl.exp2(scores - lse[None, :])
                dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
                if not TMA:
                    delta = tl.load(delta_next + m * es)
                ds = p * (dp - delta[None, :]) * slope
                if (i0 - seen).to(tl.uint32) >= inside:
                    shown = (i[None, :] >= top[:, None]) & (i[None, :] <= end[:, None])
                    p, ds = tl.where(shown, p, 0.0), tl.where(shown, ds, 0.0)
                dv += tl.dot(p.to(dout.dtype), dout, input_precision=PRECISION)
                dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
                lse_next += M * ls
                delta_next += M * es
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
