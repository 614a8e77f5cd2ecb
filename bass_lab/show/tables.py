"""Print tables and facts at the width of the terminal (80 columns in a pipe). Wide text is wrapped, never cut. A pipe
receives plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns
NUMERIC = frozenset("+-0123456789")  # first characters of right-aligned values
VERDICTS = {"PASS": "bold green", "FAIL": "bold red"}


def show(text: str, style: str = "") -> None:
    """Print a text in a style of rich."""
    _print(Text(text, style))


def show_table(rows: Iterable[Mapping[str, object]], heading: str = "") -> None:
    """Print rows with the same columns. Floats have four digits, None and NaN are blank, empty columns are left out."""
    shown = [{name: _shown(value) for name, value in row.items()} for row in rows]
    names = [name for name in (shown[0] if shown else ()) if any(row[name] for row in shown)]
    columns = [[row[name] for row in shown] for name in names]
    widths = _widths(names, columns, Console().width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for place, (name, column, width) in enumerate(zip(names, columns, widths, strict=True)):
        right = place > 0 and all(cell[:1] in NUMERIC for cell in column if cell)
        table.add_column(Text(name), justify="right" if right else "left", width=width, overflow="fold")
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    if heading:
        show(heading, "bold")
    _print(table)


def _widths(names: list[str], columns: list[list[str]], room: int) -> list[int]:
    """Return column widths. If the room is too small, the widest columns shrink: names wrap first, then cells. Words
    break last."""
    cells = [max(map(cell_len, column)) for column in columns]
    widths = [max(cell_len(name), cell) for name, cell in zip(names, cells, strict=True)]
    of_name = [_longest_word([name]) for name in names]
    words = [max(name, _longest_word(column)) for name, column in zip(of_name, columns, strict=True)]
    for least in (list(map(max, of_name, cells)), words, [1] * len(widths)):
        while sum(widths) + GAP * (len(widths) - 1) > room and widths != least:
            wider = [place for place in range(len(widths)) if widths[place] > least[place]]
            widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=1)


def show_facts(facts: Iterable[tuple[str, str]] | Mapping[str, str], heading: str = "", indent: int = 2) -> None:
    """Print names and their descriptions in two columns. PASS and FAIL are coloured."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in facts.items() if isinstance(facts, Mapping) else facts:
        grid.add_row(Text(name, VERDICTS.get(name, "")), Text(said))
    if heading:
        show(heading, "bold")
    _print(Padding(grid, (0, 0, 0, indent)))


def _print(what: Text | Table | Padding) -> None:
    console = Console()
    with console.capture() as drawn:
        console.print(what)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().rstrip("\n").split("\n")))


def _shown(value: object) -> str:
    if value is None or value != value:  # NaN
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
