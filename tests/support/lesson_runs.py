"""What tests of several lessons do: try an exercise, run a notebook with other parameters, find Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def accepted_and_stub_is_not(check: Callable, solution: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that the check of an exercise takes the solution, and answers a stub with "Not solved yet."."""
    assert check(solution)
    out = capsys.readouterr().out
    assert out.startswith("Right: "), out

    def stub(*_):
        raise NotImplementedError

    assert not check(stub)
    out = capsys.readouterr().out
    assert out == "Not solved yet.\n", out


def refused(check: Callable, attempt: Callable, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that the check of an exercise tells a wrong attempt the first case that it fails, with this message."""
    assert not check(attempt)
    out = capsys.readouterr().out
    assert out.startswith("Not right. Case ") and message in out, out


def execute(name: str, folder: Path, /, **parameters) -> nbformat.NotebookNode:
    """The notebook of that name (no ending) as it is after a run with these parameters; `folder` gets a copy."""
    return _papermill(name, folder / "out.ipynb", parameters, cwd=NOTEBOOKS, store_widget_state=False)


def parameterized(name: str, folder: Path, /, **parameters) -> nbformat.NotebookNode:
    """The notebook of that name with these parameters, not yet run; `folder` gets a copy of the same name."""
    return _papermill(name, folder / f"{name}.ipynb", parameters, prepare_only=True)


def _papermill(name: str, copy: Path, parameters: dict, **options) -> nbformat.NotebookNode:
    import papermill  # here: exercises are tested without the packages that run notebooks, too

    return papermill.execute_notebook(
        NOTEBOOKS / f"{name}.ipynb", copy, parameters=parameters, progress_bar=False, **options
    )


def chromium() -> str:
    """The machine's Chromium. Skips the test where there is none, but not in CI, which installs it."""
    found = shutil.which("chromium")
    if found is None:
        assert not os.environ.get("CI"), "CI installs chromium: this test may not be skipped there"
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    return found
