"""Apply each mutant to a copy of the repository and find a test that fails: `make mutants ARGS="--only engine"`.

To add a mutant, edit the list of its package. Under the file, write a name for the bug, the right text after "- ", and
the wrong text after "+ " (nothing to delete lines). The right text must occur exactly once in the file. A mutant must
change behaviour, must not break an import, and must not be equivalent to the right code. Then run `make mutants
ARGS="--only NAME"`, which records the catching test in caught.json. Commit both files. null in caught.json: no known
test catches the mutant.

Tests that caught a mutant before run first. The test files nearest to the mutated module by imports follow, then all
other test files. Heavy packages are imported once, because each pytest run is a fork of this process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.with_name("support")))

from import_graph import ImportGraph  # noqa: E402

CAUGHT = HERE / "caught.json"
LISTS = [HERE / f"{part}.txt" for part in ("core", "lab", "kernels")]
SELF = "tests/mutants"
HANGS = 300  # seconds without the end of a test: the mutant hangs, and counts as caught
WHOLE = 3600  # time limit of a pytest run in seconds
TOGETHER = 4  # test files per pytest run
NEAR = 2  # with --quick: largest import distance between a mutated module and a test file
FEWEST = 6  # with --quick: least number of test files
INTERPRETED = "interpreted and not slow and not ci"
ELSEWHERE = ("test_quantized",)  # not in `make test`


@dataclass(frozen=True)
class Mutant:
    file: str
    bug: str
    right: str
    wrong: str

    @property
    def name(self) -> str:
        return f"{self.file.removesuffix('.py')}: {self.bug}"


def load_mutants() -> list[Mutant]:
    """Return all mutants of the lists. Raises SystemExit if two mutants have the same name."""
    found: list[Mutant] = []
    for path in LISTS:
        file, bug, right, wrong = "", "", [], []
        for line in [*path.read_text("utf-8").splitlines(), ""]:
            if line.startswith(("-", "+")):
                (right if line[0] == "-" else wrong).append(line[2:])
                continue
            if right:
                found.append(Mutant(file, bug, "\n".join(right), "\n".join(wrong)))
            file, bug, right, wrong = line[4:] if line.startswith("=== ") else file, line, [], []
    names = [mutant.name for mutant in found]
    if doubled := {name for name in names if names.count(name) > 1}:
        sys.exit(f"duplicate mutant names: {', '.join(sorted(doubled))}")
    return found


def check_mutants(mutants: Iterable[Mutant], tree: Path) -> None:
    wrong = []
    for mutant in mutants:
        count = (tree / mutant.file).read_text("utf-8").count(mutant.right) if (tree / mutant.file).exists() else 0
        if count != 1:
            wrong.append(f"{mutant.name}: {mutant.right!r} occurs {count} times")
        elif mutant.right == mutant.wrong:
            wrong.append(f"{mutant.name}: both texts are equal")
        else:
            ast.parse(mutated(mutant, tree))
    if wrong:
        sys.exit("\n".join(wrong))


def mutated(mutant: Mutant, tree: Path) -> str:
    return (tree / mutant.file).read_text("utf-8").replace(mutant.right, mutant.wrong)


# --- pytest runs ----------------------------------------------------------------------------------


@dataclass
class Run:
    """A pytest run. interpreted: run kernels in Triton's interpreter, in a separate process."""

    tests: list[str]
    limit: float
    interpreted: bool = False
    all_failures: bool = False


class FailedTests:
    """A pytest plugin that writes the ids of failed tests to a file, and the id of the running test to another file."""

    def __init__(self, path: Path):
        self.path, self.running = path, path.with_name("running")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.write_text(nodeid, "utf-8")

    def pytest_runtest_logreport(self, report) -> None:
        self._add(report)

    def pytest_collectreport(self, report) -> None:
        self._add(report)

    def _add(self, report) -> None:
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_in(tree: Path, run: Run, failed: Path) -> int:
    """Run tests in a tree. No module of the project may have been imported before."""
    os.chdir(tree)
    sys.dont_write_bytecode = True
    own = [str(tree), str(tree / "kernels")]
    support = [str(tree / "tests/support")] if run.interpreted else []
    sys.path[:] = own + support + [path for path in sys.path if path and Path(path).resolve() not in (HERE, ROOT)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(own + support), "PYTHONDONTWRITEBYTECODE": "1"}
    import pytest

    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={failed.parent / 'tmp'}"]
    options += [] if run.all_failures else ["-x"]
    options += ["-m", INTERPRETED, "-p", "kernel_interpreter"] if run.interpreted else []
    return int(pytest.main([*options, *run.tests], plugins=[FailedTests(failed)]))


