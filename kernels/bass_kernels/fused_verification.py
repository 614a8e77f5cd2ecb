"""Token verification on the device: which drafted tokens stay, what follows them, and where the rows then end.

Written with tensor operations, verification makes probabilities of all B × (K + 1) × V logits and walks them a dozen
times. Here every logit is read once, in blocks of the vocabulary, and leaves three numbers per block (streamed
log-sum-exp: Milakov & Gimelshein 2018, as in flash attention); the one distribution per row that the next token is
drawn from is worked out again at the slot that the decisions point to, twice in blocks that stay in the cache.

1. `_block_statistics` (blocks, K + 1, B): maximum and sums of exponentials of a block.
2. `_decide` (K + 1, B): the slot's log-sum-exp from its blocks; is its drafted token kept?
3. `_block_masses` (blocks, B): mass of the block in the law of the next token, at the first slot not kept.
4. `_finish` (B): the block and then the id that the uniform number falls on; all results.

Grids depend on shapes alone and nothing is read back, so a CUDA graph may hold the four. There is no atomic addition
and the blocks' size is fixed: a row's results do not depend on its neighbours, and come out the same each time.

Shapes: B rows, K drafted tokens, V vocabulary, N blocks of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bass_kernels.launching import check_device, on

BLOCK = 4096  # vocabulary ids per program
WARPS = 8  # with half of them `_finish` spills registers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class VerifyOutput(NamedTuple):
    """What one step adds to each row.

    accepted int64 [B]: drafted tokens kept. next_token int64 [B]: the target's token after them. tokens int64
    [B, K + 1]: the drafted tokens with next_token at index `accepted` and at the end (where accepted < K, only the
    first accepted + 1 mean something). logprobs float32 [B, K + 1]: of `tokens` under the target at temperature 1, in
    nats; 0 at slots that the row did not submit. finite bool [B]: the target's logits were numbers at all submitted
    slots (their log-sum-exp is finite). lengths int64 [B]: committed + accepted + 1.
    """

    accepted: Tensor
    next_token: Tensor
    tokens: Tensor
    logprobs: Tensor
    finite: Tensor
    lengths: Tensor


def verify(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    accept_uniform: Tensor,
    draw_uniform: Tensor,
    committed: Tensor,
    temperature: float,
) -> VerifyOutput:
    """Token verification (Leviathan et al. 2023, algorithm 1), or greedy matching at temperature 0.

    logits [B, K + 1, V] in float32, bfloat16 or float16, ids adjacent in memory: the target's, after the last
    committed token and after each drafted one. drafted int64 [B, K], ids below V; K may be 0. submitted int64 [B],
    0 … K: a row's later slots are not read. q float32 [B, K, V], what the tokens were drawn from, or None: they were
    certain (not read at temperature 0). accept_uniform float64 [B, K] and draw_uniform float64 [B] in [0, 1), from
    `bass_core.randomness`. committed int64 [B]: lengths before this step.

    The decisions are those of `bass_core.verification.token`, or of `matching` with the argmax (lowest id on ties), on
    probabilities that rounding moves by less than 1e-6. An id of probability zero is never drawn. Rows whose logits
    are not numbers get ids within the vocabulary that mean nothing. Raises ValueError for logits of another type or
    layout.
    """
    _check(logits, q)
    rows, slots, vocabulary = logits.shape
    drafts, blocks = slots - 1, triton.cdiv(vocabulary, BLOCK)
    greedy = temperature == 0
    # 0 x inf is NaN: the bound keeps the maximum's own weight at 1 where 1 / temperature overflows float32.
    inverse_temperature = 1.0 if greedy else min(1 / temperature, 1e38)
    has_q = q is not None and not greedy

    def empty(dtype: torch.dtype, *shape: int, needed: bool = True) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=logits.device)

    maxima, sums, tempered_sums = (empty(torch.float32, rows, slots, blocks) for _ in range(3))
    argmaxima = empty(torch.int32, rows, slots, blocks, needed=greedy)
    partial = maxima, sums, tempered_sums if inverse_temperature != 1 else sums, argmaxima
    kept, numbers = empty(torch.int8, rows, drafts), empty(torch.int8, rows, slots)
    log_sums, shifts = empty(torch.float64, rows, slots), empty(torch.float32, rows, slots)
    scales, choices = empty(torch.float32, rows, slots), empty(torch.int32, rows, slots, needed=greedy)
    masses = [empty(torch.float64, rows, blocks, needed=not greedy) for _ in range(2)]
    output = VerifyOutput(
        accepted=empty(torch.int64, rows),
        next_token=empty(torch.int64, rows),
        tokens=empty(torch.int64, rows, slots),
        logprobs=empty(torch.float32, rows, slots),
        finite=empty(torch.bool, rows),
        lengths=empty(torch.int64, rows),
    )

    drafted, submitted = drafted.contiguous(), submitted.contiguous()
    q = q if has_q else logits  # which is not read as q
    inputs = logits, drafted, submitted, q
    layout = *logits.stride()[:2], *q.stride()[:2], vocabulary
    wide = {"BLOCK": BLOCK, "num_warps": WARPS}
    narrow = {"SLOTS": triton.next_power_of_2(slots), "HAS_Q": has_q}
    combining = {"BLOCKS": triton.next_power_of_2(blocks), "GREEDY": greedy}
    with on(logits.device):
        _block_statistics[(blocks, slots, rows)](
            logits, submitted, *partial, *logits.stride()[:2], vocabulary, inverse_temperature,
            TEMPERED=inverse_temperature != 1, GREEDY=greedy, **wide,
        )  # fmt: skip
        _decide[(slots, rows)](
            *inputs, accept_uniform.contiguous(), *partial, kept, numbers, log_sums, shifts, scales, choices,
            *layout, blocks, inverse_temperature, HAS_Q=has_q, **combining,
        )  # fmt: skip
        if not greedy:
            _block_masses[(blocks, rows)](
                *inputs, kept, shifts, scales, *masses, *layout, drafts, inverse_temperature, **narrow, **wide
            )
        _finish[(rows,)](
            *inputs, draw_uniform.contiguous(), committed.contiguous(), kept, numbers, log_sums, shifts, scales,
            choices, *masses, *output, *layout, drafts, blocks, inverse_temperature, **narrow, **combining, **wide,
        )  # fmt: skip
    return output


def _check(logits: Tensor, q: Tensor | None) -> None:
    check_device(logits.device)
    if logits.dtype not in DTYPES or logits.stride(-1) != 1:
        raise ValueError(
            f"logits must be float32, bfloat16 or float16 with stride 1 along the vocabulary, got {logits.dtype} "
            f"with strides {logits.stride()}"
        )
    if q is not None and (q.dtype != torch.float32 or q.shape[-1] != logits.shape[-1] or q.stride(-1) != 1):
        raise ValueError(
            f"q must be float32 with {logits.shape[-1]} ids and stride 1 along them, got {q.dtype} of shape "
            f"{list(q.shape)} with strides {q.stride()}"
        )


@triton.jit
def _block_statistics(
    logits,  # [B, K + 1, V]
    submitted,  # [B]
    maxima,  # [B, K + 1, N]
    sums,  # [B, K + 1, N]: of exp(x - the block's maximum)
    tempered_sums,  # [B, K + 1, N]: of exp((x - the block's maximum) / temperature) (TEMPERED)
    argmaxima,  # [B, K + 1, N]: lowest id of the block's maximum (GREEDY)
    stride_b,
    stride_s,
    vocabulary,
    inverse_temperature,
    GREEDY: tl.constexpr,
    TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, slot, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if slot > tl.load(submitted + row):
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride_b + slot * stride_s + ids, mask=ids < vocabulary, other=float("-inf"))
    x = x.to(tl.float32)
    # What `max` makes of NaN depends on the device; here NaN is passed on by the sum alone.
    ordered = tl.where(x == x, x, float("-inf"))
    top = tl.max(ordered)
    x -= tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    at = (row * tl.num_programs(1) + slot) * tl.num_programs(0) + block
    tl.store(maxima + at, top)
    tl.store(sums + at, tl.sum(tl.exp(x)))
    if TEMPERED:
        tl.store(tempered_sums + at, tl.sum(tl.exp(x * inverse_temperature)))
    if GREEDY:
        tl.store(argmaxima + at, tl.min(tl.where(ordered == top, ids, vocabulary)))


@triton.jit
def _decide(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    submitted,  # [B]
    q,  # [B, K, V] (HAS_Q)
    accept_uniform,  # [B, K]
    maxima,  # [B, K + 1, N]; this and the next three: what _block_statistics left
    sums,
    tempered_sums,
    argmaxima,
    kept,  # [B, K]: is the drafted token kept if all before it are?
    numbers,  # [B, K + 1]: is the log-sum-exp finite?
    log_sums,  # [B, K + 1]: at temperature 1
    shifts,  # [B, K + 1]: p = scale * exp((x - shift) / temperature)
    scales,  # [B, K + 1]
    choices,  # [B, K + 1]: argmax (GREEDY)
    stride_b,
    stride_s,
    q_stride_b,
    q_stride_s,
    vocabulary,
    blocks,
    inverse_temperature: tl.float64,
    GREEDY: tl.constexpr,
    HAS_Q: tl.constexpr,
    BLOCKS: tl.constexpr,  # N rounded up to a power of two
):
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(submitted + row)
    if slot > length:
        return
    at = row * tl.num_programs(0) + slot
    n = tl.arange(0, BLOCKS)
    inside = n < blocks
    tops = tl.load(maxima + at * blocks + n, mask=inside, other=float("-inf"))
    top = tl.max(tops)
    shift = tl.where(top == float("-inf"), 0.0, top)
    below = tops.to(tl.float64) - shift  # [BLOCKS]
    total = tl.sum(tl.load(sums + at * blocks + n, mask=inside, other=0.0) * tl.exp(below))
    tl.store(log_sums + at, shift + tl.log(total))
    tl.store(numbers + at, (total > 0).to(tl.int8))  # a NaN or inf among the logits makes it NaN: false
    drafted_at = row * (tl.num_programs(0) - 1) + slot
    if GREEDY:
        ids = tl.load(argmaxima + at * blocks + n, mask=inside, other=vocabulary)
        choice = tl.min(tl.where(tops == top, ids, vocabulary))
        tl.store(choices + at, choice)
        if slot < length:
            tl.store(kept + drafted_at, (tl.load(drafted + drafted_at) == choice).to(tl.int8))
    else:
        tempered = tl.load(tempered_sums + at * blocks + n, mask=inside, other=0.0)
        mass = tl.sum(tempered * tl.exp(below * inverse_temperature))
        tl.store(shifts + at, shift)
        tl.store(scales + at, (1 / mass).to(tl.float32))
        if slot < length:
            token = tl.load(drafted + drafted_at)
            x = tl.load(logits + row * stride_b + slot * stride_s + token).to(tl.float32)
            # In float64: for an improbable token, float32 would round the exponent too coarsely for p / q.
            p_x = tl.exp((x.to(tl.float64) - shift) * inverse_temperature) / mass
            ratio = p_x
            if HAS_Q:
                ratio = p_x / tl.load(q + row * q_stride_b + slot * q_stride_s + token)
            # p >= q: accept. p < q: accept with probability p/q.
            tl.store(kept + drafted_at, (tl.load(accept_uniform + drafted_at) < ratio).to(tl.int8))


@triton.jit
def _accepted(kept, row, drafts, length, SLOTS: tl.constexpr):
    """How many leading drafted tokens of the row are kept: the first slot with none, or one not kept or submitted."""
    slots = tl.arange(0, SLOTS)
    is_kept = tl.load(kept + row * drafts + slots, mask=(slots < length) & (slots < drafts), other=0)
    return tl.min(tl.where(is_kept != 0, SLOTS, slots))


@triton.jit
def _next_law(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    q,  # [B, K, V] (HAS_Q)
    shifts,  # [B, K + 1]
    scales,  # [B, K + 1]
    row,
    slot,  # the first slot not kept
    length,
    block,
    stride_b,
    stride_s,
    q_stride_b,
    q_stride_s,
    vocabulary,
    drafts,
    inverse_temperature,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p and max(0, p - q) of a block of ids: [BLOCK] each. Where all that was submitted is kept, q counts as 0."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    rejected = slot < length
    x = tl.load(logits + row * stride_b + slot * stride_s + ids, mask=inside, other=float("-inf")).to(tl.float32)
    at = row * (drafts + 1) + slot
    p = tl.exp((x - tl.load(shifts + at)) * inverse_temperature) * tl.load(scales + at)
    if HAS_Q:
        q_ids = tl.load(q + row * q_stride_b + slot * q_stride_s + ids, mask=inside & rejected, other=0.0)
    else:
        q_ids = (ids == tl.load(drafted + row * drafts + slot, mask=rejected, other=-1)).to(tl.float32)
    return p, tl.maximum(p - q_ids, 0.0)


@triton.jit
def _block_masses(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    submitted,  # [B]
    q,  # [B, K, V] (HAS_Q)
    kept,  # [B, K]
    shifts,  # [B, K + 1]
    scales,  # [B, K + 1]
    masses,  # [B, N]: of p at the first slot not kept
    residual_masses,  # [B, N]: of max(0, p - q) there
    stride_b,
    stride_s,
    q_stride_b,
    q_stride_s,
    vocabulary,
    drafts,
    inverse_temperature,
    HAS_Q: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(submitted + row)
    slot = _accepted(kept, row, drafts, length, SLOTS).to(tl.int64)
    p, residual = _next_law(
        logits, drafted, q, shifts, scales, row, slot, length, block, stride_b, stride_s, q_stride_b, q_stride_s,
        vocabulary, drafts, inverse_temperature, HAS_Q, BLOCK,
    )  # fmt: skip
    at = row * tl.num_programs(0) + block
    tl.store(masses + at, tl.sum(p.to(tl.float64)))
    tl.store(residual_masses + at, tl.sum(residual.to(tl.float64)))


@triton.jit
def _first_above(weights, target, SIZE: tl.constexpr):
    """First index whose cumulative weight exceeds `target`, never one of weight zero. weights float64 [SIZE].

    The last index of positive weight where rounding leaves none; 0 where nothing has weight (or it is NaN).
    """
    index = tl.arange(0, SIZE)
    # A parallel scan need not be monotone to the last bit, so that a weight of zero could seem to reach the target.
    reached = (tl.cumsum(weights) > target) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE))
    last = tl.max(tl.where(weights > 0, index, 0))
    return tl.minimum(first, last)


@triton.jit
def _finish(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    submitted,  # [B]
    q,  # [B, K, V] (HAS_Q)
    draw_uniform,  # [B]
    committed,  # [B]
    kept,  # [B, K]; this and the next five: what _decide left
    numbers,
    log_sums,
    shifts,
    scales,
    choices,
    masses,  # [B, N]; this and the next: what _block_masses left (not GREEDY)
    residual_masses,
    accepted,  # this and the next five: the results, as in VerifyOutput
    next_token,
    tokens,
    logprobs,
    finite,
    lengths,
    stride_b,
    stride_s,
    q_stride_b,
    q_stride_s,
    vocabulary,
    drafts,
    blocks,
    inverse_temperature,
    GREEDY: tl.constexpr,
    HAS_Q: tl.constexpr,
    SLOTS: tl.constexpr,  # K + 1 rounded up to a power of two
    BLOCKS: tl.constexpr,  # N rounded up to a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(submitted + row)
    slot = _accepted(kept, row, drafts, length, SLOTS).to(tl.int64)
    if GREEDY:
        token = tl.load(choices + row * (drafts + 1) + slot)
    else:
        n = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + n, mask=n < blocks, other=0.0)
        residual_mass = tl.load(residual_masses + row * blocks + n, mask=n < blocks, other=0.0)
        # A residual without mass has probability zero, up to rounding of p = q; the target's own law is the limit.
        is_residual = tl.sum(residual_mass) > 0
        mass = tl.where(is_residual, residual_mass, mass)
        # u is at most 1 - 2^-52 and the sums are float64: u times the total rounds below the total.
        target = tl.load(draw_uniform + row) * tl.sum(mass)
        block = _first_above(mass, target, BLOCKS)
        p, residual = _next_law(
            logits, drafted, q, shifts, scales, row, slot, length, block, stride_b, stride_s, q_stride_b, q_stride_s,
            vocabulary, drafts, inverse_temperature, HAS_Q, BLOCK,
        )  # fmt: skip
        weights = tl.where(is_residual, residual, p).to(tl.float64)
        target -= tl.sum(tl.where(n < block, mass, 0.0))
        token = block * BLOCK + _first_above(weights, target, BLOCK)
    tl.store(accepted + row, slot)
    tl.store(next_token + row, token)
    tl.store(lengths + row, tl.load(committed + row) + slot + 1)

    slots = tl.arange(0, SLOTS)
    exists, sent = slots <= drafts, (slots <= drafts) & (slots <= length)
    new = tl.load(drafted + row * drafts + slots, mask=slots < drafts, other=0)
    new = tl.where((slots == slot) | (slots == drafts), token, new)
    at = row * (drafts + 1) + slots
    x = tl.load(logits + row * stride_b + slots.to(tl.int64) * stride_s + new, mask=sent, other=0.0).to(tl.float32)
    logprob = x - tl.load(log_sums + at, mask=sent, other=0.0)
    tl.store(tokens + at, new, mask=exists)
    tl.store(logprobs + at, logprob.to(tl.float32), mask=exists)
    tl.store(finite + row, tl.min(tl.load(numbers + at, mask=sent, other=1)) != 0)
