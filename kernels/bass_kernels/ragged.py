"""Ragged attention: rows with different KV lengths and query lengths in one launch, without padding.

There are two kernels: the plan (plan.py, once per forward pass), and one program per (block of queries, KV head, piece
of keys). If a row was cut, its last program to finish adds up the partial results. FlashDecoding (Dao et al. 2023)
splits keys for few queries. This kernel also supports any query length, packs the query heads of a KV head into one
tile, and balances rows of different lengths, as verification of many sequences needs (BASS, arXiv 2404.15778).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching, plan, tiles
from bass_kernels.launching import Flags
from bass_kernels.online_softmax import attend, load_queries, nothing_seen, store_output, tile_rows
from bass_kernels.plan import Plan

REDUCE_ROWS = 16  # rows of a tile that are added up at a time


def make_plan(
    query: Tensor,
    key: Tensor,
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    sliding_window: int | None = None,
    deterministic: bool = False,
) -> Plan:
    """Return the work list of `ragged_attention` for these shapes and lengths, with the arguments as there.

    Attention layers of a forward pass with equal arguments share the plan.
    """
    launching.check(query, key, key, starts, kv_lengths)
    _, heads, query_length, head_dim = query.shape
    group = heads // key.shape[1]
    return plan.make_plan(
        starts,
        kv_lengths,
        query_length=query_length,
        kv_heads=key.shape[1],
        width=key.shape[2],
        tile=tiles.choose(query_length * group, head_dim, query.dtype, deterministic),
        group=group,
        window=sliding_window or 0,
        deterministic=deterministic,
    )


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    plan: Plan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return softmax(QKᵀ · scaling) V, causal by position: [B, Q, H, D], contiguous, in the query's dtype.

    query: [B, H, Q, D]. key, value: [B, H_kv, S, D], slot s holds position s; only the last dimension must be
    contiguous, so views of a cache are accepted. starts: int32 or int64 [B], position of each row's first query token.
    Token t has position starts[b] + t and is live at positions 0 … kv_lengths[b] - 1. Other tokens are padding with
    output exactly 0. If the queries end the row, starts = kv_lengths - Q. Slots from kv_lengths[b] on are never read.
    kv_lengths[b] <= S is not checked, because the lengths stay on the device.

    scaling: default D ** -0.5. sliding_window: keys that a query sees, itself included. softcap: scores become
    softcap · tanh(score / softcap). sinks: [H], an additional logit per head without a value. deterministic: the bits
    of a query do not depend on other queries of its row (up to 64 in a pass) or batch, at some cost in speed. plan:
    from `make_plan` for these rows, with at least as many queries. Splits are added in order, so equal input gives
    equal bits.

    Raises ValueError for mismatched shapes, dtypes and devices.
    """
    launching.check(query, key, value, starts, kv_lengths, sinks)
    launching.require(plan is None or len(plan.rows) == len(query), "plan must be made by make_plan for these rows")
    work = plan or make_plan(query, key, starts, kv_lengths, sliding_window=sliding_window, deterministic=deterministic)
    batch, heads, query_length, head_dim = query.shape
    kv_heads, tile = key.shape[1], work.tile
    group = heads // kv_heads
    rows = query_length * group
    out = query.new_empty(batch, query_length, heads, head_dim)
    flags = Flags(query, key, value, scaling, sliding_window, softcap, sinks)
    splits = len(work.items) if work.may_split else 0
    partial = out.new_empty(splits, kv_heads, rows, head_dim, dtype=flags.accumulator)
    partial_top, partial_mass = out.new_empty(2, splits, kv_heads, rows, dtype=flags.accumulator)
    with launching.on(query.device):
        _attend_pieces[(triton.cdiv(rows, tile.block_m), kv_heads, len(work.items))](
            query,
            key,
            value,
            out,
            partial,
            partial_top,
            partial_mass,
            starts,
            kv_lengths,
            work.items,
            work.rows,
            work.counters,
            sinks,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            query_length,
            KV_HEADS=kv_heads,
            GROUP=group,
            D=head_dim,
            BLOCK_D=tile.block_d,
            **flags.constants,
            MAY_SPLIT=work.may_split,
            ONE_LOOP=deterministic,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            REDUCE_ROWS=REDUCE_ROWS,
            **tile.launch,
            # By default the compiler limits this tile to 168 registers on sm_80 and spills. Two programs fit with 255.
            maxnreg=255 if (tile.block_m, tile.block_d) == (32, 256) else None,
        )
    return out


