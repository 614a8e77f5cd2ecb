"""Draft-length policies for comparison in the lessons. None beat `Goodput` in the project's measurements."""

from bass_lab.policies.objective import Objective
from bass_lab.policies.ragged_budget import RaggedBudget

__all__ = ["Objective", "RaggedBudget"]
