"""Run programs that the embedded pair wrote, in a process of their own with limits: enough for text of a model that we
trained on harmless functions, and no sandbox. Do not run a downloaded model's programs with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bass_core.evaluation.problems import Problem

WORKER = """
import builtins, json, resource, sys
job = json.loads(sys.stdin.read())
for limit, most in (("RLIMIT_CPU", 2), ("RLIMIT_AS", 2**29), ("RLIMIT_FSIZE", 0), ("RLIMIT_NOFILE", 3)):
    resource.setrlimit(getattr(resource, limit), (most, most))
refused = {"open", "exec", "eval", "compile", "__import__", "input", "breakpoint", "exit", "quit", "help"}
scope = {"__builtins__": {name: value for name, value in vars(builtins).items() if name not in refused}}
try:
    exec(job["program"], scope)
    exec(job["test"], scope)
    scope["check"](scope[job["entry_point"]])
except BaseException:  # SystemExit too
    sys.exit(1)
"""


def passes(problem: Problem, completion: str, seconds: float = 5.0) -> bool:
    """Whether prompt + completion passes the problem's tests: no exception, no import, within 2 s of CPU time."""
    job = {"program": problem.prompt + completion, "test": problem.test, "entry_point": problem.entry_point}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", WORKER],
            input=json.dumps(job).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            env={},
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def share_passed(problems: Sequence[Problem], completions: Sequence[str]) -> float:
    """Share of the problems whose completion passes: pass@1 with one sample per problem."""
    with ThreadPoolExecutor(2) as pool:  # the threads wait for the processes
        results = list(pool.map(passes, problems, completions))
    return sum(results) / len(results)
