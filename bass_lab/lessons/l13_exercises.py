"""Exercises of lesson 13: source masks, the state after a step, and bytes of the two caches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bass_lab.lessons.checking import Case, check, with_hint


def check_source_mask(source_mask: Callable) -> bool:
    """Check source_mask(lengths) -> bool [B, longest], True for source positions that the row may attend to."""
    return check(source_mask, _mask_cases())


def _mask_cases() -> Iterator[Case]:
    chance = random.Random(13)
    drawn = [("one source", [4]), ("two of equal length", [3, 3]), ("three of different lengths", [2, 5, 1])]
    for number in range(30):
        drawn.append((f"random case {number}", [chance.randint(1, 9) for _ in range(chance.randint(1, 5))]))
    for name, lengths in drawn:
        yield f"{name}: lengths={lengths}", (list(lengths),), partial(_judge_mask, lengths)


def _judge_mask(lengths: Sequence[int], result: object) -> str:
    wanted = torch.tensor([[slot < length for slot in range(max(lengths))] for length in lengths])
    found = torch.as_tensor(result)
    if torch.equal(found, wanted) and found.dtype == torch.bool:
        return ""
    mistakes = {
        "the mask is True where queries may *not* attend": ~wanted,
        "the mask is causal, but the whole source is known from the beginning": (
            torch.arange(max(lengths)) <= torch.arange(len(lengths))[:, None]
        ),
    }
    told = f"expected {wanted.int().tolist()}, got {found.tolist()}"
    return with_hint(told, mistakes, lambda each: torch.equal(found.bool(), each))


def check_state_after(state_after: Callable) -> bool:
    """Check state_after(inputs, start, accepted, width) -> the last `width` - 1 inputs of a row's convolution.

    inputs: numbers of all positions so far. start: position of the verified step's first (committed) token. accepted:
    accepted draft tokens after it. Positions before 0 count as 0.0.
    """
    return check(state_after, _state_cases())


def _state_cases() -> Iterator[Case]:
    chance = random.Random(31)
    drawn = [
        ("all draft tokens accepted", list(range(1, 11)), 6, 3, 3),
        ("no draft token accepted", list(range(1, 11)), 6, 0, 3),
        ("one of three", list(range(1, 11)), 6, 1, 3),
        ("near the beginning", [1, 2, 3], 0, 0, 4),
    ]
    for number in range(40):
        start, drafts, width = chance.randint(0, 8), chance.randint(0, 4), chance.randint(2, 5)
        numbers = [chance.randint(1, 99) for _ in range(start + drafts + 1)]
        drawn.append((f"random case {number}", numbers, start, chance.randint(0, drafts), width))
    for name, numbers, start, accepted, width in drawn:
        numbers = [float(each) for each in numbers]
        told = f"{name}: inputs={numbers}, start={start}, accepted={accepted}, width={width}"
        yield told, (numbers, start, accepted, width), partial(_judge_state, numbers, start, accepted, width)


def _state(inputs: Sequence[float], end: int, width: int) -> list[float]:
    return [inputs[at] if at >= 0 else 0.0 for at in range(end - width + 1, end)]


def _judge_state(inputs: Sequence[float], start: int, accepted: int, width: int, result: object) -> str:
    wanted = _state(inputs, start + accepted + 1, width)
    mistakes = {
        "this is the state after all submitted tokens, rejected ones too": _state(inputs, len(inputs), width),
        "this is the state before the step": _state(inputs, start, width),
        "the step's first token is committed, but missing": _state(inputs, start + accepted, width),
    }
    found = [float(each) for each in result] if isinstance(result, Sequence) else result
    if found == wanted:
        return ""
    return with_hint(f"expected {wanted}, got {found}", mistakes, lambda state: found == state)


def check_cache_bytes(cache_bytes: Callable) -> bool:
    """Check cache_bytes(sources, texts, layers, numbers, element) -> bytes of keys and values of a batch.

    sources, texts: tokens of each row's source, and of its longest text. layers: decoder layers, each with both caches.
    numbers: heads × head dimension. element: bytes per number. All batch slots have the length of the longest source
    and of the longest text.
    """
    return check(cache_bytes, _bytes_cases())


def _bytes_cases() -> Iterator[Case]:
    chance = random.Random(17)
    drawn = [("one row", [10], [20], 1, 64, 2), ("two different rows", [10, 30], [20, 5], 2, 64, 4)]
    for number in range(30):
        rows = chance.randint(1, 6)
        lengths = [[chance.randint(1, 50) for _ in range(rows)] for _ in range(2)]
        drawn.append((f"random case {number}", *lengths, chance.randint(1, 12), 64, chance.choice([2, 4])))
    for name, *given in drawn:
        names = ("sources", "texts", "layers", "numbers", "element")
        told = ", ".join(f"{each}={value}" for each, value in zip(names, given, strict=True))
        yield f"{name}: {told}", tuple(given), partial(_judge_cache_bytes, *given)


def _judge_cache_bytes(
    sources: Sequence[int], texts: Sequence[int], layers: int, numbers: int, element: int, result: object
) -> str:
    each = 2 * layers * numbers * element  # keys and values of one position
    wanted = len(sources) * (max(sources) + max(texts)) * each
    mistakes = {
        "you count keys or values, not both": wanted // 2,
        "you count filled slots; every row has as many slots as the longest": (sum(sources) + sum(texts)) * each,
        "the sources are missing": len(sources) * max(texts) * each,
        "this is the size of one layer": wanted // layers if layers > 1 else -1,
    }
    if result == wanted:
        return ""
    return with_hint(f"expected {wanted:,}, got {result}", mistakes, lambda number: result == number)
