"""Tests run on CPU, offline, in one thread: waiting threads make matrices this small many times slower."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: kernels of notebooks, the demo
torch.set_num_threads(1)

# Triton exists for Linux alone; elsewhere there are no kernels to test.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["kernels/*", "engine/test_gpu_*"]
# torchao prints into every program that imports transformers: `make test-quantized` has it, other runs do not.
collect_ignore_glob += [] if importlib.util.find_spec("torchao") else ["engine/test_quantized.py"]


# The proofs come first. The slow files come last, the longest first: two workers then end at about the same time.
PROOFS = ("exactness", "gpu", "engine", "policies", "kernels")
SLOW_LAST = (
    "test_notebooks",
    "test_sweep",
    "test_browser",
    "test_sandbox",
    "test_quality",
    "test_explorer",
    "test_sweep_ray",
)


def place_in_the_run(path: Path) -> tuple[int, int]:
    """Return the sort key of a test file: proofs by folder, then other tests, then slow files."""
    if path.stem in SLOW_LAST:
        return len(PROOFS) + 1, SLOW_LAST.index(path.stem)
    return (PROOFS.index(path.parent.name) if path.parent.name in PROOFS else len(PROOFS)), 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and deselect `interpreted` tests unless Triton's interpreter is on.

    TRITON_INTERPRET=1 must be set before the imports. test_interpreter.py starts such a process.
    """
    items.sort(key=lambda item: place_in_the_run(item.path))
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if not interpreting and item.get_closest_marker("interpreted")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _with_room(call):
    """Call a function in a frame of one megabyte.

    Python keeps frames in chunks of 16 kB. A loop of calls that cross the end of a chunk maps and frees one per call,
    which takes half of the interpreted kernels' time. The large frame brings a chunk for all later frames.
    """
    return call()


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=80_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test like pytest does, but in a large frame."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _with_room(lambda: pyfuncitem.obj(**given))
    return True


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """An empty folder of measured costs, without the shipped ones."""
    from bass_core.loading import measured_costs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measured_costs, "SHIPPED", tmp_path / "shipped")
    return measured_costs.cache_folder()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test sets its `now`."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def cache_memory(monkeypatch):
    """The bytes that caches hold: `recovery.CacheMemory`."""
    from recovery import CacheMemory

    return CacheMemory(monkeypatch)
