"""Run the documentation's programs, and check the commands in the documentation."""

import contextlib
import io
import re
import shutil
import tomllib

import pytest
import typer
from documents import DOCUMENTS, ROOT, blocks, commands
from typer.testing import CliRunner

from bass_core.loading import measured_costs
from bass_core.loading.model_pair import ASSETS
from bass_lab.cli import main

BASS = typer.main.get_command(main.app).commands
CHEAP = ("generate", "doctor")  # run as typed; sweeps are planned, other commands are only parsed
HUB = {"7B": "target", "0.5B": "draft"}  # embedded model for a hub model of this size
CHAT = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
TOLD = re.compile(r"`(make|bass) ([a-z][a-z-]*)")
WITH_PROGRAMS = [name for name in DOCUMENTS if blocks(name, "python")]
SLOW = [name for name in WITH_PROGRAMS if any(block.slow for block in blocks(name, "python"))]
PROGRAMS = [pytest.param(name, False, marks=[pytest.mark.ci] * (name != "README.md")) for name in WITH_PROGRAMS]
PROGRAMS += [pytest.param(name, True, marks=pytest.mark.slow) for name in SLOW]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Make a folder with the embedded models under the names of hub models, and a costs file."""
    folder = tmp_path_factory.mktemp("desk")
    for size, role in HUB.items():
        for name in (f"Qwen2.5-Coder-{size}", f"Qwen2.5-Coder-{size}-Instruct"):
            shutil.copytree(ASSETS / role, folder / "Qwen" / name)
        (folder / "Qwen" / name / "chat_template.jinja").write_text(CHAT)
    shutil.copy(next(measured_costs.SHIPPED.glob("*.json")), folder / "costs.json")  # of `bass calibrate`
    return folder


@pytest.mark.parametrize(("document", "slow"), PROGRAMS)
def test_programs_run(document, slow, desk, monkeypatch):
    monkeypatch.chdir(desk)
    names: dict = {"__name__": document}
    for block in blocks(document, "python"):
        if block.slow and not slow:
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * (block.line - 1) + block.text, ROOT / document, "exec"), names)
        if block.output is not None:
            assert said.getvalue().split() == block.output.split()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_can_be_typed(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(document):
        program, *arguments = words
        if program == "bass":
            types_bass(arguments)
        elif program == "make":
            names = [each for each in arguments if "=" not in each]
            assert set(names) <= targets() and all(variable(each) for each in arguments if "=" in each)
        elif program == "pip":
            assert arguments[0] == "install" and extras(arguments[-1]) <= set(project()["optional-dependencies"])
        elif program == "conda":
            assert arguments[:3] == ["env", "create", "-f"] and (ROOT / arguments[3]).is_file()
        else:
            assert program in ("git", "cd"), f"{' '.join(words)}: nothing here checks this program"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_named_in_sentences_exist(document):
    known = {"make": targets(), "bass": set(BASS)}
    told = TOLD.findall((ROOT / document).read_text(encoding="utf-8"))
    assert [f"{program} {name}" for program, name in told if name not in known[program]] == []


def test_pip_installs_existing_extras():
    """The project is in no package index: pip must install a folder."""
    for document in DOCUMENTS:
        for what in re.findall(r"pip install ('[^']*'|[^\s`,)]+)", (ROOT / document).read_text(encoding="utf-8")):
            assert what.strip("'").startswith("."), f"{document}: pip install {what}"
            assert extras(what.strip("'")) <= set(project()["optional-dependencies"])


def test_programs_outputs_and_commands_are_found():
    assert {"README.md", "docs/API.md"} <= set(WITH_PROGRAMS)
    assert any(block.output for block in blocks("README.md", "python")) and len(commands("README.md")) > 3


def test_unknown_command_is_found():
    with pytest.raises(KeyError):
        types_bass(["no-such-command"])
    with pytest.raises(Exception, match="--no-such-option"):
        types_bass(["verify", "--no-such-option"])
    assert "no-such-target" not in targets() and not variable("NO_SUCH=1")


def types_bass(arguments: list[str]) -> None:
    """Run a cheap `bass` command, or only parse its arguments. Raises KeyError, click's error or AssertionError."""
    command = BASS[arguments[0]]
    if arguments[0] in CHEAP or arguments[0] == "sweep":
        planned = ["--dry-run"] if arguments[0] == "sweep" else []
        done = CliRunner().invoke(main.app, [*arguments, *planned])
        assert done.exit_code == 0, done.output
    else:
        command.make_context(arguments[0], arguments[1:])


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def variable(assignment: str) -> bool:
    return f"$({assignment.partition('=')[0]})" in (ROOT / "Makefile").read_text()


def extras(requirement: str) -> set[str]:
    return set(filter(None, requirement.partition("[")[2].rstrip("]").split(",")))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
