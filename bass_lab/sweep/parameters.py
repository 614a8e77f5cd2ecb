"""The parameters of a notebook: which there are, what each may be, and an error that says so for all others.

A notebook declares them in its cell tagged `parameters`, as annotated literals (`batch_size: int = 8`). Rules come from
`COMMON_RULES` and from the notebook's own call of `check_parameters`, which `bass sweep` reads without running it.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import NoneType
from typing import Any

from bass_core.exactness.verification import RULES as VERIFICATIONS
from bass_lab.sweep.store import AUTO
from bass_lab.texts.prompt_sets import NAMES

Rule = str | Sequence  # "> 0" or ">= 1", or the values themselves, as patterns where one has a "*"

COMMON_RULES: dict[str, Rule] = {  # of names that mean the same in every notebook
    **dict.fromkeys(("batch_size", "batch_sizes", "max_new_tokens", "repeats", "problem_count"), ">= 1"),
    "draft_length": ">= 0",
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "temperature": ">= 0",
    "prompt_set": NAMES,
    "verification": (*VERIFICATIONS, "coupled"),
}
COMPARISONS = {">": operator.gt, ">=": operator.ge}
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "None": NoneType}
WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "a mapping"}
INJECTED = "# Parameters"  # how papermill's own cell begins


@dataclass(frozen=True)
class Parameter:
    """kinds: types of its annotation; elements: of a list's elements (none: any). rule: what else each value obeys."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    rule: Rule | None = None
    elements: tuple[type, ...] = ()

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
        """The value; an integer becomes a float where that is what it stands for, "auto" None. Raises ValueError."""
        if value == AUTO and NoneType in self.kinds:
            return None
        if type(value) is int and int not in self.kinds and float in self.kinds:
            value = float(value)
        if type(value) is list and self.elements:
            value = self._checked_elements(value)
        if type(value) not in self.kinds or not _obeys(value, self.rule):
            raise ValueError(f"{self.name} must be {self.accepted}; got {value!r}")
        return value

    def _checked_elements(self, values: list) -> list:
        floats = float in self.elements and int not in self.elements
        values = [float(each) if type(each) is int and floats else each for each in values]
        if wrong := [each for each in values if type(each) not in self.elements]:
            one = " or ".join(AUTO if kind is NoneType else WORDS[kind] for kind in self.elements)
            raise ValueError(f"each of {self.name} must be {one}; got {wrong[0]!r}")
        return values

    def parse(self, text: str) -> Any:
        """The value that a text on a command line or in a table stands for. Raises ValueError."""
        for value in _readings(text.strip()):
            if type(value) in self.kinds:
                return self.check(value)
        form = ", as JSON" if {list, dict} & set(self.kinds) else ""
        raise ValueError(f"{self.name} must be {self.accepted}{form}; got {text!r}")


def check_parameters(**rules: Rule) -> None:
    """In a notebook, after its parameters: stop if papermill set an unknown name, or a value is wrong. The text "auto"
    becomes None where None is allowed.

    rules: in place of `COMMON_RULES`, the values themselves (a list or a range) or a bound such as "> 0", as literals.
    Raises ValueError that lists the valid names, or says what the value may be.
    """
    names = inspect.currentframe().f_back.f_globals
    cells = [cell for cell in reversed(names.get("In", ())) if cell]  # what this kernel has run, the last one first
    if not cells:  # a script made from a notebook, or nbval, which keeps no history: nobody sets parameters there
        return
    own = next(filter(_declares, cells), None)
    if own is None:
        raise ValueError(
            "check_parameters found no cell of annotated literals, such as `batch_size: int = 8`, before it"
        )
    parameters = declared(own, rules)
    injected = next((cell for cell in cells if cell.startswith(INJECTED)), "")
    for statement in ast.parse(injected).body:
        known("this notebook", statement.targets[0].id, parameters)
    for parameter in parameters.values():
        names[parameter.name] = parameter.check(names[parameter.name])


