"""What the pages for lecturers name exists: the notebooks and cells of a route, their order, and the minutes."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import lesson_runs
import nbformat
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
ROWS = [pytest.param(row, id=f"{minutes}-{row.notebook}-{row.first}") for minutes in ROUTES for row in ROUTES[minutes]]


@pytest.mark.parametrize("row", ROWS)
def test_a_stretch_names_cells_that_exist_in_their_order(row):
    cells = notebook(row.notebook)
    ids = [cell["id"] for cell in cells]
    assert ids.index(row.first) <= ids.index(row.last)
    assert heading(cells, ids.index(row.first)) == row.heading
    assert all(row.said) and len(row.said) == 3 and "?" in row.said[1]


def test_there_are_routes_of_60_90_and_180_minutes():
    assert {minutes: sum(row.minutes for row in rows) for minutes, rows in ROUTES.items()} == {60: 60, 90: 90, 180: 180}


@pytest.mark.parametrize("minutes", ROUTES)
def test_a_route_covers_the_paper_and_goes_forward_in_each_notebook(minutes):
    rows = ROUTES[minutes]
    seen = {row.notebook[:2] for row in rows}
    assert all(seen & needed for needed in NEEDED)
    assert rows[0].notebook.startswith("00") and rows[-1].notebook.startswith("14")
    taught = set()
    for row in rows:
        ids = [cell["id"] for cell in notebook(row.notebook)]
        part = {(row.notebook, name) for name in ids[ids.index(row.first) : ids.index(row.last) + 1]}
        assert not taught & part, "the same cell twice"
        taught |= part


def test_the_quiz_asks_and_answers_five_questions_for_each_lesson_it_names():
    sections = re.split(r"^## ", (TEACHING / "quiz.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        number, title = section.splitlines()[0].split(" · ")
        [lesson] = NOTEBOOKS.glob(f"{number}_*.ipynb")
        assert notebook(lesson.stem)[0]["source"][0].startswith(f"# {number} · {title}")
        asked, answered = section.split("<details><summary>Answers</summary>")
        for part in (asked, answered):
            assert re.findall(r"^(\d)\. ", part, re.MULTILINE) == list("12345")
        assert answered.rstrip().endswith("</details>")


def test_the_glossary_names_lessons_that_exist():
    head, _, *rows = [
        cells_of(line)
        for line in (TEACHING / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    assert head == ["word", "meaning", "formula or example", "lesson"]
    assert all(all(row) and len(row) == 4 for row in rows)
    assert all(list(NOTEBOOKS.glob(f"{number}_*.ipynb")) for row in rows for number in row[3].split(", "))


# --- its time ---

MINUTES = 6  # of two cores, for all cells of a route and those above them


@pytest.fixture(scope="module")
def seconds(tmp_path_factory) -> dict[str, dict[str, float]]:
    """What each code cell takes, by notebook and id, up to the last cell that a route names, with quicker settings."""
    folder, last = tmp_path_factory.mktemp("routes"), {}
    for row in (row for route in ROUTES.values() for row in route):
        last[row.notebook] = max(last.get(row.notebook, 0), place(row.notebook, row.last))
    taken = {}
    for name, end in last.items():
        settings = lesson_runs.QUICKER.get(name, {})
        cut = lesson_runs.parameterized(name, folder, **settings)
        cut.cells = cut.cells[: end + 1 + len(cut.cells) - len(notebook(name))]  # papermill has put one in
        nbformat.write(cut, folder / f"{name}.ipynb")
        done = lesson_runs.run(folder / f"{name}.ipynb", folder)
        taken[name] = {cell.id: cell.metadata.papermill.duration or 0.0 for cell in done.cells}
    return taken


def place(name: str, cell: str) -> int:
    return [each["id"] for each in notebook(name)].index(cell)


@pytest.mark.slow
@pytest.mark.parametrize("minutes", ROUTES)
def test_the_cells_of_a_route_run_in_time(minutes, seconds):
    last = {row.notebook: row.last for row in ROUTES[minutes]}  # rows of a notebook are in its order
    total = 0.0
    for name, end in last.items():
        ids = list(seconds[name])
        total += sum(seconds[name][cell] for cell in ids[: ids.index(end) + 1])
    assert 0 < total < 60 * MINUTES
