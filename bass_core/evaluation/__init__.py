"""Is what a model writes right? Problems in HumanEval's format, and how many of them are solved."""

from bass_core.evaluation.problems import Problem, load_problems

__all__ = ["Problem", "load_problems"]
