"""The kernels' own tests, in a process with Triton's interpreter: it runs the kernels' code on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


@pytest.mark.parametrize(("which", "least"), [("not slow", 200), pytest.param("slow", 15, marks=pytest.mark.slow)])
def test_kernels_pass_their_tests_in_the_interpreter(which, least):
    files = [file for file in HERE.glob("test_kernel_*.py") if "pytest.mark.interpreted" in file.read_text()]
    options = ["-m", f"interpreted and {which}", "-q", "-p", "no:cacheprovider", "-p", "kernel_interpreter"]
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))  # where the plugin is found
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > least  # they were found
