"""BASS-PAD: one launch, every row as long as the longest (arXiv 2404.15778, reconstructed; ours is fused).

Simple, and wasteful in proportion to raggedness: each program reads all `extent` slots of its row and masks what is not
the row's. The masked slots are read, so they must hold numbers: 0 x NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching, tiles
from bass_kernels.launching import Flags
from bass_kernels.online_softmax import attend, load_queries, normalised, store_output, tile_rows


def pad_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    extent: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `ragged_attention`, reading slots 0 … extent - 1 of every row: [B, Q, H, D].

    extent: at least the longest row's length, at most S. Slots up to it must hold finite numbers.
    """
    launching.check(query, key, value, starts, kv_lengths, sinks)
    if extent > key.shape[2]:
        raise ValueError(f"extent must be at most the {key.shape[2]} slots of the cache, got {extent}")
    batch, heads, query_length, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    tile = tiles.choose(query_length * group, head_dim, query.dtype, deterministic=False)
    out = query.new_empty(batch, query_length, heads, head_dim)
    flags = Flags(query, scaling, sliding_window, softcap, sinks)
    with launching.on(query.device):
        _attend_padded[(triton.cdiv(query_length * group, tile.block_m), kv_heads, batch)](
            query,
            key,
            value,
            out,
            starts,
            kv_lengths,
            sinks,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            extent,
            QUERY_LENGTH=query_length,
            GROUP=group,
            D=head_dim,
            BLOCK_D=tile.block_d,
            **flags.constants,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            **tile.launch,
        )
    return out


@triton.jit
def _attend_padded(
    query,
    key,
    value,
    out,
    starts,
    kv_lengths,
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
    extent,
    QUERY_LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of one row's queries over all `extent` slots."""
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row).to(tl.int32)
    kv_length = tl.load(kv_lengths + row).to(tl.int32)
    b = row.to(tl.int64)
    rows, positions, live, _, _ = tile_rows(block, start, kv_length, QUERY_LENGTH, GROUP, BLOCK_M)
    q = load_queries(query + b * query_stride_b, query_stride_h, query_stride_q, kv_head, rows, live, D, GROUP, BLOCK_D)
    key += b * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    value += b * value_stride_b + kv_head.to(tl.int64) * value_stride_h
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    top = tl.full([BLOCK_M], float("-inf"), ACC)
    mass = tl.zeros([BLOCK_M], ACC)
    acc, top, mass = attend(
        acc, top, mass, q, positions, key, value, key_stride_s, value_stride_s, 0, extent, extent,
        True, D, BLOCK_D, BLOCK_N, SCALE, SOFTCAP, WINDOW, WIDEN,
    )  # fmt: skip
    result = normalised(acc, top, mass, sinks, kv_head, rows, live, GROUP, SINKS)
    store_output(
        out + b * out_stride_b, out_stride_q, out_stride_h, result, kv_head, rows, QUERY_LENGTH, GROUP, D, BLOCK_D
    )
