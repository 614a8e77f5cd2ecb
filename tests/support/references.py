"""References to code in prose: which there are in a text, and whether what they name exists.

A path, `python -m module`, a link, and in backticks a dotted name that begins with a package, a module or a class of
ours, or a name that nothing but code has: with an underscore before or within it. What begins with another name, such
as `torch.compile` or `policy.task`, is not looked at.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"bass_core": ".", "bass_lab": ".", "bass_kernels": "kernels"}  # package: where it lies
SHORT = {"bass": "bass_core", "lab": "bass_lab"}  # as notebooks import them
FOLDERS = "bass_core|bass_lab|kernels|notebooks|pictures|tests"
NAMED_FILE = re.compile(
    rf"(?<![\w/.<-])(?:(?:{FOLDERS})/[\w./*-]*[\w*/]|[\w/-]*\w\.(?:py|md)|\d\d_\w+\.ipynb)(?![\w<*])"
)
STARTED = re.compile(r"python -m ([\w.]*\w)")
LINK = re.compile(r"\]\((?!https?:|#|data:)([^)#\s]+)[^)\s]*\)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMENT = re.compile(r"(?:^|\s)# .*$", re.MULTILINE)
OF_OURS = re.compile(rf"(?<![\w./`])(?:{'|'.join((*SHORT, *SOURCES))})(?:\.[A-Za-z_]\w*)+(?!\w)")
FOREIGN = {"assistant_tokenizer", "inspect_notebook"}  # of transformers, of papermill
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def prose(path: Path) -> str:
    """What a file says to its reader: all of a text, comments and docstrings of a module, cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _said_by_code(text)
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n".join(_said_by_code(source) if kind == "code" else source for kind, source in cells)
    return text


def _said_by_code(source: str) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n".join(COMMENT.findall(source) + [ast.get_docstring(node) or "" for node in nodes])


class Code:
    """What exists: files, modules, their names, the members of classes."""

    def __init__(self):
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        lines = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        self.files = [name for name in lines if (ROOT / name).exists()]
        self.modules: dict[str, ast.Module] = {}
        for package, where in SOURCES.items():
            for path in (ROOT / where / package).rglob("*.py"):
                parts = path.relative_to(ROOT / where).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                self.modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
        self.packages = {name.rpartition(".")[0] for name in self.modules} - {""}
        self.names = {module: _names(tree.body) for module, tree in self.modules.items()}
        self.classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
        for module, tree in self.modules.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append((module, node))

    @cached_property
    def words(self) -> set[str]:
        """All names that our code uses for anything, in tests and notebooks too, and words of its strings."""
        found: set[str] = set()
        for path in map(Path, self.files):
            if path.suffix == ".py" and path.stem != "test_references":
                found |= _words((ROOT / path).read_text(encoding="utf-8"))
            elif path.suffix == ".ipynb":
                cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
                found = found.union(*(_words("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"))
        return found

    def stale(self, text: str, folder: Path = ROOT) -> Iterator[str]:
        """The references in a text that lies in this folder to what does not exist."""
        for link in LINK.findall(text):
            if not (folder / link).exists():
                yield link
        for name in NAMED_FILE.findall(LINK.sub("]", text)):
            if not self._has_file(name):
                yield name
        for name in STARTED.findall(text):
            if name.partition(".")[0] in SOURCES and not {name, f"{name}.__main__"} & self.modules.keys():
                yield name
        for name in OF_OURS.findall(text):
            if not name.endswith((".py", ".toml")) and not self._has_name(name):
                yield name
        for quoted in QUOTED.findall(text):
            name = NAME.match(quoted)
            if name is None or quoted[name.end() :][:1] not in ("", "(", "[") or NAMED_FILE.match(quoted):
                continue
            if not self._has_name(name.group()):
                yield name.group()

    def _has_file(self, name: str) -> bool:
        return any(ROOT.glob(name)) or any(f"/{known}".endswith(f"/{name}") for known in self.files)

    def _has_name(self, name: str) -> bool:
        first, *rest = name.split(".")
        first = SHORT.get(first, first)
        if not rest:
            ours = "_" in first and not first.endswith("__") and first not in FOREIGN
            return not ours or first in self.words or first in self.packages
        if first in SOURCES:
            return self._in_module(first, rest)
        modules = [module for module in self.modules if module.rpartition(".")[2] == first]
        classes = list(self.classes.get(first, []))
        if not classes and (modules or "_" in first):  # such a name is often an object's: `trace` of a Trace
            classes = [one for name, found in self.classes.items() if _snake(name) == first for one in found]
        if not modules and not classes:
            return True  # not ours
        return any(self._in_module(module, rest) for module in modules) or any(
            self._in_class(module, node, rest[0]) for module, node in classes
        )

    def _in_module(self, module: str, rest: list[str]) -> bool:
        if not rest:
            return True
        first, *deeper = rest
        if (inner := f"{module}.{first}") in self.modules.keys() | self.packages:
            return self._in_module(inner, deeper)
        known = self.names.get(module, {})
        if first not in known:
            return "__getattr__" in known and hasattr(importlib.import_module(module), first)
        node = known[first]
        if not deeper:
            return True
        if isinstance(node, ast.ClassDef):
            return self._in_class(module, node, deeper[0])
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in SOURCES:
            return self._in_module(node.module, rest)
        return not isinstance(node, ast.FunctionDef)

    def _in_class(self, module: str, node: ast.ClassDef, member: str) -> bool:
        if member in _members(node):
            return True
        found = importlib.import_module(module)  # what it inherits
        return hasattr(getattr(found, node.name, None), member)


def _names(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """What statements give names to, those within `if`, `try` and `with` included."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id: n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        else:
            for inner in ("body", "orelse", "finalbody", "handlers"):
                found |= _names(getattr(node, inner, []))
    return found


def _words(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                found.update(name.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            found.update(re.findall(r"\w+", node.value))
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and what methods assign to `self`."""
    of_self = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
        and isinstance(inner.ctx, ast.Store)
    }  # fmt: skip
    return set(_names(node.body)) | of_self


def _snake(name: str) -> str:
    """The name that an instance of a class usually has: `ragged_cache` of RaggedCache."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
