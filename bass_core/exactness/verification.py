"""Which drafted tokens stay, and which token follows them: token, block and coupled verification.

Each rule takes what was drafted, x_1..x_k per row (rows may have submitted fewer), the drafts' distributions
Q_1..Q_k and the target's P_1..P_{k+1}, and returns how many drafted tokens are accepted and the one token of the
target's that follows. The committed text then has the target's law exactly, whatever the draft. Where rows submitted
fewer than K tokens, slots beyond `lengths` are ignored.

Shapes: B rows, K drafted tokens, V target vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import StepKeys


class Outcome(NamedTuple):
    """accepted: int64 [B], drafted tokens kept. next_token: int64 [B], the target's token after them."""

    accepted: Tensor
    next_token: Tensor


class Verified(NamedTuple):
    """What a step adds to its rows.

    accepted: int64 [B]. tokens: int64 [B, K + 1], accepted drafts, then the target's token, then padding. logprobs
    [B, K + 1]: of `tokens` under the target at temperature 1, in nats. finite: bool [B], the target's logits were
    numbers wherever the row submitted tokens.
    """

    accepted: Tensor
    tokens: Tensor
    logprobs: Tensor
    finite: Tensor


def token(drafted: Tensor, lengths: Tensor, q: Tensor, p: Tensor, keys: StepKeys) -> Outcome:
    """Token verification (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    drafted int64 [B, K], lengths int64 [B], q [B, K, V], p [B, K + 1, V]; keys: the randomness of this step.
    """
    if drafted.shape[1] == 0:
        return _regular(p, keys)
    slots = torch.arange(drafted.shape[1], device=drafted.device)  # [K]
    p_x, q_x = _of_drafted(p, drafted), _of_drafted(q, drafted)  # [B, K]
    # p >= q: accept. p < q: accept with probability p/q. First rejection: resample from norm(max(0, p - q)).
    ratio = p_x.double() / q_x.double()
    kept = randomness.accept(ratio.clamp(max=1), keys.accept(slots))
    accepted = leading(kept & (slots < lengths[:, None]))
    return Outcome(accepted, _residual_draw(q, p, accepted, lengths, None, keys))


def block(drafted: Tensor, lengths: Tensor, q: Tensor, p: Tensor, keys: StepKeys) -> Outcome:
    """Block verification (Sun et al. 2024, algorithm 2): accepts at least as many tokens in expectation.

    Arguments as for `token`. q must be the distribution that the drafts were really drawn from.
    """
    if drafted.shape[1] == 0:
        return _regular(p, keys)
    slots = torch.arange(drafted.shape[1], device=drafted.device)
    p, q = p.double(), q.double()
    ratio = _of_drafted(p, drafted) / _of_drafted(q, drafted)  # [B, K]
    weight = _running_weight(ratio)  # p_i of the paper, i = 0..K: [B, K + 1]
    # Z_i = sum_x max(p_i P_{i+1}(x) - Q_{i+1}(x), 0) for i = 1..K-1; the last submitted token has h_k = p_k.
    excess = (weight[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)  # [B, K - 1]
    denominator = excess + 1 - weight[:, 1:-1]
    inner = torch.where(denominator > 0, excess / denominator, 0.0)
    is_last = slots + 1 == lengths[:, None]
    h = torch.where(is_last, weight[:, 1:], torch.nn.functional.pad(inner, (0, 1)))  # [B, K]
    kept = randomness.accept(h, keys.accept(slots)) & (slots < lengths[:, None])
    accepted = (kept * (slots + 1)).amax(1)  # the largest i with u_i < h_i, 0 if none
    return Outcome(accepted, _residual_draw(q, p, accepted, lengths, weight, keys))


RULES = {"token": token, "block": block}  # coupled verification compares choices instead: `matching`


def _regular(p: Tensor, keys: StepKeys) -> Outcome:
    """Nothing was drafted: one token from the target's distribution."""
    return Outcome(torch.zeros_like(keys.counter), randomness.draw(p[:, 0], keys.target()))


def matching(drafted: Tensor, lengths: Tensor, choices: Tensor) -> Outcome:
    """Accept drafted tokens while they equal the target's own choices; then take the target's.

    choices: int64 [B, K + 1], the target's token after each prefix: its argmax (greedy decoding), or
    argmax(log p + noise) with the noise that the draft used too (coupled verification: the Gumbel coupling of Daliri
    et al. 2024, arXiv 2408.07978). The committed text is the target's own, whatever was drafted.
    """
    if drafted.shape[1] == 0:
        return Outcome(torch.zeros_like(lengths), choices[:, 0])
    slots = torch.arange(drafted.shape[1], device=drafted.device)
    accepted = leading((drafted == choices[:, :-1]) & (slots < lengths[:, None]))
    return Outcome(accepted, choices.gather(1, accepted[:, None])[:, 0])


def perturbed_choice(probs: Tensor, gumbel: Tensor) -> Tensor:
    """argmax(log p + g): a draw from p by the Gumbel-max trick. probs, gumbel [..., V] -> int64 [...]."""
    return (probs.log() + gumbel).argmax(-1)


def verified(outcome: Outcome, drafted: Tensor, lengths: Tensor, logits: Tensor) -> Verified:
    """The outcome as tokens with their log-probabilities. logits [B, K + 1, V], the target's."""
    accepted, next_token = outcome
    tokens = next_token[:, None]
    if drafted.shape[1]:
        tokens = torch.cat([drafted, tokens], 1).scatter(1, accepted[:, None], tokens)
    logprobs = sampling.wide(logits).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # [B, K + 1]
    # One logit that is NaN or +inf, or none that is finite, makes all of a distribution NaN.
    finite = ~logprobs.isnan()
    if drafted.shape[1]:
        finite |= torch.arange(tokens.shape[1], device=tokens.device) > lengths[:, None]
    finite = finite.all(1)
    return Verified(accepted, tokens, logprobs, finite)


def _of_drafted(probs: Tensor, drafted: Tensor) -> Tensor:
    """Probability of each drafted token: probs [B, >= K, V], drafted [B, K] -> [B, K]."""
    return probs[:, : drafted.shape[1]].gather(-1, drafted[..., None])[..., 0]


def leading(kept: Tensor) -> Tensor:
    """How many leading True per row: bool [B, K] -> int64 [B]."""
    return kept.long().cumprod(1).sum(1)


def _running_weight(ratio: Tensor) -> Tensor:
    """p_0 = 1, p_i = min(p_{i-1} * ratio_i, 1): [B, K] -> [B, K + 1]."""
    weights = [torch.ones_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
    return torch.stack(weights, dim=1)


def _residual_draw(
    q: Tensor, p: Tensor, accepted: Tensor, lengths: Tensor, weight: Tensor | None, keys: StepKeys
) -> Tensor:
    """Draw from norm(max(0, w P - Q)) at the first rejected slot, or from P after full acceptance. int64 [B].

    weight: block verification's p_i [B, K + 1] (None: 1 everywhere).
    """
    rows = torch.arange(len(p), device=p.device)
    at_next = p[rows, accepted]  # [B, V]
    scaled = at_next if weight is None else at_next * weight[rows, accepted][:, None]
    q_next = q[rows, accepted.clamp(max=q.shape[1] - 1)]
    residual = (scaled - q_next).clamp(min=0)
    # A residual without mass has probability zero, up to rounding of p = q; the target's own law is then the limit.
    full = (accepted == lengths) | (residual.sum(-1) <= 0)
    return randomness.draw(torch.where(full[:, None], at_next, residual), keys.target())
