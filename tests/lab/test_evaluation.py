import ast
import gzip
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from attacks import ADD

from bass_lab.evaluation import Problem, load_problems
from bass_lab.texts import mini_set

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "HumanEval.jsonl.gz"
needs_human_eval = pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="HumanEval is not committed")


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


def test_committed_set_equals_the_generated_set():
    assert mini_set.make_problems(12) == load_problems()[:12]


def test_problems_are_read_from_plain_and_gzipped_files(tmp_path):
    line = json.dumps(asdict(ADD))
    (tmp_path / "a.jsonl").write_text(line + "\n\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert load_problems(tmp_path / name, trust_problems=True) == [ADD]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "not a problem"),
        ('{"task_id": "x"}', "not a problem"),
        (json.dumps(asdict(ADD) | {"test": None}), "not a problem.*: test must be a text, got None"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(json.dumps(asdict(ADD)) + "\n" + line)
    with pytest.raises(ValueError, match=f"line 2 is {said}"):
        load_problems(tmp_path / "a.jsonl")


def written(path: Path, problems: list[Problem]) -> Path:
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))
    return path


@pytest.mark.parametrize(
    "known", [pytest.param(HUMAN_EVAL, marks=needs_human_eval), None], ids=["HumanEval", "mini set"]
)
@pytest.mark.parametrize("field", ["prompt", "test", "canonical_solution"])
def test_unknown_code_outside_the_sandbox_has_to_be_trusted(tmp_path, known, field):
    problems = load_problems(known)
    assert load_problems(written(tmp_path / "same.jsonl", problems)) == problems
    with pytest.raises(ValueError, match="trust_problems=True"):
        load_problems(written(tmp_path / "some.jsonl", problems[:20]))
    problems[100] = replace(problems[100], **{field: getattr(problems[100], field) + "\nimport this\n"})
    path = written(tmp_path / "other.jsonl", problems)
    assert load_problems(path, trust_problems=True) == problems
    if field == "canonical_solution":
        assert load_problems(path) == problems
    else:
        with pytest.raises(ValueError, match=r"other.jsonl is neither .* prompt and test outside .*--trust-problems"):
            load_problems(path)
