"""The folder of a sweep: results that a kill or a full disk cannot spoil.

    sweep.json                   what was asked for: the notebook, and every run's key and parameters
    KEY/notebook.ipynb           the executed notebook
    KEY/records.jsonl            what it wrote to `output` (a folder `records` where it writes one)
    KEY/done.json                the mark, written last: parameters, seconds, hashes of the records
    failed/KEY/                  the same of a run that failed, with error.txt and no mark

A run works in a folder of its own under `.scratch`; when it has succeeded, its files are synced, the folder is renamed
to its key, and the mark follows. Where the mark is missing, or a file is no longer what it was made for, there is no
result, and the next start clears it away and runs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bass_lab.locks import lock
from bass_lab.sweep.run_process import NOTEBOOK, RECORDS

SWEEP, MARK, SCRATCH, FAILED = "sweep.json", "done.json", ".scratch", "failed"
AUTO = "auto"  # what None is called on a command line and in tables: the library decides


@dataclass(frozen=True)
class FinishedRun:
    """files: what it recorded, as paths. mark: what `done.json` says."""

    key: str
    parameters: dict[str, Any]
    files: list[Path]
    mark: dict[str, Any]


class Store:
    """The folder of a sweep, held by this process alone until it is closed; made if there is none.

    done: keys of the runs that had a result. notebook: its name. runs: parameters by key; a run replaces one with the
    same parameters. Raises ValueError, and changes nothing, if the folder is held or is of another notebook.
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
                raise ValueError(f"another sweep is writing {folder}; wait for it, or give another folder") from None
            raise

    def _begin(self, notebook: str, runs: Mapping[str, dict]) -> None:
        asked = {"notebook": notebook, "runs": {}}
        if (self.folder / SWEEP).exists():
            asked = read_sweep(self.folder)
        elif any(self.folder.glob("[!.]*")):
            raise ValueError(f"{self.folder} holds other files and no sweep; give an empty or a new folder")
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
        """An empty folder for an attempt at a run."""
        path = self.folder / SCRATCH / f"{key}-{attempt}-{os.getpid()}"
        path.mkdir(parents=True)
        return path

    def keep(self, key: str, scratch: Path, mark: Mapping[str, Any]) -> None:
        """Make the files of a successful attempt the run's result. Raises ValueError where a record is no JSON line."""
        records = scratch / RECORDS
        if records.is_file():
            records.rename(records.with_suffix(".jsonl"))
        hashes = {str(path.relative_to(scratch)): _checked_hash(path) for path in sorted(scratch.rglob("*.jsonl"))}
        executed = _hash(scratch / NOTEBOOK)
        self._move(scratch, self.folder / key)
        _write(self.folder / key / MARK, {"key": key, **mark, "records": hashes, "executed": executed})
        shutil.rmtree(self.folder / FAILED / key, ignore_errors=True)

    def keep_failed(self, key: str, scratch: Path, error: str) -> Path:
        """Put the files of a failed attempt aside, with what went wrong; where they lie."""
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
        """Let go of the folder, and clear away what unfinished runs left."""
        shutil.rmtree(self.folder / SCRATCH, ignore_errors=True)
        os.close(self._lock)


def _stands_for(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Return True if a run replaces an earlier one: the parameters that both have are the same."""
    return all(new[name] == value for name, value in old.items() if name in new)


def is_done(folder: Path, key: str) -> bool:
    """Whether a run has a result in a sweep's folder, all of it as the run left it."""
    place = folder / key
    try:
        mark = _checked_mark(place)
        return mark.get("executed") == _hash(place / NOTEBOOK)
    except (OSError, ValueError):
        return False


def read_sweep(folder: Path) -> dict:
    """What a sweep's folder was asked for: `notebook` (its name) and `runs` (parameters by key). Raises ValueError."""
    path = folder / SWEEP
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"notebook": str(found["notebook"]), "runs": dict(found["runs"])}
    except FileNotFoundError:
        raise ValueError(f"{folder} is no sweep: there is no {SWEEP}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of `bass sweep`: {type(error).__name__}: {error}") from None


def finished_runs(folder: Path) -> Iterator[FinishedRun]:
    """Yield the finished runs of a sweep, in the order asked for. Raises ValueError for another folder or a changed
    record."""
    for key, parameters in read_sweep(folder)["runs"].items():
        place = folder / key
        if (place / MARK).exists():
            mark = _checked_mark(place)
            yield FinishedRun(key, parameters, [place / name for name in mark["records"]], mark)


def _checked_mark(place: Path) -> dict[str, Any]:
    """The mark of a finished run. Raises ValueError where it is none, or a record is not the one it was made for."""
    advice = "it was changed or lost afterwards; the sweep's own command runs it again"
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
    """A parameter's value as tables show it: None is `AUTO`, a list or a mapping its JSON."""
    return AUTO if value is None else json.dumps(value) if isinstance(value, list | dict) else value


def _write(path: Path, document: object) -> None:
    """Replace a JSON file, whole, and wait until the folder knows it."""
    from bass_core.environment import write_whole  # with torch, for which the command line does not wait

    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_hash(path: Path) -> str:
    """Of a file of JSON lines; ValueError naming the line that is none, or where there is none."""
    number = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number} is not JSON: {error}") from None
    if not number:
        raise ValueError(f"{path.name} holds no record: the notebook opened it and wrote nothing")
    return _hash(path)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
