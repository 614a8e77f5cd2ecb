"""Exercises of lesson 08: latency and utilisation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from bass_lab.lessons.checking import Case, check, with_hint


def check_latencies(latencies: Callable) -> bool:
    """Check latencies(started, finished, tokens) -> (first, mean, last), milliseconds per token of a batch's rows.

    Lists with one entry per row. started: end of the prefill (s); finished: time of the last token (s); tokens: number
    of tokens, with the prefill's token. The latency of a row is finished - started, divided by the tokens in this time.
    first: smallest latency; last: largest latency; mean: over the rows.
    """
    return check(latencies, _latency_cases())


def _latency_cases() -> Iterator[Case]:
    chance = random.Random(8)
    drawn = [
        ("one row", [0.5], [1.5], [101]),
        ("equal rows", [0.0, 0.0], [1.0, 1.0], [51, 51]),
        ("short and long texts", [0.0, 0.0], [0.5, 2.0], [101, 201]),
        ("rows one after the other", [0, 1], [1, 3], [11, 11]),
    ]
    for number in range(100):
        rows = chance.randint(1, 8)
        started = [round(chance.uniform(0, 1), 2) for _ in range(rows)]
        finished = [begin + round(chance.uniform(0.1, 3), 2) for begin in started]
        drawn.append((f"random case {number}", started, finished, [chance.randint(2, 300) for _ in range(rows)]))
    for name, started, finished, tokens in drawn:
        told = f"{name}: started {started}, finished {finished}, tokens {tokens}"
        wanted, *mistakes = _latencies(started, finished, tokens)
        said = dict(zip(_LATENCY_MISTAKES, mistakes, strict=True))
        yield told, (list(started), list(finished), list(tokens)), partial(_close, wanted, said)


def check_floor(floor: Callable) -> bool:
    """Check floor(weights, per_key, batch, query_length, kv_length, bandwidth, flops) -> the least seconds of a pass.

    weights: parameters in matrix products, two bytes each, all read once per pass. per_key: bytes of keys and values
    per position; a row reads kv_length positions. A token takes two operations per parameter (without attention).
    bandwidth: bytes/s; flops: operations/s. Reads and operations overlap.
    """
    return check(floor, _floor_cases())


def _floor_cases() -> Iterator[Case]:
    chance = random.Random(8)
    h100 = 3.35e12, 989e12
    drawn = [(7.8e9, 524_288, *shape, 512, *h100) for shape in ((8, 1), (8, 6), (64, 9))]
    for _ in range(60):
        shape = chance.choice([1, 2, 8, 64, 256]), chance.randint(1, 17), chance.randint(1, 4096)
        sizes = chance.choice([1e8, 8e9]), chance.choice([2**14, 2**19])
        drawn.append((*sizes, *shape, *chance.choice([h100, (1e11, 2e11)])))
    for case in drawn:
        weights, per_key, batch, query_length, kv_length, bandwidth, flops = case
        memory = (2 * weights + per_key * batch * kv_length) / bandwidth
        arithmetic = 2 * weights * batch * query_length / flops
        peaks = f"bandwidth {bandwidth:g}, flops {flops:g}"
        sizes = f"weights {weights:g}, per_key {per_key}, batch {batch}, query_length {query_length}"
        mistakes = {
            "reads and operations overlap: use the longer time, not the sum": memory + arithmetic,
            "use the longer of the two times": min(memory, arithmetic),
            "the weights are read once for all tokens": max(memory * batch * query_length, arithmetic),
            "the keys and values of all rows are read, too": max(2 * weights / bandwidth, arithmetic),
            "all query_length tokens are computed": max(memory, arithmetic / query_length),
            "a token takes two operations per parameter": max(memory, arithmetic / 2),
            "a weight takes two bytes": max(memory - weights / bandwidth, arithmetic),
        }
        mistakes = {said: (seconds,) for said, seconds in mistakes.items()}
        yield f"{sizes}, kv_length {kv_length}, {peaks}", case, partial(_close, (max(memory, arithmetic),), mistakes)


_LATENCY_MISTAKES = (
    "the prefill's token comes before this time and does not count",
    "these are seconds, not milliseconds",
    "a row's time starts at the end of its own prefill",
    "the mean is over rows, and each row counts once",
    "first is the smallest latency, not the latency of the row that finishes first; last is the largest",
)


def _latencies(started: Sequence[float], finished: Sequence[float], tokens: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the right result, and the result of each common mistake."""

    def summary(each: Sequence[float]) -> tuple[float, ...]:
        return min(each), sum(each) / len(each), max(each)

    spans = [b - a for a, b in zip(started, finished, strict=True)]
    right = [1e3 * span / (n - 1) for span, n in zip(spans, tokens, strict=True)]
    by_finish = [latency for _, latency in sorted(zip(finished, right, strict=True))]
    return [
        summary(right),
        summary([1e3 * span / n for span, n in zip(spans, tokens, strict=True)]),
        summary([each / 1e3 for each in right]),
        summary([1e3 * b / (n - 1) for b, n in zip(finished, tokens, strict=True)]),
        (min(right), 1e3 * sum(spans) / (sum(tokens) - len(tokens)), max(right)),
        (by_finish[0], sum(right) / len(right), by_finish[-1]),
    ]


def _close(wanted: tuple[float, ...], mistakes: Mapping[str, tuple[float, ...]], result: object) -> str:

    def near(found: Sequence[float], right: Sequence[float]) -> bool:
        return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, right, strict=True))

    found = result if isinstance(result, tuple | list) else (result,)
    numbers = len(found) == len(wanted) and all(isinstance(value, int | float) for value in found)
    if numbers and near(found, wanted):
        return ""
    told = f"expected {', '.join(f'{value:.6g}' for value in wanted)}, got {result!r}"
    return with_hint(told, mistakes, lambda each: numbers and near(found, each))
