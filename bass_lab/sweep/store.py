"""The folder of a sweep, safe against kills and full disks.

    sweep.json                   the plan: name of the notebook, key and parameters of every run
    KEY/notebook.ipynb           the executed notebook
    KEY/records.jsonl            the records written to `output` (or a folder `records`)
    KEY/done.json                the mark, written last: parameters, seconds, hashes of the files
    failed/KEY/                  the files of a failed run, with error.txt and without mark

A run works in a folder of its own under `.scratch`. After success, the files are synced, the folder is renamed to the
key, and the mark is written. Without the mark, or if a file no longer matches the mark, there is no result: the next
start removes the folder and repeats the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bass_lab.locks import lock
from bass_lab.sweep.run_process import NOTEBOOK, RECORDS

SWEEP, MARK, SCRATCH, FAILED = "sweep.json", "done.json", ".scratch", "failed"
AUTO = "auto"  # None on the command line and in tables: the library decides


@dataclass(frozen=True)
class Run:
    """A run of a sweep or papermill. files: paths of the records. mark: content of `done.json`, or status and time."""

    key: str
    parameters: dict[str, Any]
    files: list[Path]
    mark: dict[str, Any]


class Store:
    """The folder of a sweep, created if missing and locked by this process until the store is closed.

    notebook: name. runs: parameters by key; a run replaces an earlier run with the same parameters. done: keys of the
    runs with a result. Raises ValueError, and changes nothing, if the folder is locked or is of another notebook.
    """

    def __init__(self, folder: Path, notebook: str, runs: Mapping[str, dict]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            lock(self._lock, wait=False)
            self._begin(notebook, runs)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise ValueError(f"another sweep is writing {folder}; wait, or give another folder") from None
            raise

    def _begin(self, notebook: str, runs: Mapping[str, dict]) -> None:
        asked = {"notebook": notebook, "runs": {}}
        if (self.folder / SWEEP).exists():
            asked = read_sweep(self.folder)
        elif any(self.folder.glob("[!.]*")):
            raise ValueError(f"{self.folder} holds other files and no sweep; give an empty or new folder")
        if asked["notebook"] != notebook:
            raise ValueError(f"{self.folder} is a sweep of {asked['notebook']}, not of {notebook}; give another folder")
        kept = {
            key: own for key, own in asked["runs"].items() if not any(_stands_for(new, own) for new in runs.values())
        }
        _write(self.folder / SWEEP, asked | {"runs": kept | dict(runs)})
        self.done = {key for key in runs if is_done(self.folder, key)}
        for name in {SCRATCH, *runs} - self.done:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def scratch(self, key: str, attempt: int) -> Path:
        """Make an empty folder for an attempt at a run."""
        path = self.folder / SCRATCH / f"{key}-{attempt}-{os.getpid()}"
        path.mkdir(parents=True)
        return path

    def keep(self, key: str, scratch: Path, mark: Mapping[str, Any]) -> None:
        """Make the files of a successful attempt the run's result. Raises ValueError for a record that is not JSON."""
        records = scratch / RECORDS
        if records.is_file():
            records.rename(records.with_suffix(".jsonl"))
        hashes = {str(path.relative_to(scratch)): _checked_hash(path) for path in sorted(scratch.rglob("*.jsonl"))}
        executed = _hash(scratch / NOTEBOOK)
        self._move(scratch, self.folder / key)
        _write(self.folder / key / MARK, {"key": key, **mark, "records": hashes, "executed": executed})
        shutil.rmtree(self.folder / FAILED / key, ignore_errors=True)

    def keep_failed(self, key: str, scratch: Path, error: str) -> Path:
        """Keep the files of a failed attempt, with the error. Return their folder."""
        (scratch / "error.txt").write_text(error, encoding="utf-8")
        place = self.folder / FAILED / key
        place.parent.mkdir(exist_ok=True)
        self._move(scratch, place)
        return place

    def _move(self, scratch: Path, place: Path) -> None:
        for path in [*scratch.rglob("*"), scratch]:
            _sync(path)
        shutil.rmtree(place, ignore_errors=True)
        scratch.rename(place)
        _sync(place.parent)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc) -> None:
        """Release the folder, and remove the files of unfinished runs."""
        shutil.rmtree(self.folder / SCRATCH, ignore_errors=True)
        os.close(self._lock)


