"""Exercise of lesson 11: goodput, the requests per second within both limits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bass_lab.lessons.checking import Case, check, with_hint

Request = tuple[float, float, float, float, int]  # arrived, started, first, ended, tokens


def check_goodput(goodput: Callable) -> bool:
    """Check goodput(requests, first_s, between_s) -> float, the requests per second within both limits.

    requests: tuples (arrived, started, first, ended, tokens), times in seconds since the start; started, first and
    ended may be NaN (never). A request is served well if three conditions hold: it ended; its first token came at most
    first_s seconds after arrival; each further token took at most between_s seconds on average. The total time is from
    the first arrival to the last end.
    """
    return check(goodput, _cases())


def _cases() -> Iterator[Case]:
    nan = math.nan
    drawn = [
        ("one request, served well", [(0.0, 0.1, 0.2, 1.1, 11)], 0.5, 0.1),
        ("one request after a pause", [(3.0, 3.1, 3.2, 4.0, 11)], 0.5, 0.1),
        ("exactly at both limits", [(0.0, 0.25, 0.5, 1.5, 9)], 0.5, 0.125),
        ("a long wait before the start", [(0.0, 0.9, 1.0, 1.9, 11), (1.0, 1.1, 1.2, 2.1, 11)], 0.5, 0.1),
        ("ten tokens have nine gaps", [(0.0, 0.1, 0.2, 1.15, 10), (0.1, 0.2, 0.3, 1.1, 11)], 0.5, 0.1),
        ("a text of one token", [(0.0, 0.1, 0.2, 0.2, 1), (0.0, 0.1, 0.2, 1.0, 10)], 0.5, 0.1),
        ("one request never got a token", [(0.0, nan, nan, nan, 0), (0.1, 0.2, 0.3, 1.3, 12)], 0.5, 0.1),
        ("one request was cut off", [(0.0, 0.1, 0.2, nan, 5), (0.1, 0.2, 0.3, 1.3, 12)], 0.5, 0.1),
        ("the last request is a bad one", [(0.0, 0.1, 0.2, 1.0, 9), (0.5, 2.0, 3.0, 4.0, 9)], 0.5, 0.1),
    ]
    chance = random.Random(11)
    for number in range(100):
        drawn.append((f"random case {number}", _random(chance), chance.choice([0.2, 0.5]), chance.choice([0.03, 0.1])))
    for name, requests, first_s, between_s in drawn:
        yield name, (list(requests), first_s, between_s), partial(_judge, requests, first_s, between_s)


def _random(chance: random.Random) -> list[Request]:
    requests, now = [(0.0, 0.05, 0.1, 0.4, 20)], 0.0
    for _ in range(chance.randint(1, 12)):
        now += chance.expovariate(2.0)
        started = now + chance.expovariate(4.0)
        first, tokens = started + 0.1, chance.randint(1, 30)
        ended = first + (tokens - 1) * chance.uniform(0.01, 0.15)
        fate = chance.random()
        if fate < 0.1:
            started = first = ended = math.nan
        elif fate < 0.2:
            ended = math.nan
        requests.append((now, started, first, ended, 0 if math.isnan(first) else tokens))
    return requests


def _goodput(
    requests: Sequence[Request],
    first_s: float,
    between_s: float,
    *,
    origin: int = 0,
    gaps: int = 1,
    zero: float | None = None,
    until: str = "all",
    everyone: bool = False,
) -> float:
    """Return the right result, or, with options, the result of a common mistake."""
    good = [
        each
        for each in requests
        if everyone or (each[2] - each[origin] <= first_s and each[3] - each[2] <= between_s * max(each[4] - gaps, 0))
    ]
    ends = [each[3] for each in (good if until == "good" else requests) if not math.isnan(each[3])]
    start = requests[0][0] if zero is None else zero
    return len(good) / (max(ends) - start) if ends and max(ends) > start else 0.0


_MISTAKES = {
    "the wait starts at the arrival, not at the start of service": {"origin": 1},
    "you divide by the tokens, but n tokens have n - 1 gaps": {"gaps": 0},
    "requests outside the limits must not count": {"everyone": True},
    "the time starts with the first arrival, not at 0": {"zero": 0.0},
    "the time ends with the last request, not with the last good request": {"until": "good"},
}


def _judge(requests: Sequence[Request], first_s: float, between_s: float, result: object) -> str:
    wanted = _goodput(requests, first_s, between_s)

    def same(found: object, value: float) -> bool:
        return math.isclose(found, value, rel_tol=1e-9, abs_tol=1e-12)

    if isinstance(result, bool) or not isinstance(result, int | float):
        return f"expected a number of requests per second, got {result!r}"
    if same(result, wanted):
        return ""
    told = f"expected {wanted:.4g} per second, got {result:.4g}"
    return with_hint(told, _MISTAKES, lambda how: same(result, _goodput(requests, first_s, between_s, **how)))
