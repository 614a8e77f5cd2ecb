"""Token verification on the device: accepted draft tokens, the next token, and the rows' new lengths.

Tensor operations would compute probabilities of all B × (K + 1) × V logits and read them a dozen times. Here every
logit is read once, in blocks of the vocabulary, and each block leaves three numbers (streamed log-sum-exp: Milakov &
Gimelshein 2018, as in flash attention). Only the distribution of the next token is computed again, at the first
rejected slot, from blocks that stay in the cache.

1. `block_statistics` (blocks, K + 1, B): maximum and sums of exponentials of a block.
2. `decide` (K + 1, B): log-sum-exp of a slot from its blocks, and acceptance of its draft token.
3. `block_masses` (blocks, B): mass of a block in the next token's distribution, at the first slot not accepted.
4. `finish` (B): the block and the id for the uniform number, all results, and the row's new length.

Grids depend on shapes alone and the host reads nothing back, so a CUDA graph can hold all four launches. Without atomic
additions and with a fixed block size, decisions of a row are reproducible and do not depend on other rows.

Shapes: B rows, K draft tokens, V vocabulary, N blocks of the vocabulary.
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
    """Result of one step for each row.

    accepted int64 [B]: accepted length. next_token int64 [B]: the target's token after the accepted ones. tokens int64
    [B, K + 1]: the draft tokens with next_token at index `accepted` and at the end; only the first accepted + 1 are
    defined. logprobs float32 [B, K + 1]: of `tokens` under the target at temperature 1, in nats; 0 at slots that the
    row did not submit. finite bool [B]: the target's logits were numbers at all submitted slots (their log-sum-exp is
    finite). lengths int64 [B]: committed + accepted + 1.
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
    """Return the result of token verification (Leviathan et al. 2023, algorithm 1), or of matching at temperature 0.

    logits [B, K + 1, V] in float32, bfloat16 or float16, ids adjacent in memory: the target's, after the last
    committed token and after each draft token. drafted int64 [B, K], ids below V; K may be 0. submitted int64 [B],
    0 … K: later slots of a row are not read. q float32 [B, K, V]: distributions of the draft tokens, or None if the
    tokens were certain (not read at temperature 0). accept_uniform float64 [B, K] and draw_uniform float64 [B] in
    [0, 1), from `bass_core.exactness.randomness`. committed int64 [B]: lengths before this step.

    Decisions equal `bass_core.exactness.verification.token`, or `matching` with the argmax (lowest id on ties), on
    probabilities that differ by rounding (below 1e-6). An id of probability zero is never drawn. Rows with logits that
    are not numbers get arbitrary ids of the vocabulary. Raises ValueError for logits of another type or layout.
    """
    block, logprobs = _launch(logits, drafted, submitted, q, temperature, (accept_uniform, draw_uniform), None)
    tokens, (accepted, finite, _) = block[:, : logits.shape[1]], block[:, logits.shape[1] :].unbind(1)
    return VerifyOutput(accepted, tokens[:, -1], tokens, logprobs, finite == 1, committed + accepted + 1)


class RowMemory(NamedTuple):
    """Memory of B rows. tokens int64 [B, S] and logprobs float32 [B, S], from position 0; lengths int64 [B]: committed
    tokens; steps int64 [B]: commits of the row; streams int64 [B]: the row's seed."""

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
    """Verify with the random numbers of each row's step and commit the result to the rows: append tokens and
    log-probabilities, advance lengths and steps. Return int64 [B, K + 4]: `tokens`, `accepted`, `finite`, draft_finite.

    submitted: -1 for an empty batch slot, which stays unchanged and returns arbitrary values. draft_finite bool [B]:
    the draft model's logits were numbers. A row stays unchanged if logits of either model are not numbers; with
    all_or_none all rows then stay unchanged. chances float64 [N, T]: draw accepted lengths with the chances of text
    stream mod N at position mod T; log-probabilities are then NaN (`bass_lab.SyntheticAcceptance`).
    """
    return _launch(logits, drafted, submitted, q, temperature, None, rows, draft_finite, chances, all_or_none)[0]


def _launch(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    temperature: float,
    numbers: tuple[Tensor, Tensor] | None,  # None: of each row's step
    rows: RowMemory | None,  # None: nothing is committed
    draft_finite: Tensor | None = None,
    chances: Tensor | None = None,
    all_or_none: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the result of `commit`, and the log-probabilities [B, K + 1] if rows is None."""
    _check(logits, q)
    batch, slots, vocabulary = logits.shape
    drafts, blocks = slots - 1, triton.cdiv(vocabulary, BLOCK)
    greedy = temperature == 0
    # If 1 / temperature overflows float32, 0 x inf is NaN. The bound keeps the weight of the maximum at 1.
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
    q = q if has_q else logits  # a pointer is needed; the kernels do not read q
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
