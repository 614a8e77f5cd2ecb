"""Crash-safe files of samples, as JSON lines. The first line holds the settings, each further line a problem.

Each line is written and synced before the next problem starts, so a kill loses only the current problem. Text after the
last line break is an incomplete line and is dropped.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

from bass_lab.locks import lock

HEADER = "evaluation"  # the first key of the first line
START = f'{{"{HEADER}": '.encode()


def read(path: str | Path) -> tuple[dict, dict[str, dict]]:
    """Return the header and the lines by task_id. Raises FileNotFoundError, and ValueError for another file."""
    header, lines = _parsed(Path(path), _whole_lines(Path(path).read_bytes()))
    if header is None:
        raise ValueError(f"{path} does not begin with a line of settings and holds no samples of `compare`")
    return header, lines


class SampleFile:
    """A file of samples, open for appending and created if missing. `lines`: the earlier lines by task_id.

    environment: recorded, not compared. Raises ValueError for other content, other settings, or another writer. The
    file then stays unchanged.
    """

    def __init__(self, path: str | Path, settings: dict, environment: dict):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        try:
            self.lines = self._begin(settings, environment)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, settings: dict, environment: dict) -> dict[str, dict]:
        try:
            lock(self._file.fileno(), wait=False)
        except BlockingIOError:
            raise ValueError(f"{self.path} is being written by another process; wait, or give another folder") from None
        self._file.seek(0)
        found = self._file.read()
        whole = _whole_lines(found)
        if not whole and found[: len(START)] != START[: len(found)]:
            raise ValueError(f"{self.path} holds no samples of `compare` and was not changed; give another folder")
        header, lines = _parsed(self.path, whole)
        if header is not None:
            _check_same(self.path, header[HEADER], json.loads(json.dumps(settings)))
            before, now = header["environment"].get("commit"), environment.get("commit")
            if before and now and before != now:
                warnings.warn(
                    f"{self.path} was begun by commit {before}, and new samples are of commit {now}", stacklevel=2
                )
        if len(whole) < len(found):
            self._file.truncate(len(whole))
        if header is None:
            self.append({HEADER: settings, "environment": environment, "schema": HEADER})
        return lines

    def append(self, line: dict) -> None:
        """Append a line and sync the file."""
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *exc) -> None:
        self._file.close()


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _parsed(path: Path, data: bytes) -> tuple[dict | None, dict[str, dict]]:
    """Return the header (None for an empty file) and the lines by task_id."""
    header, lines = None, {}
    for number, text in enumerate(data.splitlines(), 1):
        try:
            line = json.loads(text)
            if number == 1:
                header = {HEADER: dict(line[HEADER]), "environment": line["environment"]}
            elif line["task_id"] in lines:
                raise ValueError(f"{line['task_id']} occurs twice")
            else:
                lines[line["task_id"]] = line
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not of `compare`: {type(error).__name__}: {error}") from None
    return header, lines


def _check_same(path: Path, there: dict, here: dict) -> None:
    """Raise ValueError naming the settings that differ."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        differing = "; ".join(f"{name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in names)
        instead = f"continue with OMP_NUM_THREADS={there['threads']}, or " if names == ["threads"] else ""
        raise ValueError(f"{path} holds samples with other settings ({differing}); {instead}give another folder")
