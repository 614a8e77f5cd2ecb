"""Exercise of lesson 03: α and acceptance rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bass_core.loop.trace import alpha
from bass_lab.lessons.checking import Case, check


def check_alpha(rates: Callable) -> bool:
    """Check rates(accepted, drafted) -> (alpha, acceptance_rate). Both arguments have one entry per row and step.

    Acceptance rate: accepted / drafted tokens, over all steps. Alpha: share of accepted tokens among checked draft
    tokens. A step's draft tokens are checked one by one up to the first rejection. At least one step has draft tokens.
    """
    return check(rates, _cases())


def _cases() -> Iterator[Case]:
    chance = random.Random(3)
    drawn = [
        ("everything accepted", [5, 5], [5, 5]),
        ("one token per step", [1, 0, 1, 1], [1, 1, 1, 1]),
        ("rejected at the second token", [1], [5]),
        ("a step without draft tokens", [2, 0], [4, 0]),
        ("drafts of unequal length", [0, 8], [2, 8]),
        ("nothing accepted", [0, 0], [3, 3]),
    ]
    for number in range(200):
        drafted = [chance.randint(1, 8)] + [chance.randint(0, 8) for _ in range(chance.randint(0, 9))]
        drawn.append((f"random case {number}", [chance.randint(0, d) for d in drafted], drafted))
    for name, accepted, drafted in drawn:
        description = f"{name}: accepted {accepted}, drafted {drafted}"
        yield description, (list(accepted), list(drafted)), partial(_judge, accepted, drafted)


def _judge(accepted: Sequence[int], drafted: Sequence[int], result: object) -> str:
    steps = [(a, d) for a, d in zip(accepted, drafted, strict=True) if d]
    wanted = {"alpha": alpha(np.array(drafted), np.array(accepted)), "acceptance rate": sum(accepted) / sum(drafted)}
    mean = sum(a / d for a, d in steps) / len(steps)
    mistakes = {
        "alpha": {
            "this is the acceptance rate; draft tokens after a rejection were never checked": wanted["acceptance rate"],
            "a step that accepted everything has no rejection": sum(accepted) / (sum(accepted) + len(drafted)),
            "this is the share of full steps": sum(a == d for a, d in steps) / len(steps),
        },
        "acceptance rate": {
            "this is a mean over steps; each token should count the same": mean,
            "this is alpha": wanted["alpha"],
        },
    }
    if not isinstance(result, tuple | list) or len(result) != 2:
        return f"expected a pair (alpha, acceptance rate), got {result!r}"
    for (name, value), found in zip(wanted.items(), result, strict=True):
        if not isinstance(found, int | float):
            return f"{name} should be a number, got {found!r}"
        if not math.isclose(found, value, abs_tol=1e-9):
            hints = [text for text, wrong in mistakes[name].items() if math.isclose(found, wrong, abs_tol=1e-9)]
            return f"{name} should be {value:.4f}, got {found:.4f}" + (f" ({hints[0]})" if hints else "")
    return ""
