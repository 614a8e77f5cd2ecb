import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"it did not come to pass in {seconds} s"
        time.sleep(0.01)
