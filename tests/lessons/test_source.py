import functools
import html
import inspect
import re
import subprocess
import sys

import pytest
import torch

import bass_lab as lab
from bass_core.exactness.verification import token
from bass_core.policies.protocol import BassHeuristic
from bass_lab.lessons import l02_naive_batches


def plain(source):
    return html.unescape(re.sub("<[^>]*>", "", source._repr_html_()))


@functools.wraps(token)
def wrapped(*arguments):
    return token(*arguments)


@torch.inference_mode()
def decorated(x):
    return x + 1  # the answer < 43


@pytest.mark.parametrize("thing", [token, BassHeuristic])
def test_source_has_the_files_lines_and_numbers(thing):
    shown = lab.show_source(thing)
    lines, first = inspect.getsourcelines(thing)
    whole = inspect.getsource(inspect.getmodule(thing)).splitlines()
    assert shown.shown == list(range(first, first + len(lines))) and shown.marked == []
    for number, line in shown.lines.items():
        assert line.strip() == whole[number - 1].strip()
        assert f"{number:5}  {line}".rstrip() in repr(shown) and f"{number:5}  {line}" in plain(shown)
    name = thing.__module__.replace(".", "/") + ".py"
    assert shown.place == f"{name}, lines {first} to {first + len(lines) - 1}: {thing.__qualname__}"


def test_decorated_functions_are_shown():
    assert lab.show_source(wrapped).lines == lab.show_source(token).lines
    naive = lab.show_source(l02_naive_batches.naive_generate)
    first, second, *_ = naive.lines.values()
    assert first == "@torch.inference_mode()" and second.startswith("def naive_generate(")
    assert "the answer &lt; 43" in lab.show_source(decorated)._repr_html_()


def test_marked_lines_have_arrow_bar_and_colour():
    shown = lab.show_source(BassHeuristic.update, highlight="most_accepted == most_drafted")
    (number,) = shown.marked
    assert "most_accepted == most_drafted" in shown.lines[number]
    assert [line for line in repr(shown).splitlines() if "▶" in line] == [f"▶{number:5}  {shown.lines[number]}"]
    page = shown._repr_html_()
    assert page.count("▶") == page.count("border-left:5px solid #D55E00") == page.count("background:#FFF3B0") == 1


def test_marks_are_texts_or_expressions():
    text = lab.show_source(l02_naive_batches.PaddedModel, 'self.bug == "mask"')
    expression = lab.show_source(l02_naive_batches.PaddedModel, re.compile(r"self\.bug == \"(mask|pads)\""))
    both = lab.show_source(l02_naive_batches.PaddedModel, ['self.bug == "mask"', re.compile("self.bug == .pads")])
    assert len(text.marked) == 1 < len(expression.marked) == 2 and both.marked == expression.marked
    assert lab.show_source(decorated, "x + 1").marked  # not a regular expression: + means +


def test_only_lines_around_a_mark_are_shown():
    part = lab.show_source(l02_naive_batches.naive_generate, 'bug == "behind"', around=2)
    (number,) = part.marked
    assert part.shown == list(range(number - 2, number + 3))
    _, gap, *code, end = repr(part).splitlines()
    assert gap.strip() == end.strip() == "⋮" and len(code) == 5 and code[2].startswith("▶")
    assert plain(part).count("⋮") == 2 and len(plain(part).splitlines()) == 7  # it stands before the first gap


def test_mark_without_a_line_is_refused():
    for highlight in ("no such text", ["def", "no such text"], re.compile("no such text"), "d.f decorated"):
        with pytest.raises(ValueError, match="no line of decorated has"):
            lab.show_source(decorated, highlight)


def test_import_loads_no_drawing_library():
    code = "import sys, bass_lab; print({'pygments', 'plotly', 'ipywidgets', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
