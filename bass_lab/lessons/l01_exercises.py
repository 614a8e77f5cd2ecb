"""Exercises of lesson 01: the acceptance rule, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bass_core.draft_length import expected_tokens
from bass_lab.lessons.checking import Case, Fault, check

CLOSE = 1e-9


def check_accept_or_recover(accept_or_recover: Callable) -> bool:
    """accept_or_recover(p, q, drafted) -> (chance, law): what becomes of one drafted token.

    p, q: the target's and the draft's law, float64 [V], with zeros here and there; drafted: an id drawn from q. chance:
    that it is accepted; law [V]: what the token is drawn from otherwise (any law, if that cannot happen). Right is what
    gives the text the target's law and accepts as often as is possible.
    """
    return check(lambda p, q: [accept_or_recover(p, q, x) for x in range(len(q)) if q[x] > 0], _rule_cases())


def _rule_cases() -> Iterator[Case]:
    drawn = [
        ("the draft is too sure of its favourite", [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]),
        ("q = p", [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
        ("the draft never drafts one token", [0.2, 0.5, 0.3], [0.6, 0.0, 0.4]),
        ("the target forbids one token", [0.0, 0.6, 0.4], [0.5, 0.3, 0.2]),
        ("a draft without doubt", [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]),
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
    return f"{name}: p = {_brief(p)}, q = {_brief(q)}", (p, q), _has_law(p, q)


def _has_law(p: Tensor, q: Tensor) -> Fault:
    def fault(results: Sequence) -> str:
        emitted, accepted = torch.zeros_like(p), 0.0
        for x, result in zip(q.nonzero()[:, 0].tolist(), results, strict=True):
            if message := _not_a_pair(result, len(p)):
                return f"for drafted = {x} {message}"
            chance, law = float(result[0]), torch.as_tensor(result[1], dtype=torch.float64)
            if not -CLOSE <= chance <= 1 + CLOSE:
                return f"for drafted = {x} the chance is {chance:.4g}; a chance is from 0 to 1"
            accepted += float(q[x]) * chance
            emitted[x] += q[x] * chance
            if chance < 1 - CLOSE:
                if not law.isfinite().all() or law.min() < -CLOSE or abs(float(law.sum()) - 1) > CLOSE:
                    return f"for drafted = {x} the law after a rejection is {_brief(law)}; laws are >= 0 and sum to 1"
                emitted += q[x] * (1 - chance) * law
        if not torch.allclose(emitted, p, rtol=0, atol=CLOSE):
            return f"the text gets the law {_brief(emitted)}, and p is {_brief(p)}"
        possible = float(torch.minimum(p, q).sum())
        if accepted < possible - CLOSE:
            return f"the law is right, but {accepted:.4g} of the drafts are accepted, and {possible:.4g} is possible"
        return ""

    return fault


def _not_a_pair(result: object, size: int) -> str:
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a pair (chance, law) is expected, not {type(result).__name__}"
    if torch.as_tensor(result[0]).numel() != 1:
        return f"the chance should be one number, not {list(torch.as_tensor(result[0]).shape)}"
    if torch.as_tensor(result[1]).shape != (size,):
        return f"the law should have shape [{size}], not {list(torch.as_tensor(result[1]).shape)}"
    return ""


def _brief(law: Tensor) -> str:
    return "[" + ", ".join(f"{x:.3g}" for x in law.tolist()) + "]"


def check_expected_tokens(solution: Callable) -> bool:
    """expected_tokens(alpha, k) -> tokens that a step commits on average, the target's own included.

    alpha, 0 … 1: the chance that a draft is accepted if all before it in the step were. k >= 0 drafts.
    """
    return check(solution, _count_cases())


def _count_cases() -> Iterator[Case]:
    for alpha in (0.8, 0.5, 0.99, 0.0, 1.0):
        for k in (5, 1, 2, 8, 0):
            yield f"alpha {alpha}, k {k}", (alpha, k), _is_count(alpha, k)


def _is_count(alpha: float, k: int) -> Fault:
    wanted = float(expected_tokens(alpha, k)[k])
    slips = {
        wanted - 1: "the token that the target adds itself is missing",
        wanted - alpha**k: "one term too few",
        1 + alpha * k: "a draft counts only if all before it were accepted too",
        alpha * k: "a draft counts only if all before it were accepted too, and the target adds a token itself",
    }

    def fault(result: object) -> str:
        if isinstance(result, bool) or not isinstance(result, int | float):
            return f"expected a number, got {result!r}"
        if abs(result - wanted) < CLOSE:
            return ""
        hints = [hint for slip, hint in slips.items() if abs(result - slip) < CLOSE]
        return f"expected {wanted:.4f}, got {result:.4f}" + (f" ({hints[0]})" if hints else "")

    return fault
