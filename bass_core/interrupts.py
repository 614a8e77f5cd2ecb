"""State that a Ctrl-C must not leave half changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def always(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on the way out, and again in case a Ctrl-C falls into the first call. action: may be repeated."""
    try:
        try:
            yield
        finally:
            action()
    finally:
        action()


class Exclusive:
    """A lock that is held by one `holder` at a time, and that anybody may release in that holder's name.

    Unlike `threading.Lock`, a holder that a Ctrl-C interrupts while it acquires the lock can still tell whether it has.
    """

    def __init__(self) -> None:
        self._holder: dict[str, object] = {}  # `setdefault` is atomic

    def acquire(self, holder: object) -> bool:
        """Return True if `holder` has the lock now, False if another one has it."""
        return self._holder.setdefault("", holder) is holder

    def held_by(self, holder: object) -> bool:
        return self._holder.get("") is holder

    def release(self, holder: object) -> None:
        if self.held_by(holder):
            self._holder.clear()
