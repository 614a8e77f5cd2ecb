"""Programs are graded from outside a sandbox that they neither leave nor deceive."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
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
    return [pytest.param(HUMAN_EVAL, id="HumanEval", marks=[pytest.mark.slow, skip]), pytest.param(None, id="mini set")]


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
    with attacks.standalone() as folder:
        yield folder


USERS = [
    pytest.param(False, id="this user"),
    pytest.param(
        True,
        id="an ordinary user",
        marks=[
            pytest.mark.skipif(os.getuid() != 0, reason="the others have run as an ordinary user already"),
            pytest.mark.skipif(attacks.ordinary_python() is None, reason="an ordinary user can run no Python >= 3.11"),
        ],
    ),
]


@pytest.mark.slow
@confined
@pytest.mark.parametrize("ordinary", USERS[1:])
def test_attacks_fail_as_an_ordinary_user_too(standalone, ordinary):
    assert attacks.complaints(standalone, attacks.ATTACKS, ordinary=ordinary) == {}


@pytest.mark.slow
@confined
@pytest.mark.parametrize("ordinary", USERS)
@pytest.mark.parametrize("version", range(1, 6))
def test_attacks_on_the_host_fail_with_older_landlock_too(version, ordinary):
    """The others have nothing to do with Landlock; `python tests/support/attacks.py` runs them all."""
    if version > confinement.landlock_version():
        pytest.skip(f"this kernel has Landlock {confinement.landlock_version()}")
    with attacks.standalone(attacks.LANDLOCK.format(version)) as folder:
        assert attacks.complaints(folder, attacks.ON_THE_HOST, ordinary=ordinary) == {}


OPENS_ANYTHING = """

def without_judging_what_is_opened(judging=refuse_calls):
    judging(judged="fcntl 72 25, openat2 437 437")

refuse_calls = without_judging_what_is_opened
"""


@confined
@pytest.mark.parametrize("version", [1, 2, 3])
def test_landlock_alone_sees_from_version_3_on_that_a_file_is_emptied_but_not_that_it_is_opened(version):
    code = (
        "import attacks; from bass_lab.evaluation.sandbox import grade_all\n"
        "host = attacks.Host(); program = attacks.program('open a file for neither reading nor writing', host)\n"
        "print(grade_all([(attacks.ADD, program.removeprefix(attacks.ADD.prompt))], unsafe=True)[0].reason)\n"
        "print(host.complaints()); host.close()"
    )
    with attacks.standalone(attacks.LANDLOCK.format(version) + OPENS_ANYTHING) as folder:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    reason, host = done.stdout.splitlines()
    achieved = "only, emptied" if version < 3 else "only"
    assert reason.endswith(f"breach: {achieved}") and host == str(["the host has changed"] if version < 3 else [])


@confined
def test_a_sandbox_that_opens_what_landlock_does_not_see_fails_its_self_test():
    code = "from bass_lab.evaluation.sandbox import sandbox_obstacle; print(sandbox_obstacle())"
    with attacks.standalone(OPENS_ANYTHING) as folder:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert "failed its self-test" in done.stdout and "['empty /dev/null']" in done.stdout


CALLS = """
import ctypes, errno, fcntl, json, os, sys, tempfile
from bass_lab.evaluation import confinement

def call(name, *arguments):
    numbers = {"openat2": (437, 437), "timer_create": (222, 107)}
    return confinement.syscall(numbers[name][os.uname().machine == "aarch64"], *arguments)

number = ctypes.c_int()
with tempfile.TemporaryDirectory() as folder:
    path = folder + "/file"
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    pipe = os.pipe()[1]
    name, flags = ctypes.create_string_buffer(path.encode()), ctypes.create_string_buffer(64)
    done = {}
    if os.fork() == 0:
        confinement.no_new_privileges()
        exec(sys.argv[1])
        for each in json.loads(sys.argv[2]):
            try:
                eval(each)
                done[each] = "works"
            except OSError as error:
                done[each] = errno.errorcode[error.errno]
        print(json.dumps(done), flush=True)
        os._exit(0)
    os.wait()
"""
REFUSED = dict.fromkeys(
    [
        "os.open(path, os.O_WRONLY)",
        "os.open(path, os.O_RDWR)",
        "os.open(path, 3)",
        "os.open(path, os.O_RDONLY | os.O_TRUNC)",
        "os.open(path + '2', os.O_RDONLY | os.O_CREAT)",
        "os.open(folder, os.O_RDWR | os.O_TMPFILE)",
        "os.open(path, os.O_RDONLY | os.O_APPEND)",
        "fcntl.fcntl(file, 1036, bytes(8))",  # F_SET_RW_HINT
        "fcntl.fcntl(pipe, 10, 9)",  # F_SETSIG
        "fcntl.fcntl(file, fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(pipe, 1031, 2**20)",  # F_SETPIPE_SZ: the user's pages for pipes are counted, too
        "fcntl.lockf(file, fcntl.LOCK_EX)",
        "call('timer_create', 0, 0, ctypes.addressof(number))",
    ],
    "EPERM",
)
REFUSED["call('openat2', -100, ctypes.addressof(name), ctypes.addressof(flags), 24)"] = "ENOSYS"
LET_THROUGH = (
    "os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
    "os.listdir(folder)",
    "open(path).read()",
    "fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)",
    "os.dup(pipe)",
    "fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 9)",
)


def outcomes(standalone: Path, measure: str, calls) -> dict[str, str]:
    """What becomes of each of CALLS' expressions after one of the sandbox's measures: "works", or the error's name."""
    command = [sys.executable, "-c", CALLS, measure, json.dumps(list(calls))]
    done = subprocess.run(command, cwd=standalone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@confined
def test_the_filter_alone_lets_files_be_opened_to_read_and_nothing_else(standalone):
    through = dict.fromkeys(LET_THROUGH, "works")
    assert outcomes(standalone, "confinement.refuse_calls()", [*REFUSED, *LET_THROUGH]) == REFUSED | through
    assert outcomes(standalone, "pass", REFUSED) == dict.fromkeys(REFUSED, "works")


@confined
def test_the_limits_alone_keep_the_users_queue_of_signals_from_running_dry(standalone):
    measure = "sys.path.append('bass_lab/evaluation'); import _worker; _worker.limit()"
    assert set(outcomes(standalone, measure, [call for call in REFUSED if "timer" in call]).values()) == {"EAGAIN"}


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
        f"confinement.no_new_privileges(); confinement.refuse_calls({call!r}, judged='openat2 437 437')\n"
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