def _stands_for(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Return True if a run replaces an earlier run: the parameters in both runs have equal values."""
    return all(new[name] == value for name, value in old.items() if name in new)


def is_done(folder: Path, key: str) -> bool:
    """Return True if a sweep's folder has the unchanged result of a run."""
    place = folder / key
    try:
        mark = _checked_mark(place)
        return mark.get("executed") == _hash(place / NOTEBOOK)
    except (OSError, ValueError):
        return False


def read_sweep(folder: Path) -> dict:
    """Return the plan in a sweep's folder: `notebook` (name) and `runs` (parameters by key). Raises ValueError."""
    path = folder / SWEEP
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"notebook": str(found["notebook"]), "runs": dict(found["runs"])}
    except FileNotFoundError:
        raise ValueError(f"{folder} is no sweep: {SWEEP} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of `bass sweep`: {type(error).__name__}: {error}") from None


def finished_runs(folder: Path) -> Iterator[Run]:
    """Yield the finished runs of a sweep, in the order of the plan. Raises ValueError for another folder or a changed
    record."""
    for key, parameters in read_sweep(folder)["runs"].items():
        place = folder / key
        if (place / MARK).exists():
            mark = _checked_mark(place)
            yield Run(key, parameters, [place / name for name in mark["records"]], mark)


def executed(folder: Path) -> list[Run]:
    """Return the notebooks that papermill executed under a folder, without those of sweeps. A file that several
    notebooks share belongs to no run.

    key: path in the folder, without ending. mark: status ("done", "failed" or "missing"), seconds, error. papermill
    does not store the working folder: a relative `output` may start at any folder above the notebook, and a moved
    output lies next to the notebook.
    """
    runs = []
    for path in sorted(folder.rglob("*.ipynb")):
        notebook, place = json.loads(path.read_text(encoding="utf-8")), path.relative_to(folder)
        told = notebook["metadata"].get("papermill", {})
        of_sweep = any((folder / above / SWEEP).exists() for above in place.parents)
        if of_sweep or "parameters" not in told or ".ipynb_checkpoints" in place.parts:
            continue
        chosen = dict(told["parameters"])
        output = Path(chosen.pop("output", ""))
        places = [above / output for above in path.absolute().parents] + [path.parent / output.name]
        files = [place for place in places if output.name and place.exists()][:1]
        errors = [each for cell in notebook["cells"] for each in cell.get("outputs", ()) if "ename" in each]
        seconds = told.get("duration")
        mark = {"status": "missing"} if seconds is None else {"status": "done", "seconds": seconds}
        if errors:
            mark = {"status": "failed", "error": f"{errors[0]['ename']}: {errors[0]['evalue']}"}
        runs.append(Run(str(place.with_suffix("")), chosen, files, mark))
    shared = Counter(file for run in runs for file in run.files)
    return [replace(run, files=[file for file in run.files if shared[file] == 1]) for run in runs]


def _checked_mark(place: Path) -> dict[str, Any]:
    """Return the mark of a finished run. Raises ValueError for a wrong mark, or a record that does not match it."""
    advice = "it was changed or lost afterwards; repeat the run with the sweep's own command"
    try:
        mark = json.loads((place / MARK).read_text(encoding="utf-8"))
        records = dict(mark["records"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{place / MARK} is not what the sweep wrote: {advice}") from None
    for name, digest in records.items():
        if not (place / name).is_file() or _hash(place / name) != digest:
            raise ValueError(f"{place / name} is not what the run wrote: {advice}")
    return mark


def in_table(value: Any) -> Any:
    """Return a parameter's value for tables: None as `AUTO`, a list or mapping as JSON."""
    return AUTO if value is None else json.dumps(value) if isinstance(value, list | dict) else value


def _write(path: Path, document: object) -> None:
    """Replace a JSON file atomically, and sync the folder."""
    from bass_core.environment import write_whole  # imports torch, which would slow down the command line

    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_hash(path: Path) -> str:
    """Return the hash of a file of JSON lines. Raises ValueError naming an invalid line, or for an empty file."""
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number} is not JSON: {error}") from None
    if not number:
        raise ValueError(f"{path.name} holds no record: the notebook opened the file and wrote nothing")
    return _hash(path)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
