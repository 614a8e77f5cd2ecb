"""Training texts and prompts of the embedded pair, available in every Python installation:

* **generated functions**: signature + docstring -> body, composed by `grammar.py`.
* **library functions**: functions of the running interpreter's standard library.

`grammar.is_held_out` and `HELD_OUT_MODULES` exclude texts from training for every seed.
"""

import ast
import sysconfig
import textwrap
from functools import cache
from pathlib import Path

from bass_lab.texts import grammar

HELD_OUT_MODULES = (
    "bisect", "calendar", "colorsys", "copy", "csv", "fnmatch", "graphlib", "heapq", "shlex", "statistics", "textwrap",
)  # fmt: skip
SKIPPED_FOLDERS = {
    "__pycache__", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test",
    "tests", "turtledemo",
}  # fmt: skip


def generated_functions(count: int, seed: int = 0, held_out: bool = False) -> list[str]:
    """Return `count` functions for training, or held-out functions. A seed always gives the same functions."""
    return [function.prompt + function.body for function in grammar.functions(count, seed, held_out)]


def library_functions(held_out: bool = False) -> list[str]:
    """Return dedented functions and methods of the standard library, from `HELD_OUT_MODULES` only if `held_out`.

    Raises FileNotFoundError if the interpreter has no source files of its library.
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


def held_out_prompts(max_chars: int = 400) -> list[tuple[str, str]]:
    """Return (module, prompt) pairs of the held-out modules: signature, docstring if any, first lines if short.

    Prompts have at most `max_chars` characters (about 40 to 130 tokens) and leave at least two lines to write.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return [
        (module, source[:cut])
        for module in HELD_OUT_MODULES
        for source, cut in _functions_of(root / f"{module}.py")
        if 0 < cut <= max_chars
    ]


@cache
def _functions_of(path: Path) -> list[tuple[str, int]]:
    """Return (source, end of the prompt) of the outermost functions and methods in a file, without extreme sizes."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):  # some files contain invalid code or encodings on purpose
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
    """Return the prompt's length: signature, docstring and more lines up to `min_chars`. 0: too few lines remain."""
    lines = source.splitlines(keepends=True)
    has_docstring = ast.get_docstring(node) is not None
    kept = (node.body[0].end_lineno + 1 if has_docstring else node.body[0].lineno) - node.lineno
    while kept < len(lines) and sum(map(len, lines[:kept])) < min_chars:
        kept += 1
    return sum(map(len, lines[:kept])) if len(lines) - kept >= 2 else 0
