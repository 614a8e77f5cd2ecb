from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bass_lab.sweep import run_process

PARAMETERS = """\
size: int = 1
length: int = None
word: str = "plain"
factors: list = [1, 2]
share: float = 0.5
pause: float = 0.0
fails: bool = False
started: str = ""
output: str = ""
"""
BEGIN = """\
import os, time
if started:
    with open(started, "a") as file:
        file.write(f"{size} {os.getpid()} {os.getppid()}\\n")
time.sleep(pause)
assert not fails, "asked to fail"
"""
END = """\
import json
if output:
    with open(output, "a") as file:
        file.writelines(json.dumps({"size": size, "product": size * each}) + "\\n" for each in factors)
"""


def stub(folder: Path, *more: str, name: str = "stub") -> Path:
    """Write a notebook that notes its start, waits, fails on request and records a line per factor."""
    import nbformat  # tests of processes run without nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, *more, BEGIN, END)]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


class Instant:
    """An executor with these outcomes for its first runs, then DONE. records: the text of each run's records."""

    jobs = 1

    def __init__(self, *outcomes: str, records: str | None = None):
        self.outcomes, self.started, self.records = list(outcomes), 0, records

    def start(self, job: dict, folder: Path) -> Ended:
        self.started += 1
        line = json.dumps({"size": job["parameters"]["size"], "found": 2}) + "\n"
        (folder / run_process.NOTEBOOK).write_text(json.dumps(job["notebook"]))
        (folder / run_process.RECORDS).write_text(line if self.records is None else self.records, encoding="utf-8")
        return Ended(folder, self.outcomes.pop(0) if self.outcomes else run_process.DONE)

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *exc) -> None:
        pass


class Ended(NamedTuple):
    folder: Path
    status: str

    def outcome(self) -> dict:
        return {"status": self.status, "error": "told to", "details": "", "seconds": 0.1}


def forked(action: Callable[[], None]) -> int:
    """Run a function in a fork of this process. Return the process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()
        os._exit(0)
    except SystemExit as exit:
        os._exit(exit.code or 0)
    finally:
        os._exit(99)


def killed_after(steps: int, action: Callable[[], None], within: Path | str = "") -> int:
    """Run an action in a fork, kill the fork after `steps` file operations on paths with `within`, and return the exit
    status."""

    def counted():
        left = steps

        def count(event, arguments):
            nonlocal left
            if event.split(".")[0] in ("open", "os", "shutil", "fcntl") and str(within) in str(arguments):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        fsync, os.fsync = os.fsync, lambda file: (count("os.fsync", ()), fsync(file))
        sys.addaudithook(count)
        action()

    return os.waitpid(forked(counted), 0)[1]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
