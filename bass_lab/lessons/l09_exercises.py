"""Exercise of lesson 09: quality within a time budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

from bass_lab.lessons.checking import Case, check


def check_pass_at_first(pass_at_first: Callable) -> bool:
    """Check pass_at_first(finish, confidence, passed, budget) -> bool, True if a problem is solved.

    Lists with one entry per row. finish: end of the row (seconds; NaN: never); confidence: mean log-probability;
    passed: True if the row is right. The most confident row within the budget must be right. Ties: the first row.
    """
    return check(pass_at_first, _cases())


def _cases() -> Iterator[Case]:
    chance = random.Random(9)
    drawn = [
        ("one row, right and in time", [1.0], [-0.5], [True], 2.0),
        ("done exactly at the budget", [2.0], [-0.5], [True], 2.0),
        ("too late", [2.5], [-0.5], [True], 2.0),
        ("no row is done", [math.nan, 3.0], [-0.1, -0.2], [True, True], 2.0),
        ("the most confident row is too late", [1.0, 9.0], [-0.9, -0.1], [True, False], 2.0),
        ("the most confident row is wrong", [1.0, 1.0], [-0.9, -0.1], [True, False], 2.0),
        ("equally confident: the first row counts", [1.5, 1.0], [-0.3, -0.3], [False, True], 2.0),
    ]
    for number in range(200):
        n = chance.randint(1, 6)
        finish = [chance.choice([math.nan, round(chance.uniform(0, 4), 1)]) for _ in range(n)]
        confidence = [-chance.randint(1, 5) / 4 for _ in range(n)]
        passed = [chance.random() < 0.5 for _ in range(n)]
        drawn.append((f"random case {number}", finish, confidence, passed, 2.0))
    for name, finish, confidence, passed, budget in drawn:
        arguments = list(finish), list(confidence), list(passed), budget
        told = f"{name}: finish {finish}, confidence {confidence}, passed {passed}, budget {budget}"
        in_time = [row for row, seconds in enumerate(finish) if seconds <= budget]
        yield told, arguments, partial(_judge, in_time, confidence, passed)


def _judge(in_time: list[int], confidence: list[float], passed: list[bool], result: object) -> str:
    """Return a message about a wrong result, or "". in_time: rows within the budget."""
    wanted = False
    if in_time:
        first = max(in_time, key=lambda row: (confidence[row], -row))
        wanted = passed[first]
        why = f"rows {in_time} are done in time. The most confident of these rows, row {first}, is "
        why += "right" if wanted else "wrong"
    else:
        why = "no row is done in time"
    return "" if isinstance(result, bool) and result is wanted else f"expected {wanted}, got {result!r}; {why}"
