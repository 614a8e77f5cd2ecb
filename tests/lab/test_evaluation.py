"""The mini set's tests tell right from wrong."""

import ast
import gzip
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bass_lab.evaluation import Problem, load_problems
from bass_lab.texts import mini_set

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "HumanEval.jsonl.gz"
ADD = Problem(
    task_id="t/0",
    prompt='def add(a, b):\n    """Return a plus b."""\n',
    entry_point="add",
    canonical_solution="    return a + b\n",
    test="def check(candidate):\n    assert candidate(1, 2) == 3\n",
)


def run(problem: Problem, body: str) -> None:
    scope: dict = {}
    exec(problem.prompt + body + problem.test, scope)
    scope["check"](scope[problem.entry_point])


def test_mini_set_has_humanevals_format():
    problems = load_problems()
    assert [problem.task_id for problem in problems] == [f"mini/{i}" for i in range(164)]
    for problem in problems:
        (function,) = ast.parse(problem.prompt + problem.canonical_solution).body
        assert function.name == problem.entry_point and ast.get_docstring(function)
        assert problem.test.startswith("def check(candidate):\n    assert candidate(")


def test_canonical_solutions_pass():
    for problem in load_problems():
        run(problem, problem.canonical_solution)


def test_trivial_solutions_fail():
    for problem in load_problems():
        parameter = re.search(r"\((\w+)", problem.prompt)[1]
        for body in ("pass", "return 0", "return []", "return True", f"return {parameter}"):
            with pytest.raises(AssertionError):
                run(problem, f"    {body}\n")


def test_the_committed_set_is_what_the_code_makes():
    assert mini_set.make_problems(12) == load_problems()[:12]


def test_problems_are_read_from_plain_and_gzipped_files(tmp_path):
    line = json.dumps(asdict(ADD))
    (tmp_path / "a.jsonl").write_text(line + "\n\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert load_problems(tmp_path / "a.jsonl") == load_problems(tmp_path / "a.jsonl.gz") == [ADD]


@pytest.mark.parametrize("line", ["{", "[1]", '{"task_id": "x"}'])
def test_a_line_that_is_no_problem_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps(asdict(ADD)) + "\n" + line)
    with pytest.raises(ValueError, match="line 2 is not a problem"):
        load_problems(tmp_path / "a.jsonl")


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="HumanEval is not committed; its file is not here")
def test_humaneval_is_read():
    problems = load_problems(HUMAN_EVAL)
    assert len(problems) == 164 and problems[0].task_id == "HumanEval/0"
