import io
import re
import sys

import pytest

from bass_lab.cli.progress import Progress
from bass_lab.measure.ratios import Ratio
from bass_lab.show import tables

RATIO = str(Ratio(1.13, 1.07, 1.19))
LINE = {"method": "batched default", "tokens/s": "1,234", "over regular": RATIO, "over faster": RATIO}
LINE |= {"ms/token: first, mean, last": "33.3, 34.1, 35.8", "α": "0.94", "tokens per step": "4.38"}
LINE["exact rows"] = "16/16"


@pytest.fixture
def printed(monkeypatch, capsys):
    def printed(columns: int, function, *arguments, **options) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        function(*arguments, **options)
        return capsys.readouterr().out

    return printed


def test_widest_table_fits_80_columns_and_breaks_no_word(printed):
    text = printed(80, tables.show_table, [LINE, LINE | {"method": "transformers"}])
    assert max(map(len, text.splitlines())) <= 80
    for value in (*LINE.values(), *LINE):
        for word in value.split():
            assert re.search(rf"(^|\s){re.escape(word)}(\s|$)", text), word


def test_long_value_is_wrapped_and_never_cut(printed):
    key = "0123456789abcdef" * 4
    for columns in (20, 40, 80):
        lines = printed(columns, tables.show_table, [{"run": key, "status": "failed"}]).splitlines()[1:]
        assert "".join(line[: columns - 6].split(" ")[0] for line in lines) == key


def test_pipe_gets_plain_text(printed):
    text = printed(80, tables.show_table, [LINE], "speeds")
    text += printed(80, tables.show_facts, {"PASS": "greedy"}, "checks")
    assert not re.search("[\x1b\u2500-\u257f]", text)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_numbers_have_four_digits_and_empty_columns_are_omitted(printed):
    rows = [{"batch": 2, "ms": 11.914569, "alpha": None, "error": ""}, {"batch": 10, "ms": float("nan")}]
    rows[1] |= {"alpha": None, "error": ""}
    assert printed(80, tables.show_table, rows) == "batch     ms\n2      11.91\n10\n"


def test_markup_is_printed_as_it_is(printed):
    assert printed(80, tables.show, "[bold]x[/bold] :smile:") == "[bold]x[/bold] :smile:\n"


def drive(monkeypatch, is_terminal: bool) -> str:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        for step in range(5):
            progress("first" if step < 3 else "second", step / 5)
    return stream.getvalue()


def test_progress_without_a_terminal_is_a_line_per_part(monkeypatch):
    assert drive(monkeypatch, False) == "  first\n  second\n"


def test_progress_in_a_terminal_shows_share_and_time_left(monkeypatch):
    said = drive(monkeypatch, True)
    assert "first   0%" in said and "second  60%" in said and re.search(r"00:00, \d\d:\d\d left", said)
    assert "\n" not in said and said.endswith("\r")
