"""Exercises of lesson 01: the acceptance rule, expected tokens per step, and block verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bass_core.policies.protocol import expected_tokens
from bass_lab.lessons.checking import Case, check, with_hint

CLOSE = 1e-9


def check_accept_or_recover(accept_or_recover: Callable) -> bool:
    """Check accept_or_recover(p, q, drafted) -> (chance, distribution), the decision on one draft token.

    p, q: distributions of target and draft, float64 [V], with some zeros. drafted: an id drawn from q. chance: the
    acceptance probability. distribution [V]: source of the recovered token (anything, if no rejection is possible). A
    right rule gives the text the target's distribution and accepts as often as possible.
    """
    return check(lambda p, q: [accept_or_recover(p, q, x) for x in range(len(q)) if q[x] > 0], _rule_cases())


def _rule_cases() -> Iterator[Case]:
    drawn = [
        ("the draft is too sure of its favourite", [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]),
        ("q = p", [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
        ("the draft never drafts one token", [0.2, 0.5, 0.3], [0.6, 0.0, 0.4]),
        ("the target forbids one token", [0.0, 0.6, 0.4], [0.5, 0.3, 0.2]),
        ("a draft with a single token", [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]),
        ("nothing in common", [1.0, 0.0], [0.0, 1.0]),
    ]
    for name, p, q in drawn:
        yield _rule_case(name, torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    for number in range(100):
        size = int(torch.randint(2, 9, (), generator=generator))
        p, q = torch.rand(2, size, generator=generator, dtype=torch.float64).pow(3).add(1e-6).unbind()
        yield _rule_case(f"random case {number}", p / p.sum(), q / q.sum())


def _rule_case(name: str, p: Tensor, q: Tensor) -> Case:
    return f"{name}: p = {_brief(p)}, q = {_brief(q)}", (p, q), partial(_has_law, p, q)


def _has_law(p: Tensor, q: Tensor, result: Sequence) -> str:
    emitted, accepted, from_p = torch.zeros_like(p), 0.0, []
    for x, each in zip(q.nonzero()[:, 0].tolist(), result, strict=True):
        if message := _not_a_pair(each, len(p)):
            return f"for drafted = {x} {message}"
        chance, law = float(each[0]), torch.as_tensor(each[1], dtype=torch.float64)
        if not -CLOSE <= chance <= 1 + CLOSE:
            return f"for drafted = {x} the chance is {chance:.4g}; a chance must be between 0 and 1"
        accepted += float(q[x]) * chance
        emitted[x] += q[x] * chance
        if chance < 1 - CLOSE:
            if not law.isfinite().all() or law.min() < -CLOSE or abs(float(law.sum()) - 1) > CLOSE:
                return f"for drafted = {x} you redraw from {_brief(law)}; a distribution must be >= 0 and sum to 1"
            emitted += q[x] * (1 - chance) * law
            from_p.append(torch.allclose(law, p))
    if not torch.allclose(emitted, p, rtol=0, atol=CLOSE):
        hint = " (redraw from p: the recovered token comes from the residual)" if from_p and all(from_p) else ""
        return f"the text gets the distribution {_brief(emitted)}, but p is {_brief(p)}{hint}"
    possible = float(torch.minimum(p, q).sum())
    if accepted < possible - CLOSE:
        return f"the distribution is right, but the acceptance rate is {accepted:.4g}; {possible:.4g} is possible"
    return ""


def _not_a_pair(result: object, size: int) -> str:
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a pair (chance, distribution) is expected, not {type(result).__name__}"
    if torch.as_tensor(result[0]).numel() != 1:
        return f"the chance should be one number, not {list(torch.as_tensor(result[0]).shape)}"
    if torch.as_tensor(result[1]).shape != (size,):
        return f"the distribution should have shape [{size}], not {list(torch.as_tensor(result[1]).shape)}"
    return ""


def _brief(law: Tensor) -> str:
    return "[" + ", ".join(f"{x:.3g}" for x in law.tolist()) + "]"


def check_expected_tokens(solution: Callable) -> bool:
    """Check expected_tokens(alpha, k) -> mean number of tokens per step, the target's own token included.

    alpha: acceptance probability, 0 … 1, of a draft token if all earlier ones of the step were accepted. k >= 0.
    """
    return check(solution, _count_cases())


def _count_cases() -> Iterator[Case]:
    for alpha in (0.8, 0.5, 0.99, 0.0, 1.0):
        for k in (5, 1, 2, 8, 0):
            yield f"alpha {alpha}, k {k}", (alpha, k), partial(_is_count, alpha, k)


def _is_count(alpha: float, k: int, result: object) -> str:
    wanted = float(expected_tokens(alpha, k)[k])
    mistakes = {
        "the target's own token is missing": wanted - 1,
        "one term too few": wanted - alpha**k,
        "a draft token counts only if all before it were accepted": 1 + alpha * k,
        "a draft token counts only if all before it were accepted, and the target adds one token": alpha * k,
    }
    if isinstance(result, bool) or not isinstance(result, int | float):
        return f"expected a number, got {result!r}"
    if abs(result - wanted) < CLOSE:
        return ""
    return with_hint(f"expected {wanted:.4f}, got {result:.4f}", mistakes, lambda each: abs(result - each) < CLOSE)


def check_by_block(by_block: Callable) -> bool:
    """Check by_block(drafted, q, p, u) -> (accepted, weights): block verification of one row.

    (Sun et al. 2024, algorithm 2.) drafted: int64 [k]; q: draft distributions [k, V]; p: target distributions [k + 1,
    V]; u: uniform numbers [k]. accepted: accepted length; weights [V]: distribution of the next token, unnormalized.
    """
    return check(by_block, _block_cases())


def _block_cases() -> Iterator[Case]:
    drafted, *numbers = (
        torch.tensor([0, 0]),
        [[0.5, 0.5], [0.2, 0.8]],
        [[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]],
        [0.9, 0.5],
    )
    yield _block_case("the second makes up for the first", drafted, *(torch.tensor(each).double() for each in numbers))
    generator = torch.Generator().manual_seed(2)
    for number in range(200):
        k = (number + 2) % 5  # k = 0 is a case, too
        mass = torch.rand(2 * k + 1, 4, generator=generator, dtype=torch.float64).pow(3).add(1e-6)
        q, p = (mass / mass.sum(-1, keepdim=True)).split([k, k + 1])
        if number % 10 == 9:
            q = p[:-1].clone()  # no rejection, and an empty residual
        drafted = q.multinomial(1, generator=generator)[:, 0] if k else torch.zeros(0, dtype=torch.int64)
        u = torch.rand(k, generator=generator, dtype=torch.float64)
        yield _block_case(f"random case {number}", drafted, q, p, u)


def _block_case(name: str, drafted: Tensor, q: Tensor, p: Tensor, u: Tensor) -> Case:
    inputs = f"drafted = {drafted.tolist()}, u = {_brief(u)}, q = {_table(q)}, p = {_table(p)}"
    return f"{name}: {inputs}", (drafted, q, p, u), partial(_is_block, drafted, q, p, u)


def _is_block(drafted: Tensor, q: Tensor, p: Tensor, u: Tensor, result: object) -> str:
    weights, h, left = _block(drafted, q, p)
    passed = (u < h).tolist()
    wanted = max((i + 1 for i, each in enumerate(passed) if each), default=0)
    slips = {
        [*passed, False].index(False): "you stop at the first draft token that fails, but a later one may still pass",
        sum(passed): "you count the draft tokens that pass; return the position of the last one",
    }
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a pair (accepted, weights) is expected, not {type(result).__name__}"
    accepted, found = int(result[0]), torch.as_tensor(result[1], dtype=torch.float64)
    if accepted != wanted:
        hint = f"; {slips[accepted]}" if accepted in slips else ""
        return f"expected {wanted} accepted, got {accepted}; w is {_brief(weights)}, the chances h {_brief(h)}{hint}"
    if found.shape != p[0].shape:
        return f"the weights should have shape {list(p[0].shape)}, not {list(found.shape)}"
    if not found.isfinite().all() or found.min() < -CLOSE or found.sum() <= 0:
        return f"after {wanted} accepted tokens the weights are {_brief(found)}; they should be >= 0 and not all 0"
    law, right = found / found.sum(), left[wanted] / left[wanted].sum()
    if torch.allclose(law, right, rtol=0, atol=1e-6):
        return ""
    unweighted = (p[wanted] - q[wanted]).clamp(min=0) if wanted < len(q) else p[wanted]
    forgot = torch.allclose(law, unweighted / unweighted.sum(), rtol=0, atol=1e-6)
    hint = "; multiply p by the weight before you subtract q" if forgot else ""
    return f"after {wanted} accepted the next token has the distribution {_brief(law)}, not {_brief(right)}{hint}"


def _block(drafted: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return w_0 … w_k, h_1 … h_k, and the residuals after 0 … k accepted tokens: [k + 1, V]."""
    weights = [1.0]
    for slot, x in enumerate(drafted.tolist()):
        weights.append(min(1.0, weights[-1] * float(p[slot, x] / q[slot, x])))
    w = torch.tensor(weights, dtype=torch.float64)
    left = torch.cat([(w[:-1, None] * p[:-1] - q).clamp(min=0), p[-1:]])
    z = left[1:-1].sum(-1)  # empty for k <= 1
    h = torch.cat([(z / (z + 1 - w[1:-1])).nan_to_num(0.0), w[1:][-1:]])  # [k]
    return w, h, torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _table(rows: Tensor) -> str:
    return "[" + ", ".join(map(_brief, rows)) + "]"
