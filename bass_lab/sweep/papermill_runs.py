"""Runs of papermill in a folder: executed notebooks, with the records that each notebook wrote to `output`."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path

from bass_lab.sweep import parameters
from bass_lab.sweep.store import SWEEP, Run


def executed(folder: Path) -> list[Run]:
    """Return the notebooks that papermill executed under a folder, without those of sweeps.

    key: path in the folder, without ending. parameters: with defaults. files: the records, except files that several
    notebooks share. mark: status ("done", "failed" or "missing"), seconds, error. Raises ValueError for other files.
    """
    runs = []
    for path in sorted(folder.rglob("*.ipynb")):
        notebook, place = json.loads(path.read_text(encoding="utf-8")), path.relative_to(folder)
        told = notebook["metadata"].get("papermill", {})
        of_sweep = any((folder / above / SWEEP).exists() for above in place.parents)
        if of_sweep or "parameters" not in told or ".ipynb_checkpoints" in place.parts:
            continue
        chosen = dict(told["parameters"])
        with contextlib.suppress(ValueError):  # a notebook without declared parameters
            chosen = {p.name: p.default for p in parameters.of_notebook(notebook, path.name).values()} | chosen
        output, seconds = chosen.pop("output", ""), told.get("duration")
        errors = [each for cell in notebook["cells"] for each in cell.get("outputs", ()) if "ename" in each]
        mark = {"status": "missing"} if seconds is None else {"status": "done", "seconds": seconds}
        if errors:
            mark = {"status": "failed", "error": f"{errors[0]['ename']}: {errors[0]['evalue']}"}
        runs.append(Run(str(place.with_suffix("")), chosen, _records(path, output) if output else [], mark))
    shared = Counter(file for run in runs for file in run.files)
    return [Run(r.key, r.parameters, [file for file in r.files if shared[file] == 1], r.mark) for r in runs]


def _records(notebook: Path, output: str) -> list[Path]:
    """Return the files of `output`, a file or a folder. papermill does not store the working folder, so a relative path
    may start at any folder above the notebook. Moved files lie next to the notebook."""
    places = [*(above / output for above in notebook.absolute().parents), notebook.with_name(Path(output).name)]
    for place in filter(Path.exists, places):
        return sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]
    return []
