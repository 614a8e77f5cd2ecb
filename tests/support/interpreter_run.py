"""Runs the tests marked `interpreted` in a process that starts with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
KERNELS = SUPPORT.parent / "kernels"


def files() -> set[str]:
    """Names of the files with interpreted tests, without `test_kernel_` and `.py`."""
    found = (file for file in KERNELS.glob("test_kernel_*.py") if "pytest.mark.interpreted" in file.read_text())
    return {file.stem.removeprefix("test_kernel_") for file in found}


def passed(names: set[str], which: str) -> int:
    """Number of tests of these files that passed. Fails if a test does. which: "slow" or "not slow"."""
    paths = [KERNELS / f"test_kernel_{name}.py" for name in sorted(names)]
    options = ["-m", f"interpreted and {which}", "-q", "-p", "no:cacheprovider", "-p", "kernel_interpreter"]
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))  # of the plugin
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", *options, *paths]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=KERNELS.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
    return int(re.search(r"(\d+) passed", result.stdout)[1])
