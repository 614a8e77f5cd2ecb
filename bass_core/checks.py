"""Check values from callers and files. Errors name the value and the accepted values."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

Kinds = dict[str, type | tuple[type, ...]]  # accepted types by name of the field


def integer(name: str, value: Any, least: int | None = 0) -> int:
    """Return `value` as a 64-bit int >= `least` (None: no limit). Raises TypeError (also for bool) or ValueError."""
    try:
        number = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be >= {least}, got {number}")
    if not -(2**63) <= number < 2**63:  # range of int64 tensors
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


def seconds(name: str, value: Any) -> float:
    """Return `value` as a number of seconds >= 0. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not value >= 0 or math.isnan(value):
        raise ValueError(f"{name} must be >= 0 seconds, got {value!r}")
    return float(value)


def one_of(name: str, value: Any, accepted: Iterable[str]) -> str:
    """Return `value` if the name is accepted. Raises ValueError otherwise."""
    accepted = tuple(accepted)
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")
    return value


def check_fields(line: dict, fields: Kinds, positive: Sequence[str]) -> None:
    """Raise ValueError for a field that is missing, of the wrong type, infinite or not positive."""
    if not isinstance(line, dict):
        raise ValueError(f"a record must be a JSON object, got {type(line).__name__}")
    for name, kind in fields.items():
        if name not in line:
            raise ValueError(f"the field {name!r} is missing")
        value, kinds = line[name], kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{name} must be {_names(kinds)}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
    for name in positive:
        if line[name] is not None and line[name] <= 0:
            raise ValueError(f"{name} must be positive, got {line[name]!r}")


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if one is type(None) else one.__name__ for one in kinds)
