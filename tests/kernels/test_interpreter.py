"""The tests marked `interpreted` pass in a process with TRITON_INTERPRET=1."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.with_name("support")


@pytest.mark.parametrize(
    ("ring", "least"),
    [
        pytest.param("not slow and not ci", 180, id="test"),
        pytest.param("ci and not slow", 10, id="ci", marks=pytest.mark.ci),
        pytest.param("slow", 6, id="slow", marks=pytest.mark.slow),
    ],
)
def test_kernels_pass_in_the_interpreter(ring, least):
    options = ["-m", f"interpreted and {ring}", "-q", "-p", "no:cacheprovider", "-p", "kernel_interpreter"]
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))  # path of the plugin
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    files = [file for file in sorted(HERE.glob("test_kernel_*.py")) if "pytest.mark.interpreted" in file.read_text()]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > least
