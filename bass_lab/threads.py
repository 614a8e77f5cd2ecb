"""How many threads torch uses and how they wait, by what other programs leave of the machine.

A decode step is hundreds of short operations, after each of which threads wait. On an idle machine they had best spin;
beside other programs spinning takes the CPU from the thread that is waited for, and decoding may be ten times slower
than with threads that sleep. OMP_WAIT_POLICY=PASSIVE is read when torch is imported, too early for a notebook. OpenMP
of GNU, which torch has on Linux, spins 1,000 turns instead of 300,000 once a process has more threads than the machine
has CPUs (GOMP_SPINCOUNT), so a second, idle team of threads is made. Elsewhere the team changes nothing.
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
BUSY = 0.5  # CPUs missing to our threads beside other programs; above this, some often wait for one
MARGIN, BESIDE = 1.3, 0.9  # how much faster one thread has to be on an idle machine, and beside other programs: there
# a decode, which is longer, meets them more often than what is timed here
LOOK = 0.25  # seconds to watch the others
PASS = 0.1  # seconds to compute with each number of threads
ROWS, WIDTH = 48, 192  # of what is computed: eight rows of six tokens, in layers as short as the embedded pair's
TICKS = Path("/proc/stat")


@dataclass(frozen=True)
class Choice:
    """How many threads; whether other programs keep the machine busy, so that ours sleep while they wait."""

    threads: int
    busy: bool
    sentence: str


def settle_threads(say: Callable[[str], None] = print) -> Choice | None:
    """Set torch's threads by what other programs leave, and say so. None where the user has settled it."""
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
    """Whether a variable is set, or the number of torch's threads is none that it starts with: of CPUs, or of cores."""
    return any(name in environment for name in SETTINGS) or threads not in (cpus, cpus // 2)


def is_busy(threads: int, others: float, cpus: int) -> bool:
    return threads + others - cpus > BUSY


def choose(threads: int, others: float, cpus: int, speed: Callable[[int], float]) -> Choice:
    """Return all threads, or one where that is faster. speed: how fast so many threads are, in any unit."""
    busy = is_busy(threads, others, cpus)
    how = "asleep while they wait" if busy else "awake while they wait"
    if threads == 1:
        how = "with no other to wait for"
    elif speed(1) > (BESIDE if busy else MARGIN) * speed(threads):
        how, threads = f"faster here than {threads}", 1
    warning = ": times measured now say little" if busy else ""
    return Choice(threads, busy, f"Threads: {threads}, {how}; other programs use {others:.1f} of {cpus} CPUs{warning}.")


def cpus_of_others(seconds: float) -> float:
    """How many CPUs everybody else uses, watched for so long. Where the system does not tell: its load."""
    if not TICKS.exists():
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    start, own, ticks = time.monotonic(), time.process_time(), _busy_seconds()
    time.sleep(seconds)
    taken = time.monotonic() - start
    return max(0.0, (_busy_seconds() - ticks - (time.process_time() - own)) / taken)


def _busy_seconds() -> float:
    """CPU time of all programs since the start, and what other virtual machines took meanwhile."""
    user, nice, system, _, _, irq, soft_irq, stolen = map(int, TICKS.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def speed(threads: int) -> float:
    """Layers per second with so many threads: a decode's operations are as short, and threads meet after each."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = (ROWS, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH)
        states, inwards, outwards = map(torch.ones, shapes)
        linear(states, inwards)  # which starts the threads
        count, start = 0, time.monotonic()
        while (taken := time.monotonic() - start) < PASS:
            linear(silu(linear(states, inwards)), outwards) + states
            count += 1
        return count / taken
    finally:
        torch.set_num_threads(before)


class _IdleTeam:
    """A second team of OpenMP's threads that does nothing but exist."""

    def __init__(self):
        self._end: threading.Event | None = None

    def keep(self, threads: int) -> None:
        """A team of so many threads from now on, unless there is one; none if 0."""
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
    torch.ones(threads * 2**16).exp_()  # long enough for torch to share it out
    made.set()
    end.wait()


_idle_team = _IdleTeam()
_before: dict[int, int] = {}  # by the number of threads that we set, the number that there was
