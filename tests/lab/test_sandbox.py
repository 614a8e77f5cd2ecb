"""Programs are graded from outside a sandbox that they neither leave nor deceive."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import attacks
import pytest
from attacks import ADD

from bass_lab.evaluation import (
    Problem,
    SandboxUnavailable,
    confinement,
    grade,
    grade_all,
    load_problems,
    sandbox,
    values,
)
from bass_lab.evaluation.sandbox import Checker, require_sandbox
from bass_lab.pair.data_card import share_passed

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "HumanEval.jsonl.gz"
ORDINARY = 12345  # a uid that owns nothing
try:
    require_sandbox()
    WHY_NOT = ""
except SandboxUnavailable as error:
    WHY_NOT = str(error)
confined = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def problem(test: str, prompt: str = ADD.prompt, name: str = "add") -> Problem:
    return Problem("t/1", prompt, name, "", "def check(candidate):\n" + test)


def returning(value: str) -> str:
    return f"    return {value}\n"


# ----------------------------------------------------------------------------------------------------------- grades


def problem_sets() -> list:
    skip = pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="HumanEval is not committed; its file is not here")
    return [pytest.param(HUMAN_EVAL, id="HumanEval", marks=skip), pytest.param(None, id="mini set")]


@confined
@pytest.mark.parametrize("path", problem_sets())
def test_every_canonical_solution_passes_and_no_stub_does_in_30_s_of_cpu_time(path):
    problems = load_problems(path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    right = grade_all([(each, each.canonical_solution) for each in problems], seconds=30)
    stubs = grade_all([(each, "    pass\n") for each in problems], seconds=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [found for found in right if not found.passed] == [] and len(right) == 164
    assert [found for found in stubs if found.passed] == [] and len(stubs) == 164
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30  # 15 s on each of 2 cores


@confined
@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("    return a + b\n", "passed"),
        ("    return a - b\n", "wrong: assert found == total, found: -1"),
        ("    return a +\n", "error: SyntaxError: "),
        ("    return a + c\n", "error: NameError: name 'c' is not defined"),
        ("    while True: pass\n", "timeout"),
        ("    return add(a, b)\n", "error: RecursionError: "),
        ("    return [0] * 10**10\n", "error: MemoryError"),
        ("    raise SystemExit\n", "error: SystemExit"),
        ("    open('/etc/passwd')\n    return a + b\n", "error: PermissionError: "),
        ("    import os\n    os.abort()\n", "died: SIG"),
        ("    return a + b\n\nadd = 3\n", "error: TypeError: 'int' object is not callable"),
        ("    return a + b\n\ndel add\n", "error: AttributeError: "),
        ("    raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')\n", "error: UnicodeDecodeError: "),
    ],
)
def test_a_grade_says_why(completion, reason):
    found = grade(ADD, completion, seconds=1 if reason == "timeout" else 10)
    assert found.reason.startswith(reason) and found.passed == (reason == "passed")


@confined
def test_grades_are_in_the_order_of_the_jobs_and_a_program_out_of_time_harms_no_other():
    completions = ["    return a + b\n", "    while True: pass\n", "    return 0\n", "    return b + a\n"] * 2
    found = grade_all([(ADD, completion) for completion in completions], seconds=2, workers=3)
    assert [each.passed for each in found] == [True, False, False, True] * 2


@confined
def test_share_passed_counts_programs():
    assert share_passed([ADD] * 4, [ADD.canonical_solution] * 3 + ["    return 0\n"]) == 0.75


@confined
def test_no_jobs_no_grades():
    assert grade_all([]) == []


@confined
def test_the_cpu_limit_ends_a_loop_before_the_wall_clock():
    began = time.monotonic()
    assert grade(ADD, "    while True: pass\n", seconds=60).reason == "timeout: 4 s of CPU time"
    assert time.monotonic() - began < 30


@confined
@pytest.mark.parametrize(
    "loop", ["while candidate(1, 2): pass", "sum(range(candidate(1, 2)))", "1 in [candidate(1, 2)] * 2**40"]
)
def test_a_check_that_a_value_keeps_busy_ends_too(loop):
    began = time.monotonic()
    assert not grade(problem(f"    {loop}\n"), returning("10**18"), seconds=1).passed
    assert time.monotonic() - began < 3


@confined
def test_helpers_of_the_prompt_and_the_entry_points_name_are_there_for_the_check():
    prompt = 'import math\n\ndef half(x):\n    return x / 2\n\ndef add(a, b):\n    """Adds."""\n'
    case = problem("    assert math.floor(half(candidate(1, b=2))) == 1\n    assert add(2, 2) == 4\n", prompt)
    assert grade(case, "    return a + b\n").passed
    assert not grade(case, "    return half(a)\n").passed


@confined
def test_a_check_sees_builtin_exceptions_and_cannot_hide_the_sandboxs():
    expecting = "    try:\n        candidate(1, 2)\n    except ValueError:\n        return\n    assert False\n"
    assert grade(problem(expecting), "    raise ValueError('no')\n").passed
    assert grade(problem(expecting), "    raise KeyError('no')\n").reason == "error: KeyError: 'no'"
    mapping = "    assert all(map(lambda a: candidate(a, 1) == a + 1, range(9)))\n"
    assert grade(problem(mapping), "    return a + b\n").passed
    assert not grade(problem(mapping), "    raise StopIteration\n").passed
    hiding = "    try:\n        candidate(1, 2)\n    except:\n        pass\n"
    assert grade(problem(hiding), "    import os\n    os._exit(0)\n").reason == "died: exit status 0"


@confined
def test_arguments_go_by_value():
    kept = "    given = [1, 2]\n    candidate(given, given)\n    assert given == [1, 2]\n"
    assert grade(problem(kept), "    a.append(3)\n    b.clear()\n").passed


@confined
def test_a_problem_that_cannot_be_checked_is_named():
    with pytest.raises(ValueError, match="problem t/1 cannot be checked: NameError"):
        grade(problem("    pass\nnothing\n"), "    return 1\n")
    with pytest.raises(ValueError, match="seconds must be positive"):
        grade(ADD, "", seconds=0)


@confined
@pytest.mark.parametrize(
    "name", ["math", "re", "collections.abc", "random", "hashlib", "datetime", "decimal", "statistics"]
)
def test_programs_can_import_the_usual_modules(name):
    assert grade(ADD, f"    import {name}\n    return a + b\n").passed


# ----------------------------------------------------------------------------------------------------------- values

EXACT = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**64),
    10**400,
    0.1,
    -0.0,
    math.inf,
    1j,
    "",
    "é\n\0",
    "\ud83d\ude00",
    b"\xff",
    [],
    (),
]
NESTED = [[(1, [2.0])], {1: "a", (2, None): {3}}, {"tuple": [1]}, {1, "a"}, frozenset({b"x"}), [True, 1, 1.0, "1"]]


def sent(value: object) -> object:
    """As it comes through the channel."""
    return values.decode(json.loads(json.dumps(values.encode(value))))


@pytest.mark.parametrize("value", EXACT + NESTED)
def test_values_come_back_exactly(value):
    found = sent(value)
    assert found == value and repr(found) == repr(value) and type(found) is type(value)


def test_nan_comes_back():
    assert math.isnan(sent([math.nan])[0])


@pytest.mark.parametrize(
    "value", [type("Int", (int,), {})(1), range(3), object(), {1: [int]}, iter([])], ids=lambda x: type(x).__name__
)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="is not one of the built-in types"):
        values.encode(value)


def test_what_is_too_large_deep_or_cyclic_is_refused():
    cycle: list = []
    cycle.append(cycle)
    wide: list = []
    for _ in range(40):
        wide = [wide, wide]
    for value in (cycle, wide, [0] * 100_001, 1 << 10**6):
        with pytest.raises(ValueError, match=r"cyclic|bits"):
            values.encode(value)


FORGED = [
    "[",
    "[" * 10**5,
    "{}",
    '{"list": [1]}',
    '{"set": [[]]}',
    '{"dict": [1]}',
    '{"int": 3}',
    '{"int": "0x", "a": 1}',
]
MORE_FORGED = [
    '{"bytes": "x"}',
    '{"complex": ["a", 1]}',
    '{"complex": [1' + "0" * 400 + ", 1]}",
    '{"tuple": "ab"}',
    '{"int": "' + "f" * 10**6 + '"}',
    "9" * 10**4,
]


@pytest.mark.parametrize("text", FORGED + MORE_FORGED, ids=lambda text: text[:20])
def test_other_text_is_no_value(text):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        values.decode(json.loads(text))


# ---------------------------------------------------------------------------------------------------------- attacks


@pytest.fixture(scope="module")
def host():
    attacks.adopt_orphans()
    host = attacks.Host()
    yield host
    host.close()


@pytest.mark.parametrize("name", attacks.HARMLESS)
def test_an_attack_works_where_there_is_no_sandbox(name):
    host = attacks.Host()
    try:
        code = attacks.program(name, host) + "\nprint(add(1, 2))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False)
        assert done.stdout.startswith("breach: "), done
    finally:
        host.close()


@confined
@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_an_attack_neither_passes_nor_harms_nor_stays(host, name):
    assert attacks.run(name, host, seconds=1) == []


@pytest.fixture(scope="module")
def standalone():
    """A folder that every user can read, with the attacks and the evaluation package alone, which needs no torch."""
    folder = Path(tempfile.mkdtemp(prefix="bass-standalone-"))
    source, package = Path(confinement.__file__).parent, folder / "bass_lab" / "evaluation"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (package, package.parent):
        (path / "__init__.py").write_text("")
    shutil.copy(attacks.__file__, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def ordinary_python() -> str | None:
    """An interpreter that an ordinary user can run: this one may live under root's home."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            code = "import sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([path, "-c", code], user=ORDINARY, stderr=subprocess.DEVNULL, cwd="/").returncode == 0:
                return path
        except OSError:
            continue
    return None


