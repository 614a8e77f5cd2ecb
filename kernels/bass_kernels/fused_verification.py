"""Token verification on the device: which drafted tokens stay, what follows them, and the rows' new ends.

Written with tensor operations, verification makes probabilities of all B × (K + 1) × V logits and walks them a dozen
times. Here every logit is read once, in blocks of the vocabulary, and leaves three numbers per block (streamed
log-sum-exp: Milakov & Gimelshein 2018, as in flash attention); the one distribution per row that the next token is
drawn from is worked out again at the slot that the decisions point to, twice in blocks that stay in the cache.

1. `block_statistics` (blocks, K + 1, B): maximum and sums of exponentials of a block.
2. `decide` (K + 1, B): the slot's log-sum-exp from its blocks; is its drafted token kept?
3. `block_masses` (blocks, B): mass of the block in the law of the next token, at the first slot not kept.
4. `finish` (B): the block and then the id that the uniform number falls on; all results, and the row's new end.

Grids depend on shapes alone and nothing is read back, so a CUDA graph may hold the four. There is no atomic addition
and the blocks' size is fixed: a row's decisions do not depend on its neighbours, and come out the same each time.

Shapes: B rows, K drafted tokens, V vocabulary, N blocks of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from bass_kernels.launching import check_logits, on
from bass_kernels.verification_kernels import block_masses, block_statistics, decide, finish

BLOCK = 4096  # vocabulary ids per program
WARPS = 8  # with half of them `finish` spills registers


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
    `bass_core.exactness.randomness`. committed int64 [B]: lengths before this step.

    The decisions are those of `bass_core.exactness.verification.token`, or of `matching` with the argmax (lowest id on
    ties), on probabilities that rounding moves by less than 1e-6. An id of probability zero is never drawn. Rows whose
    logits are not numbers get ids within the vocabulary that mean nothing. Raises ValueError for logits of another type
    or layout.
    """
    block, logprobs = _launch(logits, drafted, submitted, q, temperature, (accept_uniform, draw_uniform), None)
    tokens, (accepted, finite, _) = block[:, : logits.shape[1]], block[:, logits.shape[1] :].unbind(1)
    return VerifyOutput(accepted, tokens[:, -1], tokens, logprobs, finite == 1, committed + accepted + 1)


