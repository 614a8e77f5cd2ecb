"""What the tests of several lessons do: try the check of an exercise, run a notebook with other parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import nbformat

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


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
    import papermill  # here: exercises are tested without the packages that run notebooks, too

    return papermill.execute_notebook(
        NOTEBOOKS / f"{name}.ipynb",
        folder / "out.ipynb",
        parameters=parameters,
        cwd=NOTEBOOKS,
        progress_bar=False,
        store_widget_state=False,
    )
