"""Sweeps: plan the runs of a notebook, and execute each run once.

A run's key is a hash of all inputs of the result: parameters, cells, code, models, files and costs. A second start
therefore executes only missing and changed runs. The machine is not part of the key; records name the machine.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bass_core.loading.measured_costs import cache_folder
from bass_core.loading.model_pair import ASSETS
from bass_core.loading.quantization import kind_of_copy
from bass_lab import drafters
from bass_lab.named_pairs import SHAPES
from bass_lab.sweep import parameters, run_process
from bass_lab.sweep.executors import LocalExecutor, RayExecutor
from bass_lab.sweep.parameters import Parameter
from bass_lab.sweep.store import Store, in_table, is_done
from bass_lab.texts import prompt_sets

MODELS = ("target", "draft")  # parameters that name models
OUTPUT = "output"  # parameter with the path of the records that a notebook writes
STOPPING = {  # outcomes that affect all other runs, with advice
    run_process.FULL: "free some space",
    run_process.CHANGED: "do not change the code while a sweep runs",
}
FINISHED = (run_process.DONE, "was done")  # statuses of runs with a result
AGAIN = "the same command continues with the missing runs"


class SweepStopped(Exception):
    """The sweep ended before all runs were tried. The message has the cause and advice."""

    def __init__(self, status: str, error: str):
        super().__init__(f"{status}: {error}; {STOPPING[status]}, and {AGAIN}")


@dataclass(frozen=True)
class SweepPlan:
    """A planned sweep. path: of the notebook; runs work in its folder. notebook: as JSON. runs: parameters by key.
    varied: names with several values. code: version of the code in the keys."""

    path: Path
    notebook: dict
    runs: dict[str, dict[str, Any]]
    varied: list[str]
    code: str
    cells: str  # version of the notebook's cells
    records: bool  # True if the notebook has the parameter `output`

    def job(self, key: str, timeout: float | None) -> dict:
        """Return the `job` argument of `RunProcess`."""
        return {
            "notebook": self.notebook,
            "parameters": self.runs[key],
            "cwd": str(self.path.parent.resolve()),
            "code": self.code,
            "output": self.records,
            "environment": {},
            "place": None,
            "timeout": timeout,
        }

    def shown(self, key: str) -> dict[str, Any]:
        """Return the varied parameters of a run, as text for tables."""
        return {name: in_table(self.runs[key][name]) for name in self.varied}

    def table(self, folder: Path) -> pd.DataFrame:
        """Return a line per run: key, varied parameters, and status ("done" if `folder` has the result)."""
        status = {key: "done" if is_done(folder, key) else "to run" for key in self.runs}
        return pd.DataFrame([{"run": key, **self.shown(key), "status": status[key]} for key in self.runs])


def plan(path: str | Path, values: Sequence[str] = (), rows: str | Path | None = None) -> SweepPlan:
    """Return the runs of a notebook: every combination of the values, for each row of a file if given.

    values: texts NAME=VALUE,VALUE,…. rows: a CSV or YAML file with the parameters of a run in each row. Raises
    ValueError for a wrong name or value, and for a model that cannot be found.
    """
    path = Path(path)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        known = parameters.of_notebook(notebook, path.name)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no notebook: {type(error).__name__}: {error}") from None
    output = known.pop(OUTPUT, None)
    grid = _grid(path.name, values, known)
    listed = _rows(path.name, Path(rows), known) if rows else [{}]
    if twice := [name for name in grid if any(name in row for row in listed)]:
        raise ValueError(f"{', '.join(twice)} is given both in {rows} and with -p; give it only once")
    defaults = {name: parameter.default for name, parameter in known.items()}
    product = [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*grid.values())]
    wanted = [defaults | row | chosen for row in listed for chosen in product]
    code, cells = run_process.code_version(), [["".join(c["source"]), c["cell_type"]] for c in notebook["cells"]]
    costs = [path.read_text(encoding="utf-8") for path in sorted(cache_folder().glob("*.json"))]
    always = [cells, code, _folder_hash(ASSETS), costs]
    models = {name: _model(name, path.parent) for run in wanted for name in map(run.get, MODELS) if name}
    runs = {}
    for run in wanted:
        chosen = [models[name] for name in map(run.get, MODELS) if name]
        runs[_hash([run, *always, chosen, _files(run, path.parent)])] = run
    varied = [name for name in defaults if len({json.dumps(run[name]) for run in wanted}) > 1]
    return SweepPlan(path, notebook, runs, varied or [*grid], code, _hash(cells), output is not None)


def _grid(title: str, values: Sequence[str], known: Mapping[str, Parameter]) -> dict[str, list]:
    grid = {}
    for text in values:
        name, equals, listed = text.partition("=")
        if not equals:
            raise ValueError(f"-p takes NAME=VALUE,VALUE,…; got {text!r}")
        if name in grid:
            raise ValueError(f"-p {name}=… was given twice; give all values in a single list, separated by commas")
        parameter = _parameter(title, name, known)
        grid[name] = [parameter.parse(value) for value in parameters.split(listed)]
    return grid


def _rows(title: str, file: Path, known: Mapping[str, Parameter]) -> list[dict]:
    """Return the parameters in each row of a file. Texts are parsed like the values of -p."""
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8-sig") as lines:  # spreadsheets may write a byte order mark
            rows = list(csv.DictReader(lines))
    elif file.suffix in (".yaml", ".yml"):
        import yaml

        try:
            rows = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is no YAML: {error}") from None
    else:
        raise ValueError(f"rows must be a .csv, .yaml or .yml file; got {file}")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} must hold at least one row, each a mapping from names to values")
    found = []
    for number, row in enumerate(rows, 1):
        try:
            if None in row or (None in row.values() and file.suffix == ".csv"):
                raise ValueError("the number of fields differs from the first line")
            own = {str(name): (_parameter(title, str(name), known), value) for name, value in row.items()}
            found.append({name: p.parse(v) if isinstance(v, str) else p.check(v) for name, (p, v) in own.items()})
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from None
    return found


def _parameter(title: str, name: str, known: Mapping[str, Parameter]) -> Parameter:
    """Return the parameter of that name. Raises ValueError for `output`, which the sweep sets."""
    if name == OUTPUT:
        raise ValueError(f"{OUTPUT} is set by the sweep, which collects the records of each run; use --output FOLDER")
    return parameters.known(title, name, known)


def _model(name: str, folder: Path) -> str:
    """Return the identity of a model or drafter, by the content of its files. Raises ValueError if it is not found."""
    ships = (ASSETS / name).is_dir() and not Path(name).is_absolute()
    if ships or name in SHAPES or drafters.named(name) or kind_of_copy(name):
        return name
    place = folder / name
    return _folder_hash(place) if place.is_dir() else f"{name}@{_revision(name)}"


def _files(run: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the hashes of files that parameters name. Raises ValueError for missing files of prompts or problems."""
    found = {}
    for name, value in run.items():
        if isinstance(value, str) and value and ((folder / value).is_file() or prompt_sets.is_file(value)):
            try:
                found[name] = hashlib.sha256((folder / value).read_bytes()).hexdigest()[:16]
            except OSError as error:
                said = f"the {name.replace('_', ' ')} {value!r} is no file next to the notebook: {error.strerror}"
                raise ValueError(said) from None
    return found


