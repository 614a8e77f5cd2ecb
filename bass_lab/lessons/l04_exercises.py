"""Exercises of lesson 04: the paper's update rule, and the draft length with the most expected tokens per second."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

from bass_lab.lessons.checking import Case, check


def check_algorithm_1(update: Callable) -> bool:
    """Check update(length, s, accepted) -> (length, s), the next draft length by the paper's Algorithm 1.

    length: draft length of this step; s: 0 or 1, from the last update; accepted: list of accepted lengths per row.
    """
    return check(update, _update_cases())


def _update_cases() -> Iterator[Case]:
    chance = random.Random(4)
    drawn = [
        ("one of two rows accepted all", 7, 0, [7, 0]),
        ("all accepted, after a miss", 7, 1, [7, 7]),
        ("the limit is 32", 31, 0, [31]),
        ("a first miss", 7, 0, [1, 2]),
        ("a second miss in a row", 7, 1, [1, 2]),
        ("a miss from a long draft", 25, 0, [3, 4]),
        ("a row with almost all accepted", 7, 1, [6, 0]),
        ("nothing accepted at length 1", 1, 1, [0, 0, 0]),
    ]
    for number in range(200):
        length = chance.randint(1, 32)
        accepted = [chance.randint(0, length) for _ in range(chance.randint(1, 8))]
        drawn.append((f"random case {number}", length, chance.randint(0, 1), accepted))
    for name, length, s, accepted in drawn:
        about = f"{name}: length {length}, s {s}, accepted {accepted}"
        yield about, (length, s, list(accepted)), partial(_is_next, length, s, accepted)


def _is_next(length: int, s: int, accepted: list[int], result: object) -> str:
    wanted = _next(length, s, accepted)
    shorter = length - math.ceil(length / 10)
    slips = {
        "the length grows only if some row accepted the whole draft": (min(length + 2, 32), 0),
        "s makes the draft one token shorter": (max(1, *accepted, shorter), 1),
        "s is 1 after a miss, not s + 1": (max(1, *accepted, shorter - s), s + 1),
        "round length / 10 up": (max(1, *accepted, length - length // 10 - s), 1),
        "the length is at least 1 and at least the longest accepted length": (shorter - s, 1),
    }
    if not isinstance(result, tuple) or len(result) != 2:
        return f"expected a pair (length, s), got {result!r}"
    if result == wanted:
        return ""
    hints = [hint for hint, slip in slips.items() if slip == result]
    return f"expected {wanted}, got {result}" + (f" (perhaps: {', or '.join(hints)})" if hints else "")


def _next(length: int, s: int, accepted: list[int]) -> tuple[int, int]:
    if max(accepted) == length:
        return min(length + 2, 32), 0
    return max(1, *accepted, length - math.ceil(length / 10) - s), 1


def check_best_length(best_length: Callable) -> bool:
    """Check best_length(chances, seconds) -> k >= 0, the draft length with the most expected tokens per second.

    chances: list of acceptance probabilities of a step's draft tokens, given that all earlier ones were accepted.
    seconds: list of step times at draft lengths 0, 1, …, one entry more than chances. Ties: the shortest length.
    """
    return check(best_length, _length_cases())


def _length_cases() -> Iterator[Case]:
    chance = random.Random(4)
    drawn = [
        ("draft tokens are cheap and good", [0.9] * 8, [1 + 0.02 * k for k in range(9)]),
        ("draft tokens are never accepted", [0.0] * 4, [1 + 0.1 * k for k in range(5)]),
        ("draft tokens cost more than they gain", [0.8] * 4, [1.0 + k for k in range(5)]),
        ("step costs rise like stairs", [0.8] * 8, [1, 1.3, 1.3, 1.3, 1.3, 2.2, 2.2, 2.2, 2.2]),
        ("later draft tokens are easier", [0.5, 0.99, 0.99, 0.99], [1, 1.5, 1.6, 1.7, 1.8]),
        ("two lengths are equally good", [0.5, 0.0], [1.0, 1.5, 3.0]),
    ]
    for number in range(200):
        k = chance.randint(1, 12)
        steps = [chance.uniform(0, 0.6) * chance.random() for _ in range(k)]
        seconds = [round(1 + sum(steps[:j]), 3) for j in range(k + 1)]
        drawn.append((f"random case {number}", [round(chance.random() ** 0.5, 3) for _ in range(k)], seconds))
    for name, chances, seconds in drawn:
        yield f"{name}: {chances}, {seconds}", (list(chances), list(seconds)), partial(_is_best, chances, seconds)


def _is_best(chances: list[float], seconds: list[float], result: object) -> str:
    tokens, survival = [1.0], 1.0
    for chance in chances:
        survival *= chance
        tokens.append(tokens[-1] + survival)
    rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
    wanted = rates.index(max(rates))
    if result == wanted and not isinstance(result, bool):
        return ""
    without = [(n - 1) / s for n, s in zip(tokens, seconds, strict=True)]
    hint = "; perhaps the target's own token is missing" if result == without.index(max(without)) else ""
    known = isinstance(result, int) and 0 <= result < len(rates)
    about = f" ({rates[result]:.4f})" if known else ""
    return f"expected {wanted} ({rates[wanted]:.4f} tokens per unit of time), got {result!r}{about}{hint}"
