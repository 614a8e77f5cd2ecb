"""Draft-length policies for comparison in the lessons. None beat `Goodput` in the project's measurements."""

from bass_lab.policies.objective import Objective

__all__ = ["Objective"]