def of_notebook(notebook: Mapping, title: str) -> dict[str, Parameter]:
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
    """The parameters that a cell declares, under `rules` before the common ones. ValueError for any other line."""
    found = {}
    for statement in ast.parse(source).body:
        try:
            name, kinds = statement.target.id, _kinds(statement.annotation)
            default = ast.literal_eval(statement.value)
        except (AttributeError, KeyError, ValueError):
            raise ValueError(
                f"parameters are lines like `batch_size: int = 8`, of {', '.join(KINDS)}, or several with |; "
                f"got {ast.unparse(statement)!r}"
            ) from None
        rule = rules.get(name, COMMON_RULES.get(name))
        found[name] = Parameter(name, kinds, default, rule, _elements(statement.annotation, default))
    if strange := [name for name in rules if name not in found]:
        raise ValueError(f"check_parameters names {', '.join(strange)}; the parameters are {', '.join(found)}")
    return found


def known(title: str, name: str, parameters: Mapping[str, Parameter]) -> Parameter:
    """The parameter of that name. Raises ValueError that lists all if there is none."""
    if name in parameters:
        return parameters[name]
    near = difflib.get_close_matches(name, parameters, n=1)
    width = max(map(len, parameters))
    lines = [f"  {p.name:{width}}  {p.accepted}; default {p.default!r}" for p in parameters.values()]
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{title} has no parameter {name!r}.{hint} It has\n" + "\n".join(lines))


def split(text: str) -> list[str]:
    """The values of a comma-separated list; commas within brackets or quotes divide nothing."""
    values = [""]
    for piece in text.split(","):
        if _is_whole(values[-1]):
            values.append(piece)
        else:
            values[-1] += f",{piece}"
    return values[1:]


def _is_whole(text: str) -> bool:
    """Whether every bracket and quote of a text is closed. An apostrophe within a word opens nothing."""
    bare = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"", "", text)
    return not re.search(r"(?<!\w)'|\"", bare) and len(re.findall(r"[\[{(]", bare)) <= len(re.findall(r"[\]})]", bare))


def _readings(text: str) -> Iterator[Any]:
    """What a text may stand for; itself, without quotes around it, comes last."""
    if text.lower() in (AUTO, "none"):
        yield None
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    for read in (int, float, *[json.loads] * text.startswith(("[", "{"))):
        with contextlib.suppress(ValueError):
            yield read(text)
    yield re.sub(r"^(['\"])(.*)\1$", r"\2", text)


def _declares(cell: str) -> bool:
    try:
        return bool(declared(cell, {}))
    except (SyntaxError, ValueError):
        return False


def _kinds(annotation: ast.expr) -> tuple[type, ...]:
    """The types of an annotation such as `int`, `int | None` or `list[int]`. Raises KeyError for another type."""
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return _kinds(left) + _kinds(right)
        case ast.Subscript(value):
            return _kinds(value)
    return (KINDS[ast.unparse(annotation)],)


def _elements(annotation: ast.expr, default: Any) -> tuple[type, ...]:
    """The types of a list's elements: of an annotation such as `list[int]`, else those of the default."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "list":
            return _kinds(node.slice)
    return tuple(dict.fromkeys(map(type, default))) if isinstance(default, list) else ()


def _called_with(source: str) -> dict[str, Rule]:
    """The keywords of a call of `check_parameters` in a cell; a cell that is not plain Python has none."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "check_parameters":
                return {keyword.arg: _rule(keyword.value) for keyword in node.keywords}
    return {}


def _rule(node: ast.expr) -> Rule:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
        return range(*map(ast.literal_eval, node.args))
    return ast.literal_eval(node)


def _obeys(value: Any, rule: Rule | None) -> bool:
    if isinstance(value, list):
        return (rule is None or bool(value)) and all(_obeys(each, rule) for each in value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if rule is None or value is None:
        return True
    if not isinstance(rule, str):
        patterns = [each for each in rule if isinstance(each, str) and "*" in each]
        return value in rule or any(fnmatchcase(str(value), pattern) for pattern in patterns)
    comparison, bound = rule.split()
    return type(value) in (int, float) and COMPARISONS[comparison](value, float(bound))
