"""Tools around `bass_core`: measurement, checks, simulation, figures, lessons.

`__init__.pyi` lists the names. Names load on first use: importing torch takes seconds, and `bass --help` must be fast.
"""

import ast
from importlib import import_module
from pathlib import Path

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    found = import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
