"""What the tests of several lessons do: try the check of an exercise, run a notebook with other parameters."""

from __future__ import annotations

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