class Job:
    """A copy of the repository and its current pytest run."""

    def __init__(self, tree: Path, folder: Path):
        self.folder, self.tree = folder, tree
        self.failed, self.running, self.log = folder / "failed", folder / "running", folder / "log"

    def start(self, run: Run) -> None:
        self.failed.unlink(missing_ok=True)
        self.running.write_text(run.tests[0], "utf-8")
        self.run, self.ends = run, time.monotonic() + run.limit
        self.pid = os.fork()
        if self.pid == 0:
            self._child()

    def _child(self) -> None:
        code = 70
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if self.run.interpreted:  # Triton reads the variable at import
                os.environ["TRITON_INTERPRET"] = "1"
                job = json.dumps([str(self.tree), self.run.tests, self.run.all_failures, str(self.failed)])
                os.execv(sys.executable, [sys.executable, str(HERE / "run.py"), "--interpreted", job])
            code = pytest_in(self.tree, self.run, self.failed)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def outcome(self) -> list[str] | None:
        """Return the failed tests, or None during the run."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        hangs = time.time() - self.running.stat().st_mtime > HANGS
        if pid == 0 and not hangs and time.monotonic() < self.ends:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if pid == 0:
            os.waitpid(self.pid, 0)
            return [f"time limit: {self.running.read_text('utf-8')}"] if hangs else []
        found = self.failed.read_text("utf-8").splitlines() if self.failed.exists() else []
        code = os.waitstatus_to_exitcode(status)
        return found or ([f"exit {code}: {self.run.tests[0]}"] if code not in (0, 4, 5) else [])


def is_interpreted(tree: Path, test: str) -> bool:
    path = tree / test.split("::")[0]
    return path.name.startswith("test_kernel_") and "pytest.mark.interpreted" in path.read_text("utf-8")


def runs_of(tree: Path, tests: list[str], limit: float) -> Generator[Run, list[str], list[str]]:
    """Run tests, interpreted tests first. Return the failed tests."""
    for test in [test for test in tests if is_interpreted(tree, test)]:
        if failed := (yield Run([test], limit, interpreted=True)):
            return failed
    if ordinary := [test for test in tests if not is_interpreted(tree, test) or "::" not in test]:
        return (yield Run(ordinary, limit))
    return []


# --- the hunt -------------------------------------------------------------------------------------


class Hunt:
    """The order of test files for each mutant. within: use only these test files."""

    def __init__(self, tree: Path, known: dict[str, str | None], within: list[str] | None, quick: bool, seconds: float):
        self.tree, self.known, self.within, self.quick, self.seconds = tree, known, within, quick, seconds
        self.imports = ImportGraph(tree, leave_out=ELSEWHERE)

    def of(self, mutant: Mutant) -> Generator[Run, list[str], str | None]:
        """Yield pytest runs until one fails. Return the failed test."""
        last, ends = plain(self.known.get(mutant.name)), time.monotonic() + self.seconds
        if last and self._is_there(last) and (failed := (yield from runs_of(self.tree, [last], WHOLE))):
            return failed[0]
        for files in self._parts(mutant):
            if (left := ends - time.monotonic()) < 0:
                break
            if failed := (yield from runs_of(self.tree, files, min(left, WHOLE))):
                return failed[0]
        return None

    def _parts(self, mutant: Mutant) -> Iterable[list[str]]:
        near = self.imports.nearest(mutant.file)
        same, all_files = Counter[str](), Counter[str]()
        for name, test in self.known.items():
            if file := (plain(test) or "").split("::")[0]:
                all_files[file] += 1
                same[file] += same_file(name, mutant)
        order = sorted(near, key=lambda each: (-same[each[1]], each[0] > 1, each[0] > 1 and -all_files[each[1]]))
        if self.quick:
            order = [each for place, each in enumerate(order) if each[0] <= NEAR or place < FEWEST or same[each[1]]]
        files = [file for _, file in order]
        if not self.quick:
            files += [file for file in self.imports.tests if file not in set(files)]
        if self.within is not None:
            files = [file for file in files if file in self.within]
            files += [file for file in self.within if file not in files]
        alone = [file for file in files if is_interpreted(self.tree, file)]
        others = [file for file in files if file not in alone]
        if mutant.file.startswith("kernels/bass_kernels"):
            yield from ([file] for file in alone)
        yield from (others[at : at + TOGETHER] for at in range(0, len(others), TOGETHER))

    def _is_there(self, test: str) -> bool:
        file = test.split("::")[0]
        return (self.tree / file).is_file() and (self.within is None or file in self.within)


def same_file(name: str, mutant: Mutant) -> bool:
    return name.startswith(f"{mutant.file.removesuffix('.py')}: ")


def plain(test: str | None) -> str | None:
    """Return a test's id without the kind of failure."""
    return None if test is None else re.sub(r"^(time limit|exit -?\d+): ", "", test)


