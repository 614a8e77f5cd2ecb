"""Exercises of the lessons: `check_<name>(your_function)` compares it with a plain reference on random cases.

A check prints one line and returns whether the function is right: the stub (it raises NotImplementedError) is "not
solved yet", a wrong one is told the first case that it fails and what differs. What the function itself raises passes
through, after a line that names the case.
"""

from bass_lab.lessons.checking import relative_error
from bass_lab.lessons.l01_exercises import check_accept_or_recover, check_expected_tokens
from bass_lab.lessons.l02_exercises import check_keep, check_positions
from bass_lab.lessons.l03_exercises import check_alpha
from bass_lab.lessons.l04_exercises import check_algorithm_1, check_best_length
from bass_lab.lessons.l06_exercises import check_gaps, check_owner
from bass_lab.lessons.l07_exercises import check_cut, check_keys_needed, check_merge
from bass_lab.lessons.l08_exercises import check_floor, check_latencies
from bass_lab.lessons.l09_exercises import check_pass_at_first

__all__ = [
    "check_accept_or_recover",
    "check_algorithm_1",
    "check_alpha",
    "check_best_length",
    "check_cut",
    "check_expected_tokens",
    "check_floor",
    "check_gaps",
    "check_keep",
    "check_keys_needed",
    "check_latencies",
    "check_merge",
    "check_owner",
    "check_pass_at_first",
    "check_positions",
    "relative_error",
]