def _folder_hash(folder: Path) -> str:
    """Hash names, sizes and 128 parts (4 MiB in total) of each file of a checkpoint, without reading all weights."""
    digest, part = hashlib.sha256(), 2**15
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}".encode())
        with path.open("rb") as file:
            for at in dict.fromkeys(max(size - part, 0) * number // 127 for number in range(128)):
                file.seek(at)
                digest.update(file.read(part))
    return digest.hexdigest()[:16]


def _revision(name: str) -> str:
    """Return the commit of a hub model: the cached commit, or else the newest commit."""
    from huggingface_hub import model_info, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else model_info(name, timeout=10).sha
    except Exception as error:  # many types, from the hub and the network
        raise ValueError(
            f"the model {name!r} is no folder next to the notebook, not in the cache, and not found on the hub: {error}"
        ) from None


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def run(
    plan: SweepPlan,
    folder: str | Path,
    executor: LocalExecutor | RayExecutor,
    *,
    timeout: float | None = None,
    retries: int = 2,
    progress: Callable[[str, dict], None] = lambda key, line: None,
) -> pd.DataFrame:
    """Execute the missing runs of a plan. Return a line per run: varied parameters, status, seconds, attempts, error.

    status: "done" (in this call), "was done", or the reason for a missing result, with more in `details`. retries: for
    a run whose process died or did not start. Failing cells, and runs over `timeout` seconds, are not repeated.
    progress: called with the key and line of each run that has ended.

    Raises ValueError if the folder cannot be used, SweepStopped if no other run could succeed. Finished runs stay.
    """
    folder = Path(folder)
    lines: dict[str, dict] = {}

    def settle(key: str, line: dict) -> None:
        lines[key] = line
        progress(key, line)
        if line["status"] in STOPPING:
            raise SweepStopped(line["status"], line["error"])

    with _full_disk_stops(), Store(folder, plan.path.name, plan.runs) as store, executor:
        waiting, running, attempts = [], {}, dict.fromkeys(plan.runs, 0)
        for key in plan.runs:
            if key in store.done:
                settle(key, {"status": FINISHED[1]})
            else:
                waiting.append(key)
        while waiting or running:
            while waiting and len(running) < executor.jobs:
                key = waiting.pop(0)
                attempts[key] += 1
                running[key] = executor.start(plan.job(key, timeout), store.scratch(key, attempts[key]))
            outcomes = {key: outcome for key, each in running.items() if (outcome := each.outcome()) is not None}
            if not outcomes:
                time.sleep(run_process.PAUSE)
            for key, outcome in outcomes.items():
                scratch = running.pop(key).folder
                if outcome["status"] == run_process.DIED and attempts[key] <= retries:
                    shutil.rmtree(scratch, ignore_errors=True)
                    waiting.insert(0, key)
                else:
                    settle(key, _kept(plan, store, key, scratch, outcome | {"attempts": attempts[key]}))
    return pd.DataFrame([{"run": key, **plan.shown(key), **lines[key]} for key in plan.runs])


@contextmanager
def _full_disk_stops() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not run_process.is_full(error):
            raise
        raise SweepStopped(run_process.FULL, str(error)) from error


def _kept(plan: SweepPlan, store: Store, key: str, scratch: Path, line: dict) -> dict:
    """Store the files of a run's last attempt and return the run's line: a failure if the files are no result."""
    try:
        if line["status"] == run_process.DONE:
            mark = {"notebook": plan.path.name, "parameters": plan.runs[key], "code": plan.code, "cells": plan.cells}
            store.keep(key, scratch, mark | {name: line[name] for name in ("seconds", "attempts")})
            return line
    except ValueError as error:
        line |= {"status": run_process.FAILED, "error": str(error), "details": ""}
    report = f"{line['status']}: {line['error']}\n\n{line['details']}\n"
    return line | {"kept": str(store.keep_failed(key, scratch, report))}
