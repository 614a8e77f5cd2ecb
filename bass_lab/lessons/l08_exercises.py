"""Exercises of lesson 08: latency and utilisation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from bass_lab.lessons.checking import Case, Fault, check


def check_latencies(latencies: Callable) -> bool:
    """latencies(started, finished, tokens) -> (first, mean, last): milliseconds per token of the rows of a batch.

    Lists with one entry per row: when its prefill ended and when its last token came (seconds), and its tokens, the one
    that the prefill gave included. The latency of a row is the time between the two, divided by the tokens that came in
    it. first and last: the least and the greatest of the rows' latencies; mean: over the rows.
    """
    return check(latencies, _latency_cases())


def _latency_cases() -> Iterator[Case]:
    chance = random.Random(8)
    drawn = [("one row", [0.5], [1.5], [101]), ("equal rows", [0.0, 0.0], [1.0, 1.0], [51, 51])]
    drawn += [
        ("short and long texts", [0.0, 0.0], [0.5, 2.0], [101, 201]),
        ("rows that take turns", [0, 1], [1, 3], [11, 11]),
    ]
    for number in range(100):
        rows = chance.randint(1, 8)
        started = [round(chance.uniform(0, 1), 2) for _ in range(rows)]
        finished = [begin + round(chance.uniform(0.1, 3), 2) for begin in started]
        drawn.append((f"random case {number}", started, finished, [chance.randint(2, 300) for _ in range(rows)]))
    for name, started, finished, tokens in drawn:
        each = [1e3 * (b - a) / (n - 1) for a, b, n in zip(started, finished, tokens, strict=True)]
        wanted = min(each), sum(each) / len(each), max(each)
        yield name, (list(started), list(finished), list(tokens)), _close(wanted)


def check_floor(floor: Callable) -> bool:
    """floor(weights, per_key, batch, query_length, kv_length, bandwidth, flops) -> the least seconds of a pass.

    The model has `weights` parameters in matrix products, two bytes each, all read once per pass, and `per_key` bytes
    of keys and values per position; each row has kv_length of them to read. A token costs two operations per parameter
    (attention's own are left out). bandwidth in bytes/s, flops in operations/s; both go on at the same time.
    """
    return check(floor, _floor_cases())


def _floor_cases() -> Iterator[Case]:
    chance = random.Random(8)
    h100 = 3.35e12, 989e12
    drawn = [
        (7.8e9, 524_288, 8, 1, 512, *h100),
        (7.8e9, 524_288, 8, 6, 512, *h100),
        (7.8e9, 524_288, 64, 9, 512, *h100),
    ]
    for _ in range(60):
        shape = chance.choice([1, 2, 8, 64, 256]), chance.randint(1, 17), chance.randint(1, 4096)
        drawn.append(
            (chance.choice([1e8, 8e9]), chance.choice([2**14, 2**19]), *shape, *chance.choice([h100, (1e11, 2e11)]))
        )
    for case in drawn:
        weights, per_key, batch, query_length, kv_length, bandwidth, flops = case
        memory = (2 * weights + per_key * batch * kv_length) / bandwidth
        arithmetic = 2 * weights * batch * query_length / flops
        name = f"{weights / 1e9:g}B, batch {batch}, query length {query_length}, kv length {kv_length}"
        yield name, case, _close((max(memory, arithmetic),))


def _close(wanted: tuple[float, ...]) -> Fault:
    def fault(result: object) -> str:
        found = result if isinstance(result, tuple | list) else (result,)
        numbers = len(found) == len(wanted) and all(isinstance(value, int | float) for value in found)
        if numbers and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, wanted, strict=True)):
            return ""
        return f"expected {', '.join(f'{value:.6g}' for value in wanted)}, got {result!r}"

    return fault
