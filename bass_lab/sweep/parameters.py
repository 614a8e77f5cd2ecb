"""Parameters of a notebook: declarations, rules and validation.

A notebook declares parameters in the cell tagged `parameters`, as literals with a plain type (`batch_size: int = 8`):
papermill does not recognise unions. Rules are `COMMON_RULES` and the arguments of the notebook's `check_parameters`
call, which `bass sweep` parses but does not run. A default None, or a rule such as ">= 1 or auto", permits None. A list
of numbers also takes a single number, and the notebook receives a list.
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

Rule = str | Sequence  # a bound ("> 0", ">= 1 or auto"), or the permitted values; a value with "*" is a pattern

COMMON_RULES: dict[str, Rule] = {  # for names with the same meaning in every notebook
    **dict.fromkeys(("batch_size", "batch_sizes", "max_new_tokens", "repeats", "problem_count"), ">= 1"),
    "draft_length": ">= 0",
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "temperature": ">= 0",
    "prompt_set": NAMES,
    "verification": (*VERIFICATIONS, "coupled"),
}
COMPARISONS = {">": operator.gt, ">=": operator.ge}
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}
OR_AUTO = f" or {AUTO}"  # end of a rule that permits None
WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "a mapping"}
INJECTED = "# Parameters"  # first line of the cell that papermill inserts


@dataclass(frozen=True)
class Parameter:
    """kinds: types of the value. elements: types of a default list's elements (empty: any). rule: a constraint."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    rule: Rule | None = None
    elements: tuple[type, ...] = ()

    @property
    def accepted(self) -> str:
        """Description of the permitted values."""
        words = [WORDS[kind] for kind in self.kinds if kind is not NoneType]
        if isinstance(self.rule, str):
            words[-1] += f" {self.rule}"
        elif isinstance(self.rule, range):
            words[-1] += f" from {self.rule[0]} to {self.rule[-1]}"
        elif self.rule is not None:
            words = [f"one of {', '.join(map(str, self.rule))}"]
        return " or ".join(words + [AUTO] * (NoneType in self.kinds))

    def check(self, value: Any) -> Any:
        """Return the value; "auto" becomes None, and integers become floats for the type float. Raises ValueError."""
        if value == AUTO and NoneType in self.kinds:
            return None
        if type(value) is int and int not in self.kinds and float in self.kinds:
            value = float(value)
        if type(value) is list and self.elements:
            value = self._checked_elements(value)
        if type(value) not in self.kinds or not _obeys(value, self.rule):
            hint = f'. With papermill, give a list as -y "{self.name}: [{str(value).strip("[]")}]"'
            hint *= type(value) is str and list in self.kinds
            raise ValueError(f"{self.name} must be {self.accepted}; got {value!r}{hint}")
        return value

    def _checked_elements(self, values: list) -> list:
        floats = float in self.elements and int not in self.elements
        values = [float(each) if type(each) is int and floats else each for each in values]
        if wrong := [each for each in values if type(each) not in self.elements]:
            one = " or ".join(AUTO if kind is NoneType else WORDS[kind] for kind in self.elements)
            raise ValueError(f"each of {self.name} must be {one}; got {wrong[0]!r}")
        return values

    def parse(self, text: str) -> Any:
        """Return the value of a text from a command line or a table. Raises ValueError."""
        for value in _readings(text.strip()):
            if type(value) in self.kinds:
                return self.check(value)
        form = ", as JSON" if {list, dict} & set(self.kinds) else ""
        raise ValueError(f"{self.name} must be {self.accepted}{form}; got {text!r}")


