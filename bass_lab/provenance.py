"""Where a figure was measured: device, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from bass_core.environment import processor


def describe_environment() -> dict[str, str | int]:
    """Where a figure was measured: device, processor, cores, versions, commit."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bass": _own_version(),
        "commit": _commit(),
    }


def _own_version() -> str:
    try:
        return version("bass-hands-on")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The repository's commit, with + if the tree differs from it; empty outside a repository."""
    run = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
    except OSError:
        return ""
    return head + ("+" if head and changed else "")
