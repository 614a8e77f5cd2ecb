"""Write a line of JSON per finished test to the file GPU_LOG, and skip tests that passed in earlier runs."""

import os
from pathlib import Path

import pytest

from bass_lab.measure import records
from bass_lab.provenance import describe_environment

LOG = Path(os.environ["GPU_LOG"])
HERE = {name: describe_environment()[name] for name in ("device", "commit")}


def _passed() -> set[str]:
    return {line["test"] for line in records.earlier(LOG, HERE) if line["outcome"] == "passed"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = _passed()
    again = [item for item in items if item.nodeid in done]
    if again:
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _passed():  # all passed in earlier runs
        session.exitstatus = pytest.ExitCode.OK


class _Log:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)} | HERE
        records.append(LOG, [line | {"text": report.longreprtext[-4000:]}], lambda line: None)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the main process
        config.pluginmanager.register(_Log())
