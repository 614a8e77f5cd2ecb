"""Drafters for comparison in the lessons. None won in the project's measurements."""

from bass_core import drafters
from bass_core.drafters import Drafter
from bass_lab.drafters.layer_skip import LayerSkipDrafter


def named(name: object) -> Drafter | None:
    """Return the drafter for "ngram", "suffix" or "layers:N" (the target's first N layers), else None."""
    count = name.removeprefix("layers:") if isinstance(name, str) and name.startswith("layers:") else ""
    return LayerSkipDrafter(int(count)) if count.isdecimal() else drafters.named(name)
