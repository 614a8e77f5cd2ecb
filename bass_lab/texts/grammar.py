"""Compose small Python functions: source -> filters -> map -> finish, each with several phrasings and code variants.

Words and code are in `assets/function_grammar.toml`. Other functions come from templates. A composition describes the
computation, without names, numbers and phrasing. A hash holds out a tenth of all compositions, and a tenth of all
signatures with docstrings from templates.
"""

import re
import textwrap
import tomllib
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

GRAMMAR = Path(__file__).parents[1] / "assets" / "function_grammar.toml"
TEMPLATE_SHARE = 0.2
HELD_OUT_ONE_IN = 10
NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 50, 100)
LETTERS = "abcdefghiklmnoprstuw"
GLUES = (", ", " ", "-", "/", "; ", "")
TYPES = {"number": "int", "string": "str", "character": "str"}
OPPOSITES = {" == ": " != ", " != ": " == ", " > ": " <= ", " < ": " >= ", " >= ": " < ", " <= ": " > "}


@dataclass(frozen=True)
class Function:
    """A generated function. Functions with the same `key` are held out together. `prompt` ends after the docstring."""

    key: str
    prompt: str
    body: str


@dataclass(frozen=True)
class Iteration:
    """Code of the middle of a pipeline: nested (variable, iterable) loops, a test or "", and the value."""

    loops: tuple[tuple[str, str], ...]
    test: str
    value: str

    @property
    def is_plain(self) -> bool:
        """True if the iteration only yields the elements of one iterable."""
        return not self.test and len(self.loops) == 1 and self.value == self.loops[0][0]


@dataclass(frozen=True)
class Pipeline:
    """Specification of a function, before its body is chosen.

    key: the composition. filters: number of filters. head: the `def` line. said: the docstring's sentence. arguments:
    type hints by name. kind, field, element: describe the iterated elements. tests, values: alternative codes of the
    filters and the map. empty: the result for an empty argument, or "".
    """

    key: str
    filters: int
    head: str
    said: str
    arguments: dict[str, str]
    kind: str
    field: str
    element: str
    loops: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]
    values: tuple[str, ...]
    finish: dict
    local: str
    empty: str

    def body(self, rng: Random) -> str:
        """Return a random body, indented."""
        middle = Iteration(self.loops, rng.choice(self.tests), rng.choice(self.values))
        parameter = next(iter(self.arguments))
        lines = _body(rng, self.finish, middle, self.local, parameter)
        if self.empty:
            lines = [f"if not {parameter}:", f"    return {self.empty}", *lines]
        return textwrap.indent("\n".join(lines) + "\n", "    ")

    @property
    def prompt(self) -> str:
        return f'{self.head}\n    """{self.said}."""\n'


def functions(count: int, seed: int, held_out: bool) -> list[Function]:
    """Return `count` functions, all held out or none, the same for the same seed. Held-out prompts are unique."""
    rng = Random(f"{seed}-{held_out}")
    found, prompts = [], set()
    while len(found) < count:
        if rng.random() < TEMPLATE_SHARE:
            function = _template(rng)
        else:
            plan = pipeline(rng)
            function = Function(plan.key, plan.prompt, plan.body(rng))
        if is_held_out(function.key) != held_out:
            continue
        if not held_out or function.prompt not in prompts:  # training may contain a prompt with several bodies
            prompts.add(function.prompt)
            found.append(function)
    return found


