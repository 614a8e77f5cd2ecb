"""Protect state changes against an interruption by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepRunning(RuntimeError):
    """Raised for a change of a session while a step of this session runs."""


@contextmanager
def always(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on exit, twice, in case a Ctrl-C interrupts the first call. action: must be idempotent."""
    try:
        try:
            yield
        finally:
            action()
    finally:
        action()


class Exclusive:
    """A lock held by one `holder` object at a time. Any thread may release the lock for the holder.

    Unlike `threading.Lock`, a holder interrupted by Ctrl-C in `acquire` can check `held_by`.
    """

    def __init__(self) -> None:
        self._holder: dict[str, object] = {}  # `setdefault` is atomic

    def acquire(self, holder: object) -> bool:
        """Return True if `holder` has the lock now, False if another holder has the lock."""
        return self._holder.setdefault("", holder) is holder

    def held_by(self, holder: object) -> bool:
        return self._holder.get("") is holder

    def release(self, holder: object) -> None:
        if self.held_by(holder):
            self._holder.clear()
