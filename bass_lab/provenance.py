"""Where a figure was measured: device, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from bass_core import __version__
from bass_core.environment import processor

HERE = "bass_lab/provenance.py"  # in this project's own repository
COMMIT = "BASS_COMMIT"  # of a tree that came without its repository


def describe_environment(device: torch.device | None = None) -> dict[str, str | int]:
    """Where a figure was measured: device, cores, versions, commit. device: None is the GPU where there is one."""
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bass": __version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of this project's own repository, with + if the tree differs from it. Outside of it, also where the
    package is installed in a folder of somebody else's repository: what BASS_COMMIT says, since a tree may be copied to
    a GPU box without its repository; or empty."""
    try:
        if _git("ls-files", "--full-name", Path(__file__).name) != HERE:
            return os.environ.get(COMMIT, "")
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:  # no git
        return os.environ.get(COMMIT, "")


def _git(*arguments: str) -> str:
    """What git prints, empty after an error. It only looks: no index is renewed, no program of a repository started."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