def hunt_all(mutants: list[Mutant], hunt: Hunt, jobs: list[Job]) -> Generator[tuple[Mutant, str | None, float]]:
    """Run the hunts in the copies, one mutant at a time per copy. Yield mutant, catching test and seconds."""
    waiting, free, active = list(mutants), list(jobs), []
    while waiting or active:
        while waiting and free:
            mutant, job = waiting.pop(0), free.pop()
            right = (job.tree / mutant.file).read_text("utf-8")
            (job.tree / mutant.file).write_text(mutated(mutant, job.tree), "utf-8")
            steps = hunt.of(mutant)
            job.start(next(steps))
            active.append((mutant, job, steps, right, time.monotonic()))
        for each in list(active):
            mutant, job, steps, right, began = each
            if (failed := job.outcome()) is None:
                continue
            try:
                job.start(steps.send(failed))
            except StopIteration as stop:
                (job.tree / mutant.file).write_text(right, "utf-8")
                active.remove(each)
                free.append(job)
                yield mutant, stop.value, time.monotonic() - began
        time.sleep(0.02)


def unsound(tests: Iterable[str], job: Job) -> list[str]:
    tests = sorted({test for test in map(plain, tests) if test})
    found = []
    for interpreted in (False, True):
        chosen = [test for test in tests if is_interpreted(job.tree, test) is interpreted]
        if chosen:
            job.start(Run(chosen, WHOLE, interpreted, all_failures=True))
            while (failed := job.outcome()) is None:
                time.sleep(0.1)
            found += failed
    return found


# --- copies and packages --------------------------------------------------------------------------


