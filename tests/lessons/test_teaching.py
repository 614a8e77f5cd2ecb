"""Pages for lecturers name existing notebooks and cells in order, and routes of the promised minutes."""

import json
import re

import pytest
from documents import ROOT
from lesson_runs import NOTEBOOKS

# Topics of a class on the paper: hook, rule, raggedness, lengths, attention, results, disagreements.
NEEDED = [{"00"}, {"01"}, {"02"}, {"04"}, {"07"}, {"08", "09"}, {"14"}]
COLUMNS = "| minutes | notebook | cells | under the heading | say | ask | wrong answers to expect |"
# A row of a route: first and last cell of a notebook, what to say, what to ask, and wrong answers.
ROW = re.compile(
    r"\| (\d+) \| \[(\w+)\]\(\.\./\.\./notebooks/\2\.ipynb\) \| (\S+) – (\S+) \| ([^|]+) \| "
    r"[^|]+ \| [^|]*\?[^|]* \| [^|]+ \|"
)


def heading(cells: list[dict], place: int) -> str:
    text = "\n".join("".join(cell["source"]) for cell in cells[: place + 1] if cell["cell_type"] == "markdown")
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)[-1]


@pytest.mark.parametrize("minutes", [60, 90, 180])
def test_route_names_existing_cells_and_covers_the_paper(minutes):
    text = (ROOT / "docs/teaching/routes.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {minutes} minutes\n")[2].partition("\n## ")[0]
    head, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
    rows, taught = [ROW.fullmatch(line).groups() for line in lines], set()
    apart = re.findall(r"^\*\*.+, (\d+) minutes\.\*\*", section, re.MULTILINE)  # opening, quiz
    assert head == COLUMNS and sum(map(int, [*apart, *(row[0] for row in rows)])) == minutes
    assert rows[0][1].startswith("00") and rows[-1][1].startswith("14")
    assert all({row[1][:2] for row in rows} & needed for needed in NEEDED)
    for _, notebook, first, last, under in rows:
        cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
        ids = [cell["id"] for cell in cells]
        part = {(notebook, name) for name in ids[ids.index(first) : ids.index(last) + 1]}
        assert part and not taught & part, "no cell, or the same cell twice"
        taught |= part
        assert heading(cells, ids.index(first)) == under


def test_hands_on_class_has_the_parts_of_its_lesson():
    text = (ROOT / "docs/teaching/routes.md").read_text(encoding="utf-8").partition("\n## Hands-on class")[2]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    cells = json.loads((NOTEBOOKS / "02b_write_the_loop.ipynb").read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    assert sum(int(minutes) for minutes, _ in rows) == 90 and all(f"## {part}\n" in source for _, part in rows)


def test_glossary_names_lessons_that_use_the_term():
    lessons = {path.name.split("_")[0]: path.read_text(encoding="utf-8").lower() for path in NOTEBOOKS.glob("*.ipynb")}
    text = (ROOT / "docs/teaching/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\*\*[^|]+) \|.* \| ([\w, ]+) \|$", text, re.MULTILINE)
    terms = [(term, number) for row, numbers in rows for term in re.findall(r"\*\*(.+?)\*\*", row)
             for number in numbers.split(", ")]  # fmt: skip
    assert len(terms) > 60 and [each for each in terms if each[0].lower() not in lessons[each[1]]] == []
