"""Check an exercise: `check_<name>(your_function)` compares a function with a plain reference on many cases.

A check prints one line and returns True if the function is right. A stub with NotImplementedError is "not solved yet".
For a wrong function the line shows the first failed case. Other exceptions of the function pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

Fault = Callable[[object], str]  # message about a wrong result; empty if right
Case = tuple[str, tuple, Fault]  # description, arguments, judgement of the result


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return ‖found - wanted‖ / ‖wanted‖ in float64; infinite for different shapes or NaN."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def with_hint(told: str, mistakes: Mapping[str, object], made: Callable[[object], bool]) -> str:
    """Return the sentence, with the first matching common mistake in brackets."""
    hint = next((said for said, mistake in mistakes.items() if made(mistake)), "")
    return f"{told} ({hint})" if hint else told


def equals(wanted: object, result: object) -> str:
    """Return a message if the result differs from the wanted result, else ""."""
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
