"""Where the runs of a sweep take place: processes of this machine, or the workers of a Ray cluster.

Both start a run, say which have ended, and kill what still runs when they are left; `planning.run` decides all else.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bass_lab.sweep import one_run

QUIET = {"log_to_driver": False, "logging_level": "error"}  # `planning.run` says what became of each run
PAUSE = 0.05  # seconds between two looks at what has ended
Ended = list[tuple[str, Path, dict]]  # key, scratch folder, outcome


class LocalExecutor:
    """Processes of this machine. jobs: how many at once. gpus: how many GPUs each run has to itself (0: it sees all).

    Raises ValueError where there are not jobs × gpus of them.
    """

    def __init__(self, jobs: int = 1, gpus: int = 0):
        self._free_gpus = _visible_gpus() if gpus else []
        if jobs * gpus > len(self._free_gpus):
            raise ValueError(
                f"{jobs} runs at a time with {gpus} GPU(s) each need {jobs * gpus}, and there are "
                f"{len(self._free_gpus)} here; give fewer --jobs or --gpus-per-run"
            )
        self._jobs, self._gpus = jobs, gpus
        self.running: dict[str, tuple[one_run.Run, list[str]]] = {}

    @property
    def free(self) -> bool:
        return len(self.running) < self._jobs

    def start(self, key: str, job: dict, scratch: Path) -> None:
        own, self._free_gpus = self._free_gpus[: self._gpus], self._free_gpus[self._gpus :]
        if own:
            job["environment"] |= {"CUDA_VISIBLE_DEVICES": ",".join(own)}
        self.running[key] = one_run.Run(job, scratch), own

    def ended(self) -> Ended:
        """Runs that have ended since the last call; waits a moment if there are none."""
        found: Ended = []
        for key, (run, own) in list(self.running.items()):
            if (outcome := run.outcome()) is not None:
                del self.running[key]
                self._free_gpus += own
                found.append((key, run.folder, outcome))
        if not found:
            time.sleep(PAUSE)
        return found

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *exc) -> None:
        for run, _ in self.running.values():
            run.stop()
        self.running.clear()


def _visible_gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES calls the GPUs that this process may use."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


class RayExecutor:
    """Tasks of Ray, each of which starts a run as the local executor does and sends its files back.

    address: of a running cluster; None starts one on this machine for the time of the sweep. Ray listens on all
    interfaces, so a token is asked for: a new one for a cluster of our own, the caller's (RAY_AUTH_TOKEN, or the file
    where Ray keeps it) for one at an address beyond this machine. The machines of a cluster need this package, in this
    version, and the notebook's folder under the same path.

    Raises ValueError without Ray, without a token, and where no machine has the GPUs that a run asks for: Ray itself
    would wait for them for ever.
    """

    def __init__(self, jobs: int = 1, gpus: int = 0, address: str | None = None):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as locally: no GPU asked for, all seen
        _ask_for_a_token(address)
        try:
            import ray  # which reads the variables, so they are set by now
        except ImportError:
            raise ValueError("--executor ray needs Ray: pip install 'bass-hands-on[sweep]'") from None
        self._ray, self._jobs, self._gpus = ray, jobs, gpus
        if address is None:
            here = _visible_gpus() if gpus else []
            self._check_gpus([len(here)])
            ray.init("local", num_cpus=jobs, num_gpus=len(here), include_dashboard=False, **QUIET)
        else:
            self._connect(address)
        self._source = Path(one_run.__file__).read_text(encoding="utf-8")
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_worker())  # planning.run counts attempts
        self.running: dict[Any, tuple[str, Path]] = {}

    def _connect(self, address: str) -> None:
        host, colon, port = address.split("://")[-1].rpartition(":")
        try:
            if colon:  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            self._ray.init(address, **QUIET)
        except Exception as error:  # of several kinds, also where the token is missing or wrong
            asked = "Is it running, and is its token in RAY_AUTH_TOKEN, or in Ray's own file?"
            raise ValueError(f"cannot use the Ray cluster at {address} ({error}). {asked}") from None
        try:
            self._check_gpus([node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]])
        except ValueError:
            self._ray.shutdown()
            raise

    def _check_gpus(self, machines: list[float]) -> None:
        if self._gpus > max(machines, default=0):
            raise ValueError(
                f"a run asks for {self._gpus} GPU(s), and no machine of the Ray cluster has more than "
                f"{max(machines, default=0):.0f}: it would wait for ever. Give a smaller --gpus-per-run"
            )

    @property
    def free(self) -> bool:
        return len(self.running) < self._jobs

    def start(self, key: str, job: dict, scratch: Path) -> None:
        job["environment"] |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}  # Ray would make it 1
        self.running[self._task.remote(self._source, job)] = key, scratch

    def ended(self) -> Ended:
        """Runs that have ended since the last call; waits a moment if there are none."""
        references, _ = self._ray.wait(list(self.running), timeout=PAUSE)
        found: Ended = []
        for reference in references:
            key, scratch = self.running.pop(reference)
            try:
                outcome, files = self._ray.get(reference)
                for name, content in files.items():
                    (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                    (scratch / name).write_bytes(content)
            except self._ray.exceptions.RayError as error:  # its worker or its machine died
                outcome = {"status": one_run.DIED, "error": str(error).splitlines()[0], "details": "", "seconds": 0.0}
            found.append((key, scratch, outcome))
        return found

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *exc) -> None:
        for reference in self.running:
            self._ray.cancel(reference, force=True)
        self.running.clear()
        self._ray.shutdown()


def _ask_for_a_token(address: str | None) -> None:
    """Set what makes Ray do so. Raises ValueError if it is switched off for a cluster beyond this machine."""
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        return
    host = address.split("://")[-1].rsplit(":", 1)[0]
    here = host in ("127.0.0.1", "localhost", "[::1]", "auto")
    if not here and os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        raise ValueError(
            f"a cluster at {address} must ask for a token, or anybody who reaches it runs code there: start it with "
            "RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes one), and set the same here"
        )


def _worker() -> Callable[[str, dict], tuple[dict, dict[str, bytes]]]:
    """The task. A function within a function is sent by value: a worker does not import this package, or torch."""

    def attempt(source: str, job: dict) -> tuple[dict, dict[str, bytes]]:
        import importlib.util
        import pathlib
        import tempfile
        import time

        with tempfile.TemporaryDirectory(prefix="bass-") as folder:
            script, results = pathlib.Path(folder, "sweep_run.py"), pathlib.Path(folder, "results")
            script.write_text(source, encoding="utf-8")
            results.mkdir()
            spec = importlib.util.spec_from_file_location("sweep_run", script)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            run = module.Run(job, results)
            while (outcome := run.outcome()) is None:
                time.sleep(0.05)
            found = [path for path in results.rglob("*") if path.is_file()]
            return outcome, {str(path.relative_to(results)): path.read_bytes() for path in found}

    return attempt
