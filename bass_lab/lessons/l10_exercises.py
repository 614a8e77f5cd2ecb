"""Exercises of lesson 10: unpack four bits, count the bytes of a step, and the distribution of a lossy rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bass_lab.lessons.checking import Case, check, with_hint

HALF = 16  # codes in the low halves of a group's bytes


def _same(found: object, wanted: Sequence[float]) -> bool:
    """Return True if these are the numbers, up to rounding."""
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
    """unpack(packed, scale) -> 32 floats: the weights of a group.

    packed: 16 integers 0 … 255, two codes each: in the low halves the codes of the first 16 inputs, in the high ones
    those of the other 16; a code has four bits, -8 … 7 in two's complement. A weight is its code times the scale.
    """
    return check(unpack, _packed_cases())


def _packed_cases() -> Iterator[Case]:
    chance = random.Random(10)
    drawn = [
        ("codes 0 to 7 alone", [each % 8 | (each + 3) % 8 << 4 for each in range(HALF)], 0.5),
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
    """The reference, and, by its options, the mistakes that are made most often."""
    low, high = [each & 15 for each in packed], [each >> 4 for each in packed]
    codes = {
        "halves": [*low, *high],
        "swapped": [*high, *low],
        "in turn": [code for both in zip(low, high, strict=True) for code in both],
    }[order]
    codes = [code - 16 if signed and code > 7 else code for code in codes]
    return [(code - offset) * scale for code in codes]


_UNPACK_MISTAKES = {
    "its codes have no sign; from 8 on a code of four bits stands for itself minus 16": {"signed": False},
    "it takes codes for 0 … 15 with 8 in the middle; here they are in two's complement": {"signed": False, "offset": 8},
    "it takes the two codes of a byte for neighbours": {"order": "in turn"},
    "it takes the high halves for the first 16 inputs": {"order": "swapped"},
}


def _judge_unpacked(packed: Sequence[int], scale: float, result: object) -> str:
    wanted = _unpacked(packed, scale)
    if _same(result, wanted):
        return ""
    told = f"packed={list(packed)}, scale={scale:.4g}: {_told(result, wanted)}"
    return with_hint(told, _UNPACK_MISTAKES, lambda how: _same(result, _unpacked(packed, scale, **how)))


def check_step_bytes(step_bytes: Callable) -> bool:
    """step_bytes(target, draft, draft_length, target_bits, draft_bits) -> bytes of weights that a step reads.

    target, draft: how many weights. A step is `draft_length` passes of the draft and one of the target. Bits are 16, 8
    or 4; weights of 4 bits have a scale of 16 bits for every 32 of them, the few scales of 8 bits are left out.
    """
    return check(step_bytes, _step_cases())


def _step_cases() -> Iterator[Case]:
    chance = random.Random(11)
    drawn = [
        ("both in 16 bits, one draft", 320, 32, 1, 16, 16),
        ("regular decoding", 320, 32, 0, 16, 16),
        ("five drafts", 320, 32, 5, 16, 16),
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
    """The reference, and, by its options, the mistakes that are made most often."""
    if swapped:
        target_bits, draft_bits = draft_bits, target_bits
    wide = {16: 16, 8: 8, 4: 4 + 16 / 32 * scales}
    passes = (min(draft_length, 1) if once else draft_length), (1 + targets * draft_length)
    found = passes[0] * draft * wide[draft_bits] + passes[1] * target * wide[target_bits]
    return found if bits else found / 8


_BYTES_MISTAKES = {
    "the draft's weights are read in every one of its passes": {"once": True},
    "weights of 4 bits have scales, too: 16 bits for every 32": {"scales": False},
    "the target checks all drafts in one pass, not in one each": {"targets": 1},
    "these are bits": {"bits": True},
    "it takes the draft's bits for the target's": {"swapped": True},
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
    """lossy_law(p, q, epsilon) -> the distribution of the token that is emitted, a list of chances.

    p, q: lists of chances, the target's and the draft's. A draft x is drawn from q and kept if p(x) >= epsilon · max p;
    otherwise a draw from p takes its place.
    """
    return check(lossy_law, _law_cases())


def _law_cases() -> Iterator[Case]:
    chance = random.Random(12)
    drawn = [
        # the first cases tell mistakes apart that give the same numbers in later ones
        ("the draft has another favourite", [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], 0.3),
        ("one draft is exactly at the limit", [0.4, 0.2, 0.4], [0.5, 0.5, 0.0], 0.5),
        ("the draft is the target", [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 0.0),
        ("every draft is kept", [0.5, 0.3, 0.2], [0.1, 0.1, 0.8], 0.0),
        ("the favourite alone is kept", [0.5, 0.3, 0.2], [0.2, 0.4, 0.4], 1.0),
    ]
    for number in range(50):
        size = chance.randint(2, 5)
        laws = [[chance.random() ** 2 + 1e-3 for _ in range(size)] for _ in range(2)]
        laws = [[each / sum(law) for each in law] for law in laws]
        drawn.append((f"random case {number}", *laws, chance.choice([0.1, 0.3, 0.7])))
    for name, p, q, epsilon in drawn:
        yield name, (list(p), list(q), epsilon), partial(_judge_law, p, q, epsilon)


def _law(p: Sequence[float], q: Sequence[float], epsilon: float, *, how: str = "") -> list[float]:
    """The reference, and, by name, the mistakes that are made most often."""
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
    "it forgets the draws that take the place of rejected drafts": "lost",
    "it scales up what is kept; a rejected draft is replaced by a draw from p": "scaled",
    "it draws from norm(max(0, p - q)) after a rejection: that is the exact rule's": "residual",
    "it compares q, not p": "by q",
    "it compares p with epsilon; the limit is epsilon times the largest p": "absolute",
    "a draft that is exactly at the limit is kept": "strict",
}


def _judge_law(p: Sequence[float], q: Sequence[float], epsilon: float, result: object) -> str:
    wanted = _law(p, q, epsilon)
    if _same(result, wanted):
        return ""
    given = ", ".join(f"{name}=[{', '.join(f'{each:.3g}' for each in law)}]" for name, law in (("p", p), ("q", q)))
    told = f"{given}, epsilon={epsilon}: {_told(result, wanted)}"
    return with_hint(told, _LAW_MISTAKES, lambda how: _same(result, _law(p, q, epsilon, how=how)))
