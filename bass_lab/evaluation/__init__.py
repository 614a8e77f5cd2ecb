"""Is what a model writes right, and right in time? Problems in HumanEval's format, and how many of them are solved."""

from bass_lab.evaluation.problems import Problem, load_problems
from bass_lab.evaluation.quality import METHODS, Evaluation, compare, evaluate, load
from bass_lab.evaluation.sandbox import Grade, SandboxUnavailable, grade, grade_all, require_sandbox, sandbox_obstacle

__all__ = [
    "METHODS",
    "Evaluation",
    "Grade",
    "Problem",
    "SandboxUnavailable",
    "compare",
    "evaluate",
    "grade",
    "grade_all",
    "load",
    "load_problems",
    "require_sandbox",
    "sandbox_obstacle",
]
