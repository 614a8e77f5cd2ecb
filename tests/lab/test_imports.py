"""Who may import whom: the contracts in pyproject.toml, and what an import brings along."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {"plotly", "ipywidgets", "papermill", "ray", "pydantic", "datasets", "IPython"}
LAB = "The lab imports the core, never the other way round"
DRAWS = "The core imports nothing that draws, serves or sweeps"
LAYERS = "Modules of the core import from lines below their own"
CIRCLES = "No circles in the lab, between its folders or inside one"
needs_policies_package = pytest.mark.xfail(
    not (ROOT / "bass_core/policies/__init__.py").exists(),
    reason="bass_core/policies has no __init__.py: import-linter does not see it, and a wheel leaves it out",
)


def modules_after(statement: str) -> set[str]:
    """The modules that a new process has loaded once this was executed."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def of(modules: set[str], *packages: str) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in packages}


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


@needs_policies_package
def test_contracts_are_kept(planted):
    done = planted()
    assert done.returncode == 0, done.stdout


@needs_policies_package
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


def test_core_imports_few_modules_of_ours_and_none_that_draws_serves_or_sweeps():
    modules = modules_after("import bass_core")
    assert len(of(modules, "bass_core", "bass_lab", "bass_kernels")) < 40
    assert not of(modules, *OPTIONAL, "typer", "bass_lab", "bass_kernels")


def test_lab_imports_nothing_that_draws_serves_or_sweeps():
    assert not of(modules_after("import bass_lab"), *OPTIONAL, "typer")