def is_held_out(key: str) -> bool:
    """Return True if training must not contain this composition, or this template's signature and docstring."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


@cache
def _grammar() -> dict:
    with GRAMMAR.open("rb") as file:
        return tomllib.load(file)


def pipeline(rng: Random) -> Pipeline:
    """Compose source -> filters -> map -> finish, and choose names, numbers and phrasing."""
    source, keeps, change, finish = _choose(rng)
    parameter, noun, variable, field = (*rng.choice(source["words"]).split(":"), "")[:4]
    words = {"p": parameter, "e": variable, "f": field}
    loops = tuple(tuple(loop.format(**words).split(" in ", 1)) for loop in source["loops"])
    element = source.get("element", "{e}").format(**words)
    arguments = {parameter: source["hint"]}
    taken = {name for names, _ in loops for name in re.findall(r"\w+", names)}

    phrase, tests = noun, [""]
    for keep in keeps:
        said, codes = _fill(rng, keep, arguments, taken)
        phrase = said.replace("{}", phrase)
        tests = [f"{test} and {code}" if test else code for test in tests for code in codes]
    said, values = _fill(rng, change, arguments, taken)
    phrase = said.replace("{}", phrase) + " " + rng.choice(source["places"]).format(**words)
    finish, sentence = _filled_finish(rng, finish, arguments, taken)
    sentence = sentence.format(phrase.strip())
    empty = rng.choice(finish["empty"]) if "empty" in finish and "list" in source["hint"] and rng.random() < 0.5 else ""
    if empty:
        sentence += rng.choice((f". Return {empty} if {parameter} is empty", f", or {empty} if {parameter} is empty"))
    names = [rng.choice(finish["names"]), (change or {}).get("name"), *(keep["name"] for keep in keeps)]
    kinds = [*source["loops"], *sorted(keep["name"] for keep in keeps), (change or {}).get("name", "-")]
    return Pipeline(
        key="/".join([*kinds, finish["said"][0]]),
        filters=len(keeps),
        head=_head(rng, names, noun, arguments, finish["hint"].format(t=TYPES[_kind(source, change)])),
        said=sentence,
        arguments=arguments,
        kind=source["kind"],
        field=field,
        element=element,
        loops=loops,
        tests=tuple(test.replace("{x}", element) for test in tests),
        values=tuple(value.replace("{x}", element) for value in values),
        finish=finish,
        local=rng.choice([name for name in finish["local"] if name not in arguments and name not in taken]),
        empty=empty,
    )


def _choose(rng: Random) -> tuple[dict, list[dict], dict | None, dict]:
    """Choose a source, up to two filters, an optional map, and a matching finish."""
    grammar = _grammar()
    source = rng.choices(grammar["source"], [source["weight"] for source in grammar["source"]])[0]
    keeps = rng.sample(grammar["filter"][source["kind"]], rng.choices((0, 1, 2), (25, 60, 15))[0])
    change = rng.choice(grammar["map"][source["kind"]]) if rng.random() < 0.6 else None
    finishes = [
        finish
        for finish in grammar["finish"]
        if _kind(source, change) in finish["kinds"]
        and (keeps or not finish.get("filtered"))
        and (not change or finish.get("mapped", True))
    ]
    return source, keeps, change, rng.choices(finishes, [finish.get("weight", 1) for finish in finishes])[0]


def _kind(source: dict, change: dict | None) -> str:
    return (change or {}).get("becomes", source["kind"])


def _fill(rng: Random, step: dict | None, arguments: dict[str, str], taken: set[str]) -> tuple[str, list[str]]:
    """Return a phrase and the alternative codes of a step, with literals or new `arguments` in the slots."""
    if step is None:
        return "{}", ["{x}"]
    said, codes = rng.choice(step["said"]), step["code"]
    for slot, filling in _fillings(rng, step, arguments, taken).items():
        said, *codes = (text.replace(f"{{{slot}}}", filling) for text in (said, *codes))
    return said, codes


def _filled_finish(rng: Random, finish: dict, arguments: dict[str, str], taken: set[str]) -> tuple[dict, str]:
    """Return the finish with filled slots, and its sentence."""
    said, filled = rng.choice(finish["said"]), dict(finish)
    for slot, filling in _fillings(rng, finish, arguments, taken).items():
        said = said.replace(f"{{{slot}}}", filling)
        for part in {"one", "loop"} & finish.keys():
            filled[part] = [text.replace(f"{{{slot}}}", filling) for text in filled[part]]
    return filled, said


def _fillings(rng: Random, step: dict, arguments: dict[str, str], taken: set[str]) -> dict[str, str]:
    low = rng.choice(NUMBERS[:-1])
    literals = {"n": low, "m": rng.choice([n for n in NUMBERS if n > low]), "g": f'"{rng.choice(GLUES)}"'}
    fillings = {}
    for slot, names in step.get("slots", {}).items():
        free = [name for name in names if name not in arguments and name not in taken]
        if free and rng.random() < 0.4:
            fillings[slot] = rng.choice(free)
            arguments[fillings[slot]] = "int" if slot in "nm" else "str"
        else:
            fillings[slot] = str(literals.get(slot, f'"{rng.choice(LETTERS)}"'))
    return fillings


def _head(rng: Random, parts: list[str | None], noun: str, arguments: dict[str, str], returned: str) -> str:
    """Return the `def` line: a name from some of the steps' names, and sometimes type hints."""
    named = [part for part in parts if part]
    if len(named) < 2 or rng.random() < 0.5:
        named.append(noun)
    while len(named) > 2 and (len(named) > 3 or rng.random() < 0.3):
        named.pop(1)
    joint = "_of_" if rng.random() < 0.15 else "_"
    name = joint.join((named[0], "_".join(named[1:]))) if len(named) > 1 else f"get_{named[0]}"
    if rng.random() < 0.4:
        return f"def {name}({', '.join(f'{argument}: {hint}' for argument, hint in arguments.items())}) -> {returned}:"
    return f"def {name}({', '.join(arguments)}):"


