"""The mini evaluation set: 164 functions with tests. Their compositions are not in the embedded pair's training data.

`python -m bass_lab.texts.mini_set` writes `assets/mini_set.jsonl`, always the same file. All alternative bodies of a
function agree on the expected values. The tests must fail for a body without the filters or without the map.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import asdict, replace
from random import Random

from bass_core.environment import write_whole
from bass_lab.evaluation.problems import MINI_SET, Problem
from bass_lab.texts import grammar

SIZE = 164
WAYS = 24  # bodies drawn per function
ASSERTS = 7
WORDS = re.findall(
    r"\w+",
    "apple Banana cherry level radar noon Anna kayak tree house river stone cloud window garden silver orange purple "
    "table chair 42 7 1001 HELLO WORLD Python data code moon star sea a b xyz tact stats able list area extra error",
)
CHARACTERS = "aeiouAEIbcdXYZ 0123 .,!-"


def make_problems(count: int = SIZE, seed: int = 0) -> list[Problem]:
    """Return `count` problems of different held-out compositions, the same for the same seed. Two thirds have two
    filters, because the pair solves nearly all problems with one filter."""
    rng = Random(f"mini-{seed}")
    problems, compositions = [], set()
    while len(problems) < count:
        plan = grammar.pipeline(rng)
        if not grammar.is_held_out(plan.key) or plan.key in compositions:
            continue
        if (plan.filters == 2) != (len(problems) % 3 != 0):
            continue
        if problem := _problem(plan, rng, f"mini/{len(problems)}"):
            problems.append(problem)
            compositions.add(plan.key)
    return problems


def _problem(plan: grammar.Pipeline, rng: Random, task_id: str) -> Problem | None:
    """Return the problem with tests, or None if the tests cannot detect wrong bodies."""
    ways = sorted({plan.body(rng) for _ in range(WAYS)})
    if len(ways) < 2 or any("max(set(" in way for way in ways):  # the hash seed would decide ties
        return None
    functions = [_function(plan, way) for way in ways]
    cases = {}
    for _ in range(60):
        arguments = _arguments(plan, rng)
        found = {_outcome(function, arguments) for function in functions}
        if len(found) == 1 and (expected := found.pop()) is not None:
            cases.setdefault(expected, arguments)  # one case per expected value
    chosen = rng.sample(sorted(cases), min(ASSERTS, len(cases)))
    if len(chosen) < (2 if plan.finish["hint"] == "bool" else 5):
        return None
    for simpler in (replace(plan, tests=("True",)), replace(plan, values=(plan.element,))):
        if (simpler.tests, simpler.values) != (plan.tests, plan.values):
            function = _function(plan, simpler.body(rng))
            if all(_outcome(function, cases[expected]) == expected for expected in chosen):
                return None
    name = re.match(r"def (\w+)", plan.head)[1]
    lines = [f"    assert candidate({', '.join(map(repr, cases[value]))}) == {value}" for value in chosen]
    test = "def check(candidate):\n" + "\n".join(lines) + "\n"
    return Problem(task_id, plan.prompt, name, rng.choice(ways), test, plan.key)


def _function(plan: grammar.Pipeline, body: str):
    scope: dict = {}
    exec(plan.prompt + body, scope)  # safe: text from our own grammar
    return scope[re.match(r"def (\w+)", plan.head)[1]]


def _outcome(function, arguments: list) -> str | None:
    """Return the repr of the result, with sorted sets, or None if the function raises."""
    try:
        result = function(*deepcopy(arguments))
    except Exception:  # the function need not handle this input
        return None
    if isinstance(result, set) and result:
        return "{" + ", ".join(map(repr, sorted(result))) + "}"
    return repr(result)


def _arguments(plan: grammar.Pipeline, rng: Random) -> list:
    """Return arguments that fit the type hints, near the numbers and letters of the docstring."""
    numbers = [int(n) for n in re.findall(r"\b\d+\b", plan.said)]
    letters = re.findall(r'"(\w)"', plan.said)
    near = numbers or [rng.choice((2, 3, 5, 10))]
    values = {}
    for name, hint in list(plan.arguments.items())[1:]:
        if hint == "int":
            values[name] = rng.choice((1, 2, 3, 4, 5, 7, 10))
        else:
            few = name in ("other", "allowed", "letters", "forbidden")
            values[name] = "".join(rng.sample("aeioubcd", 4)) if few else rng.choice("aeionrst")
        (near if hint == "int" else letters).append(values[name])

    def number() -> int:
        base = rng.choice(near)
        around = (base - 1, base, base + 1, 2 * base, 3 * base, -base, rng.randint(-20, 40), rng.randint(0, 12), 5, 10)
        return rng.choice(around)

    def word() -> str:
        kinds = [rng.choice(WORDS), rng.choice(WORDS), rng.choice(WORDS).upper()]
        if letters:
            letter = rng.choice(letters)
            kinds += [letter + rng.choice(WORDS), rng.choice(WORDS) + letter, letter * 2]
        if numbers and rng.random() < 0.5:
            length = max(0, rng.choice(numbers) + rng.choice((-1, 0, 1)))
            kinds.append("".join(rng.choice("abcdeno") for _ in range(min(length, 40))))
        return rng.choice(kinds)

    def character() -> str:
        return rng.choice(letters)[:1] if letters and rng.random() < 0.3 else rng.choice(CHARACTERS)

    return [_first(plan, rng, number, word, character), *values.values()]


def _first(plan: grammar.Pipeline, rng: Random, number, word, character) -> object:
    """Return the first argument, the iterated one."""
    (name, hint), *_ = plan.arguments.items()
    size = rng.choice((0, 1, 2, 4, 6, 8))
    iterable = plan.loops[-1][1]
    if hint == "list[int]":
        return [number() for _ in range(size)]
    if hint == "list[str]":
        return [word() for _ in range(size)]
    if hint == "int":
        return rng.randint(100, 99999) if "str(" in iterable else rng.randint(0, 25)
    if hint == "dict[str, int]":
        return {word(): number() for _ in range(size)}
    if hint == "list[tuple[str, int]]":
        return [(word(), number()) for _ in range(size)]
    if hint == "list[list[int]]":
        return [[number() for _ in range(rng.randint(0, 4))] for _ in range(size // 2)]
    if hint == "list[dict]":
        return [{plan.field: number() if plan.kind == "number" else word()} for _ in range(size)]
    if hint == "str" and "split()" in iterable:
        return " ".join(word() for _ in range(size))
    if hint == "str" and "splitlines()" in iterable:
        return "\n".join(" ".join(word() for _ in range(rng.randint(0, 2))) for _ in range(size))
    if hint == "str":
        return "".join(character() for _ in range(2 * size))
    raise ValueError(f"no inputs are known for {name}: {hint}")


def main() -> None:
    lines = [json.dumps(asdict(problem)) for problem in make_problems()]
    write_whole(MINI_SET, "\n".join(lines) + "\n")
    print(f"{len(lines)} problems in {MINI_SET.name}")


if __name__ == "__main__":
    main()
