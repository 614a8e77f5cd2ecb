import ast
import re

import pytest

from bass_lab.evaluation import load_problems
from bass_lab.pair import training
from bass_lab.texts import corpus, grammar
from bass_lab.texts.prompt_sets import prompt_set


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return corpus.generated_functions(500, seed=3)


def test_same_seed_gives_the_same_functions(texts):
    assert corpus.generated_functions(500, seed=3) == texts
    assert corpus.generated_functions(500, seed=4) != texts


def test_generated_functions_are_valid_python(texts):
    for text in texts:
        (function,) = ast.parse(text).body
        assert ast.get_docstring(function) and len(function.body) > 1


def test_generated_functions_match_their_docstrings():
    tests = {"even": lambda x: x % 2 == 0, "odd": lambda x: x % 2}
    tests |= {"positive": lambda x: x > 0, "negative": lambda x: x < 0}
    sums = re.compile(
        r'"""[A-Z][a-z ]+ (?:sum of|total of|up) the (even|odd|positive|negative) \w+( in (the list )?\w+)?\.'
    )
    numbers = [1, 2, 3, 4, -6, -7, 0]
    found = 0
    for text in corpus.generated_functions(20_000, seed=1):
        if said := sums.search(text):
            scope: dict = {}
            exec(text, scope)
            assert scope[ast.parse(text).body[0].name](numbers) == sum(filter(tests[said[1]], numbers)), text
            found += 1
    assert found > 5


@pytest.mark.slow
def test_training_holds_every_part_and_no_composition_of_the_mini_set():
    recipe = training.Recipe()
    trained = grammar.functions(recipe.generated, recipe.seed, held_out=False)
    keys, compositions = {function.key for function in trained}, {problem.composition for problem in load_problems()}
    assert len(compositions) == 164 and not compositions & keys
    assert not {problem.prompt for problem in load_problems()} & {function.prompt for function in trained}
    assert not {function.key for function in grammar.functions(500, seed=1, held_out=True)} & keys
    met = set().union(*(key.split("/") for key in keys if "{}" in key))
    assert set().union(*(composition.split("/") for composition in compositions)) <= met


@pytest.mark.slow
def test_library_prompts_come_from_held_out_modules():
    held_out, trained = corpus.library_functions(held_out=True), corpus.library_functions()
    prompts = prompt_set("library")
    assert len(set(prompts)) == 96
    assert not any(function.startswith(prompt) for prompt in prompts for function in trained)
    assert sum(any(function.startswith(prompt) for function in held_out) for prompt in prompts) > 80  # other Pythons
    found = corpus.held_out_prompts()
    assert {module for module, _ in found} <= set(corpus.HELD_OUT_MODULES)
    assert all(prompt.startswith("def ") and len(prompt) <= 400 for _, prompt in found)
