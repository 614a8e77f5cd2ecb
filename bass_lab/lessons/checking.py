"""How an exercise is checked: `check_<name>(your_function)` compares it with a plain reference on many cases.

A check prints one line and returns whether the function is right. The stub raises NotImplementedError and is "not
solved yet"; a wrong one is told the first case that it fails. What the function raises passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

Fault = Callable[[object], str]  # what is wrong with a result; empty: nothing
Case = tuple[str, tuple, Fault]  # description, arguments, judge of the result


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in float64; infinite for another shape, or where a number is missing (NaN)."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def with_hint(told: str, mistakes: Mapping[str, object], made: Callable[[object], bool]) -> str:
    """Return the sentence, and in brackets the first of the usual mistakes that was made."""
    hint = next((said for said, mistake in mistakes.items() if made(mistake)), "")
    return f"{told} ({hint})" if hint else told


def equals(wanted: object, result: object) -> str:
    """Say what is wrong with a result that is not the wanted one."""
    return "" if result == wanted and result is not None else f"expected {wanted!r}, got {result!r}"


def check(solution: Callable, cases: Iterator[Case]) -> bool:
    count = 0
    for description, arguments, fault in cases:
        count += 1
        try:
            result = solution(*arguments)
        except NotImplementedError:
            print("Not solved yet.")
            return False
        except Exception:
            print(f"Case {count} ({description}) raises:")
            raise
        if message := fault(result):
            print(f"Not right. Case {count} ({description}): {message}")
            return False
    print(f"Right: {count} cases agree with the reference.")
    return True