def check_parameters(**rules: Rule) -> None:
    """Check the parameters of a notebook, after the parameters cell. "auto" becomes None where None is permitted, and a
    number becomes a list for a list of numbers.

    rules: replace `COMMON_RULES`. Each rule is a literal: the permitted values (a list or range), or a bound such as
    "> 0". Raises ValueError for a wrong value, and for an unknown name set by papermill, listing the valid names.
    """
    names = inspect.currentframe().f_back.f_globals
    cells = [cell for cell in reversed(names.get("In", ())) if cell]  # cells that this kernel has run, newest first
    if not cells:  # a script made from a notebook, or nbval without history: parameters are not set there
        return
    own = next(filter(_declares, cells), None)
    if own is None:
        raise ValueError(
            "check_parameters found no cell of annotated literals before the call; add lines like `batch_size: int = 8`"
        )
    parameters = declared(own, rules)
    injected = next((cell for cell in cells if cell.startswith(INJECTED)), "")
    for statement in ast.parse(injected).body:
        known("this notebook", statement.targets[0].id, parameters)
    for parameter in parameters.values():
        value = parameter.check(names[parameter.name])
        names[parameter.name] = [value] if list in parameter.kinds and type(value) in (int, float) else value


def of_notebook(notebook: Mapping, title: str) -> dict[str, Parameter]:
    """Return the parameters of a notebook in nbformat's JSON. title: for errors. Raises ValueError if it has none."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{title} must have one code cell tagged `parameters`, got {len(tagged)}")
    rules = {}
    for cell in code:
        rules |= _called_with("".join(cell["source"]))
    try:
        return declared("".join(tagged[0]["source"]), rules)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None


def declared(source: str, rules: Mapping[str, Rule]) -> dict[str, Parameter]:
    """Return the parameters of a cell. rules: override the common rules. Raises ValueError for any other line."""
    found = {}
    for statement in ast.parse(source).body:
        try:
            name, kind = statement.target.id, KINDS[ast.unparse(statement.annotation)]
            default = ast.literal_eval(statement.value)
        except (AttributeError, KeyError, ValueError):
            raise ValueError(
                f"parameters must be lines like `batch_size: int = 8` with the types {', '.join(KINDS)}; got "
                f"{ast.unparse(statement)!r}"
            ) from None
        rule, optional = rules.get(name, COMMON_RULES.get(name)), default is None
        if isinstance(rule, str) and rule.endswith(OR_AUTO):
            rule, optional = rule.removesuffix(OR_AUTO), True
        elements = tuple(dict.fromkeys(map(type, default))) if isinstance(default, list) else ()
        kinds = (*(each for each in elements if each in (int, float)), kind, *[NoneType] * optional)
        found[name] = Parameter(name, kinds, default, rule, elements)
    if strange := [name for name in rules if name not in found]:
        raise ValueError(f"check_parameters names {', '.join(strange)}; the parameters are {', '.join(found)}")
    return found


def known(title: str, name: str, parameters: Mapping[str, Parameter]) -> Parameter:
    """Return the parameter of that name. Raises ValueError with a list of all parameters if there is none."""
    if name in parameters:
        return parameters[name]
    near = difflib.get_close_matches(name, parameters, n=1)
    width = max(map(len, parameters))
    lines = [f"  {p.name:{width}}  {p.accepted}; default {p.default!r}" for p in parameters.values()]
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{title} has no parameter {name!r}.{hint} It has\n" + "\n".join(lines))


def split(text: str) -> list[str]:
    """Split a comma-separated list. Commas within brackets or quotes do not separate values."""
    values = [""]
    for piece in text.split(","):
        if _is_whole(values[-1]):
            values.append(piece)
        else:
            values[-1] += f",{piece}"
    return values[1:]


def _is_whole(text: str) -> bool:
    """Return True if all brackets and quotes are closed. An apostrophe within a word is not a quote."""
    bare = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"", "", text)
    return not re.search(r"(?<!\w)'|\"", bare) and len(re.findall(r"[\[{(]", bare)) <= len(re.findall(r"[\]})]", bare))


def _readings(text: str) -> Iterator[Any]:
    """Yield the possible values of a text. The last is the text without surrounding quotes."""
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


def _called_with(source: str) -> dict[str, Rule]:
    """Return the keyword arguments of a `check_parameters` call in a cell. A cell that is not plain Python has none."""
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
