"""Show code in a lesson, always read from its current source file."""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

FONT = "font-family:ui-monospace,monospace"  # HTML pages restyle <pre>
Mark = str | re.Pattern  # text in a line, or a regular expression that matches a part of a line


class ShownSource:
    """Lines of a file for display in a notebook cell. marked, shown: line numbers. place: file, lines and name."""

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
        # Fixed colours are readable on light and dark pages.
        style = "background:#f7f7f7;color:#1b1f24;border:1px solid #d6dade;border-radius:6px;padding:8px 0;margin:0"
        return (
            f'<div style="font-size:85%;margin-bottom:2px"><code>{html.escape(self.place)}</code></div>'
            f'<pre style="{style};overflow-x:auto;white-space:pre;line-height:1.4;{FONT}">{listed}</pre>'
        )

    def _listed(self, lines: Mapping[int, str], form: str, gap: str) -> Iterator[str]:
        """Yield each shown line in this form, and a gap sign for left-out lines."""
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
    """Sources with titles, side by side, or in a column on a narrow page."""

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
    """Return the source of a function, method or class, with marked lines.

    highlight: a text, a compiled regular expression, or several; matching lines are marked. around: number of lines to
    show before and after each marked line. Raises ValueError if a highlight matches no line, and TypeError if there is
    no Python source.
    """
    thing = inspect.unwrap(thing)
    found, first = inspect.getsourcelines(thing)
    lines = dict(enumerate(textwrap.dedent("".join(found)).splitlines(), start=first))
    marked: set[int] = set()
    for mark in [highlight] if isinstance(highlight, Mark) else highlight:
        expression = re.compile(re.escape(mark)) if isinstance(mark, str) else mark
        hits = {number for number, line in lines.items() if expression.search(line)}
        if not hits:
            raise ValueError(f"no line of {thing.__qualname__} has {mark!r}; use a highlight from its source")
        marked |= hits
    place = f"{_named(thing)}, lines {first} to {max(lines)}: {thing.__qualname__}"
    near = [number for number in lines if around is None or any(abs(number - mark) <= around for mark in marked)]
    return ShownSource(place, lines, marked, near)


def _named(thing: Callable | type) -> str:
    """Return the path of the thing's file, starting at the package folder."""
    path, package = Path(inspect.getsourcefile(thing)), thing.__module__.partition(".")[0]
    parts = path.parts
    return "/".join(parts[len(parts) - parts[::-1].index(package) - 1 :]) if package in parts[:-1] else path.name
