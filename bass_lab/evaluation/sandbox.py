"""Grade model-written programs: run each program in a sandbox, and check the results from outside.

A job uses two processes. The *worker* (`_worker.py`) holds the program and answers calls, confined by Landlock,
seccomp, resource limits and a uid other than root. The *checker* (`_checker.py`) runs the dataset's `check(candidate)`,
where the candidate calls the worker. Expected values never enter the worker, so a program cannot pass by printing,
patching or exiting. The checker is a separate process, so a check that does not end can be killed.

Calls are by value. A check sees only results of exact built-in types (a Counter is an error), and no changes that the
program makes to arguments. Programs can import a list of standard modules (`_worker.IMPORTED`), and further modules if
every user can read the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import NamedTuple

from bass_lab.evaluation import bare, confinement
from bass_lab.evaluation.channel import Channel, ChannelError
from bass_lab.evaluation.problems import MINI_SET, Problem

GRACE = 0.5  # seconds from a job's time limit to the kill of the checker
START_SECONDS = 30.0
ADVICE = (
    "Model-written programs need a sandbox. Run in a Linux container or virtual machine (kernel 5.13 or newer; "
    "Docker's defaults suffice), or pass unsafe=True on a machine where programs can do no harm."
)
PROBE = Problem(
    task_id="self-test",
    prompt='def candidate():\n    """Return which forbidden things this process can do."""\n',
    entry_point="candidate",
    canonical_solution=f"    MINI_SET = {str(MINI_SET)!r}\n"
    """    import os, socket
    attempts = {
        "read /etc/passwd": lambda: open("/etc/passwd"),
        "read the mini set": lambda: open(MINI_SET),
        "write /dev/null": lambda: open("/dev/null", "w"),
        "empty /dev/null": lambda: os.open("/dev/null", 3 | os.O_TRUNC),  # not covered by Landlock alone
        "open a socket": lambda: socket.socket(),
        "start a process": lambda: os.fork() or os._exit(0),
        "signal a process": lambda: os.kill(os.getppid(), 0),
        "be root": lambda: None if 0 in (os.getuid(), os.geteuid()) else 1 / 0,
    }
    possible = []
    for name, attempt in attempts.items():
        try:
            attempt()
            possible.append(name)
        except (OSError, ZeroDivisionError):
            pass
    return possible
""",
    test="def check(candidate):\n    possible = candidate()\n    assert possible == [], possible\n",
)


class Grade(NamedTuple):
    """reason: "passed", "wrong: ..." (the failing line of the check), "error: ...", "timeout..." or "died: ..."."""

    passed: bool
    reason: str


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a program."""


def grade(problem: Problem, completion: str, *, seconds: float = 5.0) -> Grade:
    """Grade prompt + completion by the problem's tests, within `seconds` of wall time and 4 s of CPU time.

    Raises as `grade_all`.
    """
    return grade_all([(problem, completion)], seconds=seconds, workers=1)[0]


def grade_all(
    jobs: Sequence[tuple[Problem, str]], *, seconds: float = 5.0, workers: int = 2, unsafe: bool = False
) -> list[Grade]:
    """Return a grade for each (problem, completion), in order. workers: jobs at a time. seconds: per job.

    unsafe: run even if the sandbox is incomplete; the caller must record this with the results. Raises
    SandboxUnavailable if the sandbox is incomplete, ValueError if a problem's prompt or test cannot be executed.
    """
    if not seconds > 0 or workers < 1:
        raise ValueError(f"seconds must be positive and workers at least 1, not {seconds} and {workers}")
    if not unsafe:
        require_sandbox()
    return _grade_all(jobs, seconds, workers, unsafe)


def require_sandbox() -> None:
    """Raise SandboxUnavailable with the cause and advice if this machine cannot confine a program."""
    if obstacle := sandbox_obstacle():
        raise SandboxUnavailable(obstacle)


def sandbox_obstacle() -> str | None:
    """Return the reason why this machine cannot confine a program, with advice, or None."""
    if lacking := confinement.lacking():
        return f"No sandbox: there is no {'; no '.join(lacking)}. {ADVICE}"
    return _self_test()


@functools.cache
def _self_test() -> str | None:
    """Run a program that tries forbidden actions, once per process. Return the failure, or None."""
    try:
        (found,) = _grade_all([(PROBE, PROBE.canonical_solution)], START_SECONDS, 1, False)
    except SandboxUnavailable as error:
        return str(error)
    return None if found.passed else f"The sandbox failed its self-test: {found.reason}. {ADVICE}"


def _grade_all(jobs: Sequence[tuple[Problem, str]], seconds: float, workers: int, unsafe: bool) -> list[Grade]:
    waiting: SimpleQueue[int] = SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)
    grades: dict[int, Grade] = {}

    def work() -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(Empty):
            checker = None
            while True:
                index = waiting.get_nowait()
                if checker is None or checker.stopped:
                    checker = Checker()
                    stack.callback(checker.stop)
                grades[index] = checker.grade(*jobs[index], seconds, unsafe)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for lane in [pool.submit(work) for _ in range(min(workers, len(jobs)))]:
                lane.result()
        except BaseException:  # including an interrupt: workers end after the current job
            with contextlib.suppress(Empty):
                while True:
                    waiting.get_nowait()
            raise
    return [grades[index] for index in range(len(jobs))]


class Checker:
    """A process that grades jobs one after the other. The process dies with the thread that created the Checker."""

    def __init__(self) -> None:
        self._process, *pipes = bare.start("_checker")
        self._channel = Channel(*pipes)
        self.stopped = False
        try:
            self._channel.receive(time.monotonic() + START_SECONDS)
        except ChannelError as error:
            self.stop()
            raise SandboxUnavailable(f"The checker process did not start: {error}. {ADVICE}") from None

    def grade(self, problem: Problem, completion: str, seconds: float, unsafe: bool) -> Grade:
        """Grade a job. Raises as `grade_all`. A check that times out or crashes stops the checker."""
        job = asdict(problem) | {"completion": completion, "seconds": seconds, "unsafe": unsafe}
        deadline = time.monotonic() + seconds + GRACE
        try:
            self._channel.send(job, deadline)
            reply = json.loads(self._channel.receive(deadline))
        except ChannelError as error:
            self.stop()
            return Grade(False, "timeout" if str(error) == "timeout" else f"error: the check itself has {error}")
        if "lacking" in reply:
            raise SandboxUnavailable(f"The sandbox is not complete: {'; '.join(reply['lacking'])}. {ADVICE}")
        if "fault" in reply:
            raise ValueError(f"problem {problem.task_id} cannot be checked: {reply['fault']}")
        return Grade(**reply)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            bare.stop(self._process)
            self._channel.close()
