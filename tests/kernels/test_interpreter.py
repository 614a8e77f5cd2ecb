"""Interpreted tests of the kernels around attention. test_interpreter_attention.py runs the others in parallel."""

import interpreter_run
import pytest
from test_interpreter_attention import ATTENTION

AROUND = interpreter_run.files() - ATTENTION


@pytest.mark.parametrize(("which", "least"), [("not slow", 120), pytest.param("slow", 1, marks=pytest.mark.slow)])
def test_kernels_around_attention_pass_in_the_interpreter(which, least):
    assert interpreter_run.passed(AROUND, which) > least
