"""Describe the origin of a measurement: loaded models, device, versions, commit."""

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
from bass_core.loading.model_pair import ModelPair
from bass_lab.pairs import models_named

HERE = "bass_lab/provenance.py"  # path of this file in the project's repository


def describe_run(pair: ModelPair) -> dict[str, str | int]:
    """Return the names and the dtype of the loaded models, `synthetic`, and the environment: fields of a record."""
    models = {"models": models_named(pair), "dtype": str(pair.target.dtype).removeprefix("torch.")}
    return models | {"synthetic": pair.synthetic} | describe_environment(pair.device)


def describe_environment(device: torch.device | None = None) -> dict[str, str | int]:
    """Return device, cores, threads, versions and commit. device: None is the GPU if CUDA is available."""
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
    """Return BASS_COMMIT, or the commit of the project's repository (+ a hash of local changes), or ""."""
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
    """Return the output of git, empty after an error. The call takes no locks and starts no file-system monitor."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    said = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent).stdout
    return said.decode(errors="replace").strip()
