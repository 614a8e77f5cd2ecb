"""The paper's two attention methods for rows of different length (arXiv 2404.15778), reconstructed as fused kernels.

BASS-PAD: one launch, every row as long as the longest. Each program reads all `extent` slots of its row and masks the
slots beyond the row's length. Wasted bytes grow with raggedness, and masked slots must hold numbers (0 x NaN is NaN).

BASS-SPLIT: one launch per row, each with its own length. No byte is wasted, but a launch fills only part of the GPU,
launches run one after another, and the host must know the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching, tiles
from bass_kernels.launching import Flags
from bass_kernels.online_softmax import attend, load_queries, nothing_seen, store_output, tile_rows


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
    """Return the result of `ragged_attention` [B, Q, H, D], reading slots 0 … extent - 1 of every row.

    extent: from the longest row's length to S. Slots below `extent` must hold finite numbers.
    """
    launching.check(query, key, value, starts, kv_lengths, sinks)
    if extent > key.shape[2]:
        raise ValueError(f"extent must be at most the {key.shape[2]} slots of the cache, got {extent}")
    flags = Flags(query, key, value, scaling, sliding_window, softcap, sinks)
    return _launch(query, key, value, starts, kv_lengths, sinks, flags, [(range(len(query)), extent)])


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
    """Return the result of `ragged_attention` [B, Q, H, D], one launch per row. lengths: kv_lengths on the host."""
    launching.check(query, key, value, starts, kv_lengths, sinks)
    if len(lengths) != len(kv_lengths):
        raise ValueError(f"lengths must be the {len(kv_lengths)} rows' KV lengths, got {len(lengths)} numbers")
    flags = Flags(query, key, value, scaling, sliding_window, softcap, sinks)
    launches = [(range(row, row + 1), length) for row, length in enumerate(lengths)]
    return _launch(query, key, value, starts, kv_lengths, sinks, flags, launches)


def _launch(query, key, value, starts, kv_lengths, sinks, flags: Flags, launches: list[tuple[range, int]]) -> Tensor:
    """Launch once for each (rows, number of slots that their programs read)."""
    batch, heads, query_length, head_dim = query.shape
    group = heads // key.shape[1]
    tile = tiles.choose(query_length * group, head_dim, query.dtype, deterministic=False)
    # By default the compiler limits these tiles to 128 registers and spills. Three programs fit with 168.
    registers = 168 if (tile.block_m, tile.block_d) == (32, 128) else None
    out = query.new_empty(batch, query_length, heads, head_dim)
    with launching.on(query.device):
        for rows, end in launches:
            _attend_rows[(triton.cdiv(query_length * group, tile.block_m), key.shape[1], len(rows))](
                *(tensor[rows.start :] for tensor in (query, key, value, out, starts, kv_lengths)),
                sinks,
                *query.stride()[:3],
                *key.stride()[:3],
                *value.stride()[:3],
                *out.stride()[:3],
                query_length,
                end,
                GROUP=group,
                D=head_dim,
                BLOCK_D=tile.block_d,
                **flags.constants,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                **tile.launch,
                maxnreg=registers,
            )
    return out


@triton.jit(do_not_specialize=["query_length", "end"], do_not_specialize_on_alignment=["starts", "kv_lengths"])
def _attend_rows(
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
    query_length,
    end,  # slots read of each row
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend with one tile of a row's queries to the first `end` slots of the row."""
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = row.to(tl.int64)
    rows, positions, live, _, _ = tile_rows(block, starts, kv_lengths, row, query_length, GROUP, BLOCK_M)
    q = load_queries(query + b * query_stride_b, query_stride_h, query_stride_q, kv_head, rows, live, D, GROUP, BLOCK_D)
    key += b * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    value += b * value_stride_b + kv_head.to(tl.int64) * value_stride_h
    acc, top, mass = nothing_seen(BLOCK_M, BLOCK_D, ACC)
    acc, top, mass = attend(
        acc, top, mass, q, positions, key, value, key_stride_s, value_stride_s, 0, end,
        True, D, BLOCK_D, BLOCK_N, SCALE, SOFTCAP, WINDOW, FAR, WIDEN,
    )  # fmt: skip
    store_output(
        out + b * out_stride_b, out_stride_q, out_stride_h, acc, top, mass, sinks, kv_head, rows, live, query_length,
        GROUP, D, BLOCK_D, SINKS,
    )  # fmt: skip
