"""The code that a lesson talks about, as it stands in the file: shown from its source, so that it cannot go stale."""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

FONT = "font-family:ui-monospace,monospace"  # pages style <pre> themselves
Mark = str | re.Pattern  # text that stands in a line, or an expression that matches in it


class ShownSource:
    """Lines of a file by number, some of them `marked` or `shown`; a cell that ends with it shows them. place: file,
    numbers and name."""

    def __init__(self, place: str, lines: Mapping[int, str], marked: Collection[int], shown: Collection[int]):
        self.place, self.lines, self.marked, self.shown = place, dict(lines), sorted(marked), sorted(shown)

    def __repr__(self) -> str:
        return "\n".join([self.place, *self._listed(self.lines, "{margin}{code}", "     ⋮")])

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        code, formatter = "\n".join(self.lines.values()), HtmlFormatter(noclasses=True, nowrap=True)
        coloured = highlight(code, PythonLexer(stripnl=False), formatter).splitlines()
        line = '<span style="{style}"><span style="color:#666666;user-select:none">{margin}</span>{code}\n</span>'
        listed = "".join(self._listed(dict(zip(self.lines, coloured, strict=True)), line, "     ⋮\n"))
        # Its own ground and ink: readable on light and on dark pages.
        style = "background:#f7f7f7;color:#1b1f24;border:1px solid #d6dade;border-radius:6px;padding:8px 0;margin:0"
        return (
            f'<div style="font-size:85%;margin-bottom:2px"><code>{html.escape(self.place)}</code></div>'
            f'<pre style="{style};overflow-x:auto;white-space:pre;line-height:1.4;{FONT}">{listed}</pre>'
        )

    def _listed(self, lines: Mapping[int, str], form: str, gap: str) -> Iterator[str]:
        """The lines that are shown, each in this form, and a sign where some are left out."""
        before = min(self.lines) - 1
        for number in self.shown:
            if number > before + 1:
                yield gap
            marked, before = number in self.marked, number
            bar, ground = ("#D55E00", "#FFF3B0") if marked else ("transparent", "transparent")
            style = f"display:block;border-left:5px solid {bar};background:{ground};min-width:max-content"
            yield form.format(margin=f"{'▶' if marked else ' '}{number:5}  ", code=lines[number], style=style).rstrip(
                " "
            )
        if before < max(self.lines):
            yield gap


class Beside:
    """Sources next to each other, each under its title; below each other on a narrow page."""

    def __init__(self, sources: Mapping[str, ShownSource]):
        self.sources = dict(sources)

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}: {source!r}" for title, source in self.sources.items())

    def _repr_html_(self) -> str:
        parts = (
            f'<div style="flex:1 1 480px;min-width:0"><b>{html.escape(title)}</b>{source._repr_html_()}</div>'
            for title, source in self.sources.items()
        )
        return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(parts)}</div>'


def show_source(
    thing: Callable | type, highlight: Mark | Sequence[Mark] = (), around: int | None = None
) -> ShownSource:
    """Return the source of a function, method or class, with the lines marked that `highlight` names.

    highlight: a text, a compiled regular expression, or several. around: show only so many lines beside each marked
    one. Raises ValueError for a highlight that is in no line, TypeError for what has no source in Python.
    """
    thing = inspect.unwrap(thing)
    found, first = inspect.getsourcelines(thing)
    lines = dict(enumerate(textwrap.dedent("".join(found)).splitlines(), start=first))
    marked: set[int] = set()
    for mark in [highlight] if isinstance(highlight, Mark) else highlight:
        expression = re.compile(re.escape(mark)) if isinstance(mark, str) else mark
        hits = {number for number, line in lines.items() if expression.search(line)}
        if not hits:
            raise ValueError(f"no line of {thing.__qualname__} has {mark!r}: what should be highlighted?")
        marked |= hits
    place = f"{_named(thing)}, lines {first} to {max(lines)}: {thing.__qualname__}"
    near = [number for number in lines if around is None or any(abs(number - mark) <= around for mark in marked)]
    return ShownSource(place, lines, marked, near)


def _named(thing: Callable | type) -> str:
    """The file of a thing, from its package's folder on."""
    path, package = Path(inspect.getsourcefile(thing)), thing.__module__.partition(".")[0]
    parts = path.parts
    return "/".join(parts[len(parts) - parts[::-1].index(package) - 1 :]) if package in parts[:-1] else path.name
