"""Kernels of notebooks that are spoken to through files, also those of nbval: a plugin of pytest (-p notebook_kernels).

Ports are chosen before a kernel takes them. Beside other tests somebody else may have one by then, and the kernel dies.
"""

import tempfile
from pathlib import Path


def through_files(manager: type) -> type:
    """A manager of kernels as the given one of jupyter_client, that needs no ports."""

    class ThroughFiles(manager):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self._folder = tempfile.TemporaryDirectory(prefix="kernel-")
            self.transport, self.ip = "ipc", str(Path(self._folder.name) / "kernel")

    return ThroughFiles


def pytest_configure() -> None:
    from nbval import kernel

    kernel.KernelManager = through_files(kernel.KernelManager)
