"""Run a notebook with papermill, in a separate process that dies with its parent.

`clear` kills all processes that a run has started. Their environment names the run's temporary folder, or they have
open files there. If the sweep itself is killed, a cleaner process calls `clear` (`Remains`).

This file needs only the standard library and papermill: a copy is executed as a script, locally or by a Ray worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SOURCE = Path(__file__).read_text(encoding="utf-8")
PAUSE = 0.05  # seconds between checks for ended runs
DONE, FAILED, DIED, TIMEOUT, FULL, CHANGED = "done", "failed", "died", "timeout", "disk full", "code changed"
NOTEBOOK, RECORDS = "notebook.ipynb", "records"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>; this file cannot import evaluation/confinement.py


def code_version() -> str:
    """Hash the inputs of results other than parameters, notebook and models: sources, prompts, problems, versions."""
    digest = hashlib.sha256()
    for package in ("bass_core", "bass_lab", "bass_kernels"):
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin).parent if spec else Path()
        sources = [*folder.rglob("*.py"), *(folder / "assets").glob("*.jsonl")] if spec else ()
        for path in sorted(sources):
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}".encode() + b"\0" + path.read_bytes())
    for package in ("torch", "transformers", "triton"):
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(f"{package} missing".encode())
    digest.update(f"python {sys.version_info[:3]}".encode())
    return digest.hexdigest()[:16]


class RunProcess:
    """A started run. `outcome()` is None until the run has ended.

    job: `notebook` (JSON), `parameters`, `output` (True if the notebook has this parameter), `cwd`, `code` (version),
    `environment` (changes; a value None removes the variable), `timeout` (seconds or None) and `place` (parent of the
    temporary folder). folder: receives the executed notebook and the records.
    """

    def __init__(self, job: dict, folder: str | Path):
        self.folder, self._timeout = Path(folder), job["timeout"]
        self._place = place = Path(short_folder(job["place"]))
        (place / "run.py").write_text(SOURCE, encoding="utf-8")
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with (place / "said").open("wb") as said, (place / "log").open("wb") as log:
            # In a new session, Ctrl-C reaches only the sweep, which then ends the runs.
            self._process = subprocess.Popen(
                [sys.executable, place / "run.py", "run", str(os.getpid()), os.path.abspath(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=log,
                env=_environment(job["environment"], place),
                start_new_session=True,
            )
        self._started = time.monotonic()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def outcome(self) -> dict | None:
        """Return status, seconds and details (the failing cell or the log), and error (a line) unless DONE."""
        seconds = time.monotonic() - self._started
        late = self._timeout is not None and seconds > self._timeout
        if not self.ended and not late:
            return None
        said, log = ((self._place / name).read_text(errors="replace") for name in ("said", "log"))
        code = self._process.returncode
        if code is None:
            found = {"status": TIMEOUT, "error": f"took longer than {self._timeout:g} s"}
        elif said.endswith("\n"):
            found = json.loads(said)
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            found = {"status": DIED, "error": f"the process {how}"}
        self.stop()
        return {"details": log[-4000:], **found, "seconds": round(seconds, 3)}

    def stop(self) -> None:
        """Kill a running process with its kernel and all processes that it started. Remove the temporary folder."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        clear(self._place)


