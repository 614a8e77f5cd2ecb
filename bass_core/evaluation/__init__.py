"""Is what a model writes right? Problems in HumanEval's format, and how many of them are solved."""

from bass_core.evaluation.problems import Problem, load_problems
from bass_core.evaluation.sandbox import Grade, SandboxUnavailable, grade, grade_all, require_sandbox

__all__ = [
    "Grade",
    "Problem",
    "SandboxUnavailable",
    "grade",
    "grade_all",
    "load_problems",
    "require_sandbox",
]
