"""Programs are graded from outside a sandbox, and can neither leave nor deceive it."""

import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import attacks
import pytest
from attacks import ADD
from waiting import until

from bass_lab.evaluation import Problem, SandboxUnavailable, confinement, grade, grade_all, load_problems, values
from bass_lab.evaluation.problems import MINI_SET
from bass_lab.evaluation.sandbox import Checker, require_sandbox
from bass_lab.pair.data_card import share_passed

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "HumanEval.jsonl.gz"
try:
    require_sandbox()
    WHY_NOT = ""
except SandboxUnavailable as error:
    WHY_NOT = str(error)
confined = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
slow = pytest.mark.slow


def problem(test: str, prompt: str = ADD.prompt, name: str = "add") -> Problem:
    return Problem("t/1", prompt, name, "", "def check(candidate):\n" + test)


def in_folder(folder: Path, code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


absent = pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="the file of HumanEval is absent")


@confined
@pytest.mark.parametrize(
    ("path", "every"),
    [(None, 16), pytest.param(None, 1, marks=slow), pytest.param(HUMAN_EVAL, 1, marks=[slow, absent])],
)
def test_solutions_pass_and_stubs_fail_within_cpu_time(path, every):
    problems = load_problems(path)
    assert len(problems) == 164
    problems = problems[::every]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    right = grade_all([(each, each.canonical_solution) for each in problems], seconds=30)
    stubs = grade_all([(each, "    pass\n") for each in problems], seconds=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [found for found in right if not found.passed] == [] and len(right) == len(problems)
    assert [found for found in stubs if found.passed] == [] and len(stubs) == len(problems)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 30 / every  # 15 s on each of 2 cores for all problems


REASONS = {
    "    return a + b\n": "passed",
    "    return a - b\n": "wrong: assert found == total, found: -1",
    "    return a +\n": "error: SyntaxError: ",
    "    while True: pass\n": "timeout",
    "    return a + c\n": "error: NameError: name 'c' is not defined",
    "    return add(a, b)\n": "error: RecursionError: ",
    "    return [0] * 10**10\n": "error: MemoryError",
    "    raise SystemExit\n": "error: SystemExit",
    "    open('/etc/passwd')\n    return a + b\n": "error: PermissionError: ",
    "    import os\n    os.abort()\n": "died: SIG",
    "    return a + b\n\nadd = 3\n": "error: TypeError: 'int' object is not callable",
    "    raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')\n": "error: UnicodeDecodeError: ",
    "    return 'x' * 2**21\n": "error: a reply of more than",
    "    return b + a\n": "passed",
}


@confined
def test_grades_give_the_reason_in_the_order_of_the_jobs():
    found = grade_all([(ADD, completion) for completion in REASONS], seconds=0.5, workers=2)
    for one, (completion, reason) in zip(found, REASONS.items(), strict=True):
        assert one.reason.startswith(reason) and one.passed == (reason == "passed"), completion
    assert grade_all([]) == []
    assert share_passed([ADD] * 4, [ADD.canonical_solution] * 3 + ["    return 0\n"]) == 0.75


@pytest.mark.ci
@confined
def test_cpu_limit_ends_a_loop_before_the_wall_clock():
    began = time.monotonic()
    assert grade(ADD, "    while True: pass\n", seconds=60).reason == "timeout: 4 s of CPU time"
    assert time.monotonic() - began < 30


@confined
@pytest.mark.parametrize("loop", ["while candidate(1, 2): pass", "sum(range(candidate(1, 2)))"])
def test_busy_check_ends_and_the_next_job_runs(loop):
    began = time.monotonic()
    jobs = [(problem(f"    {loop}\n"), "    return 10**18\n"), (ADD, ADD.canonical_solution)]
    assert [found.passed for found in grade_all(jobs, seconds=0.3, workers=1)] == [False, True]
    assert time.monotonic() - began < 3


HELPERS = 'import math\n\ndef half(x):\n    return x / 2\n\ndef add(a, b):\n    """Adds."""\n'
HELPED = "    assert math.floor(half(candidate(1, b=2))) == 1\n    assert add(2, 2) == 4\n"
EXPECTING = "    try:\n        candidate(1, 2)\n    except ValueError:\n        return\n    assert False\n"
MAPPING = "    assert all(map(lambda a: candidate(a, 1) == a + 1, range(9)))\n"
HIDING = "    try:\n        candidate(1, 2)\n    except:\n        pass\n"
KEPT = "    given = [1, 2]\n    candidate(given, given)\n    assert given == [1, 2]\n"
MODULES = "    import math, re, collections.abc, random, hashlib, datetime, decimal, statistics\n    return 3\n"
GRADES = {  # the problem's test, a completion, and a pattern of the reason
    "a check uses helpers and the entry point's name": (problem(HELPED, HELPERS), "    return a + b\n", "passed"),
    "a check calls the program": (problem(HELPED, HELPERS), "    return half(a)\n", "wrong"),
    "an expected exception": (problem(EXPECTING), "    raise ValueError('no')\n", "passed"),
    "another exception": (problem(EXPECTING), "    raise KeyError('no')\n", "error: KeyError: 'no'"),
    "a check with an iterator": (problem(MAPPING), "    return a + b\n", "passed"),
    "StopIteration inside an iterator": (problem(MAPPING), "    raise StopIteration\n", "(?!passed)"),
    "a hidden death": (problem(HIDING), "    import os\n    os._exit(0)\n", "died: exit status 0"),
    "arguments go by value": (problem(KEPT), "    a.append(3)\n    b.clear()\n", "passed"),
    "usual modules": (problem("    assert candidate(1, 2) == 3\n"), MODULES, "passed"),
    "a full memory": (problem("    1 in [candidate(1, 2)] * 2**28\n"), "    return 2\n", ".*MemoryError"),
}


@confined
@pytest.mark.parametrize("name", GRADES)
def test_check_has_its_grade(name):
    case, completion, reason = GRADES[name]
    found = grade(case, completion, seconds=5)
    assert re.match(reason, found.reason) and found.passed == (reason == "passed"), found


@confined
def test_problem_that_cannot_be_checked_is_named():
    with pytest.raises(ValueError, match="problem t/1 cannot be checked: NameError"):
        grade(problem("    pass\nnothing\n"), "    return 1\n")
    with pytest.raises(ValueError, match="seconds must be positive"):
        grade(ADD, "", seconds=0)


EXACT = [
    None, True, 0, -1, 2**63, -(2**64), 10**400, 0.1, -0.0, math.inf, 1j, "", "é\n\0", "\ud83d\ude00", b"\xff", [], (),
    [(1, [2.0])], {1: "a", (2, None): {3}}, {"tuple": [1]}, {1, "a"}, frozenset({b"x"}), [True, 1, 1.0, "1"],
]  # fmt: skip


def sent(value: object) -> object:
    return values.decode(json.loads(json.dumps(values.encode(value))))


def test_values_return_exactly():
    for value in EXACT:
        found = sent(value)
        assert found == value and repr(found) == repr(value) and type(found) is type(value)
    assert math.isnan(sent([math.nan])[0])


def test_other_types_and_large_deep_or_cyclic_values_are_refused():
    for value in (type("int", (int,), {})(1), range(3), object(), {1: [int]}, iter([])):
        with pytest.raises(TypeError, match="is not one of the built-in types"):
            values.encode(value)
    cycle: list = []
    cycle.append(cycle)
    wide: list = []
    for _ in range(40):
        wide = [wide, wide]
    for value in (cycle, wide, [0] * 100_001, 1 << 10**6):
        with pytest.raises(ValueError, match=r"cyclic|bits"):
            values.encode(value)


FORGED = [
    "[", "[" * 10**5, "{}", '{"list": [1]}', '{"set": [[]]}', '{"dict": [1]}', '{"int": 3}', '{"int": "0x", "a": 1}',
    '{"bytes": "x"}', '{"complex": ["a", 1]}', '{"complex": [1' + "0" * 400 + ", 1]}", '{"tuple": "ab"}',
    '{"int": "' + "f" * 10**6 + '"}', "9" * 10**4, '{"__class__": "Equal", "int": "3"}',
]  # fmt: skip


def test_forged_values_are_refused():
    for text in FORGED:
        with pytest.raises((ValueError, TypeError, RecursionError)):
            values.decode(json.loads(text))


@pytest.fixture(scope="module")
def host():
    attacks.adopt_orphans()
    host = attacks.Host()
    yield host
    host.close()


@pytest.fixture(scope="module")
def standalone():
    with attacks.standalone() as folder:
        yield folder


@pytest.mark.parametrize("name", attacks.HARMLESS)
def test_attack_works_without_a_sandbox(name):
    host = attacks.Host()
    try:
        code = attacks.program(name, host) + "\nprint(add(1, 2))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False)
        assert done.stdout.startswith("breach: "), done
    finally:
        host.close()


@confined
@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attack_neither_passes_nor_harms_nor_stays(host, name):
    assert attacks.run(name, host, seconds=0.2 if name in attacks.ENDLESS else 0.5) == []


@slow
@confined
@pytest.mark.parametrize("version", range(1, 6))
def test_attacks_on_the_host_fail_with_older_landlock(version):
    if version > confinement.landlock_version():
        pytest.skip(f"this kernel has Landlock {confinement.landlock_version()}")
    code = (
        "import attacks; attacks.adopt_orphans(); host = attacks.Host()\n"
        "for name in attacks.ON_THE_HOST:\n    for found in attacks.run(name, host, 0.5):\n        print(name, found)\n"
        "host.close()\nprint('done')"
    )
    with attacks.standalone(attacks.LANDLOCK.format(version)) as folder:
        assert in_folder(folder, code) == "done\n"


def install(folder: Path) -> Path:
    """Return a copy of this interpreter with the folder's package in its own libraries."""
    version, base = f"python{sys.version_info.major}.{sys.version_info.minor}", Path(sys.base_prefix)
    executable, library = folder / "prefix" / "bin" / version, folder / "prefix" / "lib" / version
    for path in (executable.parent, library / "site-packages"):
        path.mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), executable)
    for path in (*Path(os.__file__).parent.iterdir(), *base.glob("lib/libpython*")):
        if path.name != "site-packages":
            ((library.parent if path.name.startswith("libpython") else library) / path.name).symlink_to(path)
    assets = folder / "bass_lab" / "assets"
    assets.mkdir()
    shutil.copy(MINI_SET, assets)
    for name in ("bass_lab", "attacks.py"):
        shutil.move(folder / name, library / "site-packages")
    return executable


