"""Draw the draft token of each row and store its distribution: softmax, random number and search in one launch.

Tensor operations would need five launches in every pass of a draft phase. Here a program reads a row's vocabulary
twice, in blocks. The first read gives the maximum and the sum of exponentials (streamed: Milakov & Gimelshein 2018).
The second read writes q and sums the written values in float64. The token is then found in one block. The token
follows q as stored in memory, rounding included, because verification divides by the stored q.

Each row has a single program. The logits of a row are a few hundred kilobytes and stay in the cache between both
reads. More programs per row would need further launches to wait for each other.

Shapes: B rows, V vocabulary, N blocks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bass_kernels.fused_verification import BLOCK
from bass_kernels.launching import check_logits, on, require
from bass_kernels.uniform import uniform
from bass_kernels.verification_kernels import first_above

WARPS = 16  # with half of them it spills registers on sm_120
DRAFT = tl.constexpr(1)  # Purpose.DRAFT of bass_core.exactness.randomness


def draw(
    logits: Tensor, streams: Tensor, steps: Tensor, slot: int, temperature: float, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's draft token of this slot (int64 [B]), its distribution (float32 [B, width]), and the largest
    logit (float32 [B]; NaN if the logits are not numbers).

    logits [B, V] in float32, bfloat16 or float16, ids adjacent in memory. streams, steps: int64 [B]. The random number
    is that of `bass_core.exactness.randomness.Key(streams, steps, Purpose.DRAFT, slot)`. temperature > 0. width >= V:
    ids from V on have probability zero. An id of probability zero is never drawn. A row with logits that are not
    numbers gets some id below V. Raises ValueError for logits of another type or layout.
    """
    check_logits(logits)
    rows, vocabulary = logits.shape
    require(width >= vocabulary, f"width must be at least the vocabulary's {vocabulary}, got {width}")
    blocks = triton.cdiv(width, BLOCK)
    tokens, peaks = streams.new_empty(rows), logits.new_empty(rows, dtype=torch.float32)
    q, masses = peaks.new_empty(rows, width), peaks.new_empty(rows, blocks, dtype=torch.float64)
    with on(logits.device):
        _draw[(rows,)](
            logits, streams.contiguous(), steps.contiguous(), tokens, q, peaks, masses, logits.stride(0), slot,
            vocabulary, width, blocks, min(1 / temperature, 1e38), BLOCKS=triton.next_power_of_2(blocks), BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return tokens, q, peaks


# Slots change in each draft, and the rows' tensors may start anywhere in the session's memory: avoid recompilation.
@triton.jit(do_not_specialize=["slot"], do_not_specialize_on_alignment=["streams", "steps"])
def _draw(
    logits,  # [B, V]
    streams,  # [B]
    steps,  # [B]
    tokens,  # out [B]
    q,  # out [B, width]
    peaks,  # out [B]
    masses,  # [B, N]: sums of q per block
    stride_b,
    slot,
    vocabulary,
    width,
    blocks,
    inverse_temperature,
    BLOCKS: tl.constexpr,  # N rounded up to a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_b
    q += row * width
    masses += row * blocks
    top, total = float("-inf"), 0.0
    for first in range(0, vocabulary, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        # The result of `max` for NaN depends on the device. Here only the sum passes NaN on.
        higher = tl.maximum(top, tl.max(tl.where(x == x, x, float("-inf"))))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        total *= tl.exp((tl.where(top == float("-inf"), shift, top) - shift) * inverse_temperature)
        total += tl.sum(tl.exp((x - shift) * inverse_temperature))
        top = higher
    tl.store(peaks + row, tl.where(total > 0, top, float("nan")))

    shift = tl.where(top == float("-inf"), 0.0, top)
    for block in range(0, blocks):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        q_ids = tl.exp((x - shift) * inverse_temperature) / total
        tl.store(q + ids, q_ids, mask=ids < width)
        tl.store(masses + block, tl.sum(q_ids.to(tl.float64)))
    tl.debug_barrier()  # all threads store before any thread reads

    n = tl.arange(0, BLOCKS)
    mass = tl.load(masses + n, mask=n < blocks, other=0.0)
    # u is at most 1 - 2^-52 and the sums are float64: u times the total rounds below the total.
    target = uniform(tl.load(streams + row), tl.load(steps + row), DRAFT, slot) * tl.sum(mass)
    chosen = first_above(mass, target, BLOCKS)
    target -= tl.sum(tl.where(n < chosen, mass, 0.0))
    ids = chosen * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(q + ids, mask=ids < width, other=0.0).to(tl.float64)
    tl.store(tokens + row, (chosen * BLOCK + first_above(weights, target, BLOCK)).to(tl.int64))
