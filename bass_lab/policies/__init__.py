"""Draft-length policies for comparison in the lessons. `Goodput` was at least as fast in the measurements."""

from bass_lab.policies.objective import Objective

__all__ = ["Objective"]
