"""Exercises of lesson 10: unpack 4-bit codes, bytes of a step, and the distribution of a lossy rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bass_lab.lessons.checking import Case, check, with_hint

HALF = 16  # codes in the low halves of a group's bytes


def _same(found: object, wanted: Sequence[float]) -> bool:
    try:
        return np.shape(found) == np.shape(wanted) and np.allclose(np.asarray(found, float), wanted, 1e-6, 1e-9)
    except (TypeError, ValueError):
        return False


def _told(found: object, wanted: Sequence[float]) -> str:
    def short(numbers: object) -> str:
        try:
            return f"[{', '.join(f'{float(each):.4g}' for each in numbers)}]"
        except (TypeError, ValueError):
            return repr(numbers)

    return f"expected {short(wanted)}, got {short(found)}"


def check_unpack(unpack: Callable) -> bool:
    """Check unpack(packed, scale) -> 32 floats, the weights of a group.

    packed: 16 integers 0 … 255 with two 4-bit codes each. The low halves contain the codes of the first 16 inputs, the
    high halves the codes of the last 16. A code is -8 … 7 in two's complement. A weight is code × scale.
    """
    return check(unpack, _packed_cases())


def _packed_cases() -> Iterator[Case]:
    chance = random.Random(10)
    drawn = [
        ("only codes 0 to 7", [each % 8 | (each + 3) % 8 << 4 for each in range(HALF)], 0.5),
        ("a negative code", [0x0F] + [0] * 15, 1.0),
        ("a negative scale", [0x78] * HALF, -0.25),
        ("a scale of zero", [chance.randrange(256) for _ in range(HALF)], 0.0),
    ]
    drawn += [(f"random case {each}", [chance.randrange(256) for _ in range(HALF)], chance.uniform(-1, 1))
              for each in range(50)]  # fmt: skip
    for name, packed, scale in drawn:
        yield name, (list(packed), scale), partial(_judge_unpacked, packed, scale)


def _unpacked(
    packed: Sequence[int], scale: float, *, signed: bool = True, order: str = "halves", offset: int = 0
) -> list[float]:
    """Return the right result, or, with options, the result of a common mistake."""
    low, high = [each & 15 for each in packed], [each >> 4 for each in packed]
    codes = {
        "halves": [*low, *high],
        "swapped": [*high, *low],
        "in turn": [code for both in zip(low, high, strict=True) for code in both],
    }[order]
    codes = [code - 16 if signed and code > 7 else code for code in codes]
    return [(code - offset) * scale for code in codes]


_UNPACK_MISTAKES = {
    "the codes have no sign; a 4-bit code >= 8 means code - 16": {"signed": False},
    "the codes are in two's complement, not 0 … 15 with 8 in the middle": {"signed": False, "offset": 8},
    "the two codes of a byte are 16 inputs apart, not neighbours": {"order": "in turn"},
    "the low halves contain the first 16 inputs, not the high halves": {"order": "swapped"},
}


def _judge_unpacked(packed: Sequence[int], scale: float, result: object) -> str:
    wanted = _unpacked(packed, scale)
    if _same(result, wanted):
        return ""
    told = f"packed={list(packed)}, scale={scale:.4g}: {_told(result, wanted)}"
    return with_hint(told, _UNPACK_MISTAKES, lambda how: _same(result, _unpacked(packed, scale, **how)))


def check_step_bytes(step_bytes: Callable) -> bool:
    """Check step_bytes(target, draft, draft_length, target_bits, draft_bits) -> bytes of weights read per step.

    target, draft: number of weights. A step has `draft_length` draft passes and one target pass. Bits are 16, 8 or 4.
    Every 32 weights of 4 bits have a scale of 16 bits. The few scales of 8-bit weights are not counted.
    """
    return check(step_bytes, _step_cases())


def _step_cases() -> Iterator[Case]:
    chance = random.Random(11)
    drawn = [
        ("both in 16 bits, one draft token", 320, 32, 1, 16, 16),
        ("regular decoding", 320, 32, 0, 16, 16),
        ("five draft tokens", 320, 32, 5, 16, 16),
        ("a target of 8 bits", 320, 32, 5, 8, 16),
        ("a draft of 4 bits", 320, 32, 5, 16, 4),
        ("the paper's sizes, both in 4 bits", 7_800_000_000, 310_000_000, 5, 4, 4),
    ]
    for number in range(50):
        sizes = 32 * chance.randint(10, 100), 32 * chance.randint(1, 9), chance.randint(0, 9)
        drawn.append((f"random case {number}", *sizes, chance.choice([16, 8, 4]), chance.choice([16, 8, 4])))
    for name, *given in drawn:
        yield name, tuple(given), partial(_judge_bytes, given)


def _bytes(
    target: int, draft: int, draft_length: int, target_bits: int, draft_bits: int, *,
    scales: bool = True, once: bool = False, targets: int = 0, bits: bool = False, swapped: bool = False,
) -> float:  # fmt: skip
    """Return the right result, or, with options, the result of a common mistake."""
    if swapped:
        target_bits, draft_bits = draft_bits, target_bits
    wide = {16: 16, 8: 8, 4: 4 + 16 / 32 * scales}
    passes = (min(draft_length, 1) if once else draft_length), (1 + targets * draft_length)
    found = passes[0] * draft * wide[draft_bits] + passes[1] * target * wide[target_bits]
    return found if bits else found / 8


_BYTES_MISTAKES = {
    "every draft pass reads the draft's weights": {"once": True},
    "weights of 4 bits have scales, too: 16 bits per 32 weights": {"scales": False},
    "one target pass checks all draft tokens": {"targets": 1},
    "these are bits, not bytes": {"bits": True},
    "target_bits and draft_bits are swapped": {"swapped": True},
}


def _judge_bytes(given: Sequence[int], result: object) -> str:
    wanted = _bytes(*given)
    names = ("target", "draft", "draft_length", "target_bits", "draft_bits")
    shown = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
    if isinstance(result, bool) or not isinstance(result, int | float):
        return f"{shown}: expected a number of bytes, got {result!r}"
    if math.isclose(result, wanted, rel_tol=1e-9):
        return ""
    told = f"{shown}: expected {wanted:,.0f} bytes, got {result:,.0f}"
    return with_hint(told, _BYTES_MISTAKES, lambda how: math.isclose(result, _bytes(*given, **how)))


def check_lossy_law(lossy_law: Callable) -> bool:
    """Check lossy_law(p, q, epsilon) -> list of probabilities, the distribution of the emitted token.

    p, q: lists of probabilities of target and draft. A draft token x is drawn from q, and accepted if p(x) >=
    epsilon · max p. Otherwise a draw from p replaces x.
    """
    return check(lossy_law, _law_cases())


def _law_cases() -> Iterator[Case]:
    chance = random.Random(12)
    drawn = [
        # the first cases separate mistakes with equal results in later cases
        ("the draft has another favourite", [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], 0.3),
        ("one token is exactly at the limit", [0.4, 0.2, 0.4], [0.5, 0.5, 0.0], 0.5),
        ("the draft is the target", [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 0.0),
        ("every draft token is accepted", [0.5, 0.3, 0.2], [0.1, 0.1, 0.8], 0.0),
        ("only the favourite is accepted", [0.5, 0.3, 0.2], [0.2, 0.4, 0.4], 1.0),
    ]
    for number in range(50):
        size = chance.randint(2, 5)
        laws = [[chance.random() ** 2 + 1e-3 for _ in range(size)] for _ in range(2)]
        laws = [[each / sum(law) for each in law] for law in laws]
        drawn.append((f"random case {number}", *laws, chance.choice([0.1, 0.3, 0.7])))
    for name, p, q, epsilon in drawn:
        yield name, (list(p), list(q), epsilon), partial(_judge_law, p, q, epsilon)


def _law(p: Sequence[float], q: Sequence[float], epsilon: float, *, how: str = "") -> list[float]:
    """Return the right result, or, by name, the result of a common mistake."""
    limit = {"by q": epsilon * max(q), "absolute": epsilon}.get(how, epsilon * max(p))
    judge = q if how == "by q" else p
    strict = how == "strict"
    likely = [each > limit if strict else each >= limit for each in judge]
    kept = [chance if good else 0.0 for chance, good in zip(q, likely, strict=True)]
    missing = 1 - sum(kept)
    if how == "lost":
        return kept
    if how == "scaled":
        return [each / sum(kept) if sum(kept) else 0.0 for each in kept]
    replaced = list(p)
    if how == "residual":
        replaced = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        replaced = [each / sum(replaced) for each in replaced] if sum(replaced) else list(p)
    return [each + missing * other for each, other in zip(kept, replaced, strict=True)]


_LAW_MISTAKES = {
    "the draws that replace rejected tokens are missing": "lost",
    "a draw from p replaces a rejected token; accepted tokens are not scaled up": "scaled",
    "after a rejection draw from p; norm(max(0, p - q)) is the exact rule": "residual",
    "compare p with the limit, not q": "by q",
    "the limit is epsilon times the largest p, not epsilon": "absolute",
    "a token exactly at the limit is accepted": "strict",
}


def _judge_law(p: Sequence[float], q: Sequence[float], epsilon: float, result: object) -> str:
    wanted = _law(p, q, epsilon)
    if _same(result, wanted):
        return ""
    given = ", ".join(f"{name}=[{', '.join(f'{each:.3g}' for each in law)}]" for name, law in (("p", p), ("q", q)))
    told = f"{given}, epsilon={epsilon}: {_told(result, wanted)}"
    return with_hint(told, _LAW_MISTAKES, lambda how: _same(result, _law(p, q, epsilon, how=how)))
