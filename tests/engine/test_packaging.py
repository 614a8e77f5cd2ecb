import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import bass_core

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("bass_core", "bass_lab", "kernels/bass_kernels")
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def direct_dependencies() -> list[Requirement]:
    """Return the base dependencies and the dependencies of all extras, without this project itself."""
    extras = PROJECT["optional-dependencies"].values()
    found = [Requirement(line) for lines in (PROJECT["dependencies"], *extras) for line in lines]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names_and_versions = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in names_and_versions}


def run(code: str, cwd: Path = ROOT, *paths: Path) -> str:
    """Return the output of `python -c code`. Python puts `cwd` first on sys.path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": ""}  # empty: unset
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_direct_dependencies_are_pinned_and_installed():
    assert len(direct_dependencies()) > 20
    for requirement in direct_dependencies():
        name = canonicalize_name(requirement.name)
        assert name in pins(), f"{name} stands in pyproject.toml but not in constraints.txt"
        assert pins()[name] in requirement.specifier
        try:
            installed = Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        # torch's version contains the build (+cpu, +cu130): any build will do
        assert Version(installed.public) == pins()[name], "not the tested versions: install with `-c constraints.txt`"


def test_transformers_ends_at_the_tested_minor_version():
    """`transformers_internals` uses names that a later release may change."""
    (allowed,) = [each.specifier for each in direct_dependencies() if each.name == "transformers"]
    tested = pins()["transformers"]
    assert tested in allowed and Version(f"{tested.major}.{tested.minor + 1}") not in allowed


def test_every_pin_is_locked_by_hash():
    locked = (ROOT / "requirements.lock").read_text().splitlines()[2:]
    assert {line.split(" --hash=sha256:")[0] for line in locked} == {
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    }


def test_conda_and_binder_install_the_lessons_with_a_cpu_build():
    (python,) = [entry for entry in ENVIRONMENT if isinstance(entry, str) and entry.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    (pip_lines,) = [entry["pip"] for entry in ENVIRONMENT if isinstance(entry, dict)]
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert "pip" in ENVIRONMENT and pip_lines == [index, "-c constraints.txt", "-e .[notebooks]"]
    assert "-c constraints.txt -e '.[$(EXTRAS)]'" in (ROOT / "Makefile").read_text()


IMPORTS = """
import json, sys
import bass_core
core = list(sys.modules)
import bass_lab
from transformers.utils import is_kernels_available
print(json.dumps([core, list(sys.modules), is_kernels_available()]))
"""


@pytest.mark.ci
def test_imports_load_no_extras_and_no_kernels_folder():
    core, lab, kernels = json.loads(run(IMPORTS))
    assert not {"plotly", "ipywidgets", "IPython", "papermill", "ray", "typer", "pydantic", "datasets"} & {*core, *lab}
    ours = {name for name in core if name.startswith("bass_")}
    assert {name.partition(".")[0] for name in ours} == {"bass_core"}
    assert not any(name.startswith("bass_core.gpu") for name in ours), "what a CPU never runs is not imported"
    assert kernels == (importlib.util.find_spec("kernels").origin is not None)  # the published package has a file


def test_folder_kernels_does_not_hide_the_published_package(tmp_path):
    stand_in = tmp_path / "kernels" / "__init__.py"
    stand_in.parent.mkdir()
    stand_in.touch()
    assert run("import kernels; print(kernels.__file__)", ROOT, tmp_path) == str(stand_in)


def install(folder: Path, build: str) -> Path:
    source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheels.mkdir()
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{build}({str(wheels)!r})"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(next(wheels.iterdir())).extractall(site)
    return site


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install(tmp_path_factory.mktemp("installed"), "build_wheel")


@pytest.mark.ci
def test_wheel_has_every_file_of_the_packages(installed):
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name.removeprefix("kernels/") for name in tracked.stdout.splitlines()}
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {name for name in found if ".dist-info/" not in name} == expected
    (info,) = installed.glob("*.dist-info/METADATA")
    assert f"\nVersion: {bass_core.__version__}\n" in info.read_text()
    assert "bass = bass_lab.cli.__main__:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()


USE = """
import bass_core, bass_kernels, bass_lab
from bass_lab.evaluation import load_problems
from bass_lab.texts import grammar, prompt_sets

for library in (bass_core, bass_kernels, bass_lab):
    print(library.__file__)
bass_core.generate(bass_core.load_pair(), prompt_sets.prompt_set("library", 2), max_new_tokens=4)
assert load_problems(None)
"""


@pytest.mark.ci
def test_installed_packages_work_outside_the_repository(installed, tmp_path):
    assert all(Path(line).is_relative_to(installed) for line in run(USE, tmp_path, installed).splitlines())


TYPED = """
import bass_core, bass_kernels, bass_lab
reveal_type((bass_core.FixedLength(3).k, bass_kernels.write_kv, bass_lab.HuggingFaceHeuristic()))
"""


@pytest.mark.ci
@pytest.mark.parametrize("build", ["build_wheel", "build_editable"])
def test_type_checker_finds_the_installed_packages(tmp_path, build):
    python = install(tmp_path, build).parents[2] / "bin" / "python"
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", f"--python-executable={python}", "typed.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    found = re.search(r'Revealed type is "tuple\[(.*)\]"', done.stdout)[1]
    assert re.fullmatch(r"int, def \(key_states: .*\), bass_lab\.[a-z_.]+\.HuggingFaceHeuristic", found)


def test_version_licence_and_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == bass_core.__version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    (paper,) = citation["references"]
    assert paper["title"] == "BASS: Batched Attention-optimized Speculative Sampling"
    assert [identifier["value"] for identifier in paper["identifiers"]] == ["arXiv:2404.15778"]
