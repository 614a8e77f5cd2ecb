"""Verification rules: accept a prefix of the draft tokens and choose the token after it.

A rule receives each row's draft tokens x_1..x_K, the draft distributions Q_1..Q_K and the target distributions
P_1..P_{K+1}. It returns the accepted length and one more token from the target: recovered after a rejection, bonus
after full acceptance. The committed text then has exactly the target's distribution, for every draft. A row may submit
fewer than K tokens; slots from `lengths` on are ignored. Shapes: B rows, K draft tokens, V target vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import StepKeys


class Outcome(NamedTuple):
    """Result of a verification rule: the accepted length and the target's token after it, int64 [B] each."""

    accepted: Tensor
    next_token: Tensor


class Verified(NamedTuple):
    """The tokens that a step adds to its rows.

    accepted: int64 [B], the accepted length.
    tokens: int64 [B, K + 1], the accepted tokens, then the target's token, then padding.
    logprobs: [B, K + 1], log-probability of `tokens` under the target at temperature 1, in nats.
    finite: bool [B], False if the target's logits are NaN or infinite at a slot that the row uses.
    """

    accepted: Tensor
    tokens: Tensor
    logprobs: Tensor
    finite: Tensor


class HostReport(NamedTuple):
    """`Verified` on the host. tokens int64 [B, K + 1], accepted int64 [B], flags bool [B]. likeliest: the likeliest ids
    and their log-probabilities, [B, K + 1, N] each, if a row asks for them."""

    tokens: np.ndarray
    accepted: np.ndarray
    target_finite: np.ndarray
    draft_finite: np.ndarray
    likeliest: tuple[np.ndarray, np.ndarray] | None = None


def token(drafted: Tensor, lengths: Tensor, q: Tensor, p: Tensor, keys: StepKeys) -> Outcome:
    """Token verification (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    drafted: int64 [B, K]. lengths: int64 [B], number of tokens that each row submits. p: [B, K + 1, V].
    q: [B, K, V], the distributions from which the draft tokens were drawn. keys: random numbers of this step.
    """
    if drafted.shape[1] == 0:
        return _regular(p, keys)
    slots = torch.arange(drafted.shape[1], device=drafted.device)  # [K]
    p_x, q_x = _of_drafted(p, drafted), _of_drafted(q, drafted)  # [B, K]
    # p >= q: accept. p < q: accept with probability p/q. First rejection: resample from norm(max(0, p - q)).
    ratio = p_x.double() / q_x.double()  # [B, K]
    kept = randomness.accept(ratio.clamp(max=1), keys.accept(slots))
    accepted = leading(kept & (slots < lengths[:, None]))
    return Outcome(accepted, _residual_draw(q, p, accepted, lengths, None, keys))