@confined
def test_program_reads_no_package_in_the_interpreters_libraries():
    code = (
        "import attacks; from bass_lab.evaluation.problems import MINI_SET; assert MINI_SET.exists(); print(MINI_SET)\n"
        "host = attacks.Host(); print(attacks.run('read a secret', host, 0.5)); host.close()\n"
        "print(attacks.grade(attacks.ADD, '    import bz2, xml\\n    return a + b\\n').reason)"
    )
    with attacks.standalone() as folder:
        options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": ""}, "capture_output": True, "text": True}
        said = subprocess.run([install(folder), "-c", code], **options)
        assert said.stdout.splitlines()[1:] == ["[]", "passed"], said
        assert said.stdout.startswith(f"{folder}/prefix/lib/python3")


OPENS_ANYTHING = """

def without_judging_what_is_opened(judging=refuse_calls):
    judging(judged="fcntl 72 25, openat2 437 437")

refuse_calls = without_judging_what_is_opened
"""


@confined
def test_sandbox_that_opens_any_file_fails_its_self_test():
    code = "from bass_lab.evaluation.sandbox import sandbox_obstacle; print(sandbox_obstacle())"
    with attacks.standalone(OPENS_ANYTHING) as folder:
        said = in_folder(folder, code)
    assert "failed its self-test" in said and "['empty /dev/null']" in said


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
TIMER = "call('timer_create', 0, 0, ctypes.addressof(number))"
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
        "fcntl.fcntl(pipe, 1031, 2**20)",  # F_SETPIPE_SZ: limited by the user's pages for pipes, too
        "fcntl.lockf(file, fcntl.LOCK_EX)",
        TIMER,
    ],
    "EPERM",
)
REFUSED["call('openat2', -100, ctypes.addressof(name), ctypes.addressof(flags), 24)"] = "ENOSYS"
ALLOWED = (
    "os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
    "os.listdir(folder)",
    "open(path).read()",
    "fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)",
    "os.dup(pipe)",
    "fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 9)",
)


