"""Inner loop of all attention kernels: softmax(QKᵀ)V over a range of keys, in one pass.

Online softmax (Milakov & Gimelshein 2018, as in FlashAttention, Dao et al. 2022) reads the keys in blocks. A running
maximum `top`, a running sum `mass` and an output `acc`, both scaled by 2^-top, absorb block after block. Scores
(queries × keys) are never written to memory, so only keys and values move.

Query heads that share a KV head are packed: row r of a tile is query token r // GROUP of head r % GROUP. All heads of a
group use the same read of the keys. Scores are in units of log 2 (the scale includes log2(e)), because a GPU has an
instruction for 2^x and none for e^x.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_rows(block, starts, kv_lengths, row, query_length, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tile's packed rows [BLOCK_M] of a batch row, their positions, a mask of live rows, and the first and
    last live position (first > last: no row is live).

    Query token t has position start + t and is live at positions 0 … kv_length - 1. Other tokens are padding.
    """
    start = tl.load(starts + row).to(tl.int32)
    kv_length = tl.load(kv_lengths + row).to(tl.int32)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = start + rows // GROUP
    live = (rows < query_length * GROUP) & (positions >= 0) & (positions < kv_length)
    first = tl.maximum(start + block * BLOCK_M // GROUP, 0)
    last_token = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, query_length - 1)
    last = tl.minimum(start + last_token, kv_length - 1)
    return rows, positions, live, first, last


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr):
    """Return acc, top and mass of a tile before its first key, as in `attend`."""
    return tl.zeros([BLOCK_M, BLOCK_D], ACC), tl.full([BLOCK_M], float("-inf"), ACC), tl.zeros([BLOCK_M], ACC)


@triton.jit
def load_queries(
    query, stride_h, stride_q, kv_head, rows, live, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return the tile's queries [BLOCK_M, BLOCK_D], 0 in padding. query: pointer to the batch row's queries."""
    d = tl.arange(0, BLOCK_D)
    offsets = (kv_head * GROUP + rows % GROUP).to(tl.int64) * stride_h + (rows // GROUP).to(tl.int64) * stride_q
    return tl.load(query + offsets[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(scores / SOFTCAP), accurate also for scores far below the cap."""
    x = scores * (1 / SOFTCAP)
    squared = x * x
    # The quotient cancels near 0. The series of tanh is used there; its next term is below one rounding.
    SMALL: tl.constexpr = 0.25 if scores.dtype == tl.float32 else 0.02
    series = x * (1 - squared * (1 / 3 - squared * (2 / 15 - squared * (17 / 315 - squared * (62 / 2835)))))
    small = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    quotient = (1 - small) / (1 + small)
    return SOFTCAP * tl.where(tl.abs(x) < SMALL, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def attend(
    acc,  # [BLOCK_M, BLOCK_D]
    top,  # [BLOCK_M], running maximum, -inf at first
    mass,  # [BLOCK_M], running sum
    q,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M]
    key,  # pointers to this row's and head's keys and values, one slot every stride
    value,
    key_stride,
    value_stride,
    begin,
    end,
    MASKED: tl.constexpr,  # some query of the tile may not see some of these keys
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,  # of the scores; includes log2(e) without a softcap
    SOFTCAP: tl.constexpr,  # 0: none
    WINDOW: tl.constexpr,  # 0: none
    FAR: tl.constexpr,  # offsets of slots need 64 bits (and more registers)
    WIDEN: tl.constexpr,  # multiply in float32: the interpreter's dot multiplies the bit patterns of bfloat16
):
    """Absorb the keys begin … end - 1 into (acc, top, mass), in blocks. If not MASKED, all blocks are whole.

    Keys from `end` on are neither read nor counted, also within a block: another piece of the row may begin there.
    """
    d = tl.arange(0, BLOCK_D)
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        slots = n.to(tl.int64) if FAR else n
        key_at = key + d[:, None] + slots[None, :] * key_stride  # [BLOCK_D, BLOCK_N]
        value_at = value + slots[:, None] * value_stride + d[None, :]  # [BLOCK_N, BLOCK_D]
        # Slots beyond the row may hold NaN, and 0 x NaN is NaN. A weight of 0 is not enough: do not read them.
        if MASKED:
            k = tl.load(key_at, mask=(d < D)[:, None] & (n < end)[None, :], other=0.0)
        elif D != BLOCK_D:
            k = tl.load(key_at, mask=(d < D)[:, None], other=0.0)
        else:
            k = tl.load(key_at)
        if WIDEN:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee", out_dtype=acc.dtype) * SCALE
        else:
            scores = tl.dot(q, k, input_precision="ieee", out_dtype=acc.dtype) * SCALE
        if SOFTCAP > 0:
            scores = capped(scores, SOFTCAP) * LOG2_E
        if MASKED:
            visible = (n[None, :] <= positions[:, None]) & (n < end)[None, :]
            if WINDOW > 0:
                visible &= n[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        top_next = tl.maximum(top, tl.max(scores, 1))
        # Before its first key a row has top = -inf, and -inf - -inf is NaN.
        base = tl.where(top_next == float("-inf"), 0.0, top_next)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            v = tl.load(value_at, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0)
        elif D != BLOCK_D:
            v = tl.load(value_at, mask=(d < D)[None, :], other=0.0)
        else:
            v = tl.load(value_at)
        if WIDEN:
            weights = weights.to(v.dtype).to(tl.float32)
            acc += tl.dot(weights, v.to(tl.float32), input_precision="ieee", out_dtype=acc.dtype)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee", out_dtype=acc.dtype)
        top = top_next
    return acc, top, mass


@triton.jit
def store_output(
    out,
    stride_q,
    stride_h,
    acc,  # [BLOCK_M, BLOCK_D]; acc, top and mass: results of `attend`
    top,
    mass,
    sinks,
    kv_head,
    rows,
    live,
    query_length,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write acc / mass to this batch row's output [Q, H, D], exactly 0 in padding queries.

    A sink is an additional logit per head that takes mass and has no value.
    """
    if SINKS:
        sink = tl.load(sinks + kv_head * GROUP + rows % GROUP).to(top.dtype) * LOG2_E
        highest = tl.maximum(top, sink)
        shrink = tl.exp2(top - highest)
        mass = mass * shrink + tl.exp2(sink - highest)
        acc = acc * shrink[:, None]
    result = tl.where(live[:, None], acc / tl.where(mass > 0, mass, 1.0)[:, None], 0.0)
    d = tl.arange(0, BLOCK_D)
    offsets = (kv_head * GROUP + rows % GROUP).to(tl.int64) * stride_h + (rows // GROUP).to(tl.int64) * stride_q
    inside = (rows < query_length * GROUP)[:, None] & (d < D)[None, :]
    tl.store(out + offsets[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=inside)
