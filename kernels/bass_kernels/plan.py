"""The work list of a ragged launch: rows and key ranges of all programs.

With one program per row the whole GPU would wait for the longest row. The plan cuts the keys of every row into chunks
of one size and lists the pieces, longest rows first. A single small program makes the plan on the device, once per
forward pass for all layers. The host fixes only the maximum number of pieces, so a captured CUDA graph serves any
lengths. FlashInfer's planner (Ye et al. 2025) does the same on the host.

Chunk sizes are scored by `waves x (chunk + overhead)`: pieces run in waves that fill the GPU, and a wave takes as long
as a chunk.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching
from bass_kernels.tiles import Tile, power_of_two

OVERHEAD = 64  # cost of starting and ending a program, in keys
REDUCE = 128  # cost of adding up if any row is split, in keys
WAVES = 4  # pieces beyond one per row: enough for this many waves
CHUNK = 512  # keys per piece in deterministic mode
DRAFTS = 64  # longest pass that deterministic mode splits; partial results of a long prompt would fill the memory
# Chunk sizes tried: 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, … blocks of keys, up to 160,000.
CANDIDATES = 64


class Plan(NamedTuple):
    """Work list of a launch. items int32 [I, 4]: row (-1: idle), first key, one past the last key, split (index of the
    partial result; -1: the row's only piece writes the output). rows int32 [B, 2]: first split and number of splits.
    counters int32: finished pieces per tile; all 0 before and after each launch. Launches with the same plan must not
    overlap."""

    items: Tensor
    rows: Tensor
    counters: Tensor
    tile: Tile

    @property
    def may_split(self) -> bool:
        """Return True if a row may be cut."""
        return len(self.items) > len(self.rows)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of this GPU, or of a small GPU in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def most_items(
    batch: int, query_length: int, programs_per_item: int, slots: int, width: int, block_n: int, deterministic: bool
) -> int:
    """Return the maximum number of pieces of a plan: one per row and enough more to fill the GPU."""
    if deterministic:
        # The extra item makes narrow caches use the kernel that adds up pieces, too: other kernels give other bits.
        return batch * max(1, triton.cdiv(width, CHUNK)) + 1 if query_length <= DRAFTS else batch
    extra = WAVES * slots // programs_per_item
    return batch + min(extra, batch * (triton.cdiv(width, 2 * block_n) - 1))


def make_plan(
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    query_length: int,
    kv_heads: int,
    width: int,
    tile: Tile,
    group: int,
    window: int = 0,
    deterministic: bool = False,
    span: int | None = None,
) -> Plan:
    """Return the work list for rows of these lengths. starts, kv_lengths: int32 or int64 [B], on the device.

    query_length: of the launch, padding included. width: slots of the cache, an upper bound of the lengths. window:
    keys that a query sees (0: all earlier keys). span: the plan also serves later launches with no more queries each,
    at positions starts … starts + span - 1; kv_lengths are then the lengths of the last launch (None: this launch
    only). Each launch clips pieces to its own lengths, and pieces beyond a row's length add nothing.
    """
    batch, device = len(kv_lengths), kv_lengths.device
    programs_per_item = triton.cdiv(query_length * group, tile.block_m) * kv_heads
    slots = multiprocessors(device) * tile.programs
    count = most_items(batch, query_length, programs_per_item, slots, width, tile.block_n, deterministic)
    items = torch.empty(count, 4, dtype=torch.int32, device=device)
    rows = torch.empty(batch, 2, dtype=torch.int32, device=device)
    counters = torch.empty(batch * programs_per_item if count > batch else 0, dtype=torch.int32, device=device)
    block_b = power_of_two(batch, least=2)
    with launching.on(device):
        _plan[(1,)](
            starts,
            kv_lengths,
            items,
            rows,
            counters,
            batch,
            count,
            len(counters),
            slots,
            programs_per_item,
            query_length if span is None else span,
            width,
            WINDOW=window,
            BLOCK_N=tile.block_n,
            FIXED_CHUNK=CHUNK if deterministic else 0,
            BLOCK_B=block_b,
            ITEM_BLOCK=max(16, 2048 // block_b),
            OVERHEAD=OVERHEAD,
            REDUCE=REDUCE,
            CANDIDATES=CANDIDATES,
            num_warps=4 if batch <= 64 else 16,
        )
    return Plan(items, rows, counters, tile)


@triton.jit(do_not_specialize=["batch", "count", "tiles", "slots", "programs_per_item", "query_length", "width"])
def _plan(
    starts,
    kv_lengths,
    items,  # out [count, 4]
    rows,  # out [batch, 2]
    counters,  # out [tiles]
    batch,
    count,
    tiles,
    slots,
    programs_per_item,
    query_length,
    width,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
    OVERHEAD: tl.constexpr,
    REDUCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    # Reset here and not at allocation, so that an aborted launch leaves no count to a later pass.
    for block in range(0, tiles, ITEM_BLOCK):
        tile = block + tl.arange(0, ITEM_BLOCK)
        tl.store(counters + tile, 0, mask=tile < tiles)

    # Longest rows first: sort numbers that hold a row's key count and its index.
    b = tl.arange(0, BLOCK_B)
    first, last = _keys_needed(starts, kv_lengths, b, batch, query_length, width, WINDOW, BLOCK_N)
    order = tl.sort((first - last).to(tl.int64) * BLOCK_B + b)
    b = (order & (BLOCK_B - 1)).to(tl.int32)
    first, last = _keys_needed(starts, kv_lengths, b, batch, query_length, width, WINDOW, BLOCK_N)

    if FIXED_CHUNK > 0:
        # If the pieces exceed the host's maximum, use one piece per row, so that no key is lost.
        total = tl.sum(tl.where(b < batch, _pieces(first, last, FIXED_CHUNK), 0), 0)
        chunk = tl.where(total <= count, FIXED_CHUNK, 1 << 30)
    else:
        i = tl.arange(0, CANDIDATES)
        sizes = tl.where(i < 2, 2 + i, (4 + (i - 2) % 4) << tl.maximum(i - 2, 0) // 4) * BLOCK_N  # [CANDIDATES]
        pieces = _pieces(first[None, :], last[None, :], sizes[:, None])  # [CANDIDATES, BLOCK_B]
        pieces = tl.where((b < batch)[None, :], pieces, 0)
        total = tl.sum(pieces, 1)
        waves = tl.cdiv(total * programs_per_item, slots)
        longest = tl.max(last - first, 0)
        cost = waves.to(tl.int64) * (tl.minimum(sizes, longest) + OVERHEAD)
        cost += tl.where(tl.max(pieces, 1) > 1, REDUCE, 0)
        cost = tl.where(total <= count, cost, 1 << 60)
        best = tl.argmin(cost, 0)  # on ties the smallest chunk
        chunk = tl.sum(tl.where(i == best, sizes, 0), 0)

    pieces = tl.where(b < batch, _pieces(first, last, chunk), 0)  # [BLOCK_B]
    behind = tl.cumsum(pieces, 0)
    ahead = behind - pieces  # pieces of longer rows
    tl.store(rows + b * 2, ahead, mask=b < batch)
    tl.store(rows + b * 2 + 1, pieces, mask=b < batch)
    for block in range(0, count, ITEM_BLOCK):
        item = block + tl.arange(0, ITEM_BLOCK)
        mine = (item[:, None] >= ahead[None, :]) & (item[:, None] < behind[None, :])  # [ITEM_BLOCK, BLOCK_B]
        row = tl.max(tl.where(mine, b[None, :], -1), 1)
        index = item - tl.sum(tl.where(mine, ahead[None, :], 0), 1)
        row_first = tl.sum(tl.where(mine, first[None, :], 0), 1)
        row_last = tl.sum(tl.where(mine, last[None, :], 0), 1)
        alone = tl.sum(tl.where(mine, pieces[None, :], 0), 1) == 1
        index += row_first // chunk  # chunks are counted from position 0 and do not move as rows grow
        at = items + item * 4
        tl.store(at, row, mask=item < count)
        tl.store(at + 1, tl.maximum(index * chunk, row_first), mask=item < count)
        tl.store(at + 2, tl.minimum((index + 1) * chunk, row_last), mask=item < count)
        tl.store(at + 3, tl.where(alone, -1, item), mask=item < count)


@triton.jit
def _keys_needed(starts, kv_lengths, b, batch, query_length, width, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return each row's first visible key (a multiple of BLOCK_N) and one past the last; 0, 0 if no query is live."""
    start = tl.load(starts + b, mask=b < batch, other=0).to(tl.int32)
    last = tl.load(kv_lengths + b, mask=b < batch, other=0).to(tl.int32)
    last = tl.minimum(tl.minimum(last, start + query_length), width)
    start = tl.maximum(start, 0)
    live = start < last
    first = tl.zeros_like(last)
    if WINDOW > 0:
        first = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return tl.where(live, first, 0), tl.where(live, last, 0)


@triton.jit
def _pieces(first, last, chunk):
    """Return the number of chunks of these keys, and at least 1, because a program must write zeros for empty rows."""
    return tl.maximum(tl.cdiv(last, chunk) - first // chunk, 1)
