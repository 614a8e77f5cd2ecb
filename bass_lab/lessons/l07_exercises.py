"""Exercises of lesson 07: ragged attention kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bass_lab.lessons.checking import Case, check, with_hint


def check_merge(merge: Callable) -> bool:
    """Check merge(out_a, lse_a, out_b, lse_b) -> (out, lse), two partial attention results as one.

    out [R, D] is softmax(scores) V over a part of the keys; lse [R] is the log of the sum of e^score over the part. A
    part without keys has out 0 and lse -inf. The merge of two empty parts is empty.
    """
    return check(merge, _merge_cases())


def _merge_cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(7)
    sizes = [
        ("two parts", 5, 3, 0.0),
        ("one key each", 1, 1, 0.0),
        ("scores near 1000", 4, 6, 1000.0),
        ("scores near -1000", 4, 6, -1000.0),
        ("nothing in the first part", 0, 4, 0.0),
        ("nothing in the second", 4, 0, 0.0),
        ("nothing in either", 0, 0, 0.0),
    ]
    for name, left, right, offset in sizes:
        scores = torch.randn(2, left + right, generator=generator, dtype=torch.float64) * 3 + offset
        values = torch.randn(left + right, 3, generator=generator, dtype=torch.float64)
        parts = _partial(scores[:, :left], values[:left]) + _partial(scores[:, left:], values[left:])
        yield name, parts, partial(_same_partial, *_partial(scores, values))


def _partial(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over these keys: out [R, D], lse [R]. scores: [R, N]; values: [N, D]."""
    if scores.shape[1] == 0:
        return scores.new_zeros(len(scores), values.shape[1]), scores.new_full((len(scores),), -torch.inf)
    return scores.softmax(1) @ values, scores.logsumexp(1)


def _same_partial(out: Tensor, lse: Tensor, result: object) -> str:
    if not isinstance(result, tuple) or len(result) != 2:
        return f"expected a pair (out, lse), got {type(result).__name__}"
    for name, found, wanted in zip(("lse", "out"), reversed(result), (lse, out), strict=True):
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            return f"{name} should be a tensor of shape {list(wanted.shape)}, got {_brief(found)}"
        if not torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-9):
            return f"{name} should be {_brief(wanted)}, got {_brief(found)}"
    return ""


def _brief(value: object) -> str:
    return str([round(x, 4) for x in value.flatten().tolist()]) if isinstance(value, Tensor) else repr(value)


def check_keys_needed(keys_needed: Callable) -> bool:
    """Check keys_needed(first, last, kv_length, window, block) -> (begin, end), the keys of a tile of queries.

    The queries have positions first … last. A query attends to keys up to its own position. If window > 0, a query
    attends only to the last `window` keys, its own included. begin is a multiple of `block`, as large as possible; end
    is as small as possible, at most kv_length.
    """
    return check(keys_needed, _window_cases())


