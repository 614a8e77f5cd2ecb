"""Lock files and folders for a single process. The system releases a lock when the process ends for any reason."""

from __future__ import annotations


def lock(descriptor: int, *, wait: bool = True) -> None:
    """Lock an open file or folder for this process until the descriptor is closed.

    wait: wait for a process that holds the lock; otherwise raise BlockingIOError. Raises OSError on Windows.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("file locks need Linux or macOS; on Windows, run this in WSL") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
