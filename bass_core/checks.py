"""Check arguments, and values from callers and files. Errors name the value and the accepted values."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Kinds = dict[str, type | tuple[type, ...]]  # accepted types by name of the field
F = TypeVar("F", bound=Callable[..., Any])
ARGUMENTS: dict[str, set[str]] = {}  # names of the arguments of functions with `names_arguments`
INSTEAD = {  # arguments of other libraries
    "do_sample": "temperature=… (0 is greedy)", "n": "num_return_sequences=…", "max_tokens": "max_new_tokens=…",
    "max_length": "max_new_tokens=… (without the prompt)", "stop_strings": "stop=…", "device_map": "device=…",
    **dict.fromkeys(("min_tokens", "min_new_tokens"), "processors=[bass.MinTokens(n)]"), "torch_dtype": "dtype=…",
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "processors=[bass.Penalties(…)]"),
    "logit_bias": "processors=[bass.Bias({id: value})]", "logits_processor": "processors=[…]",
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), "draft_length=…"),
    "batch_size": "max_batch_size=…", "stop_token_ids": "eos_token_id=[…]", "assistant_model": "draft=…",
    "draft_model": "draft=…", "streamer": "use bass.stream(pair, prompts)",
    "tokenizer": "use ModelPair(target, draft, tokenizer=…)", "num_beams": "beam search is not supported",
}  # fmt: skip


def names_arguments(function: F) -> F:
    """Let the TypeError for an unknown argument name the argument to use. `**options` are those of `stream`."""
    name = function.__qualname__.removesuffix(".__init__")
    known = ARGUMENTS[name] = set(inspect.signature(function).parameters)
    if "options" in known:
        known |= ARGUMENTS["Session"] | ARGUMENTS["stream"]

    @functools.wraps(function)
    def checked(*given, **options):
        for wrong in options.keys() - known:
            raise TypeError(f"{name}() has no argument {wrong!r}; {_instead(wrong, known)}")
        return function(*given, **options)

    return checked


def _instead(wrong: str, known: set[str]) -> str:
    wanted = INSTEAD.get(wrong, f"{wrong}=…")
    argument = wanted.partition("=")[0]
    if argument in known:
        return f"set {wanted}"
    for name, arguments in ARGUMENTS.items():
        if argument in arguments:
            return f"pass {wanted} to {name}()"
    close = difflib.get_close_matches(wrong, known, 1) or ["one of " + ", ".join(sorted(known))]
    return wanted if wrong in INSTEAD else f"did you mean {close[0]}?"


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
