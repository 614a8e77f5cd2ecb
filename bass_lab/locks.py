"""Files and folders that one process writes at a time. A lock goes with its process, however that ends."""

from __future__ import annotations


def lock(descriptor: int, *, wait: bool = True) -> None:
    """Hold an open file or folder for this process alone, until it is closed.

    wait: for another that holds it; else raises BlockingIOError. Raises OSError where the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(
            "what is written here has to be locked against other processes, which takes Linux or macOS: on Windows, "
            "run this in WSL"
        ) from None
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
