"""Executors for the runs of a sweep: processes on this machine, or workers of a Ray cluster.

Both execute `jobs` runs at a time, and kill unfinished runs on exit. `planning.run` does the rest.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

from bass_lab.sweep import run_process
from bass_lab.sweep.run_process import Remains, RunProcess

QUIET = {"log_to_driver": False, "logging_level": "error"}  # `planning.run` reports each run


class LocalExecutor:
    """Processes on this machine. jobs: runs at a time. gpus: per run (0: each run sees all GPUs). Raises ValueError for
    more GPUs than visible."""

    def __init__(self, jobs: int = 1, gpus: int = 0):
        visible = _visible_gpus() if gpus else []
        if jobs * gpus > len(visible):
            raise ValueError(
                f"{jobs} runs at a time with {gpus} GPU(s) each need {jobs * gpus}, and there are "
                f"{len(visible)} here; lower --jobs or --gpus-per-run"
            )
        self.jobs = jobs
        self._gpus = [",".join(visible[job * gpus : (job + 1) * gpus]) for job in range(jobs)]
        self._runs: list[RunProcess | None] = [None] * jobs
        self._remains: Remains | None = None

    def start(self, job: dict, folder: Path) -> RunProcess:
        place = next(i for i, run in enumerate(self._runs) if run is None or run.ended)
        if self._gpus[place]:
            job["environment"] |= {"CUDA_VISIBLE_DEVICES": self._gpus[place]}
        self._runs[place] = RunProcess(job | {"place": self._remains and self._remains.folder}, folder)
        return self._runs[place]

    def __enter__(self) -> LocalExecutor:
        self._remains = Remains()
        return self

    def __exit__(self, *exc) -> None:
        for run in filter(None, self._runs):
            run.stop()
        self._remains.close()


def _visible_gpus() -> list[str]:
    """Return the names of this process's GPUs for CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


class RayExecutor:
    """Tasks of Ray. Each task starts a run like the local executor and sends back the run's files.

    address: of a running cluster. None starts a private cluster on this machine for the duration of the sweep. A token
    protects the cluster: a new token for a private cluster, the caller's (RAY_AUTH_TOKEN or Ray's file) for an address
    beyond this machine. All machines need the same version of this package, and the notebook under the same path.

    Raises ValueError without Ray or a token, if Ray was imported before, or if no machine has enough GPUs for a run.
    """

    def __init__(self, jobs: int = 1, gpus: int = 0, address: str | None = None):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # 0 GPUs: all are visible, as locally
        _ask_for_a_token(address)
        try:
            import ray  # reads the variables at import
        except ImportError:
            raise ValueError("--executor ray needs Ray: pip install '.[sweep]' in the checkout") from None
        self._ray, self.jobs, self._gpus, self._remains = ray, jobs, gpus, None
        self._runs: list[RayRun] = []
        if address is None:
            self._begin_own()
        else:
            self._connect(address)
        ray.cloudpickle.register_pickle_by_value(run_process)  # workers then import neither this package nor torch
        attempt = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)  # planning.run counts attempts
        self._complete = attempt(run_process.complete)

    def _begin_own(self) -> None:
        """Start a cluster on this machine. The cleaner finds its processes by the folder of Ray's files."""
        here = _visible_gpus() if self._gpus else []
        self._check_gpus([len(here)])
        self._remains, before = Remains(), os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._remains.folder
        try:
            self._ray.init("local", num_cpus=self.jobs, num_gpus=len(here), include_dashboard=False, **QUIET)
        finally:
            del os.environ["RAY_TMPDIR"]
            os.environ |= {} if before is None else {"RAY_TMPDIR": before}
        if not self._ray.util.get_node_ip_address().startswith("127."):
            self.__exit__()
            raise ValueError("Ray was imported before and listens to other machines; start the sweep in a new process")

    def _connect(self, address: str) -> None:
        host, colon, port = address.split("://")[-1].rpartition(":")
        try:
            if colon:  # fails sooner than Ray, which retries for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            self._ray.init(address, **QUIET)
        except Exception as error:  # many types, including those for a missing or wrong token
            asked = "Check that the cluster is running, and that RAY_AUTH_TOKEN or Ray's token file has its token"
            raise ValueError(f"cannot use the Ray cluster at {address} ({error}). {asked}") from None
        try:
            self._check_gpus([node["Resources"].get("GPU", 0) for node in self._ray.nodes() if node["Alive"]])
        except ValueError:
            self._ray.shutdown()
            raise

    def _check_gpus(self, machines: list[float]) -> None:
        if self._gpus > max(machines, default=0):
            raise ValueError(
                f"a run needs {self._gpus} GPU(s), and no machine of the Ray cluster has more than "
                f"{max(machines, default=0):.0f}; lower --gpus-per-run"
            )

    def start(self, job: dict, folder: Path) -> RayRun:
        job["environment"] |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}  # Ray's default is 1
        job |= {"place": self._remains and self._remains.folder}
        self._runs.append(RayRun(self._ray, self._complete.remote(job), folder))
        return self._runs[-1]

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *exc) -> None:
        for run in self._runs:
            run.stop()
        self._ray.shutdown()
        if self._remains is not None:
            self._remains.close()


class RayRun:
    """A run on a Ray worker. `outcome()` is None until the run has ended. `folder` receives the run's files."""

    def __init__(self, ray: Any, reference: Any, folder: Path):
        self._ray, self._reference, self.folder = ray, reference, folder

    def outcome(self) -> dict | None:
        ended, _ = self._ray.wait([self._reference], timeout=0)
        if not ended:
            return None
        self._reference = None  # lets Ray free the result
        try:
            outcome, files = self._ray.get(ended[0])
        except self._ray.exceptions.RayError as error:  # the worker or machine died
            return {"status": run_process.DIED, "error": str(error).splitlines()[0], "details": "", "seconds": 0.0}
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        return outcome

    def stop(self) -> None:
        if self._reference is not None:
            self._ray.cancel(self._reference, force=True)


def _ask_for_a_token(address: str | None) -> None:
    """Set Ray's variables for token authentication. Raises ValueError if it is off for a cluster on other machines."""
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen only on 127.0.0.1, on any system
        return
    host = address.split("://")[-1].rsplit(":", 1)[0]
    here = host in ("127.0.0.1", "localhost", "[::1]", "auto")
    if not here and os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        raise ValueError(
            f"a cluster at {address} must ask for a token, because otherwise anyone can run code there; start the "
            "cluster with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes a token), and set the same here"
        )
