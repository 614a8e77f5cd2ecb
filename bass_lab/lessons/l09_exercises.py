"""Exercise of lesson 09: quality within a time budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

from bass_lab.lessons.checking import Case, check, with_hint


def check_pass_at_k(pass_at_k: Callable) -> bool:
    """Check pass_at_k(finish, passed, budget, k) -> float, the probability that at least one of k rows, drawn without
    replacement, is right and done within the budget.

    Lists with one entry per row. finish: end of the row (seconds; NaN: never). passed: True if the row is right.
    """
    return check(pass_at_k, _cases())


def _cases(budget: float = 2.0) -> Iterator[Case]:
    chance, drawn = random.Random(9), [([2.0], [True], 1), ([3.0, 1.0], [False, True], 1), ([3.0], [True], 1)]
    for _ in range(200):
        n = chance.randint(1, 6)
        finish = [chance.choice([math.nan, round(chance.uniform(0, 4), 1)]) for _ in range(n)]
        drawn.append((finish, [chance.random() < 0.5 for _ in range(n)], chance.randint(1, n)))
    for finish, passed, k in drawn:
        in_time = [seconds <= budget for seconds in finish]
        right = [done and good for done, good in zip(in_time, passed, strict=True)]
        wanted, all_rows = (sum(map(any, combinations(of, k))) / math.comb(len(of), k) for of in (right, passed))
        mistakes = {
            "late rows are not done": all_rows,
            "late rows are drawn as well": sum(right) / max(sum(in_time), 1) if k == 1 else math.nan,
            "draw without replacement": 1 - (1 - sum(right) / len(right)) ** k,
        }
        told = f"finish {finish}, passed {passed}, budget {budget}, k {k}"
        yield told, (list(finish), list(passed), budget, k), partial(_judge, wanted, mistakes)


def _judge(wanted: float, mistakes: dict[str, float], result: object) -> str:
    """Return a message about a wrong result, or ""."""
    close = partial(math.isclose, result if isinstance(result, int | float) else math.nan, abs_tol=1e-9)
    return "" if close(wanted) else with_hint(f"expected {wanted:.4f}, got {result!r}", mistakes, close)
