"""Where a figure was measured: device, versions, commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from bass_core import __version__
from bass_core.environment import processor

HERE = "bass_lab/provenance.py"  # in this project's own repository


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
    """Return BASS_COMMIT, or the commit of this project's own repository (+ a hash of differences), or ""."""
    if told := os.environ.get("BASS_COMMIT"):
        return told
    try:
        if _git("ls-files", "--full-name", Path(__file__).name) != HERE:
            return ""
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") if head else ""
        return head + (f"+{hashlib.sha256(changed.encode()).hexdigest()[:6]}" if changed else "")
    except OSError:
        return ""


def _git(*arguments: str) -> str:
    """What git prints, empty after an error. It only looks: no index is renewed, no program of a repository started."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    said = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent).stdout
    return said.decode(errors="replace").strip()
