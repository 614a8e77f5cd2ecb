"""One run of a notebook by papermill, in a process of its own that dies with the one that started it.

What a run starts besides is known by its environment, which names the run's temporary folder, or by files open there:
`clear` kills it. Where the sweep itself is killed, a process that outlives it does so (`Remains`).

Needs the standard library and papermill alone: a copy of this file is executed as a script, here or by a worker of Ray.
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
PAUSE = 0.05  # seconds between two looks at what has ended
DONE, FAILED, DIED, TIMEOUT, FULL, CHANGED = "done", "failed", "died", "timeout", "disk full", "code changed"
NOTEBOOK, RECORDS = "notebook.ipynb", "records"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>; evaluation/confinement.py has the full set, and needs the package


def code_version() -> str:
    """Hash what results depend on beside parameters, notebook and models: sources, prompts, problems, versions."""
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
    """A run that has been started; `outcome()` is None until it has ended.

    job: the notebook's JSON, its parameters, `output` (whether it takes that), `cwd`, `code` (the version),
    `environment` (changes; None: without it), `timeout` (seconds or None) and `place` (of its temporary folder).
    folder: gets the executed notebook and its `output`.
    """

    def __init__(self, job: dict, folder: str | Path):
        self.folder, self._timeout = Path(folder), job["timeout"]
        self._place = place = Path(short_folder(job["place"]))
        (place / "run.py").write_text(SOURCE, encoding="utf-8")
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with (place / "said").open("wb") as said, (place / "log").open("wb") as log:
            # A session of its own: Ctrl-C reaches the sweep alone, which then ends its runs.
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
        """status, seconds, and where it is not DONE: error (one line) and details (the failing cell, the log)."""
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
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"gave up ({code})"
            found = {"status": DIED, "error": f"the process {how}"}
        self.stop()
        return {"details": log[-4000:], **found, "seconds": round(seconds, 3)}

    def stop(self) -> None:
        """Kill it if it still runs (its kernel dies with it), all that it started, and let go of what it needed."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        clear(self._place)


class Remains:
    """A temporary `folder` for all that a sweep starts: cleared when this is closed, or when this process has ended."""

    def __init__(self):
        self.folder = short_folder(None)
        command = [sys.executable, "-I", os.path.abspath(__file__), "clear", self.folder]
        self._cleaner = subprocess.Popen(  # in a session and a place where nothing that ends the sweep reaches it
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
    """A new temporary folder; names of sockets in it, of 100 bytes at most, have room for more folders' names."""
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
    """Return processes with a variable that is this folder or leads into it, or with a file open there. Linux only."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            variables = (process / "environ").read_bytes() + b"\0"
            named = b"=" + folder + b"\0" in variables or b"=" + folder + b"/" in variables
            if named or any(os.fsencode(os.readlink(file)).startswith(folder + b"/") for file in process.glob("fd/*")):
                found.append(int(process.name))
    sweep = os.getpid(), os.getppid()  # whoever asks, and the sweep that waits for it
    return [process for process in found if process not in sweep]


def complete(job: dict) -> tuple[dict, dict[str, bytes]]:
    """A run from its start to its end: the outcome, and the files it left. A worker of Ray gets it sent by value."""
    with tempfile.TemporaryDirectory(prefix="bass-", dir=job["place"]) as folder:
        run = RunProcess(job, folder)
        while (outcome := run.outcome()) is None:
            time.sleep(PAUSE)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return outcome, {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _environment(changed: dict[str, str | None], place: Path) -> dict[str, str]:
    """Figures as data, not as 5 MB of JavaScript; connection files where they are cleared away; no token of Ray's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")}
    found = kept | {"PLOTLY_RENDERER": "plotly_mimetype", "JUPYTER_RUNTIME_DIR": str(place)} | changed
    return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------- in the run's process


def main(parent: int, folder: str) -> None:
    die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed belongs to the log
    place = Path(__file__).parent
    job = json.loads((place / "job.json").read_text(encoding="utf-8"))
    print(json.dumps(_execute(job, place, Path(folder))), file=answers, flush=True)


def die_with(parent: int) -> None:
    """Be killed when the parent process ends, however it ends; at once if it has. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not between fork and exec


def _execute(job: dict, place: Path, folder: Path) -> dict:
    if (found := code_version()) != job["code"]:
        where = f"bass_core or what it needs is not the same on {socket.gethostname()} now as when the sweep started"
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
    if left:  # papermill lets SystemExit pass
        return {"status": FAILED, "error": "SystemExit: the notebook was left before its end", "details": left[0]}
    return {"status": DONE}


def _no_pattern(path: Path) -> str:
    """As papermill takes a path: it fills in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def through_files(manager: type, place: Path) -> type:
    """Return a manager of kernels that speaks to them through files in `place`, not through ports."""

    class ThroughFiles(manager):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.transport, self.ip = "ipc", str(place / "kernel")
            self.connection_file = str(place / "kernel.json")

    return ThroughFiles


def _kernel_manager(place: Path) -> type:
    """A manager of kernels that die with this process."""
    from jupyter_client import AsyncKernelManager

    parent = os.getpid()

    class Manager(through_files(AsyncKernelManager, place)):
        async def start_kernel(self, **options):
            await super().start_kernel(**options, preexec_fn=lambda: die_with(parent))

    return Manager


def _obstacle(error: Exception, notebook: Path) -> dict:
    """What went wrong: a failing cell, a full disk, or a kernel that died or did not start (worth another attempt)."""
    if type(error).__name__ == "PapermillExecutionError":  # by name: papermill itself may be what is missing
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
        elif getattr(cause, "errno", None) == errno.EADDRINUSE and status == FAILED:  # zmq's errors have one, too
            status = DIED
        cause = cause.__cause__ or cause.__context__
    return {"status": status, "error": line.splitlines()[0], "details": traceback.format_exc()}


def is_full(error: OSError) -> bool:
    """Whether a disk, or what this user may have of it, is full."""
    return error.errno in NO_SPACE


def _current_cell(notebook: Path) -> str:
    """The source of the cell in which papermill's last copy of a notebook stops; empty if that tells nothing."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return ""
    running = [cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"]
    return "".join(running[-1]["source"]) if running else ""


if __name__ == "__main__":
    if sys.argv[1] == "clear":
        sys.stdin.read(1)  # until the sweep says that it has ended, or has
        clear(sys.argv[2])
    else:
        main(int(sys.argv[2]), sys.argv[3])
