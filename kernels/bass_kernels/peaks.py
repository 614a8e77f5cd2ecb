"""The most likely token of each row: the largest logit and its id.

One program per row keeps a maximum per lane, with many loads in flight, because the logits of a row are a few hundred
kilobytes. torch's `max` takes about three times as long for few rows (kernels/LABBOOK.md, change 21).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bass_kernels.launching import check_logits, on

BLOCK = 2048  # ids at a time
AT_ONCE = 8  # blocks with independent loads
WARPS = 16


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row (float32 [B]; NaN if the row has NaN) and its lowest id (int64 [B]).

    logits [B, V] in float32, bfloat16 or float16, ids adjacent in memory. A row with NaN gets some id below V. Raises
    ValueError for logits of another type or layout.
    """
    check_logits(logits)
    rows, vocabulary = logits.shape
    peaks = logits.new_empty(rows, dtype=torch.float32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    with on(logits.device):
        _largest[(rows,)](
            logits, peaks, tokens, logits.stride(0), vocabulary, BLOCK=BLOCK, AT_ONCE=AT_ONCE, num_warps=WARPS
        )
    return peaks, tokens


@triton.jit
def _largest(
    logits,  # [B, V]
    peaks,  # out [B]
    tokens,  # out [B]
    stride_b,
    vocabulary,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_b
    lanes = tl.arange(0, BLOCK)
    best, at = tl.full([BLOCK], float("-inf"), tl.float32), lanes
    numbers = tl.full([BLOCK], 1, tl.int32)
    for first in range(0, vocabulary, BLOCK * AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            ids = first + part * BLOCK + lanes
            x = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
            at = tl.where(x > best, ids, at)
            best = tl.where(x > best, x, best)
            numbers &= (x == x).to(tl.int32)  # the result of `max` for NaN depends on the device
    top = tl.max(best)
    tl.store(peaks + row, tl.where(tl.min(numbers) > 0, top, float("nan")))
    tl.store(tokens + row, tl.min(tl.where(best == top, at, vocabulary - 1)).to(tl.int64))
