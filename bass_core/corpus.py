"""The text that the embedded pair learns from and is asked to continue.

A pair that ships with a library may contain no text whose licence travels badly, and a reader without a network must
be able to train it again. So there are two sources that every Python has at hand:

* **generated functions**: signature + docstring -> body, composed as source -> filter -> map -> finish, each step with
  several ways to say it and several ways to write it; functions that are no such pipeline come from templates. The
  grammar is `assets/function_grammar.toml`. Its choices are what makes drafting interesting: with one way to write each
  function nearly every draft token would be accepted.
* **library functions**: functions of the running interpreter's standard library, read from its source files. Nothing
  of them is stored in this repository.

One function is one document. What is held out is decided by a hash: of what is computed (pipelines), or of signature
and docstring (templates). So a held-out prompt never occurs in training, whatever the seeds.
"""

import ast
import re
import sysconfig
import textwrap
import tomllib
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

HELD_OUT_MODULES = (
    "bisect",
    "calendar",
    "colorsys",
    "copy",
    "csv",
    "fnmatch",
    "graphlib",
    "heapq",
    "shlex",
    "statistics",
    "textwrap",
)
SKIPPED_FOLDERS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
GRAMMAR = Path(__file__).parent / "assets" / "function_grammar.toml"
TEMPLATE_SHARE = 0.3
HELD_OUT_ONE_IN = 10
NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 50, 100)
LETTERS = "abcdefghiklmnoprstuw"
TYPES = {"number": "int", "string": "str", "character": "str"}
OPPOSITES = {" == ": " != ", " != ": " == ", " > ": " <= ", " < ": " >= ", " >= ": " < ", " <= ": " > "}


@dataclass(frozen=True)
class Function:
    """One generated function. `key` says what is held out with it; `prompt` ends after the docstring's line."""

    key: str
    prompt: str
    body: str


def generated_functions(count: int, seed: int = 0, held_out: bool = False) -> list[str]:
    """`count` functions to train on, or `held_out` ones to measure with; the same for the same seed."""
    return [function.prompt + function.body for function in _functions(count, seed, held_out)]