def _body(rng: Random, finish: dict, middle: Iteration, local: str, parameter: str) -> list[str]:
    """Return the lines of the body: an expression, a loop, or named steps."""
    lines = []
    (variable, iterable), *inner = middle.loops
    simple = not inner and variable.isidentifier()
    if "loop" in finish and ("one" not in finish or rng.random() < 0.45):
        if iterable == parameter and simple and '"' not in middle.test + middle.value and rng.random() < 0.15:
            return _loop(rng, finish, _by_index(middle), local)
        return _loop(rng, finish, middle, local)
    if middle.test and simple and finish.get("mapped", True) and rng.random() < 0.2:
        name = rng.choice(("kept", "chosen", "selected"))
        if name != local:
            lines = [f"{name} = [{variable} for {variable} in {iterable} if {middle.test}]"]
            middle = Iteration(((variable, name),), "", middle.value)
    return lines + _expression(rng, finish, middle, local)


def _by_index(middle: Iteration) -> Iteration:
    """Return the same loop over positions: for i in range(len(numbers))."""
    ((variable, iterable),) = middle.loops
    test, value = (re.sub(rf"(?<![.\w]){variable}\b", f"{iterable}[i]", code) for code in (middle.test, middle.value))
    return Iteration((("i", f"range(len({iterable}))"),), test, value)


def _expression(rng: Random, finish: dict, middle: Iteration, local: str) -> list[str]:
    every = " ".join(f"for {variable} in {iterable}" for variable, iterable in middle.loops)
    clause = f"{every} if {middle.test}" if middle.test else every
    comprehension = f"{middle.value} {clause}"
    iterable = middle.loops[0][1]
    code = rng.choice(finish["one"]).format(
        a=local,
        y=middle.value,
        test=middle.test,
        every=every,
        clause=clause,
        gen=iterable if middle.is_plain else comprehension,
        arg=iterable if middle.is_plain else f"({comprehension})",
        list=f"list({iterable})" if middle.is_plain else f"[{comprehension}]",
    )
    *lines, returned = code.split(";;")
    return [*lines, f"return {returned}"]


def _loop(rng: Random, finish: dict, middle: Iteration, local: str) -> list[str]:
    before, inside, after = finish["loop"]
    opposite = next((middle.test.replace(*pair) for pair in OPPOSITES.items() if middle.test.count(pair[0]) == 1), "")
    opposite = opposite if " and " not in opposite else ""
    lines, value = [], middle.value
    if inside.startswith("unless "):
        lines, inside = [f"if {opposite or f'not ({middle.test})'}:", "    " + inside.removeprefix("unless ")], ""
    elif "{y}" in inside and not value.isidentifier() and (inside.count("{y}") > 1 or rng.random() < 0.25):
        lines, value = [f"y = {value}"], "y"
    lines += inside.format(a=local, y=value).split(";;") if inside else []
    if middle.test and finish["loop"][1] == inside:
        if opposite and rng.random() < 0.2:
            lines = [f"if {opposite}:", "    continue", *lines]
        else:
            lines = [f"if {middle.test}:", *(f"    {line}" for line in lines)]
    for variable, iterable in reversed(middle.loops):
        lines = [f"for {variable} in {iterable}:", *(f"    {line}" for line in lines)]
    return [*(before.format(a=local).split(";;") if before else []), *lines, f"return {after.format(a=local)}"]


def _template(rng: Random) -> Function:
    """Fill a template: every `let` word, every [[a|b]] choice, a docstring, a body."""
    template = rng.choice(_grammar()["template"])
    words = {name: rng.choice(options) for name, options in template["let"].items()}

    def fill(text: str) -> str:
        for _ in range(2):  # a word may contain other words
            for name, word in words.items():
                for i, part in enumerate(word if isinstance(word, list) else ()):
                    text = re.sub(rf"\${name}\.{i}", lambda _, part=part: part, text)
                if isinstance(word, str):
                    text = re.sub(rf"\${name}(?![a-z])", lambda _, word=word: word, text)
        return re.sub(r"\[\[(.*?)\]\]", lambda choice: rng.choice(choice[1].split("|")), text)

    head, doc, body = fill(template["head"]), fill(rng.choice(template["said"])), fill(rng.choice(template["body"]))
    name = re.search(r"def (\w+)", head)[1]
    body = re.sub(r"\b(gcd|factorial)\(", f"{name}(", body)  # recursive functions call themselves
    prompt = f'{head}\n    """{doc}"""\n'
    return Function(prompt, prompt, textwrap.indent(body.strip("\n") + "\n", "    "))
