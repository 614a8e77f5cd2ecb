"""Libraries import on every system, and report a missing feature at the first use."""

import subprocess
import sys

import pytest

from bass_lab import locks

# Other libraries, too, import these modules, with fallbacks of their own.
LACKING = """
import builtins, sys
ours, imported = ("bass_core", "bass_lab"), builtins.__import__

def lacking(name, globals=None, *rest, **more):
    if name in {"fcntl", "resource", "triton"} and str((globals or {}).get("__name__")).startswith(ours):
        raise ModuleNotFoundError(f"No module named {name!r}")
    return imported(name, globals, *rest, **more)

builtins.__import__ = lacking
import importlib, pkgutil
import bass_core, bass_lab.cli.main

for name in bass_lab.__all__:
    getattr(bass_lab, name)
for module in pkgutil.walk_packages(bass_core.__path__, "bass_core."):
    importlib.import_module(module.name)
print(bass_core.generate(bass_core.load_pair(), "def f():", max_new_tokens=2).texts)
"""


@pytest.mark.ci
def test_libraries_import_and_decode_without_fcntl_resource_and_triton():
    done = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['")


def test_lock_without_fcntl_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="run this in WSL"):
        locks.lock(file.fileno())