def copy_tree(source: Path, tests: Path, tree: Path) -> None:
    """Copy all files except those that git ignores. Compiled code is valid by its source's hash, not by its date."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, listed):
        if (source / name).is_file() and not name.startswith("tests/"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, tree / name)
    shutil.copytree(tests, tree / "tests", ignore=shutil.ignore_patterns("__pycache__", "mutants"))
    git = ["git", "-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "Copy"]):  # tests ask git for the files
        subprocess.run([*git, *arguments], cwd=tree, check=True)
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "bass_core", "bass_lab", "kernels"]
    subprocess.run([sys.executable, *compiled], cwd=tree, check=True)


def preload(tree: Path) -> None:
    """Import third-party packages once for all forks."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    code = "import sys, bass_core, bass_core.gpu.overlap; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'kernels'}"}
    command = [sys.executable, "-c", code]
    listed = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in [*listed.split(), "pytest", "_pytest.assertion.rewrite", "_pytest.tmpdir"]:
        if name.split(".")[0] not in ("bass_core", "bass_lab", "bass_kernels", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


# --- the command ----------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find a failing test for each mutant.")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only mutants with TEXT in the name")
    parser.add_argument("--list", action="store_true", help="only list the mutants and their tests")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent mutants, each in a separate copy")
    parser.add_argument("--tests", nargs="+", help="run only these test files or folders")
    parser.add_argument("--tests-from", type=Path, help="use another folder of tests")
    parser.add_argument("--tree", type=Path, default=ROOT, help="use code and tests of another checkout")
    parser.add_argument("--quick", action="store_true", help="skip tests far from the mutated module")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit per mutant")
    parser.add_argument("--missing", action="store_true", help="only mutants without a recorded test")
    parser.add_argument("--compare", metavar="OLD", help="a caught.json or a git revision: show before and after")
    return parser.parse_args()


def chosen(mutants: list[Mutant], arguments: argparse.Namespace, known: dict[str, str | None]) -> list[Mutant]:
    only = arguments.only or [""]
    found = [mutant for mutant in mutants if any(text in mutant.name for text in only)]
    return [mutant for mutant in found if not (arguments.missing and known.get(mutant.name))]


def recorded(source: str | Path) -> dict[str, str | None]:
    if Path(source).is_file():
        return json.loads(Path(source).read_text("utf-8"))
    shown = ["git", "show", f"{source}:{SELF}/{CAUGHT.name}"]
    return json.loads(subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def compared(before: dict[str, str | None], after: dict[str, str | None]) -> bool:
    """Print the tests before and after. Return False if a mutant caught before survives."""
    lost = [name for name in after if before.get(name) and not after[name]]
    for name in after:
        mark = "LOST  " if name in lost else "      "
        print(f"{mark}{name}\n        before: {before.get(name) or '-'}\n        after:  {after[name] or '-'}")
    print(f"{len(after)} mutants, {sum(map(bool, after.values()))} caught, {len(lost)} lost")
    return not lost


def save(found: dict[str, str | None], known: dict[str, str | None], mutants: list[Mutant], whole: bool) -> None:
    """Write caught.json. Only a whole run records surviving mutants."""
    kept = {mutant.name: known.get(mutant.name) for mutant in mutants}
    kept |= {name: test for name, test in found.items() if test or whole}
    CAUGHT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")


def within(arguments: argparse.Namespace, tree: Path) -> list[str] | None:
    if arguments.tests is None:
        return None
    paths: list[Path] = []
    for name in arguments.tests:
        paths += [tree / name] if name.endswith(".py") else (tree / name).rglob("test_*.py")
    return sorted(path.relative_to(tree).as_posix() for path in paths)


def main() -> int:
    arguments = options()
    every, known = load_mutants(), recorded(CAUGHT) if CAUGHT.exists() else {}
    check_mutants(every, arguments.tree)
    mutants = chosen(every, arguments, known)
    if arguments.list:
        print("\n".join(f"{mutant.name}\n        {known.get(mutant.name) or '-'}" for mutant in mutants))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        jobs = []
        for number in range(max(1, min(arguments.jobs, len(mutants)))):
            job = Job(Path(place) / str(number) / "tree", Path(place) / str(number))
            copy_tree(arguments.tree, arguments.tests_from or arguments.tree / "tests", job.tree)
            jobs.append(job)
        preload(jobs[0].tree)
        hunt, found = Hunt(jobs[0].tree, known, within(arguments, jobs[0].tree), arguments.quick, arguments.seconds), {}
        whole = not (arguments.tests or arguments.quick or arguments.seconds < math.inf)
        for mutant, test, seconds in hunt_all(mutants, hunt, jobs):
            found[mutant.name] = test
            print(f"{seconds:6.1f} s  {mutant.name}\n          {test or 'SURVIVES'}", flush=True)
            known[mutant.name] = test or known.get(mutant.name)
            if arguments.tree == ROOT:
                save(found, known, every, whole)
        if wrong := unsound(found.values(), jobs[0]):
            print("\n".join(f"fails without a mutant, too: {test}" for test in wrong))
            found = {name: None if plain(test) in map(plain, wrong) else test for name, test in found.items()}
            known = {name: test for name, test in known.items() if plain(test) not in map(plain, wrong)}
        if arguments.tree == ROOT:
            save(found, known, every, whole)
    survivors = [name for name, test in found.items() if test is None]
    print(f"{len(found)} mutants, {len(found) - len(survivors)} caught")
    print("".join(f"survives: {name}\n" for name in survivors), end="")
    if arguments.compare:
        return 0 if compared(recorded(arguments.compare), found) and not wrong else 1
    return 1 if survivors or wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--interpreted"]:
        tree, tests, all_failures, failed = json.loads(sys.argv[2])
        sys.exit(pytest_in(Path(tree), Run(tests, 0, True, all_failures), Path(failed)))
    sys.exit(main())