def block(drafted: Tensor, lengths: Tensor, q: Tensor, p: Tensor, keys: StepKeys) -> Outcome:
    """Block verification (Sun et al. 2024, algorithm 2). Accepts at least as many tokens as `token` in expectation.

    Arguments as for `token`.
    """
    if drafted.shape[1] == 0:
        return _regular(p, keys)
    slots = torch.arange(drafted.shape[1], device=drafted.device)  # [K]
    p, q = p.double(), q.double()
    ratio = _of_drafted(p, drafted) / _of_drafted(q, drafted)  # [B, K]
    weight = _running_weight(ratio)  # [B, K + 1], the paper's p_i for i = 0..K
    # Z_i = sum_x max(p_i P_{i+1}(x) - Q_{i+1}(x), 0) for i = 1..K-1; the last submitted token has h_k = p_k.
    excess = (weight[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)  # [B, K - 1]
    denominator = excess + 1 - weight[:, 1:-1]
    inner = torch.where(denominator > 0, excess / denominator, 0.0)
    is_last = slots + 1 == lengths[:, None]
    h = torch.where(is_last, weight[:, 1:], torch.nn.functional.pad(inner, (0, 1)))  # [B, K]
    kept = randomness.accept(h, keys.accept(slots)) & (slots < lengths[:, None])
    accepted = (kept * (slots + 1)).amax(1)  # [B], the largest i with u_i < h_i, 0 if none
    return Outcome(accepted, _residual_draw(q, p, accepted, lengths, weight, keys))


RULES = {"token": token, "block": block}  # greedy decoding and coupled verification use `matching`


def _regular(p: Tensor, keys: StepKeys) -> Outcome:
    """Regular decoding: draw one token from the target's distribution."""
    return Outcome(torch.zeros_like(keys.counter), randomness.draw(p[:, 0], keys.target()))


def matching(drafted: Tensor, lengths: Tensor, choices: Tensor) -> Outcome:
    """Accept draft tokens while they equal the target's choices, then take the target's choice.

    choices: int64 [B, K + 1], the target's token after each prefix. In greedy decoding this is the argmax. In coupled
    verification it is argmax(log p + noise), with the same noise as for the draft (Gumbel coupling, Daliri et al.
    2024, arXiv 2408.07978). The committed text consists of the target's choices and does not depend on the drafts.
    """
    if drafted.shape[1] == 0:
        return Outcome(torch.zeros_like(lengths), choices[:, 0])
    slots = torch.arange(drafted.shape[1], device=drafted.device)
    accepted = leading((drafted == choices[:, :-1]) & (slots < lengths[:, None]))
    return Outcome(accepted, choices.gather(1, accepted[:, None])[:, 0])


def perturbed_choice(probs: Tensor, gumbel: Tensor) -> Tensor:
    """Return argmax(log p + g), a draw from p (Gumbel-max trick). probs, gumbel [..., V] -> int64 [...]."""
    return (probs.log() + gumbel).argmax(-1)


def verified(outcome: Outcome, drafted: Tensor, lengths: Tensor, logits: Tensor) -> Verified:
    """Return the outcome as tokens with log-probabilities. logits: [B, K + 1, V] of the target."""
    accepted, next_token = outcome
    tokens = next_token[:, None]
    if drafted.shape[1]:
        tokens = torch.cat([drafted, tokens], 1).scatter(1, accepted[:, None], tokens)  # [B, K + 1]
    logprobs = sampling.wide(logits).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # [B, K + 1]
    # All log-probabilities of a slot are NaN if any logit is NaN or +inf, or if no logit is finite.
    finite = ~logprobs.isnan()
    if drafted.shape[1]:
        finite |= torch.arange(tokens.shape[1], device=tokens.device) > lengths[:, None]
    finite = finite.all(1)
    return Verified(accepted, tokens, logprobs, finite)


def _of_drafted(probs: Tensor, drafted: Tensor) -> Tensor:
    """Return the probability of each draft token. probs [B, >= K, V], drafted [B, K] -> [B, K]."""
    return probs[:, : drafted.shape[1]].gather(-1, drafted[..., None])[..., 0]


def leading(kept: Tensor) -> Tensor:
    """Return the number of leading True values of each row. bool [B, K] -> int64 [B]."""
    return kept.long().cumprod(1).sum(1)


def _running_weight(ratio: Tensor) -> Tensor:
    """Return p_0 = 1, p_i = min(p_{i-1} * ratio_i, 1). [B, K] -> [B, K + 1]."""
    weights = [torch.ones_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
    return torch.stack(weights, dim=1)


def _residual_draw(
    q: Tensor, p: Tensor, accepted: Tensor, lengths: Tensor, weight: Tensor | None, keys: StepKeys
) -> Tensor:
    """Draw from norm(max(0, w P - Q)) at the first rejected slot, or from P after full acceptance. Returns int64 [B].

    weight: [B, K + 1], p_i of block verification; None means 1 everywhere.
    """
    rows = torch.arange(len(p), device=p.device)
    at_next = p[rows, accepted]  # [B, V]
    scaled = at_next if weight is None else at_next * weight[rows, accepted][:, None]
    q_next = q[rows, accepted.clamp(max=q.shape[1] - 1)]  # [B, V]
    residual = (scaled - q_next).clamp(min=0)  # [B, V]
    # A residual without mass occurs only if p = q up to rounding. The limit of the residual draw is then a draw from p.
    full = (accepted == lengths) | (residual.sum(-1) <= 0)  # [B]
    return randomness.draw(torch.where(full[:, None], at_next, residual), keys.target())
