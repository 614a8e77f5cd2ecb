"""Interpreted tests of attention, and of generation over all kernels."""

import interpreter_run
import pytest

ATTENTION = {"attention", "generate"}


@pytest.mark.parametrize(("which", "least"), [("not slow", 60), pytest.param("slow", 5, marks=pytest.mark.slow)])
def test_attention_passes_in_the_interpreter(which, least):
    assert interpreter_run.passed(ATTENTION, which) > least