# Query lengths change with each prompt and lengths with each step. Neither may trigger a compilation.
@triton.jit(do_not_specialize=["query_length"])
def _attend_pieces(
    query,
    key,
    value,
    out,
    partial,  # [I, KV_HEADS, Q * GROUP, D]
    partial_top,  # [I, KV_HEADS, Q * GROUP]
    partial_mass,
    starts,
    kv_lengths,
    items,  # [I, 4]
    plan_rows,  # [B, 2]
    counters,  # [B, KV_HEADS, blocks of queries], 0 before and after
    sinks,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    out_stride_b,
    out_stride_q,
    out_stride_h,
    query_length,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    FAR: tl.constexpr,
    WIDEN: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Attend with one tile of queries to one piece of a row's keys."""
    # Blocks of queries over the same keys are neighbours on the grid. All but the first read the keys from L2.
    block, kv_head, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(items + item * 4)
    if row < 0:
        return
    begin = tl.load(items + item * 4 + 1)
    end = tl.load(items + item * 4 + 2)
    split = tl.load(items + item * 4 + 3)
    b = row.to(tl.int64)
    rows, positions, live, first, last = tile_rows(block, starts, kv_lengths, row, query_length, GROUP, BLOCK_M)
    q = load_queries(query + b * query_stride_b, query_stride_h, query_stride_q, kv_head, rows, live, D, GROUP, BLOCK_D)
    key += b * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    value += b * value_stride_b + kv_head.to(tl.int64) * value_stride_h
    acc, top, mass = nothing_seen(BLOCK_M, BLOCK_D, ACC)

    end = tl.where(first > last, begin, tl.minimum(end, last + 1))  # no query of this tile sees later keys
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    if WINDOW > 0 or ONE_LOOP:  # the compiler rounds the two loops differently, so bits depend on the loop
        all_see = begin
    else:  # blocks that every query of the tile sees completely need no mask
        all_see = begin + tl.maximum(tl.minimum(end, first + 1) - begin, 0) // BLOCK_N * BLOCK_N
        acc, top, mass = attend(
            acc, top, mass, q, positions, key, value, key_stride_s, value_stride_s, begin, all_see,
            False, D, BLOCK_D, BLOCK_N, SCALE, SOFTCAP, WINDOW, FAR, WIDEN,
        )  # fmt: skip
    acc, top, mass = attend(
        acc, top, mass, q, positions, key, value, key_stride_s, value_stride_s, all_see, end,
        True, D, BLOCK_D, BLOCK_N, SCALE, SOFTCAP, WINDOW, FAR, WIDEN,
    )  # fmt: skip

    if MAY_SPLIT:  # noqa: SIM102 (a compile-time condition, unlike the next)
        if split >= 0:
            at = (split.to(tl.int64) * KV_HEADS + kv_head) * (query_length * GROUP) + rows
            d = tl.arange(0, BLOCK_D)
            tl.store(partial + at[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
            tl.store(partial_top + at, top, mask=live)
            tl.store(partial_mass + at, mass, mask=live)
            tl.debug_barrier()  # all threads store before the count
            # The last program of the row sees all stores that precede the other programs' counts.
            count = counters + (row * KV_HEADS + kv_head) * tl.num_programs(0) + block
            splits = tl.load(plan_rows + row * 2 + 1)
            if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(count, 0)  # for the next launch
                first_split = tl.load(plan_rows + row * 2)
                for part in range(BLOCK_M // REDUCE_ROWS):
                    _add_up(
                        block * (BLOCK_M // REDUCE_ROWS) + part, kv_head, row, partial, partial_top, partial_mass,
                        first_split, splits, out + b * out_stride_b, starts, kv_lengths, sinks, out_stride_q,
                        out_stride_h, query_length, KV_HEADS, GROUP, D, BLOCK_D, SINKS, REDUCE_ROWS,
                    )  # fmt: skip
            return
    store_output(
        out + b * out_stride_b, out_stride_q, out_stride_h, acc, top, mass, sinks, kv_head, rows, live, query_length,
        GROUP, D, BLOCK_D, SINKS,
    )  # fmt: skip


@triton.jit
def _add_up(
    block,
    kv_head,
    row,
    partial,
    partial_top,
    partial_mass,
    first_split,
    splits,
    out,
    starts,
    kv_lengths,
    sinks,
    stride_q,
    stride_h,
    query_length,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add up the pieces of a row, in order, for a block of packed queries of one KV head. out: the row's output."""
    rows, _, live, _, _ = tile_rows(block, starts, kv_lengths, row, query_length, GROUP, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < D)[None, :]
    acc, top, mass = nothing_seen(BLOCK_M, BLOCK_D, partial.dtype.element_ty)
    at = (first_split.to(tl.int64) * KV_HEADS + kv_head) * (query_length * GROUP) + rows
    for _ in range(splits):
        # Other multiprocessors wrote the pieces, so load from L2, the only shared cache.
        top_split = tl.load(partial_top + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        mass_split = tl.load(partial_mass + at, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(partial + at[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        top_next = tl.maximum(top, top_split)
        base = tl.where(top_next == float("-inf"), 0.0, top_next)
        shrink, weight = tl.exp2(top - base), tl.exp2(top_split - base)
        mass = mass * shrink + mass_split * weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = top_next
        at += KV_HEADS * query_length * GROUP
    store_output(
        out, stride_q, stride_h, acc, top, mass, sinks, kv_head, rows, live, query_length, GROUP, D, BLOCK_D, SINKS
    )