def outcomes(standalone: Path, measure: str, calls) -> dict[str, str]:
    """Return "works" or the error's name of each expression after a measure of the sandbox."""
    return json.loads(in_folder(standalone, CALLS, measure, json.dumps(list(calls))))


@confined
def test_filter_alone_lets_files_be_opened_to_read_only(standalone):
    allowed = dict.fromkeys(ALLOWED, "works")
    assert outcomes(standalone, "confinement.refuse_calls()", [*REFUSED, *ALLOWED]) == REFUSED | allowed
    assert outcomes(standalone, "pass", REFUSED) == dict.fromkeys(REFUSED, "works")
    limits = "sys.path.append('bass_lab/evaluation'); import _worker; _worker.limit()"
    assert outcomes(standalone, limits, [TIMER]) == {TIMER: "EAGAIN"}  # the user's signal queue stays free


@confined
@pytest.mark.skipif(os.getuid() != 0, reason="only root has an identity to drop")
def test_root_drops_to_the_nobody_user(standalone):
    code = (
        "import os; from bass_lab.evaluation import confinement\n"
        "os.setgroups([0, 1]); confinement.drop_root(); print(os.getresuid(), os.getresgid(), os.getgroups())"
    )
    nobody = (confinement.NOBODY,) * 3
    assert in_folder(standalone, code) == f"{nobody} {nobody} []\n"


