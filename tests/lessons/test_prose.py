"""Numbers in the text of lessons come from cells or have a stated source."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MEASURED = re.compile(r"(?<![\w.])(?:\d[\d,]*\.\d+|\d[\d.,]*(?=\s*(?:%|×|times|percent|ms|µs|GB|MB|tokens/s)))")
# Sources of numbers without a cell, by lesson.
ABSTRACT = "the paper's abstract, and 8 rows / 5.8 ms"
SOURCED = {
    "04_draft_length": dict.fromkeys(("0.1", "0.3"), "the modelled GPU's launches, in ms: `modelled_costs`"),
    "07_ragged_attention_kernels": {"3.35": "TB/s, an H100's data sheet"},
    "08_latency_and_utilization": dict.fromkeys(("5.8", "2.15", "1.38", "1.1"), ABSTRACT)
    | {"0.02": "a synthetic α of the record"},
    "14_the_paper": dict.fromkeys(("5.8", "1.38"), ABSTRACT),
    "09_quality_within_a_time_budget": {"0.05": "s, the least of the budgets that were fixed beforehand"},
}


def prose(source: str) -> str:
    """Return Markdown without quotes, headings, code, links, styles and arXiv numbers."""
    source = re.sub(r"<style>.*?</style>|<div .*?</div>|```.*?```", " ", source, flags=re.DOTALL)
    source = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv\s+[\d.]+", " ", source)
    return re.sub(r"^(?:>|#).*$", "", source, flags=re.MULTILINE)


def unsourced(notebook: nbformat.NotebookNode, sourced: dict[str, str]) -> list[str]:
    """Return numbers that look measured, are in no cell, and have no source."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    used = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", code)) | set(sourced)
    found = []
    for cell in notebook.cells:
        text = prose(cell.source) if cell.cell_type == "markdown" else ""
        text = re.sub(r"95% interval|7\.8B|H100", " ", text)  # a kind of interval, and names
        found += [number for number in MEASURED.findall(text) if number.rstrip(".,") not in used]
    return found


@pytest.mark.parametrize("path", [each for each in NOTEBOOKS if not each.stem.startswith("05")], ids=lambda p: p.stem)
def test_numbers_in_prose_have_a_source(path):
    assert unsourced(nbformat.read(path, 4), SOURCED.get(path.stem, {})) == []


def test_predictions_have_one_look():
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    text = "\n".join(cell.source for cell in cells)
    boxes = re.findall(r"<div style=[^>]*>(?=\n\n✎ \*\*Predict before )", text)
    assert len(set(boxes)) == 1 and len(boxes) == text.count("**Predict ") == text.count("<div")


def test_unsourced_number_is_found():
    cells = [
        nbformat.v4.new_code_cell("x = f(0.9, k=5)"),
        nbformat.v4.new_markdown_cell(
            "With α = 0.9, 2.4 times as fast and 12% behind; `1.5` is code.\n\n> 3.5 times (a quote)"
        ),
    ]
    assert unsourced(nbformat.v4.new_notebook(cells=cells), {"12": "a source"}) == ["2.4"]


def test_every_source_is_used():
    for path in NOTEBOOKS:
        without = {number.rstrip(".,") for number in unsourced(nbformat.read(path, 4), {})}
        assert set(SOURCED.get(path.stem, {})) <= without, path
