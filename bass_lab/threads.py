"""Set torch's number of threads, and let waiting threads sleep if other programs use the CPUs.

A decode step has hundreds of short operations, and threads wait after each. On an idle machine, spinning is fastest.
Next to other programs, spinning takes CPU time from working threads, and decoding can become ten times slower.
OMP_WAIT_POLICY=PASSIVE must be set before torch is imported, too early for a notebook. GNU OpenMP (torch on Linux)
spins 1,000 turns instead of 300,000 if a process has more threads than the machine has CPUs (GOMP_SPINCOUNT).
This module therefore starts a second, idle team of threads. On other systems the idle team has no effect.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
BUSY = 0.5  # shortage of CPUs that makes threads wait often
# Relative speed at which one thread is chosen: idle machine, busy machine (a long decode is disturbed more often).
MARGIN, BESIDE = 1.3, 0.9
LOOK = 0.25  # seconds to measure other programs
PASS = 0.1  # seconds to time each number of threads
ROWS, WIDTH = 48, 192  # size of the timed layers: eight rows of six tokens, and the embedded pair's width
TICKS = Path("/proc/stat")


@dataclass(frozen=True)
class Choice:
    """Number of threads; busy: other programs use the CPUs, so that waiting threads sleep."""

    threads: int
    busy: bool
    sentence: str


def settle_threads(say: Callable[[str], None] = print) -> Choice | None:
    """Set torch's threads for the current load and report the choice. Return None if the user has set the threads."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = _before.get(torch.get_num_threads(), torch.get_num_threads())
    if settled_by_user(os.environ, threads, cpus):
        return None
    others = cpus_of_others(LOOK)
    _idle_team.keep(threads if threads > 1 and is_busy(threads, others, cpus) else 0)
    choice = choose(threads, others, cpus, speed)
    torch.set_num_threads(choice.threads)
    _before[choice.threads] = threads
    say(choice.sentence)
    return choice


def settled_by_user(environment: Mapping[str, str], threads: int, cpus: int) -> bool:
    """Return True if a variable of `SETTINGS` is set, or torch's thread count is not a default (CPUs or cores)."""
    return any(name in environment for name in SETTINGS) or threads not in (cpus, cpus // 2)


def is_busy(threads: int, others: float, cpus: int) -> bool:
    return threads + others - cpus > BUSY


def choose(threads: int, others: float, cpus: int, speed: Callable[[int], float]) -> Choice:
    """Choose all threads, or one thread if one is faster. speed: the speed of a number of threads, in any unit."""
    busy = is_busy(threads, others, cpus)
    how = "sleeping while waiting" if busy else "spinning while waiting"
    if threads == 1:
        how = "the only thread"
    elif speed(1) > (BESIDE if busy else MARGIN) * speed(threads):
        how, threads = f"faster here than {threads}", 1
    warning = ": times measured now are unreliable" if busy else ""
    return Choice(threads, busy, f"Threads: {threads}, {how}; other programs use {others:.1f} of {cpus} CPUs{warning}.")


def cpus_of_others(seconds: float) -> float:
    """Return the number of CPUs that other programs use, measured over `seconds`. Without /proc: the system load."""
    if not TICKS.exists():
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    start, own, ticks = time.monotonic(), time.process_time(), _busy_seconds()
    time.sleep(seconds)
    taken = time.monotonic() - start
    return max(0.0, (_busy_seconds() - ticks - (time.process_time() - own)) / taken)


def _busy_seconds() -> float:
    """Return the CPU seconds of all programs since boot, including time stolen by other virtual machines."""
    user, nice, system, _, _, irq, soft_irq, stolen = map(int, TICKS.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def speed(threads: int) -> float:
    """Return layers per second with `threads` threads. The layers are as short as the operations of a decode."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = (ROWS, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH)
        states, inwards, outwards = map(torch.ones, shapes)
        linear(states, inwards)  # starts the threads
        count, start = 0, time.monotonic()
        while (taken := time.monotonic() - start) < PASS:
            linear(silu(linear(states, inwards)), outwards) + states
            count += 1
        return count / taken
    finally:
        torch.set_num_threads(before)


class _IdleTeam:
    """A second team of OpenMP threads that stays idle."""

    def __init__(self):
        self._end: threading.Event | None = None

    def keep(self, threads: int) -> None:
        """Start a team of `threads` threads if none exists. 0 ends the team."""
        if threads and self._end is None:
            made, self._end = threading.Event(), threading.Event()
            arguments = (threads, made, self._end)
            threading.Thread(target=_be_a_team, args=arguments, name="idle OpenMP team", daemon=True).start()
            made.wait()
        elif not threads and self._end is not None:
            self._end.set()
            self._end = None


def _be_a_team(threads: int, made: threading.Event, end: threading.Event) -> None:
    torch.set_num_threads(threads)
    torch.ones(threads * 2**16).exp_()  # large enough for torch to use all threads
    made.set()
    end.wait()


_idle_team = _IdleTeam()
_before: dict[int, int] = {}  # thread count set here -> previous thread count
