"""Check the prose of docstrings, comments, documents and lessons: `make lint`. CONTRIBUTING.md has the rules.

usage: prose.py                print every broken limit, and exit with 1 if there is any
       prose.py PATH...        print the figures of these files or folders, and their heaviest sentences
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLAUSE = re.compile(r"\b(that|which|what|whatever|whose|whoever|whether|where|whom)\b", re.I)
PRONOUN = re.compile(r"\b(it|they|them|its|their|these|those|others|one|such|so)\b", re.I)
WORD = re.compile(r"[a-z']+", re.I)
LIMITS = {".py": (20, 30), ".md": (20, 30), ".ipynb": (24, 35)}  # matches of CLAUSE and PRONOUN in 1,000 words
ODD = re.compile(
    r"\b(but for|beside|at hand|told|tells|hears?|whoever|whatever|somebody|nobody|as it comes|stands in for"
    r"|in the midst|by turns|of late|goes by|come along)\b",
    re.I,
)
FIRST = re.compile(r"(what|whether|how|which|where|of|whoever)\b", re.I)  # no docstring begins with these
NO_PROSE = re.compile(r"<[^>]+>|^\|[^\n]*$|`[^`\n]*`", re.M)  # HTML, tables and code in Markdown


def texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each text of a file, and True if the text is a docstring."""
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or "", True
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# "), False
    elif path.suffix == ".ipynb":
        for cell in json.loads(source)["cells"]:
            if cell["cell_type"] == "markdown":
                yield NO_PROSE.sub(" ", "".join(cell["source"])), False
    else:
        yield NO_PROSE.sub(" ", re.sub(r"```.*?```", " ", source, flags=re.S)), False


def rows() -> dict[str, list[Path]]:
    """Return the files of each row: the Python files of a folder, one document, or one lesson."""
    found: dict[str, list[Path]] = {name: [ROOT / name] for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
    for folder in ("bass_core", "bass_lab", "kernels", "tests", "docs", "notebooks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in LIMITS and not {"assets", ".ipynb_checkpoints"} & set(path.parts):
                name = path.parent if path.suffix == ".py" else path
                found.setdefault(name.relative_to(ROOT).as_posix(), []).append(path)
    return found


def density(words: re.Pattern, found: list[str]) -> float:
    """Return the number of matches in 1,000 words."""
    return (
        1000 * sum(len(words.findall(text)) for text in found) / max(sum(len(WORD.findall(text)) for text in found), 1)
    )


def complaints(found: list[tuple[str, bool]], suffix: str) -> list[str]:
    """Return the faults of `texts`: densities over the limits, odd phrases, wrong first words of docstrings."""
    wrong = [f"{odd[0]!r} is an odd phrase" for text, _ in found for odd in ODD.finditer(text)]
    wrong += [f"a docstring begins with {text[:40]!r}" for text, is_doc in found if is_doc and FIRST.match(text)]
    for kind, words, limit in zip(("clause words", "pronouns"), (CLAUSE, PRONOUN), LIMITS[suffix], strict=True):
        if (figure := density(words, [text for text, _ in found])) > limit:
            wrong.append(f"{figure:.1f} {kind} in 1,000 words, the limit is {limit}")
    return wrong


def report(path: Path, worst: int = 12) -> None:
    """Print the densities of a file or folder, and the sentences with the most clause words and pronouns."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in LIMITS)
    found = [text for file in files for text, _ in texts(file)]
    print(
        f"{path}: {density(CLAUSE, found):.1f} clause words and {density(PRONOUN, found):.1f} pronouns in 1,000 words"
    )
    sentences = [part for text in found for part in re.split(r"(?<=[.!?:;])\s+", " ".join(text.split()))]
    sentences.sort(key=lambda part: -len(CLAUSE.findall(part) + PRONOUN.findall(part)))
    print(*(f"    {part[:200]}" for part in sentences[:worst]), sep="\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        report(Path(argument))
    broken = []
    for name, files in ({} if sys.argv[1:] else rows()).items():
        found = [text for file in files for text in texts(file)]
        broken += [f"{name}: {complaint}" for complaint in complaints(found, files[0].suffix)]
    if broken:
        sys.exit("\n".join(broken))