class RowMemory(NamedTuple):
    """The memory of B rows. tokens int64 [B, S] and logprobs float32 [B, S], from position 0; lengths int64 [B], how
    many of them are committed; steps int64 [B], how often the row was committed to; streams int64 [B], its seed."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    steps: Tensor
    streams: Tensor


def commit(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    draft_finite: Tensor,
    rows: RowMemory,
    temperature: float,
    *,
    all_or_none: bool,
    chances: Tensor | None = None,
) -> Tensor:
    """`verify` with the random numbers of the rows' own step, committed to them: tokens and log-probabilities are
    appended, lengths and steps move. int64 [B, K + 4]: `tokens`, `accepted`, `finite` and draft_finite.

    submitted: -1 where no row lives; such places stay as they are, and what is returned of them means nothing.
    draft_finite: bool [B], the draft's logits were numbers. Rows whose own or whose draft's were not stay as they are;
    all_or_none: then none moves. chances: float64 [N, T], accepted counts are drawn with the chances of text
    stream mod N at position mod T instead of earned; log-probabilities are NaN then (`bass_lab.SyntheticAcceptance`).
    """
    return _launch(logits, drafted, submitted, q, temperature, None, rows, draft_finite, chances, all_or_none)[0]


def _launch(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    temperature: float,
    numbers: tuple[Tensor, Tensor] | None,  # None: of the rows' own step
    rows: RowMemory | None,  # None: nothing is committed
    draft_finite: Tensor | None = None,
    chances: Tensor | None = None,
    all_or_none: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `commit` returns, and the log-probabilities [B, K + 1] where nothing is committed."""
    _check(logits, q)
    batch, slots, vocabulary = logits.shape
    drafts, blocks = slots - 1, triton.cdiv(vocabulary, BLOCK)
    greedy = temperature == 0
    # 0 x inf is NaN: the bound keeps the maximum's own weight at 1 where 1 / temperature overflows float32.
    inverse_temperature = 1.0 if greedy else min(1 / temperature, 1e38)
    has_q = q is not None and not greedy

    def empty(dtype: torch.dtype, *shape: int, needed: bool = True) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=logits.device)

    maxima, sums, tempered_sums = (empty(torch.float32, batch, slots, blocks) for _ in range(3))
    argmaxima = empty(torch.int32, batch, slots, blocks, needed=greedy)
    partial = maxima, sums, tempered_sums if inverse_temperature != 1 else sums, argmaxima
    kept, sound = empty(torch.int8, batch, drafts), empty(torch.int8, batch, slots)
    log_sums, shifts = empty(torch.float64, batch, slots), empty(torch.float32, batch, slots)
    scales, choices = empty(torch.float32, batch, slots), empty(torch.int32, batch, slots, needed=greedy)
    masses = [empty(torch.float64, batch, blocks, needed=not greedy) for _ in range(2)]
    block = empty(torch.int64, batch, slots + 3)
    logprobs = empty(torch.float32, batch, slots) if rows is None else rows.logprobs

    drafted, submitted = drafted if drafted.stride(-1) == 1 else drafted.contiguous(), submitted.contiguous()
    q = q if has_q else logits  # which is not read as q
    inputs = logits, drafted, submitted, q
    layout = *logits.stride()[:2], drafted.stride(0), *q.stride()[:2], vocabulary
    accept_uniform, draw_uniform = (None, None) if numbers is None else (each.contiguous() for each in numbers)
    tokens, lengths, steps, streams = (None,) * 4 if rows is None else (rows.tokens, *rows[2:])
    texts, places = (0, 0) if chances is None else chances.shape
    wide = {"BLOCK": BLOCK, "num_warps": WARPS}
    narrow = {"SLOTS": triton.next_power_of_2(slots), "HAS_Q": has_q}
    combining = {"BLOCKS": triton.next_power_of_2(blocks), "GREEDY": greedy}
    with on(logits.device):
        block_statistics[(blocks, slots, batch)](
            logits, submitted, *partial, *logits.stride()[:2], vocabulary, inverse_temperature,
            TEMPERED=inverse_temperature != 1, GREEDY=greedy, **wide,
        )  # fmt: skip
        decide[(slots, batch)](
            *inputs, accept_uniform, streams, steps, *partial, kept, sound, log_sums, shifts, scales, choices,
            *layout, blocks, inverse_temperature, HAS_Q=has_q, **combining,
        )  # fmt: skip
        if not greedy:
            block_masses[(blocks, batch)](
                *inputs, kept, shifts, scales, *masses, *layout, drafts, inverse_temperature, **narrow, **wide
            )
        finish[(batch,)](
            *inputs, draw_uniform, streams, steps, kept, sound, log_sums, shifts, scales, choices, *masses,
            draft_finite, chances, block, tokens, logprobs, lengths, *layout, drafts, blocks, logprobs.stride(0),
            0 if rows is None else tokens.stride(0), texts, places, inverse_temperature,
            COMMITS=rows is not None, ALL_OR_NONE=all_or_none, FORCED=chances is not None,
            ROWS=triton.next_power_of_2(batch), **narrow, **combining, **wide,
        )  # fmt: skip
    return block, logprobs


def _check(logits: Tensor, q: Tensor | None) -> None:
    check_logits(logits)
    if q is not None and (q.dtype != torch.float32 or q.shape[-1] != logits.shape[-1] or q.stride(-1) != 1):
        raise ValueError(
            f"q must be float32 with {logits.shape[-1]} ids and stride 1 along them, got {q.dtype} of shape "
            f"{list(q.shape)} with strides {q.stride()}"
        )