BODY = """    import time
    tried(outlive=lambda: system('prctl', 1, 0, 0, 0, 0))
    time.sleep(60)
"""
HARNESS = f"""
import signal
from bass_lab.evaluation.sandbox import grade_all; from attacks import ADD, HELPERS
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
grade_all([(ADD, {BODY!r} + HELPERS)] * 100, seconds=2)
"""


@confined
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, 2), pytest.param(signal.SIGINT, 10, marks=pytest.mark.ci)]
)
def test_killed_or_interrupted_harness_leaves_no_process(host, standalone, number, seconds):
    before = set(attacks.running_children())
    harness = subprocess.Popen([sys.executable, "-c", HARNESS], cwd=standalone, stderr=subprocess.PIPE, text=True)
    until(lambda: len(attacks.running_children(harness.pid)) == 4, 30)  # two checkers, two workers
    time.sleep(0.5)  # the programs have begun
    harness.send_signal(number)
    said = harness.communicate(timeout=seconds)[1]
    assert number == signal.SIGKILL or "KeyboardInterrupt" in said  # after the current jobs
    until(lambda: set(attacks.running_children()) <= before, 2)


@confined
def test_dead_checker_is_an_error_and_leaves_nothing(host):
    before = set(attacks.running_children())
    checker = Checker()
    (process,) = set(attacks.running_children()) - before
    os.kill(process, signal.SIGKILL)
    found = checker.grade(ADD, "    return a + b\n", 1, False)
    assert not found.passed and found.reason == "error: the check itself has died" and checker.stopped
    assert set(attacks.running_children()) <= before


SECCOMP = 317 if platform.machine() == "x86_64" else 277


@pytest.mark.parametrize(("number", "name"), [(444, "Landlock"), (SECCOMP, "seccomp")])
def test_kernel_without_a_measure_is_refused(monkeypatch, number, name):
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


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match=r"this is darwin.*Linux container or virtual machine"):
        grade(ADD, ADD.canonical_solution)


CASES = {
    "landlock_create_ruleset 444 444": "there is no Landlock",
    "landlock_restrict_self 446 446": "not complete: Landlock: .*Operation not permitted",
    "setresuid 117 147": "not complete: another uid than root's",
    "prlimit64 302 261": "not complete: limits",
}


@confined
@pytest.mark.parametrize("call", CASES)
def test_no_program_runs_after_a_measure_has_failed(standalone, call):
    if "uid" in call and os.getuid() != 0:
        pytest.skip("only root has a uid to drop")
    code = (
        "from bass_lab.evaluation import confinement; from attacks import ADD\n"
        "from bass_lab.evaluation.sandbox import SandboxUnavailable, grade, grade_all\n"
        f"confinement.no_new_privileges(); confinement.refuse_calls({call!r}, judged='openat2 437 437')\n"
        "print(grade_all([(ADD, ADD.canonical_solution)], unsafe=True)[0].reason)\n"
        "try:\n    grade(ADD, ADD.canonical_solution)\nexcept SandboxUnavailable as error:\n    print(error)"
    )
    unsafe, refused = in_folder(standalone, code).splitlines()
    assert unsafe == "passed"
    assert re.search(CASES[call], refused), refused