def function_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` distinct prompts (signature and docstring) of functions that training never contains."""
    return [function.prompt for function in _functions(count, seed, held_out=True)]


def library_functions(held_out: bool = False) -> list[str]:
    """Functions and methods of the standard library, dedented; those of `HELD_OUT_MODULES` only if `held_out`.

    Raises FileNotFoundError where the interpreter has no source files of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    functions = []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        is_held_out = not folders and path.stem in HELD_OUT_MODULES
        if not SKIPPED_FOLDERS.intersection(folders) and is_held_out == held_out:
            functions += [source for source, _ in _functions_of(path)]
    if not functions:
        raise FileNotFoundError(f"no Python source files of the standard library under {root}")
    return functions


def library_prompts(count: int, max_chars: int = 400) -> list[str]:
    """`count` prompts from the held-out modules: a function's signature, its docstring if any, perhaps first lines.

    The same for the same Python version. Prompts have at most `max_chars` characters (about 40 to 130 tokens) and leave
    at least two lines to write. Raises ValueError if the modules have fewer than `count` such functions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    prompts = [
        source[:cut]
        for module in HELD_OUT_MODULES
        for source, cut in _functions_of(root / f"{module}.py")
        if 0 < cut <= max_chars
    ]
    if count > len(prompts):
        raise ValueError(f"the held-out modules give {len(prompts)} library prompts, {count} were asked for")
    return [prompts[i * len(prompts) // count] for i in range(count)]  # spread over the modules


@cache
def _functions_of(path: Path) -> list[tuple[str, int]]:
    """(source, where a prompt ends) of the outermost functions and methods in a file; short and huge ones left out."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):  # some files hold wrong code or other encodings on purpose
        return []
    lines = text.splitlines(keepends=True)
    found, nodes = [], [tree]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.ClassDef):
                nodes.append(node)
            elif isinstance(node, ast.FunctionDef):
                source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip() + "\n"
                if 60 <= len(source) <= 2000 and source.isascii() and "\t" not in source:
                    found.append((source, _prompt_end(node, source)))
    return found


def _prompt_end(node: ast.FunctionDef, source: str, min_chars: int = 120) -> int:
    """Characters of the signature, the docstring and as many further lines as make a prompt; 0 if too few remain."""
    lines = source.splitlines(keepends=True)
    has_docstring = ast.get_docstring(node) is not None
    kept = (node.body[0].end_lineno + 1 if has_docstring else node.body[0].lineno) - node.lineno
    while kept < len(lines) and sum(map(len, lines[:kept])) < min_chars:
        kept += 1
    return sum(map(len, lines[:kept])) if len(lines) - kept >= 2 else 0


# ------------------------------------------------------------------------------------------------ generated functions


@cache
def _grammar() -> dict:
    with GRAMMAR.open("rb") as file:
        return tomllib.load(file)


def _functions(count: int, seed: int, held_out: bool) -> list[Function]:
    rng = Random(f"{seed}-{held_out}")
    functions, prompts = [], set()
    while len(functions) < count:
        function = _template(rng) if rng.random() < TEMPLATE_SHARE else _pipeline(rng)
        if (zlib.crc32(function.key.encode()) % HELD_OUT_ONE_IN == 0) != held_out:
            continue
        if not held_out or function.prompt not in prompts:  # training may meet one prompt with several bodies
            prompts.add(function.prompt)
            functions.append(function)
    return functions


def _template(rng: Random) -> Function:
    """Fill one template: every `let` word, every [[a|b]] choice, one docstring, one body."""
    template = rng.choice(_grammar()["template"])
    words = {name: rng.choice(options) for name, options in template["let"].items()}

    def fill(text: str) -> str:
        for _ in range(2):  # a word may hold other words
            for name, word in words.items():
                for i, part in enumerate(word if isinstance(word, list) else ()):
                    text = re.sub(rf"\${name}\.{i}", lambda _, part=part: part, text)
                if isinstance(word, str):
                    text = re.sub(rf"\${name}(?![a-z])", lambda _, word=word: word, text)
        return re.sub(r"\[\[(.*?)\]\]", lambda choice: rng.choice(choice[1].split("|")), text)

    head, doc, body = fill(template["head"]), fill(rng.choice(template["said"])), fill(rng.choice(template["body"]))
    name = re.search(r"def (\w+)", head)[1]
    body = re.sub(r"\b(gcd|factorial)\(", f"{name}(", body)  # the recursive ones call themselves
    prompt = f'{head}\n    """{doc}"""\n'
    return Function(prompt, prompt, textwrap.indent(body.strip("\n") + "\n", "    "))


def _pipeline(rng: Random) -> Function:
    """Compose source -> filter -> map -> finish, and say and write it in one of the ways the grammar knows."""
    source, keep, change, finish = steps = _choose(rng)
    parameter, noun, variable, field = (*rng.choice(source["words"]).split(":"), "")[:4]
    words = {"p": parameter, "e": variable, "f": field}
    arguments = {parameter: source["hint"]}
    kept_said, test = _fill(rng, keep, arguments, avoid=variable)
    changed_said, value = _fill(rng, change, arguments, avoid=variable)
    phrase = (
        changed_said.replace("{}", kept_said.replace("{}", noun)) + " " + rng.choice(source["places"]).format(**words)
    )
    empty = rng.choice(finish["empty"]) if "empty" in finish and "list" in source["hint"] and rng.random() < 0.5 else ""
    doc = rng.choice(finish["said"]).format(phrase.strip())
    if empty:
        doc += rng.choice((f". Return {empty} if {parameter} is empty", f", or {empty} if {parameter} is empty"))
    element = source.get("element", "{e}").format(**words)
    iteration = Iteration(
        loops=tuple(tuple(loop.format(**words).split(" in ", 1)) for loop in source["loops"]),
        test=test.replace("{x}", element) if keep else "",
        value=value.replace("{x}", element),
    )
    local = rng.choice([name for name in finish["local"] if name not in (*arguments, variable)])
    body = _body(rng, finish, iteration, local, parameter)
    if empty:
        body = [f"if not {parameter}:", f"    return {empty}", *body]
    hint = finish["hint"].format(t=TYPES[_kind(source, change)])
    head = _head(
        rng,
        [rng.choice(finish["names"]), *((step or {}).get("name") for step in (change, keep))],
        noun,
        arguments,
        hint,
    )
    key = "/".join([*source["loops"], *((step or {}).get("name", "-") for step in steps[1:3]), finish["said"][0]])
    return Function(key, f'{head}\n    """{doc}."""\n', textwrap.indent("\n".join(body) + "\n", "    "))


def _choose(rng: Random) -> tuple[dict, dict | None, dict | None, dict]:
    """A source, perhaps a filter, perhaps a map, and a finish that fits them."""
    grammar = _grammar()
    source = rng.choices(grammar["source"], [source["weight"] for source in grammar["source"]])[0]
    keep = rng.choice(grammar["filter"][source["kind"]]) if rng.random() < 0.75 else None
    change = rng.choice(grammar["map"][source["kind"]]) if rng.random() < 0.6 else None
    finishes = [
        finish
        for finish in grammar["finish"]
        if _kind(source, change) in finish["kinds"]
        and (keep or not finish.get("filtered"))
        and (not change or finish.get("mapped", True))
    ]
    return source, keep, change, rng.choices(finishes, [finish.get("weight", 1) for finish in finishes])[0]


def _kind(source: dict, change: dict | None) -> str:
    return (change or {}).get("becomes", source["kind"])


def _fill(rng: Random, step: dict | None, arguments: dict[str, str], avoid: str) -> tuple[str, str]:
    """How a step is said and written, its slots filled with literals or with new entries of `arguments`."""
    if step is None:
        return "{}", "{x}"
    said, code = rng.choice(step["said"]), rng.choice(step["code"])
    low = rng.choice(NUMBERS[:-1])
    literals = {"n": low, "m": rng.choice([n for n in NUMBERS if n > low])}
    for slot, names in step.get("slots", {}).items():
        free = [name for name in names if name not in arguments and name != avoid]
        if free and rng.random() < 0.4:
            filling = rng.choice(free)
            arguments[filling] = "int" if slot in literals else "str"
        else:
            filling = str(literals.get(slot, f'"{rng.choice(LETTERS)}"'))
        said, code = (text.replace(f"{{{slot}}}", filling) for text in (said, code))
    return said, code


def _head(rng: Random, parts: list[str | None], noun: str, arguments: dict[str, str], returned: str) -> str:
    """The line with `def`: a name made of some of the steps' names, and sometimes type hints."""
    named = [part for part in parts if part]
    if len(named) < 2 or rng.random() < 0.5:
        named.append(noun)
    if len(named) > 2 and rng.random() < 0.3:
        named.pop(1)
    joint = "_of_" if rng.random() < 0.15 else "_"
    name = joint.join((named[0], "_".join(named[1:]))) if len(named) > 1 else f"get_{named[0]}"
    if rng.random() < 0.4:
        return f"def {name}({', '.join(f'{argument}: {hint}' for argument, hint in arguments.items())}) -> {returned}:"
    return f"def {name}({', '.join(arguments)}):"


@dataclass(frozen=True)
class Iteration:
    """Code of the middle of a pipeline: nested (variable, iterable) loops, a test or "", and the value taken."""

    loops: tuple[tuple[str, str], ...]
    test: str
    value: str

    @property
    def is_plain(self) -> bool:
        """Whether it only hands on the elements of its one iterable."""
        return not self.test and len(self.loops) == 1 and self.value == self.loops[0][0]


def _body(rng: Random, finish: dict, middle: Iteration, local: str, parameter: str) -> list[str]:
    """The lines of the body: as an expression, as a loop, or in named steps."""
    lines = []
    (variable, iterable), *inner = middle.loops
    if "loop" in finish and ("one" not in finish or rng.random() < 0.45):
        if iterable == parameter and not inner and '"' not in middle.test + middle.value and rng.random() < 0.15:
            return _loop(rng, finish, _by_index(middle), local)
        return _loop(rng, finish, middle, local)
    if middle.test and not inner and finish.get("mapped", True) and rng.random() < 0.2:
        name = rng.choice(("kept", "chosen", "selected"))
        if name != local:
            lines = [f"{name} = [{variable} for {variable} in {iterable} if {middle.test}]"]
            middle = Iteration(((variable, name),), "", middle.value)
    return lines + _expression(rng, finish, middle, local)


def _by_index(middle: Iteration) -> Iteration:
    """The same loop over positions: for i in range(len(numbers))."""
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
    *lines, returned = code.split(";")
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
    lines += inside.format(a=local, y=value).split(";") if inside else []
    if middle.test and finish["loop"][1] == inside:
        if opposite and rng.random() < 0.2:
            lines = [f"if {opposite}:", "    continue", *lines]
        else:
            lines = [f"if {middle.test}:", *(f"    {line}" for line in lines)]
    for variable, iterable in reversed(middle.loops):
        lines = [f"for {variable} in {iterable}:", *(f"    {line}" for line in lines)]
    return [*(before.format(a=local).split(";") if before else []), *lines, f"return {after.format(a=local)}"]
