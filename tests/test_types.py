"""Check that the public API has types other than Any."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

import bass_lab

PROGRAM = Path(__file__).parent / "support/typed_program.py"


def test_lab_names_are_in_the_modules_of_the_stub():
    assert len(bass_lab.__all__) > 10
    for name in bass_lab.__all__:
        assert getattr(bass_lab, name).__name__ in (name, f"bass_lab.{name}")  # a module's name includes its package


def checked(program: Path, cache: Path) -> subprocess.CompletedProcess:
    """Run mypy --strict on a program next to the packages, without errors inside the packages."""
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={cache}"]
    environment = os.environ | {"MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    return subprocess.run([*command, program], cwd=cache, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_users_program_finds_types(tmp_path):
    pytest.importorskip("mypy")
    done = checked(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stdout
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(found) == PROGRAM.read_text().count("reveal_type(") and not [each for each in found if "Any" in each]
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import bass_core as bass\n\nbass.generate(bass.load_pair(), 1).texts.upper()\n")
    assert checked(wrong, tmp_path).stdout.count("error:") == 2
