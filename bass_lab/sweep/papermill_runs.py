"""Runs of papermill in a folder: executed notebooks, with the records that each notebook wrote to `output`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from bass_lab.sweep import parameters
from bass_lab.sweep.store import SWEEP, Run


def executed(folder: Path) -> Iterator[Run]:
    """Yield the notebooks that papermill executed under a folder, in the order of their paths, without those of sweeps.

    key: path in the folder, without ending. parameters: with defaults, without `output`. files: the records, empty if
    the notebook wrote no records. mark: status ("done", "failed" or "missing"), seconds or error.
    """
    for path in sorted(folder.rglob("*.ipynb")):
        above = path.relative_to(folder).parents
        if path.parent.name == ".ipynb_checkpoints" or any((folder / parent / SWEEP).exists() for parent in above):
            continue
        try:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            told = notebook["metadata"].get("papermill", {})
            errors = [each for cell in notebook["cells"] for each in cell.get("outputs", ()) if "ename" in each]
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no notebook: {type(error).__name__}: {error}") from None
        if "parameters" not in told:
            continue
        chosen = {}
        with contextlib.suppress(ValueError):  # a notebook without declared parameters
            chosen = {name: each.default for name, each in parameters.of_notebook(notebook, path.name).items()}
        chosen |= told["parameters"]
        output = chosen.pop("output", "")
        files = _records(path, output) if output else []
        mark = {"status": "missing"}  # interrupted, or still running
        if errors:
            mark = {"status": "failed", "error": f"{errors[0]['ename']}: {errors[0]['evalue']}"}
        elif told.get("duration") is not None:
            mark = {"status": "done", "seconds": told["duration"]}
        yield Run(str(path.relative_to(folder).with_suffix("")), chosen, files, mark)


def _records(notebook: Path, output: str) -> list[Path]:
    """Return the files of `output`, a file or a folder. papermill does not store the working folder, so a relative path
    may start at any folder above the notebook. Moved files lie next to the notebook."""
    places = [*(parent / output for parent in notebook.resolve().parents), notebook.with_name(Path(output).name)]
    for place in filter(Path.exists, places):
        return sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]
    return []
