"""Run tests on a CPU, offline, in one thread: with threads, matrices of this size are many times slower."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: kernels of notebooks, the demo
torch.set_num_threads(1)

# Triton exists only for Linux.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["kernels/*", "engine/test_gpu_*"]
# torchao prints in every program that imports transformers; only `make test-quantized` installs torchao.
collect_ignore_glob += [] if importlib.util.find_spec("torchao") else ["engine/test_quantized.py"]


# Proofs run first. Slow files run last, longest first, so that two workers finish together.
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
    if path.stem in SLOW_LAST:
        return len(PROOFS) + 1, SLOW_LAST.index(path.stem)
    return (PROOFS.index(path.parent.name) if path.parent.name in PROOFS else len(PROOFS)), 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and deselect `interpreted` tests unless TRITON_INTERPRET=1 was set before the imports."""
    items.sort(key=lambda item: place_in_the_run(item.path))
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if not interpreting and item.get_closest_marker("interpreted")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _with_room(call):
    """Call a function in a frame of one megabyte.

    Python keeps frames in chunks of 16 kB. Calls across the end of a chunk map and free memory each time, half of the
    interpreted kernels' time. The large frame allocates a chunk for all later frames.
    """
    return call()


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=80_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _with_room(lambda: pyfuncitem.obj(**given))
    return True


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Use an empty folder of measured costs, without the shipped costs."""
    from bass_core.loading import measured_costs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measured_costs, "SHIPPED", tmp_path / "shipped")
    return measured_costs.cache_folder()


@pytest.fixture
def clock(monkeypatch):
    """Stop the clock; a test sets `now`."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def cache_memory(monkeypatch):
    from recovery import CacheMemory

    return CacheMemory(monkeypatch)