def _window_cases() -> Iterator[Case]:
    chance = random.Random(7)
    drawn = [(60, 63, 64, 0, 16), (60, 63, 64, 20, 16), (0, 3, 4, 100, 16), (5, 5, 40, 1, 4), (15, 20, 21, 16, 16)]
    for _ in range(200):
        kv_length = chance.randint(1, 200)
        first = chance.randint(0, kv_length - 1)
        last = chance.randint(first, kv_length + 4)  # the last queries of a tile may be padding
        drawn.append((first, last, kv_length, chance.choice([0, 0, 1, 7, 16, 33, 500]), chance.choice([4, 16, 32])))
    for first, last, kv_length, window, block in drawn:
        seen = [
            key
            for key in range(kv_length)
            if any(key <= position and not 0 < window <= position - key for position in range(first, last + 1))
        ]
        wanted = (seen[0] // block * block, seen[-1] + 1)
        name = f"first {first}, last {last}, kv_length {kv_length}, window {window}, block {block}"
        yield name, (first, last, kv_length, window, block), partial(_same_range, wanted)


def _same_range(wanted: tuple[int, int], result: object) -> str:
    if not isinstance(result, tuple | list) or len(result) != 2:
        return f"expected a pair (begin, end), got {result!r}"
    return "" if tuple(map(int, result)) == wanted else f"expected {wanted}, got {tuple(map(int, result))}"


def check_cut(cut: Callable) -> bool:
    """Check cut(lengths, workers, overhead) -> [(row, begin, end), …], pieces in order of their start.

    Every key of every row must be in exactly one piece. A piece takes end - begin + overhead and goes to the first free
    worker. A right cut takes at most 10% longer than the best cut into equal chunks.
    """
    return check(cut, _cut_cases())


def _cut_cases() -> Iterator[Case]:
    chance = random.Random(7)
    drawn = [([1000], 4, 32), ([900, 60, 60, 60], 4, 32), ([200] * 8, 8, 64)]
    for _ in range(12):
        rows = chance.randint(1, 8)
        lengths = [chance.randint(1, 1500) for _ in range(rows)]
        drawn.append((lengths, chance.choice([2, 5, 16, 48]), chance.choice([16, 64])))
    for lengths, workers, overhead in drawn:
        name = f"lengths {lengths}, {workers} workers, overhead {overhead}"
        chunks = range(16, max(lengths) + 16, 16)
        best = min(_finish(_equal_chunks(lengths, chunk), workers, overhead) for chunk in chunks)
        yield name, (list(lengths), workers, overhead), partial(_good_cut, lengths, workers, overhead, best)


def _equal_chunks(lengths: Sequence[int], chunk: int) -> list[tuple[int, int, int]]:
    pieces = [(row, begin, min(begin + chunk, n)) for row, n in enumerate(lengths) for begin in range(0, n, chunk)]
    return sorted(pieces, key=lambda piece: piece[1] - piece[2])


def _finish(pieces: Sequence[tuple[int, int, int]], workers: int, overhead: int) -> int:
    from bass_kernels.accounting import Read, finish  # needs Triton

    return finish([Read(*piece) for piece in pieces], workers, overhead=overhead)


def _good_cut(lengths: Sequence[int], workers: int, overhead: int, best: int, result: object) -> str:
    if not isinstance(result, list) or any(len(piece) != 3 for piece in result):
        return f"expected a list of (row, begin, end), got {result!r}"
    for row, length in enumerate(lengths):
        at = 0
        for _, begin, end in sorted(piece for piece in result if piece[0] == row):
            if begin != at or end <= begin:
                return f"row {row}: the piece after key {at} is {begin} … {end}; pieces must be adjacent and not empty"
            at = end
        if at != length:
            return f"row {row}: the pieces end at {at} of {length}"
    time = _finish(result, workers, overhead)
    return "" if time <= 1.1 * best else f"the slowest worker is done after {time}; {best} is possible"


def check_softcap(kernel: Callable, device: str = "cpu") -> bool:
    """Check a Triton kernel kernel[(1,)](scores, out, cap, N=…) that writes cap · tanh(scores / cap) to `out`.

    scores, out: float32 [N], N a power of two. device: "cpu" uses Triton's interpreter.
    """

    def capped(scores: Tensor, cap: float) -> Tensor:
        out = torch.full_like(scores, float("nan"))
        kernel[(1,)](scores, out, cap, N=len(scores))
        return out

    return check(capped, _softcap_cases(device))


def _softcap_cases(device: str) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(7)
    for size, scale, cap in ((16, 1.0, 2.0), (32, 30.0, 50.0), (64, 5.0, 1.0), (16, 1e5, 30.0)):
        scores = scale * torch.randn(size, generator=generator)
        name = f"{size} scores, cap {cap:g}, the first scores {[round(x, 2) for x in scores[:3].tolist()]}"
        yield name, (scores.to(device), cap), partial(_is_capped, scores, cap)


def _is_capped(scores: Tensor, cap: float, result: Tensor) -> str:
    wanted = cap * (scores / cap).tanh()
    mistakes = {
        "the scores come back unchanged": scores,
        "tanh is at most 1; multiply it by the cap": (scores / cap).tanh(),
        "divide the scores by the cap first": cap * scores.tanh(),
        "the scores are clipped; use tanh": scores.clamp(-cap, cap),
    }
    found = result.cpu()
    if found.isnan().any():
        where = int(found.isnan().nonzero()[0])
        return f"out[{where}] is NaN for the score {float(scores[where]):.4g}: it was not written, or e^x overflowed"
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
        return ""
    where = int((found - wanted).abs().argmax())
    told = f"the score {float(scores[where]):.4g} becomes {float(found[where]):.4g}, not {float(wanted[where]):.4g}"
    return with_hint(told, mistakes, lambda each: torch.allclose(found, each, rtol=1e-4, atol=1e-5))
