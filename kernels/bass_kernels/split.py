"""BASS-SPLIT: one launch per row, each with its own KV length (arXiv 2404.15778, reconstructed; ours is fused).

No byte is read in vain, but a launch fills only part of the GPU, and the host has to know the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching, tiles
from bass_kernels.launching import Flags
from bass_kernels.online_softmax import attend, load_queries, normalised, store_output, tile_rows


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `ragged_attention`, with one launch per row: [B, Q, H, D]. lengths: kv_lengths again, on the host."""
    launching.check(query, key, value, starts, kv_lengths, sinks)
    if len(lengths) != len(kv_lengths):
        raise ValueError(f"lengths must be the {len(kv_lengths)} rows' KV lengths, got {len(lengths)} numbers")
    batch, heads, query_length, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    tile = tiles.choose(query_length * group, head_dim, query.dtype, deterministic=False)
    out = query.new_empty(batch, query_length, heads, head_dim)
    flags = Flags(query, scaling, sliding_window, softcap, sinks)
    with launching.on(query.device):
        for row in range(batch):
            _attend_row[(triton.cdiv(query_length * group, tile.block_m), kv_heads)](
                query[row],
                key[row],
                value[row],
                out[row],
                starts[row:],
                sinks,
                *query.stride()[1:3],
                *key.stride()[1:3],
                *value.stride()[1:3],
                *out.stride()[1:3],
                lengths[row],
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
def _attend_row(
    query,
    key,
    value,
    out,
    start_of_row,
    sinks,
    query_stride_h,
    query_stride_q,
    key_stride_h,
    key_stride_s,
    value_stride_h,
    value_stride_s,
    out_stride_q,
    out_stride_h,
    kv_length,
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
    """One tile of the row's queries over all its keys."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_of_row).to(tl.int32)
    rows, positions, live, _, _ = tile_rows(block, start, kv_length, QUERY_LENGTH, GROUP, BLOCK_M)
    q = load_queries(query, query_stride_h, query_stride_q, kv_head, rows, live, D, GROUP, BLOCK_D)
    key += kv_head.to(tl.int64) * key_stride_h
    value += kv_head.to(tl.int64) * value_stride_h
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    top = tl.full([BLOCK_M], float("-inf"), ACC)
    mass = tl.zeros([BLOCK_M], ACC)
    acc, top, mass = attend(
        acc, top, mass, q, positions, key, value, key_stride_s, value_stride_s, 0, kv_length, kv_length,
        True, D, BLOCK_D, BLOCK_N, SCALE, SOFTCAP, WINDOW, WIDEN,
    )  # fmt: skip
    result = normalised(acc, top, mass, sinks, kv_head, rows, live, GROUP, SINKS)
    store_output(out, out_stride_q, out_stride_h, result, kv_head, rows, QUERY_LENGTH, GROUP, D, BLOCK_D)
