"""The parameters of a notebook: which there are, what each may be, and an error that says so for all others.

A notebook declares them in its cell tagged `parameters`, as annotated literals (`batch_size: int = 8`). What is valid
beyond the type is said by `library_rules`, for names that mean the same everywhere, and by the notebook's own call of
`check_parameters`. That call is also read without being run, so `bass sweep` refuses before the first run what the
notebook itself would refuse.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

from bass_core.verification import RULES as VERIFICATIONS

Rule = str | Sequence  # "> 0" or ">= 1", or the values themselves

AUTO = "auto"  # what None is called on a command line and in tables: the library decides
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "None": NoneType}
WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "a mapping"}
INJECTED = "# Parameters"  # how papermill's own cell begins


@cache
def library_rules() -> dict[str, Rule]:
    """What the parameters obey that mean the same in every notebook."""
    from bass_lab.texts.prompt_sets import PROMPT_SETS  # here: they import records, and these this

    least_one = ("batch_size", "batch_sizes", "max_new_tokens", "repeats", "problem_count")
    return {
        **dict.fromkeys(least_one, ">= 1"),
        "draft_length": ">= 0",
        "temperature": ">= 0",
        "prompt_set": PROMPT_SETS,
        "verification": (*VERIFICATIONS, "coupled"),
    }


@dataclass(frozen=True)
class Parameter:
    """kinds: the types that its annotation names. rule: what else a value obeys, each of them in a list."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    rule: Rule | None = None

    @property
    def accepted(self) -> str:
        """What a value may be, in words."""
        words = [WORDS[kind] for kind in self.kinds if kind is not NoneType]
        if isinstance(self.rule, str):
            words[-1] += f" {self.rule}"
        elif isinstance(self.rule, range):
            words[-1] += f" from {self.rule[0]} to {self.rule[-1]}"
        elif self.rule is not None:
            words = [f"one of {', '.join(map(str, self.rule))}"]
        return " or ".join(words + [AUTO] * (NoneType in self.kinds))

    def check(self, value: Any) -> Any:
        """The value; an integer becomes a float where that is what it stands for. Raises ValueError."""
        if float in self.kinds and int not in self.kinds and type(value) is int:
            value = float(value)
        if type(value) not in self.kinds or not _finite(value) or not _obeys(value, self.rule):
            raise ValueError(f"{self.name} must be {self.accepted}; got {value!r}")
        return value

    def parse(self, text: str) -> Any:
        """The value that a text on a command line or in a table stands for. Raises ValueError."""
        for value in self._readings(text.strip()):
            return self.check(value)
        raise ValueError(f"{self.name} must be {self.accepted}; got {text!r}")

    def _readings(self, text: str) -> Iterator[Any]:
        if NoneType in self.kinds and text.lower() in (AUTO, "none"):
            yield None
        if bool in self.kinds and text.lower() in ("true", "false"):
            yield text.lower() == "true"
        for kind in (int, float):
            if kind in self.kinds:
                with contextlib.suppress(ValueError):
                    yield kind(text)
        if text[:1] in ("[", "{") and {list, dict} & set(self.kinds):
            try:
                yield json.loads(text)
            except ValueError:
                raise ValueError(f"{self.name} must be {self.accepted}, as JSON; got {text!r}") from None
        if str in self.kinds:
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            yield text[1:-1] if quoted else text


Parameters = Mapping[str, Parameter]


def check_parameters(**rules: Rule) -> None:
    """In a notebook, after its parameters: stop if papermill set a name that is not among them, or any value is wrong.

    rules: what is valid in this notebook beyond the types, in place of `library_rules`: the values themselves (a list
    or a range) or a bound such as "> 0". Literals only: `bass sweep` reads them from the source. Raises ValueError
    that lists the valid names, or says what the value may be.
    """
    names = inspect.currentframe().f_back.f_globals
    cells = [cell for cell in names.get("In", ()) if cell]  # what this kernel has run, this cell included
    if not cells:  # a script made from a notebook, or nbval, which keeps no history: nobody sets parameters there
        return
    own = next((cell for cell in reversed(cells) if _declares(cell)), None)
    if own is None:
        raise ValueError(
            "check_parameters found no cell of annotated literals, such as `batch_size: int = 8`, before it"
        )
    parameters = declared(own, rules)
    injected = next((cell for cell in reversed(cells) if cell.startswith(INJECTED)), "")
    for statement in ast.parse(injected).body:
        known("this notebook", statement.targets[0].id, parameters)
    for parameter in parameters.values():
        parameter.check(names[parameter.name])


