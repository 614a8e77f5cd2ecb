"""Exact conversion of values to JSON and back, across the sandbox. Only built-in types, without subclasses.

JSON's own types are used directly. An object such as `{"tuple": ...}` encodes any other type.
"""

from __future__ import annotations

MOST_DEPTH = 50
MOST_VALUES = 100_000  # also bounds cyclic values, and lists that repeat the same element
MOST_BITS = 100_000  # of an int
JSON_INT = 2**63  # larger ints are written in base 16, because Python reads long decimals slowly or not at all


def encode(value: object) -> object:
    """Return the value in JSON types, for `json.dumps`. Raises TypeError for other than built-in types, ValueError for
    values that are too deep, too large or cyclic."""
    return _encode(value, 0, _Count())


def decode(data: object) -> object:
    """Return the value that `encode` encoded, from `json.loads`. Raises ValueError or TypeError for other data."""
    return _decode(data, 0, _Count())


class _Count:
    def __init__(self) -> None:
        self.values = 0

    def another(self, depth: int) -> None:
        self.values += 1
        if depth > MOST_DEPTH or self.values > MOST_VALUES:
            raise ValueError(f"nested deeper than {MOST_DEPTH}, cyclic, or more than {MOST_VALUES} values")


def _encode(value: object, depth: int, count: _Count) -> object:
    count.another(depth)
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        if value.bit_length() > MOST_BITS:
            raise ValueError(f"an int of more than {MOST_BITS} bits")
        return value if -JSON_INT < value < JSON_INT else {"int": hex(value)}
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # half a surrogate pair: JSON would join two halves
            return {"str": value.encode("utf-8", "surrogatepass").hex()}
        return value
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is dict:
        pairs = list(value.items())
        return {"dict": [[_encode(part, depth + 1, count) for part in pair] for pair in pairs]}
    if kind in (list, tuple, set, frozenset):
        parts = [_encode(part, depth + 1, count) for part in value]
        return parts if kind is list else {kind.__name__: parts}
    raise TypeError(f"{kind.__name__} is not one of the built-in types that can cross the sandbox")


def _decode(data: object, depth: int, count: _Count) -> object:
    count.another(depth)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [_decode(part, depth + 1, count) for part in data]
    ((name, inner),) = data.items()  # ValueError unless there is exactly one pair
    if name in ("int", "str", "bytes"):
        return _from_hex(name, inner)
    if not isinstance(inner, list):
        raise ValueError(f"{name} without a list")
    if name == "complex":
        real, imaginary = inner
        if type(real) is not float or type(imaginary) is not float:
            raise ValueError("complex without two floats")
        return complex(real, imaginary)
    if name == "dict":
        # TypeError for an unhashable key
        return {_decode(key, depth + 1, count): _decode(part, depth + 1, count) for key, part in inner}
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if name not in kinds:
        raise ValueError(f"there is no type {name!r:.40}")
    return kinds[name](_decode(part, depth + 1, count) for part in inner)


def _from_hex(name: str, text: object) -> int | str | bytes:
    if not isinstance(text, str):
        raise ValueError(f"{name} without text")
    if name == "int":
        if len(text) > MOST_BITS // 4 + 4:
            raise ValueError(f"an int of more than {MOST_BITS} bits")
        return int(text, 16)
    raw = bytes.fromhex(text)
    return raw if name == "bytes" else raw.decode("utf-8", "surrogatepass")