class Remains:
    """A temporary `folder` for all processes of a sweep. `close`, or the end of this process, clears the folder."""

    def __init__(self):
        self.folder = short_folder(None)
        command = [sys.executable, "-I", os.path.abspath(__file__), "clear", self.folder]
        self._cleaner = subprocess.Popen(  # in a session and folder of its own, so the cleaner outlives the sweep
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def close(self) -> None:
        self._cleaner.communicate(b".")


def short_folder(parent: str | None) -> str:
    """Make a temporary folder with a short path: paths of sockets in subfolders are limited to about 100 bytes."""
    if parent is None and len(parent := tempfile.gettempdir()) > 25:
        parent = "/tmp"
    return tempfile.mkdtemp(prefix="bass-", dir=parent)


def clear(folder: str | Path) -> None:
    """Kill every process that belongs to a temporary folder (`_started_in`), and remove the folder."""
    deadline = time.monotonic() + 10
    while (left := _started_in(os.fsencode(folder))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _started_in(folder: bytes) -> list[int]:
    """Return processes with an environment variable or open file at or below this folder. Linux only."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            variables = (process / "environ").read_bytes() + b"\0"
            named = b"=" + folder + b"\0" in variables or b"=" + folder + b"/" in variables
            if named or any(os.fsencode(os.readlink(file)).startswith(folder + b"/") for file in process.glob("fd/*")):
                found.append(int(process.name))
    sweep = os.getpid(), os.getppid()  # the caller, and the sweep that waits for the caller
    return [process for process in found if process not in sweep]


def complete(job: dict) -> tuple[dict, dict[str, bytes]]:
    """Execute a run. Return the outcome and the run's files. Ray sends this function to workers by value."""
    with tempfile.TemporaryDirectory(prefix="bass-", dir=job["place"]) as folder:
        run = RunProcess(job, folder)
        while (outcome := run.outcome()) is None:
            time.sleep(PAUSE)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return outcome, {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _environment(changed: dict[str, str | None], place: Path) -> dict[str, str]:
    """Return a run's environment: figures without 5 MB of JavaScript, connection files in `place`, no token of Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")}
    found = kept | {"PLOTLY_RENDERER": "plotly_mimetype", "JUPYTER_RUNTIME_DIR": str(place)} | changed
    return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------- in the run's process


def main(parent: int, folder: str) -> None:
    die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    place = Path(__file__).parent
    job = json.loads((place / "job.json").read_text(encoding="utf-8"))
    print(json.dumps(_execute(job, place, Path(folder))), file=answers, flush=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends; exit now if it has ended. No effect except on Linux."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded early: loading is unsafe between fork and exec


def _execute(job: dict, place: Path, folder: Path) -> dict:
    if (found := code_version()) != job["code"]:
        where = f"the code or a package on {socket.gethostname()} differs from the start of the sweep"
        return {"status": CHANGED, "error": f"{where} ({found}, {job['code']})"}
    parameters = job["parameters"] | ({"output": str(folder / RECORDS)} if job["output"] else {})
    try:
        import papermill

        source = place / "source.ipynb"
        source.write_text(json.dumps(job["notebook"]), encoding="utf-8")
        executed = papermill.execute_notebook(
            _no_pattern(source),
            _no_pattern(folder / NOTEBOOK),
            parameters=parameters,
            cwd=job["cwd"],
            progress_bar=False,
            store_widget_state=False,
            kernel_manager_class=_kernel_manager(place),
        )
    except Exception as error:
        return _obstacle(error, folder / NOTEBOOK)
    left = [cell["source"] for cell in executed["cells"] if any("ename" in each for each in cell.get("outputs", ()))]
    if left:  # papermill does not raise for SystemExit
        return {"status": FAILED, "error": "SystemExit: the notebook exited before its end", "details": left[0]}
    return {"status": DONE}


def _no_pattern(path: Path) -> str:
    """Escape the braces of a path, which papermill would format."""
    return str(path).replace("{", "{{").replace("}", "}}")


def through_files(manager: type, place: Path) -> type:
    """Return a kernel manager that connects through files in `place` instead of ports."""

    class ThroughFiles(manager):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.transport, self.ip = "ipc", str(place / "kernel")
            self.connection_file = str(place / "kernel.json")

    return ThroughFiles


def _kernel_manager(place: Path) -> type:
    """Return a kernel manager whose kernels die with this process."""
    from jupyter_client import AsyncKernelManager

    parent = os.getpid()

    class Manager(through_files(AsyncKernelManager, place)):
        async def start_kernel(self, **options):
            await super().start_kernel(**options, preexec_fn=lambda: die_with(parent))

    return Manager


def _obstacle(error: Exception, notebook: Path) -> dict:
    """Return the outcome of an exception: failing cell, full disk, or (worth a retry) a dead or unstarted kernel."""
    if type(error).__name__ == "PapermillExecutionError":  # by name, because papermill itself may be missing
        line, told = f"{error.ename}: {error.evalue}", re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        status = FULL if any(os.strerror(number) in line for number in NO_SPACE) else FAILED
        return {"status": status, "error": line.splitlines()[0], "details": f"{error.source}\n\n{told}"}
    if type(error).__name__ == "DeadKernelError":
        return {"status": DIED, "error": f"the kernel died: {error}", "details": _current_cell(notebook)}
    line = f"{type(error).__name__}: {error}"
    status = DIED if "Kernel died before replying" in line or "Kernel didn't respond" in line else FAILED
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and is_full(cause):
            status = FULL
        elif getattr(cause, "errno", None) == errno.EADDRINUSE and status == FAILED:  # also for errors of zmq
            status = DIED
        cause = cause.__cause__ or cause.__context__
    return {"status": status, "error": line.splitlines()[0], "details": traceback.format_exc()}


def is_full(error: OSError) -> bool:
    """Return True if a disk is full, or this user's quota."""
    return error.errno in NO_SPACE


def _current_cell(notebook: Path) -> str:
    """Return the source of the running cell in papermill's last copy of a notebook, or an empty string."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return ""
    running = [cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"]
    return "".join(running[-1]["source"]) if running else ""


if __name__ == "__main__":
    if sys.argv[1] == "clear":
        sys.stdin.read(1)  # returns when the sweep writes a byte or ends
        clear(sys.argv[2])
    else:
        main(int(sys.argv[2]), sys.argv[3])
