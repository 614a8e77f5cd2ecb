"""A plugin of pytest (-p notebook_kernels): nbval speaks to the kernels of notebooks through files.

Beside other tests somebody else may have a kernel's port before it has it, and then the kernel dies.
"""

import tempfile
from pathlib import Path

from bass_lab.sweep.run_process import through_files

PLACE = tempfile.TemporaryDirectory(prefix="kernel-")  # pytest's own are too long for the name of a socket


def pytest_configure() -> None:
    from nbval import kernel

    kernel.KernelManager = through_files(kernel.KernelManager, Path(PLACE.name))
