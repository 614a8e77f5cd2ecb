"""One run of a notebook by papermill, in a process of its own that dies with the one that started it.

Needs the standard library and papermill, nothing of bass_core, whose import takes seconds: it is executed as a script,
on this machine or, sent as text, by a worker of Ray on another.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DONE, FAILED, DIED, TIMEOUT, FULL, CHANGED = "done", "failed", "died", "timeout", "disk full", "code changed"
NOTEBOOK, RECORDS = "notebook.ipynb", "records"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>; evaluation/confinement.py has the full set, and needs the package


def code_version() -> str:
    """What the results depend on beside parameters, notebook and models: the packages' sources, versions of others."""
    digest = hashlib.sha256()
    for package in ("bass_core", "bass_lab", "bass_kernels"):
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin).parent if spec else Path()
        for path in sorted(folder.rglob("*.py")) if spec else ():
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}".encode() + b"\0" + path.read_bytes())
    for package in ("torch", "transformers", "triton"):
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            digest.update(f"{package} missing".encode())
    digest.update(f"python {sys.version_info[:3]}".encode())
    return digest.hexdigest()[:16]


class Run:
    """A run that has been started; `outcome()` is None until it has ended.

    job: the notebook's JSON, its parameters, `cwd`, `code` (the version that must be found), `environment` (variables
    that differ, None: without it) and `timeout` (seconds or None). folder: gets the executed notebook and what it wrote
    as `output`.
    """

    def __init__(self, job: dict, folder: str | Path):
        self.folder, self._timeout = Path(folder), job["timeout"]
        self._runtime = tempfile.TemporaryDirectory(prefix="bass-")  # short: names of sockets have 100 bytes at most
        self._said, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        arguments = [str(os.getpid()), self._runtime.name, os.path.abspath(folder)]
        # A session of its own: Ctrl-C reaches the sweep alone, which then ends its runs. -P: modules of this folder
        # have names of the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._log,
            env=_environment(job["environment"], self._runtime.name),
            start_new_session=True,
        )
        self._started = time.monotonic()
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps(job).encode())
        except BrokenPipeError:  # it died at once; the outcome says so
            pass

    def outcome(self) -> dict | None:
        """status, seconds, and where it is not DONE: error (one line) and details (the failing cell, the log)."""
        late = self._timeout is not None and time.monotonic() - self._started > self._timeout
        if self._process.poll() is None and not late:
            return None
        seconds = time.monotonic() - self._started
        if self._process.returncode is None:
            said = {"status": TIMEOUT, "error": f"took longer than {self._timeout:g} s"}
        else:
            self._said.seek(0)
            text = self._said.read().decode(errors="replace")
            said = json.loads(text) if text.endswith("\n") else {"status": DIED, "error": self._death()}
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-4000:]
        self.stop()
        return {"details": log, **said, "seconds": round(seconds, 3)}

    def stop(self) -> None:
        """Kill it if it still runs (its kernel dies with it), and let go of what it needed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()
        self._log.close()
        self._runtime.cleanup()

    def _death(self) -> str:
        code = self._process.returncode
        return (
            f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"the process gave up ({code})"
        )


def _environment(changed: dict[str, str | None], runtime: str) -> dict[str, str]:
    """Figures as data, not as 5 MB of JavaScript; connection files where they are cleared away; no token of Ray's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")}
    found = kept | {"PLOTLY_RENDERER": "plotly_mimetype", "JUPYTER_RUNTIME_DIR": runtime} | changed
    return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------------------- in the run's process


def main(parent: int, runtime: str, folder: str) -> None:
    die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed belongs to the log
    job = json.load(sys.stdin)
    print(json.dumps(_execute(job, Path(runtime), Path(folder))), file=answers, flush=True)


def die_with(parent: int) -> None:
    """Be killed when the parent process ends, however it ends; at once if it has. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not between fork and exec


def _execute(job: dict, runtime: Path, folder: Path) -> dict:
    if (found := code_version()) != job["code"]:
        where = f"bass_core or what it needs is not the same on {socket.gethostname()} now as when the sweep started"
        return {"status": CHANGED, "error": f"{where} ({found}, {job['code']})"}
    try:
        import papermill
        from nbclient.exceptions import DeadKernelError

        source = runtime / "source.ipynb"
        source.write_text(json.dumps(job["notebook"]), encoding="utf-8")
        parameters = job["parameters"]
        if job["output"]:
            parameters = parameters | {"output": str(folder / RECORDS)}
        try:
            papermill.execute_notebook(
                source,
                folder / NOTEBOOK,
                parameters=parameters,
                cwd=job["cwd"],
                progress_bar=False,
                store_widget_state=False,
                kernel_manager_class=_kernel_manager(runtime),
            )
        except papermill.PapermillExecutionError as error:
            return _failed_cell(error)
        except DeadKernelError as error:
            return {"status": DIED, "error": f"the kernel died: {error}", "details": _current_cell(folder / NOTEBOOK)}
        return {"status": DONE}
    except Exception as error:
        return _obstacle(error)


def _kernel_manager(runtime: Path) -> type:
    """A manager of kernels that die with this process and are spoken to through files, not ports that may be taken."""
    from jupyter_client import AsyncKernelManager

    parent = os.getpid()

    class Manager(AsyncKernelManager):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.transport, self.ip = "ipc", str(runtime / "kernel")
            self.connection_file = str(runtime / "kernel.json")

        async def start_kernel(self, **options):
            await super().start_kernel(**options, preexec_fn=lambda: die_with(parent))

    return Manager


def _failed_cell(error: Exception) -> dict:
    line = f"{error.ename}: {error.evalue}".strip()
    told = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    status = FULL if any(os.strerror(number) in line for number in NO_SPACE) else FAILED
    return {"status": status, "error": _first_line(line), "details": f"{error.source}\n\n{told}"}


def _obstacle(error: Exception) -> dict:
    """What went wrong outside the cells: a full disk, or a kernel that did not start (worth another attempt)."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    full = any(isinstance(each, OSError) and is_full(each) for each in chain)
    taken = any(getattr(each, "errno", None) == errno.EADDRINUSE for each in chain)
    unborn = "Kernel died before replying" in str(error) or "Kernel didn't respond" in str(error)
    status = FULL if full else DIED if taken or unborn else FAILED
    return {
        "status": status,
        "error": _first_line(f"{type(error).__name__}: {error}"),
        "details": traceback.format_exc(),
    }


def is_full(error: OSError) -> bool:
    """Whether a disk, or what this user may have of it, is full."""
    return error.errno in NO_SPACE


def _current_cell(path: Path) -> str:
    """The source of the cell in which papermill's last copy of a notebook stops; empty if that tells nothing."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return ""
    running = [cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"]
    return "".join(running[-1]["source"]) if running else ""


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
