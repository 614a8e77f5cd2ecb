"""Sweeps on a Ray cluster of this machine. Skipped without Ray."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweeps
from waiting import until

import bass_lab as lab
from bass_lab.sweep import executors, planning, run_process, store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install '.[sweep]' in the checkout)"
    ),
]


def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_killed_worker_costs_one_run_and_no_result(tmp_path, monkeypatch):
    log, out = tmp_path / "started", tmp_path / "out"
    plan = planning.plan(sweeps.stub(tmp_path), ["size=1,2,3,4,5,6", "pause=0.5", f"started={log}"])

    killed = []

    class KillingRun(executors.RayRun):
        def outcome(self):
            if not killed and log.exists() and log.read_text().endswith("\n"):
                _, kernel, run = map(int, log.read_text().splitlines()[0].split())
                killed.extend([kernel, run, parent(run)])
                os.kill(killed[2], signal.SIGKILL)
            return super().outcome()

    monkeypatch.setattr(executors, "RayRun", KillingRun)
    executor, began = executors.RayExecutor(jobs=2), time.monotonic()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and os.environ["RAY_AUTH_MODE"] == "token"
    table = planning.run(plan, out, executor)
    assert list(table.status) == ["done"] * 6 and sorted(table.attempts) == [1, 1, 1, 1, 1, 2]
    assert not any(sweeps.alive(process) for process in killed)  # worker, run and kernel
    assert len(log.read_text().splitlines()) <= 7
    assert sorted(lab.load_records(out)["size"].unique()) == [1, 2, 3, 4, 5, 6]
    assert len(list(store.finished_runs(out))) == 6
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 99}, r"a run needs 99 GPU\(s\), and no machine of the Ray cluster has more than"),
        (
            {"address": "127.0.0.1:1"},
            r"cannot use the Ray cluster at 127\.0\.0\.1:1 .* Check that the cluster is running",
        ),
        ({"address": "ray://10.0.0.1:10001"}, r"a cluster at ray://10\.0\.0\.1:10001 must ask for a token"),
    ],
)
def test_unusable_cluster_is_refused_at_once(monkeypatch, options, said):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled" if "10001" in said else "token")
    with pytest.raises(ValueError, match=said):
        executors.RayExecutor(**options)


KILLED = """
import os, signal, sys
import psutil
from bass_lab.sweep import executors

executor = executors.RayExecutor()
own = [p for p in psutil.Process().children(recursive=True)]
print(executor._remains.folder, *(p.pid for p in own))
for process in [psutil.Process(), *own]:
    print(*(at.laddr.ip for at in process.net_connections() if at.status == "LISTEN"))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_own_cluster_is_local_and_ends_after_a_kill():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, *listening = done.stdout.splitlines()
    folder, *processes = first.split()
    addresses = {ip.removeprefix("::ffff:") for line in listening for ip in line.split()}
    assert len(processes) > 3 and addresses == {"127.0.0.1"}
    until(lambda: not any(map(sweeps.alive, map(int, processes))) and not Path(folder).exists(), 10)
    until(lambda: not run_process._started_in(folder.encode()), 10)
