"""Evaluation of model-written programs on problems in HumanEval's format, also within a time budget."""

from bass_lab.evaluation.problems import Problem as Problem
from bass_lab.evaluation.problems import load_problems as load_problems
from bass_lab.evaluation.quality import METHODS as METHODS
from bass_lab.evaluation.quality import Evaluation as Evaluation
from bass_lab.evaluation.quality import compare as compare
from bass_lab.evaluation.quality import evaluate as evaluate
from bass_lab.evaluation.quality import load as load
from bass_lab.evaluation.sandbox import Grade as Grade
from bass_lab.evaluation.sandbox import SandboxUnavailable as SandboxUnavailable
from bass_lab.evaluation.sandbox import grade as grade
from bass_lab.evaluation.sandbox import grade_all as grade_all
from bass_lab.evaluation.sandbox import require_sandbox as require_sandbox
from bass_lab.evaluation.sandbox import sandbox_obstacle as sandbox_obstacle
