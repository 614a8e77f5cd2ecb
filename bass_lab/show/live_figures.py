"""Interactive figures in a notebook: controls redraw them in place, at the width of the page.

Without ipywidgets or anywidget, and if `STATIC` is set, `widgets` has stand-ins, and a view shows its first state as
texts and figures.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import plotly.graph_objects as go
from IPython.display import HTML, display

from bass_lab.show.pages import STATIC

KINDS = ("Box", "Button", "Dropdown", "FloatSlider", "HTML", "IntSlider", "IntText", "Play", "SelectionSlider", "VBox")


class _Still:
    """Stand-in for a widget: holds values, which code may change but no user."""

    def __init__(self, value: object = "", *_, **traits):
        self._observers: list[Callable] = []
        if value == "" and traits.get("options"):  # ipywidgets selects the first option
            first = traits["options"][0]
            value = first[1] if isinstance(first, tuple) else first
        self.children = value if isinstance(value, list) else ()
        vars(self).update({"value": value, "description": "", "disabled": False} | traits)

    def __setattr__(self, name: str, value: object) -> None:
        changed = name == "value" and value != self.value
        super().__setattr__(name, value)
        for observer in self._observers if changed else ():
            observer(None)

    def observe(self, observer: Callable, names: str) -> None:
        """Call observer(None) after a change of the value, as ipywidgets does with a description of the change."""
        self._observers.append(observer)

    def has_trait(self, *_) -> None:
        """Do nothing."""

    on_click = add_class = remove_class = has_trait

    def shown(self) -> Iterator[str | go.Figure]:
        """Yield the texts and figures inside, and the values of enabled controls."""
        for child in self.children:
            yield from child.shown() if isinstance(child, _Still) else [child]
        if self.description and self.value != "":
            yield "" if self.disabled else html.escape(f"{self.description}: {self.value}")
        elif isinstance(self.value, str):
            yield self.value

    def _ipython_display_(self) -> None:
        note = "<i>The first state of a view with live controls (in JupyterLab, with ipywidgets):</i>"
        display(*(HTML(part) if isinstance(part, str) else part for part in [note, *self.shown()] if part))


try:
    if os.environ.get(STATIC):
        raise ImportError
    import ipywidgets as widgets

    from bass_lab.show.figure_widgets import Figure, Resizer
except ImportError:
    Figure, Resizer = go.Figure, _Still
    widgets = SimpleNamespace(link=lambda *_: None, **dict.fromkeys(KINDS, _Still))


def live_figure() -> go.Figure:
    """Return an empty figure for `redraw`. Place the figure inside `stacked`."""
    return Figure()


def redraw(shown: go.Figure, figure: go.Figure) -> None:
    """Show another figure with the same number of traces in a `live_figure`."""
    with shown.batch_update():
        if not shown.data:
            shown.add_traces(figure.data)
        for old, new in zip(shown.data, figure.data, strict=True):
            old.update(new.to_plotly_json(), overwrite=True)
        shown.layout = figure.layout
    if Resizer is not _Still:
        shown._repr_mimebundle_()  # updates the saved state for page reloads


@contextmanager
def busy(view: widgets.VBox) -> Iterator[None]:
    """Show a busy sign on a view of `stacked` during the block."""
    view.add_class("bass-busy")
    try:
        yield
    finally:
        view.remove_class("bass-busy")


def live(draw: Callable[..., Sequence[str | go.Figure]], **controls: widgets.Widget) -> widgets.VBox:
    """Return controls, with the HTML texts and figures below that `draw` returns for the controls' values (by name)."""

    def drawn() -> Sequence[str | go.Figure]:
        return draw(**{name: control.value for name, control in controls.items()})

    def show(parts: Sequence[str | go.Figure]) -> None:
        for view, part in zip(views, parts, strict=True):
            if isinstance(part, str):
                view.value = part
            else:
                redraw(view, part)

    def update(_) -> None:
        with busy(all_views):
            show(drawn())

    first = drawn()
    views = [widgets.HTML() if isinstance(part, str) else live_figure() for part in first]
    show(first)
    all_views = stacked(*controls.values(), *views)
    for control in controls.values():
        if control.has_trait("continuous_update"):
            control.continuous_update = False  # redraw once, when the mouse is released
        control.observe(update, names="value")
    return all_views


def slider(value: float, least: float, most: float, name: str, step: float | None = None) -> widgets.Widget:
    """Return a slider for integers, or for floats if a step is given."""
    kind, stepped = (widgets.IntSlider, {}) if step is None else (widgets.FloatSlider, {"step": step})
    return kind(value=value, min=least, max=most, description=name, style={"description_width": "initial"}, **stepped)


def stacked(*children: widgets.Widget) -> widgets.VBox:
    """Return the children in a column. Figures inside take the column's width; an invisible last child resizes them."""
    view = widgets.VBox([*children, Resizer(layout={"width": "100%"})])
    view.add_class("bass-live")
    return view
