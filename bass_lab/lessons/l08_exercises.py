"""Exercises of lesson 08: latency and utilisation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

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
        told = f"{name}: started {started}, finished {finished}, tokens {tokens}"
        yield (
            told,
            (list(started), list(finished), list(tokens)),
            _close(wanted, _latency_slips(started, finished, tokens)),
        )


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
        peaks = f"bandwidth {bandwidth:g}, flops {flops:g}"
        sizes = f"weights {weights:g}, per_key {per_key}, batch {batch}, query_length {query_length}"
        slips = {
            (memory + arithmetic,): "both go on at the same time: the longer one counts, not the sum",
            (min(memory, arithmetic),): "the longer of the two counts",
            (max(memory * batch * query_length, arithmetic),): "the weights are read once for all tokens",
            (max(2 * weights / bandwidth, arithmetic),): "the keys and values of all rows have to be read, too",
            (max(memory, arithmetic / query_length),): "every one of the query_length tokens is computed",
            (max(memory, arithmetic / 2),): "a token costs two operations per parameter",
            (max(memory - weights / bandwidth, arithmetic),): "a weight takes two bytes",
        }
        yield f"{sizes}, kv_length {kv_length}, {peaks}", case, _close((max(memory, arithmetic),), slips)


def _latency_slips(
    started: Sequence[float], finished: Sequence[float], tokens: Sequence[int]
) -> dict[tuple[float, ...], str]:
    """What usual mistakes give, and what to say of them."""

    def summary(each: Sequence[float]) -> tuple[float, ...]:
        return min(each), sum(each) / len(each), max(each)

    spans = [b - a for a, b in zip(started, finished, strict=True)]
    right = [1e3 * span / (n - 1) for span, n in zip(spans, tokens, strict=True)]
    return {
        summary([1e3 * span / n for span, n in zip(spans, tokens, strict=True)]): (
            "the prefill's token came at the beginning of the time, not in it"
        ),
        summary([each / 1e3 for each in right]): "these are seconds, not milliseconds",
        summary([1e3 * b / (n - 1) for b, n in zip(finished, tokens, strict=True)]): (
            "a row's time begins when its own prefill ended"
        ),
        (min(right), 1e3 * sum(spans) / (sum(tokens) - len(tokens)), max(right)): (
            "the mean is over the rows' latencies, each row counting once"
        ),
    }


def _close(wanted: tuple[float, ...], slips: Mapping[tuple[float, ...], str]) -> Fault:
    """slips: what usual mistakes give, and what to say of them."""

    def near(found: Sequence[float], right: Sequence[float]) -> bool:
        return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, right, strict=True))

    def fault(result: object) -> str:
        found = result if isinstance(result, tuple | list) else (result,)
        numbers = len(found) == len(wanted) and all(isinstance(value, int | float) for value in found)
        if numbers and near(found, wanted):
            return ""
        hints = [hint for slip, hint in slips.items() if numbers and near(found, slip)]
        told = f"expected {', '.join(f'{value:.6g}' for value in wanted)}, got {result!r}"
        return told + (f" ({hints[0]})" if hints else "")

    return fault
