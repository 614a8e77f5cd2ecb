"""What a user installs is what was tested, and importing it disturbs nothing."""

import functools
import os
import shutil
import subprocess
import sys
import tomllib
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
    """The base dependencies and those of every extra, without the extras that name this project again."""
    extras = PROJECT["optional-dependencies"].values()
    found = [Requirement(line) for lines in (PROJECT["dependencies"], *extras) for line in lines]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names_and_versions = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in names_and_versions}


def run_in_repository(code: str, *more_paths: Path) -> str:
    """What `python -c code` prints when started in the repository's root, which then comes first on sys.path."""
    paths = os.pathsep.join(map(str, more_paths))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": ""}  # empty stands for unset
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("requirement", direct_dependencies(), ids=lambda requirement: requirement.name)
def test_direct_dependency_is_pinned_within_its_range_and_installed_so(requirement):
    name = canonicalize_name(requirement.name)
    assert name in pins(), f"{name} stands in pyproject.toml but not in constraints.txt"
    assert pins()[name] in requirement.specifier
    try:
        installed = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    # torch's version carries its build (+cpu, +cu130): any build of the pinned version will do
    assert Version(installed.public) == pins()[name], "not the tested versions: install with `-c constraints.txt`"


def test_conda_environment_has_a_python_that_the_project_accepts():
    (python,) = [entry for entry in ENVIRONMENT if isinstance(entry, str) and entry.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))


def test_conda_environment_installs_what_make_test_installs():
    (pip_lines,) = [entry["pip"] for entry in ENVIRONMENT if isinstance(entry, dict)]
    assert "pip" in ENVIRONMENT
    assert pip_lines == ["-c constraints.txt", "-e .[notebooks,test]"]
    makefile = (ROOT / "Makefile").read_text()
    assert "-c constraints.txt -e '.[$(EXTRAS)]'" in makefile and "EXTRAS = notebooks,test\n" in makefile


def test_every_pin_is_locked_by_hash():
    locked = (ROOT / "requirements.lock").read_text().splitlines()[2:]
    assert {line.split(" --hash=sha256:")[0] for line in locked} == {
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    }


@functools.cache
def loaded_by(library: str) -> set[str]:
    return set(run_in_repository(f"import sys, {library}; print(*sys.modules)").split())


@pytest.mark.parametrize("library", ["bass_core", "bass_lab"])
def test_importing_the_library_imports_nothing_of_the_extras(library):
    extras = {"plotly", "ipywidgets", "IPython", "papermill", "ray", "typer", "pydantic", "datasets"}
    assert not extras & loaded_by(library)


def test_importing_the_core_loads_few_modules_and_neither_lab_nor_kernels():
    ours = {name for name in loaded_by("bass_core") if name.startswith("bass_")}
    assert len(ours) < 40
    assert {name.partition(".")[0] for name in ours} == {"bass_core"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What `pip install .` puts into site-packages, in a folder of its own."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_wheel_has_every_file_of_the_packages(installed):
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name.removeprefix("kernels/") for name in tracked.stdout.splitlines()}
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert {name for name in found if ".dist-info/" not in name} == expected
    assert "bass = bass_lab.cli.__main__:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()


def test_there_is_one_version_and_the_changes_say_what_comes_next(installed):
    (info,) = installed.glob("*.dist-info/METADATA")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert f"\nVersion: {bass_core.__version__}\n" in info.read_text() and str(cited) == bass_core.__version__
    assert (ROOT / "CHANGELOG.md").read_text().count("\n## ") >= 1


USE = """
import bass_core, bass_kernels, bass_lab
from bass_lab.evaluation import load_problems
from bass_lab.texts import grammar, prompt_sets

for library in (bass_core, bass_kernels, bass_lab):
    print(library.__file__)
bass_core.generate(bass_core.load_pair(), prompt_sets.prompt_set("library", 2), max_new_tokens=4)
assert load_problems(None)
"""


def test_what_is_installed_works_outside_the_repository(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(installed) for line in done.stdout.splitlines())


def test_folder_kernels_does_not_hide_the_published_package(tmp_path):
    stand_in = tmp_path / "kernels" / "__init__.py"
    stand_in.parent.mkdir()
    stand_in.touch()
    assert (ROOT / "kernels").is_dir()
    assert run_in_repository("import kernels; print(kernels.__file__)", tmp_path) == str(stand_in)


def test_folder_kernels_is_not_taken_for_the_published_package():
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    try:
        metadata.version("kernels")
    except metadata.PackageNotFoundError:
        assert run_in_repository(code) == "False"
    else:
        pytest.skip("the published package is installed")


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_citation_names_this_repository_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["title"].startswith("BASS, hands on")
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert paper["title"] == "BASS: Batched Attention-optimized Speculative Sampling"
    assert [identifier["value"] for identifier in paper["identifiers"]] == ["arXiv:2404.15778"]
    authors = ["Qian", "Gonugondla", "Ha", "Shang", "Gouda", "Nallapati", "Sengupta", "Ma", "Deoras"]
    assert [author["family-names"] for author in paper["authors"]] == authors
