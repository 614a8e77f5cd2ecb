"""Malformed calls of every command end before the work with one line, exit code 2 and no traceback."""

import gzip
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result
from waiting import until

from bass_lab.checks import doctor
from bass_lab.cli import common, main
from bass_lab.sweep.run_process import RunProcess

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(main.app).commands
CALLS = 400
SIZES = [str(sign * 2**bits) for sign, bits in ((1, 31), (1, 63), (-1, 63))]
NUMBERS = ["-1", "0", "1", "2", "3.5", "1e400", "inf", "-inf", "nan", "1e-320", "999999", *SIZES]


class WorkBegins(BaseException):
    pass


class TooLong(BaseException):
    pass


@pytest.fixture(autouse=True)
def nothing_works(monkeypatch):
    def begin(*arguments, **options):
        raise WorkBegins

    for owner, name in (
        (PreTrainedModel, "__call__"),
        (NotebookClient, "async_execute"),
        (RunProcess, "__init__"),
        (doctor, "_devices"),
    ):
        monkeypatch.setattr(owner, name, begin)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # no thread trial


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "folder").mkdir()
    (folder / "text").write_text("no JSON\n")
    (folder / "none.jsonl.gz").write_text("no gz\n")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(random.Random(0).randbytes(5000))[:300])
    (folder / "bad.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 99)[:12] + b"\xff" * 40)
    (folder / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for deep in ("deep.jsonl", "deep.ipynb", "deep.yaml"):
        (folder / deep).write_text("[" * 200_000)
    for empty in ("empty.csv", "empty.jsonl"):
        (folder / empty).touch()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"a":' * 100_000)
    found = {path.name: str(path) for path in folder.iterdir()}
    return found | {"under a file": str(folder / "text" / "below"), "null": "/dev/null", "full": "/dev/full"}


@contextmanager
def bounded(seconds: int, gigabytes: int) -> Iterator[None]:
    def stop(*_):
        raise TooLong(f"after {seconds} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (size + gigabytes * 2**30, before[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def call(arguments: list[str]) -> Result | None:
    try:
        with bounded(seconds=20, gigabytes=6):
            return CliRunner().invoke(main.app, arguments, input="def f(x):\n")
    except WorkBegins:
        return None


def fault(result: Result | None) -> str | None:
    if result is None:
        return None
    if not isinstance(result.exception, SystemExit | None):
        return f"{type(result.exception).__name__} came through: {result.exception}"
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if result.exit_code not in (0, 1, 2):
        return f"exit code {result.exit_code}"
    if "Traceback" in result.output or "a fault in bass" in result.output:
        return f"no error of the user's: {result.output[-300:]}"
    if result.exit_code == 2 and len(lines) != 1:
        return f"{len(lines)} lines of errors: {result.stderr[-300:]}"
    return None


def hostile_calls(files: dict[str, str]) -> Iterator[list[str]]:
    """Yield calls of each command with one to three options, with valid and invalid values."""
    chance = random.Random(22)
    texts = ["", " ", "abc", "x" * 5000, "ä\udc80", "../..", "-", "=", "a=1,2", *files.values()]
    for number in range(CALLS):
        name = list(COMMANDS)[number % len(COMMANDS)]
        parameters, options, places = COMMANDS[name].params, [], []
        for parameter in chance.sample(parameters, min(len(parameters), chance.randint(1, 3))):
            value = chance.choice(NUMBERS if chance.random() < 0.5 else texts)
            if parameter.param_type_name == "argument":
                places.append(value)
            elif getattr(parameter, "is_flag", False):
                options.append(parameter.opts[0])
            elif parameter.name != "help":
                options += [parameter.opts[0], value]
        yield [name, *options, *places]


@pytest.mark.slow
def test_malformed_calls_end_without_a_traceback(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "notebooks").mkdir()
    began, faults, ends = time.monotonic(), [], {}
    for arguments in hostile_calls(files):
        result = call(arguments)
        if found := fault(result):
            faults.append(f"bass {' '.join(arguments)[:200]!r}: {found}")
        end = "work begins" if result is None else result.exit_code
        ends[end] = ends.get(end, 0) + 1
    print(f"{CALLS} calls in {time.monotonic() - began:.0f} s ended with {ends}")
    assert not faults, "\n".join(faults)
    assert ends[2] > CALLS / 2 and ends["work begins"] > CALLS / 50


REFUSED = {
    ("generate", "x", "--draft-length", str(2**63)): "out of range",
    ("generate", "x", "--temperature", "nan"): "finite",
    ("demo", "--batch-size", "1000"): "from 1 to 164",
    ("bench", "--max-new-tokens", "1500"): "beyond the target model's context",
    ("bench", "--methods", "fast"): "methods must",
    ("bench", "--record", "folder"): "not a regular file",
    ("calibrate", "--target", "text"): "cannot load",
    ("calibrate", "--output", "under a file"): "cannot write into",
    ("calibrate", "--target", "opt-13b", "--weights", "dummy", "--dtype", "float64"): "GB",
    ("record", "--output", "under a file"): "cannot write into",
    ("bench", "--record", "under a file"): "cannot write into",
    ("eval", "--budgets", "inf"): "finite",
    ("eval", "--cut-off", "nan"): "--cut-off",
    ("eval", "--problems", "folder"): "not a regular file",
    ("eval", "--problems", "none.jsonl.gz"): "gzip",
    ("eval", "--problems", "bad.jsonl.gz"): "no file of JSON lines",
    ("eval", "--problems", "deep.jsonl"): "recursion",
    ("eval", "--output", "text"): "cannot write into",
    ("sweep", "deep.ipynb", "--output", "folder"): "recursion",
    ("sweep", "full", "--output", "folder"): "not a regular file",
    ("sweep", "text", "--output", "text"): "cannot write into",
    ("doctor", "--nosuch"): "No such option",
    ("nosuch",): "No such command",
    ("verify", "--target", "text"): "cannot load",
    ("verify", "--dtype", "float7"): "dtype",
    ("verify", "model"): "name models with --target NAME and --draft NAME",
    ("record", "--output", "x.npz", "model"): "name models with --target NAME and --draft NAME",
    ("demo", "surplus"): "unexpected argument 'surplus'",
    ("notebooks", "3", "99"): "no lesson 99; the lessons are 00, 01,",
    ("generate", "x", "--input", "text"): "leave one out",
    ("generate", "--input", "nosuch"): "does not exist",
    ("generate", "--input", "bytes.jsonl"): "bytes.jsonl",
    ("generate", "--input", "empty.jsonl"): "prompts is empty",
    ("generate", "x", "--device", "banana"): "device must be a device",
    ("generate", "x", "--temperature=-1"): "temperature must be",
    ("generate", "x", "--max-new-tokens=5000"): "context of",
    ("generate", "x", "--draft=/nowhere"): "without a target",
    ("generate", ""): "a prompt is empty",
    ("generate", "caf\udce9"): "a prompt is not valid Unicode: lone surrogate at index 3",
    (
        "record",
        "--output=x.npz",
        "--prompts",
        "other",
    ): "prompt_set must be one of mini, library, edits, questions, *.jsonl, *.jsonl.gz; got",
    ("generate", "--input", "folder"): "is a directory",
    ("generate", "x", "--chat"): "chat template",
    ("generate", "x", "--json", "--show-accepted"): "leave out --show-accepted",
    ("load", "--url", "http://x", "--simulate", "here"): "--url does not take --simulate",
    ("load", "--url", "http://x", "--draft-length", "0"): "--url does not take --draft-length",
    ("load", "--model", "x"): "without --url does not take --model",
    ("load", "--simulate", "here", "--temperature", "1"): "does not take --temperature",
    ("load", "--highest"): "needs a latency target",
    ("load", "--rate", "0"): "above 0",
    ("load", "--simulate", "nowhere"): "here, h100 or a file of costs; got 'nowhere'",
    ("load", "--url", "ftp://x"): "url must be an http or https address",
    ("load", "--url", "127.0.0.1:9"): "refused",
    ("load", "--record", "x.jsonl", "--highest", "--end-ms", "1"): "--record does not take --highest",
    ("load", "--simulate", "here", "--max-new-tokens", "200"): "texts have 128 tokens",
    ("load", "--max-new-tokens", "4", "--least-new-tokens", "9"): ">= 9",
    ("load", "--workload", "/dev/null", "--rate", "4"): "--workload does not take --rate",
    ("load", "--simulate", "h100", "--between-ms", "0"): "between_ms",
    ("load", "--simulate", "h100", "--save", "x.csv"): "--save writes JSON lines and cannot use x.csv",
    ("load", "--api-key", "x"): "without --url does not take --api-key",
    ("load", "--simulate", "h100", "--trace", "/dev/null"): "/dev/null holds no trace; `bass record` makes one",
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.items(), ids=lambda value: ascii(value)[:60])
def test_refusal_is_one_line_before_the_work(files, monkeypatch, arguments, reason):
    monkeypatch.chdir(ROOT)
    result = call([files.get(argument, argument) for argument in arguments])
    assert result is not None, "the work began"
    assert fault(result) is None and result.exit_code == 2 and reason in result.stderr
    assert result.stdout == "" or arguments[0] == "demo"


def bass(*arguments, module="bass_lab.cli", environment=(), **options):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    return subprocess.run(command, text=True, env=surroundings, timeout=120, **options)


def test_program_runs_as_a_module():
    done = bass("record", "--help", module="bass_lab.cli.main")
    assert done.returncode == 0 and "Usage: bass record" in done.stdout


HEAVY = ("torch", "transformers", "pandas", "numpy", "tqdm", "rich")  # not needed by help and completion


def test_help_imports_nothing_heavy():
    calls = ["--help"], ["-h"], ["generate", "-h"], ["sweep", "--help"], ["--version"]
    code = f"from bass_lab.cli.main import app; import sys\nfor call in {calls}: app(call, standalone_mode=False)\n"
    code += f"print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *COMMANDS):
        text = CliRunner().invoke(main.app, [*([name] if name else []), "--help"]).stdout
        assert max(map(len, text.splitlines())) <= 80, name
        assert "..." not in text.replace("[...]", "").replace("]...", ""), f"bass {name}: a sentence was cut"


def test_commands_name_models_by_the_same_options():
    named = {"target": ["--target", "-t"], "draft": ["--draft", "-d"]}
    found = {name: {p.name: p for p in command.params} for name, command in COMMANDS.items()}
    taking = {name for name, options in found.items() if "target" in options} - {"head"}  # which trains a draft
    assert taking == {"generate", "doctor", "verify", "bench", "calibrate", "record", "eval", "load", "serve"}
    for name in taking:
        assert {option: found[name][option].opts for option in named} == named
        assert {"dtype", "device", "as_json"} < found[name].keys()


def test_commands_name_batch_sizes_and_outputs_by_the_same_options():
    for option, commands in {
        "--batch-size": {"demo", "serve", "load"},
        "--batch-sizes": {"bench", "calibrate"},
        "--output": {"calibrate", "record", "eval", "head", "sweep"},
    }.items():
        assert {name for name, command in COMMANDS.items() if any(option in p.opts for p in command.params)} == commands


def test_a_shell_completes_commands_and_options():
    typed = {"COMP_WORDS": "bass verify --d", "COMP_CWORD": "2", "_BASS_COMPLETE": "complete_bash"}
    done = bass(environment=typed)
    assert done.stdout.split() == ["--draft", "--dtype", "--device"]


def test_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = bass("sweep", "--help", stdout=full)
    assert done.returncode == 2 and done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.ci
def test_closed_standard_input_is_one_line():
    done = bass("generate", stdin=None, preexec_fn=lambda: os.close(0))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")
    assert "give a prompt" in done.stderr and "Traceback" not in done.stderr


def test_internal_fault_is_named_and_debug_shows_it(monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("nowhere")

    monkeypatch.setattr(doctor, "diagnose", broken)
    result = CliRunner().invoke(main.app, ["doctor"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "a fault in bass: KeyError: 'nowhere'" in result.stderr and "BASS_DEBUG=1 shows" in result.stderr
    monkeypatch.setenv("BASS_DEBUG", "1")
    assert isinstance(CliRunner().invoke(main.app, ["doctor"]).exception, KeyError)


@pytest.fixture
def heeded():
    """Let programs obey Ctrl-C, even if the tests run in the background."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("seconds", [0.5, pytest.param(2.5, marks=pytest.mark.ci)])
def test_early_ctrl_c_ends_a_command_without_a_traceback(seconds):
    command = [sys.executable, "-m", "bass_lab.cli", "eval", "--limit", "1"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode in (130, -signal.SIGINT) and "Traceback" not in said, said


@pytest.mark.ci
@pytest.mark.usefixtures("heeded")
def test_ctrl_c_in_notebooks_ends_the_kernel_without_a_traceback(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('name = "bass-hands-on"')
    mark = tmp_path / "kernel"
    source = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    cells = [nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / "00_sleeps.ipynb")
    command = [sys.executable, "-m", "bass_lab.cli", "notebooks"]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    running = subprocess.Popen(command, env=surroundings, **options)
    until(lambda: mark.exists() and mark.read_text(), 60)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and said == "  executing 00_sleeps.ipynb\n"
    assert not Path("/proc", mark.read_text()).exists()


def test_ignored_ctrl_c_stays_ignored():
    for before, after in ((signal.SIG_IGN, signal.SIG_IGN), (signal.default_int_handler, common._at_interrupt)):
        found = signal.signal(signal.SIGINT, before)
        try:
            CliRunner().invoke(main.app, ["generate", "--draft-length", "x"])
            assert signal.getsignal(signal.SIGINT) is after
            common.plain_interrupts()
            assert signal.getsignal(signal.SIGINT) is before
        finally:
            signal.signal(signal.SIGINT, found)


def test_failed_cell_is_named_by_its_line():
    cell = nbformat.v4.new_code_cell("def half(x):\n    return x / 0\n\nresult = half(3)")
    with pytest.raises(CellExecutionError) as failed:
        NotebookClient(nbformat.v4.new_notebook(cells=[cell])).execute()
    said = "a cell failed: ZeroDivisionError: division by zero in the line `result = half(3)`"
    assert common.one_line(failed.value) == said
