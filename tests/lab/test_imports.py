import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = "The lab imports the core, never the other way round"
DRAWS = "The core imports nothing that draws, serves or sweeps"
LAYERS = "Folders and modules of the core import from lines below their own"
KERNELS = "Kernels import torch and triton alone"
CIRCLES = "No circles in the lab, between its folders or inside one"


LATE = "\n\ndef late():\n    import "
PLANTED = {
    "bass_core/model/cache.py": f"{LATE}bass_lab.study{LATE}plotly{LATE}bass_core.session\n",
    "bass_core/novelty.py": "",
    "kernels/bass_kernels/plan.py": f"{LATE}numpy\n",
    "bass_lab/texts/grammar.py": f"{LATE}bass_lab.cli.main\n",
}
BROKEN = {
    LAB: "bass_core.model.cache -> bass_lab.study",
    DRAWS: "bass_core.model.cache -> plotly",
    LAYERS: "bass_core.model.cache -> bass_core.session",
    KERNELS: "bass_kernels.plan -> numpy",
    CIRCLES: ".texts -> .cli",
}


def lint(folder: Path, planted: dict[str, str]) -> subprocess.CompletedProcess:
    for name in ("bass_lab", "bass_core", "kernels/bass_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, lines in planted.items():
        with (folder / path).open("a") as module:
            module.write(lines)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'kernels'}"}
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([*command, "--no-cache", "--no-logo"], **options)


def test_contracts_are_kept(tmp_path):
    done = lint(tmp_path, {})
    assert done.returncode == 0, done.stdout


def test_planted_imports_break_their_contracts(tmp_path):
    done = lint(tmp_path, PLANTED)
    assert done.returncode == 1
    for contract, chain in BROKEN.items():
        assert f"{contract} BROKEN" in done.stdout and f"- {chain} (" in " ".join(done.stdout.split())
    assert "not listed as layers: - bass_core.novelty" in " ".join(done.stdout.split())
