"""Exercises of lesson 06: kernel timelines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from bass_lab.lessons.checking import Case, check, equals

Interval = tuple[int, int]


def check_gaps(gaps: Callable) -> bool:
    """Check gaps(intervals) -> total idle time between the first start and the last end.

    intervals: list of (start, end) in any order. Intervals may overlap, touch, or contain each other. No interval: 0.
    """
    return check(gaps, _gap_cases())


def _gap_cases() -> Iterator[Case]:
    chance = random.Random(6)
    drawn = [
        ("nothing runs", []),
        ("one interval", [(3, 8)]),
        ("a gap of 2", [(0, 4), (6, 9)]),
        ("no gap: intervals touch", [(0, 4), (4, 9)]),
        ("intervals overlap", [(0, 5), (3, 9), (10, 11)]),
        ("a long interval contains a short one", [(0, 9), (2, 3), (10, 12)]),
        ("not in order", [(6, 9), (0, 4)]),
    ]
    for number in range(200):
        starts = [chance.randint(0, 60) for _ in range(chance.randint(1, 12))]
        drawn.append((f"random case {number}", [(start, start + chance.randint(1, 12)) for start in starts]))
    for name, intervals in drawn:
        yield f"{name}: {intervals}", (list(intervals),), partial(equals, _idle(intervals))


def _idle(intervals: list[Interval]) -> int:
    running = {moment for start, end in intervals for moment in range(start, end)}
    return max(running) + 1 - min(running) - len(running) if running else 0


def check_owner(owner: Callable) -> bool:
    """Check owner(kernels, launches, ranges) -> list with the phase that launched each kernel, or None.

    kernels: list of (correlation, start on the GPU). launches: dict from correlation to launch time on the host.
    ranges: list of (phase, start, end) on the host, in order, without overlap. A range contains its start, but not its
    end. A kernel without a recorded launch has no phase.
    """
    return check(owner, _owner_cases())


def _owner_cases() -> Iterator[Case]:
    chance = random.Random(6)
    two = [("draft", 0, 10), ("verify", 10, 30)]
    drawn = [
        ("one kernel", [(7, 5)], {7: 3}, two),
        ("the kernel runs during the next phase", [(7, 14)], {7: 3}, two),
        ("launched as the next phase begins", [(7, 14)], {7: 10}, two),
        ("launched after the last phase", [(7, 40)], {7: 35}, two),
        ("launched between two phases", [(7, 22)], {7: 12}, [("draft", 0, 10), ("verify", 20, 30)]),
        ("the launch was not recorded", [(7, 5)], {}, two),
        ("a CUDA graph: three kernels of one launch", [(7, 8), (7, 11), (7, 19)], {7: 4}, two),
        ("nothing ran", [], {}, two),
    ]
    for number in range(200):
        ranges, at = [], 0
        for _ in range(chance.randint(1, 3)):
            for phase in ("draft", "verify", "commit"):
                at += chance.choice([0, 0, 2])
                ranges.append((phase, at, at + chance.randint(2, 9)))
                at = ranges[-1][2]
        launches = {correlation: chance.randint(0, at + 3) for correlation in range(6)}
        kernels = [(chance.choice([*launches, 9]), chance.randint(0, at + 9)) for _ in range(8)]
        drawn.append((f"random case {number}", kernels, launches, ranges))
    for name, kernels, launches, ranges in drawn:
        wanted = [
            next((phase for phase, start, end in ranges if start <= launches.get(number, -1) < end), None)
            for number, _ in kernels
        ]
        about = f"{name}: kernels {kernels}, launches {launches}, ranges {ranges}"
        yield about, (list(kernels), dict(launches), list(ranges)), partial(equals, wanted)
