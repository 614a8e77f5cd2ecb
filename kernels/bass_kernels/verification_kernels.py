"""The four kernels of `fused_verification`, in launch order.

Shapes: B rows, K draft tokens, V vocabulary, N blocks of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bass_kernels.uniform import uniform

ACCEPT, TARGET = (
    tl.constexpr(2),
    tl.constexpr(3),
)  # Purpose.ACCEPT and Purpose.TARGET of bass_core.exactness.randomness


@triton.jit
def block_statistics(
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
    # The result of `max` for NaN depends on the device. Here only the sum passes NaN on.
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


@triton.jit(do_not_specialize_on_alignment=["streams", "steps"])
def decide(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    submitted,  # [B]
    q,  # [B, K, V] (HAS_Q)
    accept_uniform,  # [B, K]; None: hash streams and steps
    streams,  # [B]
    steps,  # [B]
    maxima,  # [B, K + 1, N]; maxima to argmaxima: from block_statistics
    sums,
    tempered_sums,
    argmaxima,
    kept,  # [B, K]: the draft token is accepted if all earlier ones are
    sound,  # [B, K + 1]: the log-sum-exp is finite
    log_sums,  # [B, K + 1]: at temperature 1
    shifts,  # [B, K + 1]: p = scale * exp((x - shift) / temperature)
    scales,  # [B, K + 1]
    choices,  # [B, K + 1]: argmax (GREEDY)
    stride_b,
    stride_s,
    drafted_stride,
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
    tl.store(sound + at, (total > 0).to(tl.int8))  # NaN or inf among the logits makes total NaN: false
    kept_at = row * (tl.num_programs(0) - 1) + slot
    drafted += row * drafted_stride + slot
    if GREEDY:
        ids = tl.load(argmaxima + at * blocks + n, mask=inside, other=vocabulary)
        choice = tl.min(tl.where(tops == top, ids, vocabulary))
        tl.store(choices + at, choice)
        if slot < length:
            tl.store(kept + kept_at, (tl.load(drafted) == choice).to(tl.int8))
    else:
        tempered = tl.load(tempered_sums + at * blocks + n, mask=inside, other=0.0)
        mass = tl.sum(tempered * tl.exp(below * inverse_temperature))
        tl.store(shifts + at, shift)
        tl.store(scales + at, (1 / mass).to(tl.float32))
        if slot < length:
            token = tl.load(drafted)
            x = tl.load(logits + row * stride_b + slot * stride_s + token).to(tl.float32)
            # float64, because float32 rounds the exponent of an improbable token too coarsely for p / q.
            p_x = tl.exp((x.to(tl.float64) - shift) * inverse_temperature) / mass
            ratio = p_x
            if HAS_Q:
                ratio = p_x / tl.load(q + row * q_stride_b + slot * q_stride_s + token)
            if accept_uniform is None:
                number = uniform(tl.load(streams + row), tl.load(steps + row), ACCEPT, slot)
            else:
                number = tl.load(accept_uniform + kept_at)
            # p >= q: accept. p < q: accept with probability p/q.
            tl.store(kept + kept_at, (number < ratio).to(tl.int8))


@triton.jit
def _accepted(kept, row, drafts, length, SLOTS: tl.constexpr):
    """Return the accepted length of the row: the first slot without an accepted submitted token."""
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
    drafted_stride,
    q_stride_b,
    q_stride_s,
    vocabulary,
    drafts,
    inverse_temperature,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return p and max(0, p - q) of a block of ids, [BLOCK] each. q is 0 if all submitted tokens are accepted."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    rejected = slot < length
    x = tl.load(logits + row * stride_b + slot * stride_s + ids, mask=inside, other=float("-inf")).to(tl.float32)
    at = row * (drafts + 1) + slot
    p = tl.exp((x - tl.load(shifts + at)) * inverse_temperature) * tl.load(scales + at)
    if HAS_Q:
        q_ids = tl.load(q + row * q_stride_b + slot * q_stride_s + ids, mask=inside & rejected, other=0.0)
    else:
        q_ids = (ids == tl.load(drafted + row * drafted_stride + slot, mask=rejected, other=-1)).to(tl.float32)
    return p, tl.maximum(p - q_ids, 0.0)


@triton.jit
def block_masses(
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
    drafted_stride,
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
    if length < 0:
        return
    slot = _accepted(kept, row, drafts, length, SLOTS).to(tl.int64)
    p, residual = _next_law(
        logits, drafted, q, shifts, scales, row, slot, length, block, stride_b, stride_s, drafted_stride,
        q_stride_b, q_stride_s, vocabulary, drafts, inverse_temperature, HAS_Q, BLOCK,
    )  # fmt: skip
    at = row * tl.num_programs(0) + block
    tl.store(masses + at, tl.sum(p.to(tl.float64)))
    tl.store(residual_masses + at, tl.sum(residual.to(tl.float64)))


@triton.jit
def first_above(weights, target, SIZE: tl.constexpr):
    """Return the first index with cumulative weight above `target` and positive weight. weights float64 [SIZE].

    If rounding leaves no such index, return the last index of positive weight; 0 if there is none (or only NaN).
    """
    index = tl.arange(0, SIZE)
    # A parallel scan is not monotone to the last bit, so an index of weight zero could seem to reach the target.
    reached = (tl.cumsum(weights) > target) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE))
    last = tl.max(tl.where(weights > 0, index, 0))
    return tl.minimum(first, last)


# The rows' tensors may start anywhere in the session's memory: compilation must not depend on their alignment.
@triton.jit(
    do_not_specialize=["logprobs_stride", "tokens_stride", "texts", "places"],
    do_not_specialize_on_alignment=["streams", "steps", "tokens", "logprobs", "lengths", "draft_finite"],
)
def finish(
    logits,  # [B, K + 1, V]
    drafted,  # [B, K]
    submitted,  # [B]
    q,  # [B, K, V] (HAS_Q)
    draw_uniform,  # [B]; None: hash streams and steps
    streams,  # [B]
    steps,  # [B], changed (COMMITS)
    kept,  # [B, K]; kept to choices: from decide
    sound,
    log_sums,
    shifts,
    scales,
    choices,
    masses,  # [B, N]; both masses: from block_masses (not GREEDY)
    residual_masses,
    draft_finite,  # [B] (COMMITS)
    chances,  # [texts, places] (FORCED)
    block,  # out [B, K + 4]
    tokens,  # [B, S], changed (COMMITS)
    logprobs,  # [B, S], changed (COMMITS); else out [B, K + 1]
    lengths,  # [B], changed (COMMITS)
    stride_b,
    stride_s,
    drafted_stride,
    q_stride_b,
    q_stride_s,
    vocabulary,
    drafts,
    blocks,
    logprobs_stride,
    tokens_stride,
    texts,
    places,
    inverse_temperature,
    COMMITS: tl.constexpr,
    ALL_OR_NONE: tl.constexpr,
    FORCED: tl.constexpr,
    GREEDY: tl.constexpr,
    HAS_Q: tl.constexpr,
    ROWS: tl.constexpr,  # B rounded up to a power of two
    SLOTS: tl.constexpr,  # K + 1 rounded up to a power of two
    BLOCKS: tl.constexpr,  # N rounded up to a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(submitted + row)
    if length < 0:
        return
    slot = _accepted(kept, row, drafts, length, SLOTS).to(tl.int64)
    if COMMITS:
        stream, step, end = tl.load(streams + row), tl.load(steps + row), tl.load(lengths + row)
    if GREEDY:
        token = tl.load(choices + row * (drafts + 1) + slot)
    else:
        n = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + n, mask=n < blocks, other=0.0)
        residual_mass = tl.load(residual_masses + row * blocks + n, mask=n < blocks, other=0.0)
        # A residual without mass occurs only by rounding of p = q; use p, the target's distribution, as the limit.
        is_residual = tl.sum(residual_mass) > 0
        mass = tl.where(is_residual, residual_mass, mass)
        number = uniform(stream, step, TARGET, 0) if draw_uniform is None else tl.load(draw_uniform + row)
        # u is at most 1 - 2^-52 and the sums are float64: u times the total rounds below the total.
        target = number * tl.sum(mass)
        chosen = first_above(mass, target, BLOCKS)
        p, residual = _next_law(
            logits, drafted, q, shifts, scales, row, slot, length, chosen, stride_b, stride_s, drafted_stride,
            q_stride_b, q_stride_s, vocabulary, drafts, inverse_temperature, HAS_Q, BLOCK,
        )  # fmt: skip
        weights = tl.where(is_residual, residual, p).to(tl.float64)
        target -= tl.sum(tl.where(n < chosen, mass, 0.0))
        token = chosen * BLOCK + first_above(weights, target, BLOCK)
    slots = tl.arange(0, SLOTS)
    if FORCED:
        text = (stream % texts + texts) % texts  # `%` takes the sign of the stream
        chance = tl.load(chances + text * places + (end + slots) % places)
        is_kept = (uniform(stream, step, ACCEPT, slots) < chance) & (slots < length)
        slot = tl.min(tl.where(is_kept, SLOTS, slots)).to(tl.int64)

    exists, sent = slots <= drafts, (slots <= drafts) & (slots <= length)
    new = tl.load(drafted + row * drafted_stride + slots, mask=slots < drafts, other=0)
    new = tl.where((slots == slot) | (slots == drafts), token, new)
    at = row * (drafts + 1) + slots
    x = tl.load(logits + row * stride_b + slots.to(tl.int64) * stride_s + new, mask=sent, other=0.0).to(tl.float32)
    logprob = (x - tl.load(log_sums + at, mask=sent, other=0.0)).to(tl.float32)
    if FORCED:
        logprob = tl.full([SLOTS], float("nan"), tl.float32)  # the logits belong to another token
    fine = tl.min(tl.load(sound + at, mask=sent, other=1)) != 0
    block += row * (drafts + 4)
    tl.store(block + slots, new, mask=exists)
    tl.store(block + drafts + 1, slot)
    tl.store(block + drafts + 2, fine.to(tl.int64))
    logprobs += row * logprobs_stride
    if COMMITS:
        is_drafted = tl.load(draft_finite + row)
        tl.store(block + drafts + 3, is_drafted.to(tl.int64))
        if ALL_OR_NONE:  # every program reads the flags of all rows, written by earlier launches
            b = tl.arange(0, ROWS)
            submits = tl.load(submitted + b, mask=b < tl.num_programs(0), other=-1)
            is_sent = (slots[None, :] <= drafts) & (slots[None, :] <= submits[:, None])  # excludes empty batch slots
            all_sound = tl.load(sound + b[:, None] * (drafts + 1) + slots[None, :], mask=is_sent, other=1)
            all_drafted = tl.load(draft_finite + b, mask=submits >= 0, other=1).to(tl.int8)
            fine = (tl.min(tl.min(all_sound, 1), 0) != 0) & (tl.min(all_drafted, 0) != 0)
        else:
            fine = fine & (is_drafted != 0)
        moves = (slots <= slot) & fine
        tl.store(tokens + row * tokens_stride + end + slots, new, mask=moves)
        tl.store(logprobs + end + slots, logprob, mask=moves)
        tl.debug_barrier()  # all threads read the row's length before the store
        tl.store(lengths + row, end + slot + 1, mask=fine)
        tl.store(steps + row, step + 1, mask=fine)
    else:
        tl.store(block + drafts + 3, 1)
        tl.store(logprobs + slots, logprob, mask=exists)
