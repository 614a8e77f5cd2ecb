"""Start minimal Python processes for a module of this folder: no site packages, no environment, no `bass_core`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
START = "import sys; sys.path.append({here!r}); import {module}; sys.path.remove({here!r}); {module}.main{arguments!r}"


def start(module: str) -> tuple[subprocess.Popen, int, int]:
    """Run `module.main(read, write, this process's id)` in a new session. Return (process, our read, our write end).

    The process has an empty environment and only the descriptors of two pipes and /dev/null.
    """
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    try:
        code = START.format(here=HERE, module=module, arguments=(their_read, their_write, os.getpid()))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(their_read, their_write),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(our_read)
        os.close(our_write)
        raise
    finally:
        os.close(their_read)
        os.close(their_write)
    return process, our_read, our_write


def stop(process: subprocess.Popen) -> int:
    """Kill a running process and its group, reap the process, and return the exit status (negative for a signal)."""
    if process.returncode is None:  # not reaped, so the id still belongs to this process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
