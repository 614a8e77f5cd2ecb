"""Extract the commands and programs in the documentation's fenced blocks."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
)
SLOW = "<!-- slow -->"  # on the line before a block for `make test-all` only
FENCED = re.compile(
    rf"^(?P<slow>{SLOW}\n)?```(?P<kind>python|console)\n(?P<text>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """kind: python or console. line: in the document, from 1. output: text of the following block "text", or None."""

    kind: str
    text: str
    line: int
    slow: bool
    output: str | None


def blocks(document: str, kind: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = [
        Block(
            each["kind"], each["text"], text.count("\n", 0, each.start("text")) + 1, bool(each["slow"]), each["output"]
        )
        for each in FENCED.finditer(text)
    ]
    return [block for block in found if block.kind == kind]


def commands(document: str) -> list[list[str]]:
    lines = [line for block in blocks(document, "console") for line in block.text.splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [shlex.split(part, comments=True) for line in typed for part in line.split(" && ")]