def of_notebook(notebook: Mapping, title: str) -> Parameters:
    """The parameters of a notebook in nbformat's JSON, called `title` in errors. Raises ValueError if it has none."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{title} must have one code cell tagged `parameters`, it has {len(tagged)}")
    rules = {}
    for cell in code:
        rules |= _called_with("".join(cell["source"]))
    try:
        return declared("".join(tagged[0]["source"]), rules)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None


def declared(source: str, rules: Mapping[str, Rule]) -> dict[str, Parameter]:
    """The parameters that a cell declares, under `rules` before the library's. ValueError for what is no literal."""
    found = {}
    for statement in ast.parse(source).body:
        if not _is_declaration(statement):
            raise ValueError(f"parameters are lines like `batch_size: int = 8`, got {ast.unparse(statement)!r}")
        name, default = statement.target.id, ast.literal_eval(statement.value)
        kinds = tuple(_kinds(statement.annotation))
        found[name] = Parameter(name, kinds, default, rules.get(name, library_rules().get(name)))
    if strange := [name for name in rules if name not in found]:
        raise ValueError(f"check_parameters names {', '.join(strange)}; the parameters are {', '.join(found)}")
    return found


def known(title: str, name: str, parameters: Parameters) -> Parameter:
    """The parameter of that name. Raises ValueError that lists all if there is none."""
    if name in parameters:
        return parameters[name]
    near = difflib.get_close_matches(name, parameters, n=1)
    width = max(map(len, parameters))
    lines = [f"  {p.name:{width}}  {p.accepted}; default {p.default!r}" for p in parameters.values()]
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{title} has no parameter {name!r}.{hint} It has\n" + "\n".join(lines))


def in_table(value: Any) -> Any:
    """A value as tables show it: None is `AUTO`, a list or a mapping its JSON."""
    return AUTO if value is None else json.dumps(value) if isinstance(value, list | dict) else value


def split(text: str) -> list[str]:
    """The values of a comma-separated list; commas within brackets or quotes divide nothing."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            values.append("")
            continue
        values[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
    return values


def _is_declaration(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True


def _declares(cell: str) -> bool:
    try:
        body = ast.parse(cell).body
    except SyntaxError:
        return False
    return bool(body) and all(map(_is_declaration, body))


def _kinds(annotation: ast.expr) -> Iterator[type]:
    """The types of an annotation such as `int`, `int | None` or `list[int]`."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _kinds(annotation.left)
        yield from _kinds(annotation.right)
        return
    plain = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    name = ast.unparse(plain)
    if name not in KINDS:
        raise ValueError(f"parameters are annotated with {', '.join(KINDS)} or several with |, got {name}")
    yield KINDS[name]


def _called_with(source: str) -> dict[str, Rule]:
    """The keywords of a call of `check_parameters` in a cell; a cell that is not plain Python has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "check_parameters":
            return {keyword.arg: _rule(keyword.value) for keyword in node.keywords}
    return {}


def _rule(node: ast.expr) -> Rule:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
        return range(*map(ast.literal_eval, node.args))
    return ast.literal_eval(node)


def _obeys(value: Any, rule: Rule | None) -> bool:
    if rule is None or value is None:
        return True
    if isinstance(value, list):
        return bool(value) and all(_obeys(each, rule) for each in value)
    if not isinstance(rule, str):
        return value in rule
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    comparison, bound = rule.split()
    return value > float(bound) if comparison == ">" else value >= float(bound)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
