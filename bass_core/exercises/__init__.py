"""Exercises of the lessons: `check_<name>(your_function)` compares it with a plain reference on random cases.

A check prints one line and returns whether the function is right: the stub (it raises NotImplementedError) is "not
solved yet", a wrong one is told the first case that it fails and what differs. What the function itself raises passes
through, after a line that names the case.
"""

from bass_core.exercises.acceptance import check_alpha
from bass_core.exercises.checking import relative_error
from bass_core.exercises.draft_length import check_algorithm_1, check_best_length
from bass_core.exercises.kernels import check_cut, check_keys_needed, check_merge
from bass_core.exercises.latency import check_floor, check_latencies
from bass_core.exercises.quality import check_pass_at_first
from bass_core.exercises.ragged import check_keep, check_positions
from bass_core.exercises.speculation import check_accept_or_recover, check_expected_tokens
from bass_core.exercises.timelines import check_gaps, check_owner

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
