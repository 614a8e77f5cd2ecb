"""Draft-length policies for comparison in the lessons. None beat `Goodput` in the project's measurements."""

from bass_lab.policies.learned import Learned
from bass_lab.policies.marginal_value import MarginalValue
from bass_lab.policies.objective import Objective
from bass_lab.policies.ragged_budget import RaggedBudget

__all__ = ["Learned", "MarginalValue", "Objective", "RaggedBudget"]