@confined
@pytest.mark.skipif(os.getuid() != 0, reason="the other attack tests have run as an ordinary user already")
def test_attacks_fail_as_an_ordinary_user_too(standalone):
    python = ordinary_python()
    if python is None:
        pytest.skip("no Python >= 3.11 that an ordinary user can run")
    done = subprocess.run(
        [python, str(standalone / "attacks.py"), "0.5"],
        user=ORDINARY,
        group=ORDINARY,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["uid"] == ORDINARY and set(result["report"]) == set(attacks.ATTACKS)
    assert {name: complaints for name, complaints in result["report"].items() if complaints} == {}


@confined
def test_kill_9_of_the_harness_leaves_no_process_after_2_s(host, standalone):
    code = (
        "from bass_lab.evaluation.sandbox import grade_all; from attacks import ADD, HELPERS\n"
        "body = '''    import time\n"
        "    tried(outlive=lambda: system('prctl', 1, 0, 0, 0, 0))\n    time.sleep(60)\n'''\n"
        "grade_all([(ADD, body + HELPERS)] * 3, seconds=60)"
    )
    before = set(attacks.running_children())
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=standalone)
    wait_until(lambda: len(attacks.running_children(harness.pid)) == 4, 30)  # two checkers, two workers
    time.sleep(0.5)  # the programs have begun
    harness.kill()
    harness.wait()
    wait_until(lambda: set(attacks.running_children()) <= before, 2)


