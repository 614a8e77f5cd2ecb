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


# The proofs come first. Last are files that start programs, wait for kills, time limits and a browser, or run lessons:
# minutes each, the longest first, so that two workers end together.
PROOFS = ("law", "engine", "policies", "kernels")
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
    """By folder of the proofs, then all other tests, then what is slow."""
    if path.stem in SLOW_LAST:
        return len(PROOFS) + 1, SLOW_LAST.index(path.stem)
    return (PROOFS.index(path.parent.name) if path.parent.name in PROOFS else len(PROOFS)), 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Kernels run on a CPU in Triton's interpreter, which a process has from its start or never.

    Tests marked `interpreted` belong to processes with TRITON_INTERPRET=1; test_interpreter.py starts one.
    """
    items.sort(key=lambda item: place_in_the_run(item.path))
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if not interpreting and item.get_closest_marker("interpreted")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _with_room(call):
    """Call it where Python has room for all the frames that follow.

    It keeps frames in chunks of 16 kB. Where calls in a loop cross the end of one, each of them maps a new chunk and
    gives it back: more than half of the kernels' time in Triton's interpreter, at the depth that pytest calls tests at.
    A frame that claims this many words comes with a chunk of a megabyte, and those after it lie in the rest.
    """
    return call()


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=80_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test, as pytest does where nobody else has."""
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _with_room(lambda: pyfuncitem.obj(**given))
    return True


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The folder of measured costs, where nothing is and nothing shipped."""
    from bass_core.policies import costs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(costs, "SHIPPED", tmp_path / "shipped")
    return costs.cache_folder()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its `now` is moved."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def cache_memory(monkeypatch):
    """Watches the bytes that caches hold: `recovery.CacheMemory`."""
    from recovery import CacheMemory

    return CacheMemory(monkeypatch)
