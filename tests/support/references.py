"""Find references to code in prose: paths, links, `python -m module`, and names in backticks.

Only our own names and names with an underscore count. Names of other packages or objects (`torch.compile`) do not.
"""

import ast
import importlib
import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"bass_core": ".", "bass_lab": ".", "bass_kernels": "kernels"}  # package: its folder
SHORT = {"bass": "bass_core", "lab": "bass_lab"}  # names in notebooks
FOLDERS = "bass_core|bass_lab|kernels|notebooks|pictures|tests"
NAMED_FILE = re.compile(
    rf"(?<![\w/.<-])(?:(?:{FOLDERS})/[\w./*-]*[\w*/]|[\w/-]*\w\.(?:py|md)|\d\d_\w+\.ipynb)(?![\w<*])"
)
STARTED = re.compile(r"python -m ([\w.]*\w)")
LINK = re.compile(r"\]\((?!https?:|#|data:)([^)#\s]+)[^)\s]*\)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMENT = re.compile(r"(?:^|\s)# .*$", re.MULTILINE)
OF_OURS = re.compile(rf"(?<![\w./`])(?:{'|'.join((*SHORT, *SOURCES))})(?:\.[A-Za-z_]\w*)+(?!\w)")
FOREIGN = {"assistant_tokenizer", "model.generate", "inspect_notebook"}  # names of transformers and papermill
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def prose(path: Path) -> str:
    """Return a file's prose: a whole text, comments and docstrings of a module, cells of a notebook."""
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
    """The existing files, our modules and classes, and the words of our code."""

    def __init__(self):
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        lines = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        self.files = [name for name in lines if (ROOT / name).exists()]
        self.modules: dict[str, str] = {}  # sources by name
        self.classes: dict[str, list[str]] = {}  # modules with a class of this name
        for package, where in SOURCES.items():
            for path in (ROOT / where / package).rglob("*.py"):
                parts = path.relative_to(ROOT / where).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[module] = path.read_text(encoding="utf-8")
                for name in re.findall(r"^class (\w+)", self.modules[module], re.MULTILINE):
                    self.classes.setdefault(name, []).append(module)
        self.packages = {name.rpartition(".")[0] for name in self.modules} - {""}

    @cached_property
    def words(self) -> set[str]:
        """Return all names in our code, including tests and notebooks, and the words of its strings."""
        found: set[str] = set()
        for path in map(Path, self.files):
            if path.suffix == ".py" and path.stem != "test_references":
                found |= _words((ROOT / path).read_text(encoding="utf-8"))
            elif path.suffix == ".ipynb":
                cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
                found = found.union(*(_words("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"))
        return found

    def stale(self, text: str, folder: Path = ROOT) -> Iterator[str]:
        """Yield the references to missing code in a text of this folder."""
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
        if name in FOREIGN:
            return True
        first, *rest = name.split(".")
        first = SHORT.get(first, first)
        if not rest:
            ours = "_" in first and not first.endswith("__")
            return not ours or first in self.words or first in self.packages
        if first in SOURCES:
            return self._reaches(first, rest)
        modules = [module for module in self.modules if module.rpartition(".")[2] == first]
        classes = [(first, module) for module in self.classes.get(first, [])]
        if not classes and (modules or "_" in first):  # often the name of an object: `trace` of a Trace
            of_name = [one for one in self.classes if _snake(one) == first]
            classes = [(one, module) for one in of_name for module in self.classes[one]]
        if not modules and not classes:
            return True  # foreign
        owned = [(module, [one, rest[0]]) for one, module in classes]
        return any(self._reaches(*each) for each in [*((module, rest) for module in modules), *owned])

    def _reaches(self, module: str, names: list[str]) -> bool:
        """Return True if the module has the first name, the object the second name, and so on to a class's member."""
        try:
            thing = importlib.import_module(module)
        except ImportError:  # a separate program with imports outside of packages
            return re.search(rf"\b{names[0]}\b", self.modules[module]) is not None
        for name in names:
            if inspect.isclass(thing):
                return hasattr(thing, name) or _is_field(thing, name)
            if inspect.ismodule(thing) and (inner := f"{thing.__name__}.{name}") in self.modules.keys() | self.packages:
                thing = importlib.import_module(inner)
            elif not hasattr(thing, name):
                return False
            else:
                thing = getattr(thing, name)
        return True


def _is_field(kind: type, name: str) -> bool:
    """Return True if a class of ours, or a base class, annotates the name or assigns it to `self`."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in SOURCES]
    assigned = re.compile(rf"\bself\.{name}\b[^=\n]*=(?!=)")
    return any(
        name in vars(base).get("__annotations__", {}) or assigned.search(inspect.getsource(base)) for base in ours
    )


def _words(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                found.update(name.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            found.update(re.findall(r"\w+", node.value))
    return found


def _snake(name: str) -> str:
    """Return the usual name of a class's instance: `ragged_cache` of RaggedCache."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
