"""Who may import whom: the contracts in pyproject.toml are kept, and notice what breaks them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = "The lab imports the core, never the other way round"
DRAWS = "The core imports nothing that draws, serves or sweeps"
LAYERS = "Modules of the core import from lines below their own"
CIRCLES = "No circles in the lab, between its folders or inside one"


@pytest.fixture
def planted(tmp_path):
    """Checks the contracts on a copy of the packages, where a file was given more lines."""
    for name in ("bass_lab", "bass_core", "kernels/bass_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def lint(path: str = "", lines: str = "") -> subprocess.CompletedProcess:
        if path:
            with (tmp_path / path).open("a") as module:
                module.write(lines)
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'kernels'}"}
        command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([*command, "--no-cache", "--no-logo"], **options)

    return lint


def test_contracts_are_kept(planted):
    done = planted()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("path", "lines", "broken"),
    [
        ("bass_core/cache.py", "def late():\n    import bass_lab.study\n", LAB),
        ("bass_core/cache.py", "def late():\n    import plotly\n", DRAWS),
        ("bass_core/cache.py", "def late():\n    from bass_core import engine\n", LAYERS),
        ("bass_core/novelty.py", "", LAYERS),
        ("bass_lab/texts/grammar.py", "def late():\n    import bass_lab.cli.main\n", CIRCLES),
    ],
)
def test_planted_import_breaks_its_contract(planted, path, lines, broken):
    done = planted(path, lines)
    assert done.returncode == 1
    assert f"{broken} BROKEN" in done.stdout
