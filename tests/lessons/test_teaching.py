"""Pages for lecturers name existing notebooks and cells, in order, and routes of the promised minutes."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest
from documents import ROOT
from lesson_runs import NOTEBOOKS

TEACHING = ROOT / "docs/teaching"
# What a class on the paper has to see: hook, rule, raggedness, lengths, attention, results, and where we disagree.
NEEDED = [{"00"}, {"01"}, {"02"}, {"04"}, {"07"}, {"08", "09"}, {"14"}]
COLUMNS = ["minutes", "notebook", "cells", "under the heading", "say", "ask", "wrong answers to expect"]


class Stretch(NamedTuple):
    """A row of a route's table: the cells from `first` to `last` of a notebook (no ending)."""

    minutes: int
    notebook: str
    first: str
    last: str
    heading: str
    said: tuple[str, ...]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def routes() -> dict[int, list[Stretch]]:
    """The routes of the page, by their minutes."""
    found = {}
    sections = re.split(r"^## (\d+) minutes$", (TEACHING / "routes.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for minutes, section in zip(sections[1::2], sections[2::2], strict=True):
        head, _, *rows = [cells_of(line) for line in section.splitlines() if line.startswith("|")]
        assert head == COLUMNS
        found[int(minutes)] = [stretch(*row) for row in rows]
    return found


def stretch(minutes: str, link: str, cells: str, heading: str, *said: str) -> Stretch:
    name = re.fullmatch(r"\[(\w+)\]\(\.\./\.\./notebooks/(\w+)\.ipynb\)", link)
    assert name and name[1] == name[2], link
    first, last = cells.split(" – ")
    return Stretch(int(minutes), name[1], first, last, heading, said)


def notebook(name: str) -> list[dict]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def heading(cells: list[dict], place: int) -> str:
    """The last heading before the end of the cell at `place`."""
    text = "\n".join("".join(cell["source"]) for cell in cells[: place + 1] if cell["cell_type"] == "markdown")
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)[-1]


ROUTES = routes()


@pytest.mark.parametrize("minutes", [60, 90, 180])
def test_route_names_existing_cells_and_covers_the_paper(minutes):
    rows, taught = ROUTES[minutes], set()
    assert sum(row.minutes for row in rows) == minutes
    assert rows[0].notebook.startswith("00") and rows[-1].notebook.startswith("14")
    assert all({row.notebook[:2] for row in rows} & needed for needed in NEEDED)
    for row in rows:
        cells = notebook(row.notebook)
        ids = [cell["id"] for cell in cells]
        first, last = ids.index(row.first), ids.index(row.last)
        part = {(row.notebook, name) for name in ids[first : last + 1]}
        assert part and not taught & part, "no cell, or the same cell twice"
        taught |= part
        assert heading(cells, first) == row.heading
        assert all(row.said) and len(row.said) == 3 and "?" in row.said[1]