@confined
def test_an_interrupt_ends_after_the_present_jobs_and_leaves_nothing(host, standalone):
    code = (  # a shell that starts tests in the background has them ignore the signal
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from bass_lab.evaluation.sandbox import grade_all; from attacks import ADD\n"
        "grade_all([(ADD, '    import time; time.sleep(60)')] * 100, seconds=2)"
    )
    before = set(attacks.running_children())
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=standalone, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(attacks.running_children(harness.pid)) == 4, 30)
    harness.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in harness.communicate(timeout=10)[1]
    assert set(attacks.running_children()) <= before


def wait_until(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@confined
def test_a_checker_that_dies_is_an_error_and_leaves_nothing(host):
    before = set(attacks.running_children())
    checker = Checker()
    (process,) = set(attacks.running_children()) - before
    os.kill(process, signal.SIGKILL)
    found = checker.grade(ADD, "    return a + b\n", 1, False)
    assert not found.passed and found.reason == "error: the check itself has died" and checker.stopped
    assert set(attacks.running_children()) <= before


# ---------------------------------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize(("number", "name"), [(444, "Landlock"), (confinement._numbers("s 317 277")["s"], "seccomp")])
def test_a_kernel_without_it_is_refused(monkeypatch, number, name):
    real = confinement.syscall

    def without(called: int, *arguments: object) -> int:
        if called == number:
            raise OSError(38, "Function not implemented")
        return real(called, *arguments)

    monkeypatch.setattr(confinement, "syscall", without)
    for use in (require_sandbox, lambda: grade(ADD, ADD.canonical_solution), lambda: grade_all([])):
        with pytest.raises(SandboxUnavailable, match=f"there is no {name}.*Function not implemented.*container"):
            use()
    assert grade_all([(ADD, ADD.canonical_solution)], unsafe=True)[0].passed


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_refused(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(SandboxUnavailable, match=f"this is {system}.*Linux container or virtual machine"):
        grade(ADD, ADD.canonical_solution)


CASES = {
    "landlock_create_ruleset 444 444": "there is no Landlock",
    "landlock_restrict_self 446 446": "not complete: Landlock: .*Operation not permitted",
    "setresuid 117 147": "not complete: another uid than root's",
    "prlimit64 302 261": "not complete: limits",
}


@confined
@pytest.mark.parametrize("call", CASES)
def test_where_a_measure_fails_no_program_runs(standalone, call):
    if "uid" in call and os.getuid() != 0:
        pytest.skip("only root has a uid to drop")
    code = (
        "from bass_lab.evaluation import confinement; from attacks import ADD\n"
        "from bass_lab.evaluation.sandbox import SandboxUnavailable, grade, grade_all\n"
        f"confinement.no_new_privileges(); confinement.refuse_calls({call!r})\n"
        "print(grade_all([(ADD, ADD.canonical_solution)], unsafe=True)[0].reason)\n"
        "try:\n    grade(ADD, ADD.canonical_solution)\nexcept SandboxUnavailable as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=standalone, capture_output=True, text=True)
    unsafe, refused = done.stdout.splitlines()
    assert unsafe == "passed"
    assert re.search(CASES[call], refused), refused


@confined
def test_a_probe_that_finds_a_way_out_is_a_refusal(monkeypatch):
    monkeypatch.setattr(sandbox, "PROBE", replace(sandbox.PROBE, canonical_solution="    return ['open a socket']\n"))
    monkeypatch.setattr(sandbox, "_self_test", sandbox._self_test.__wrapped__)  # not the cached result
    with pytest.raises(SandboxUnavailable, match=r"failed its self-test: .*open a socket"):
        require_sandbox()
