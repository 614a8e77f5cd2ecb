"""Figures that live in a notebook: redrawn in place by controls, as wide as the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anywidget
import ipywidgets
import plotly.graph_objects as go
from IPython.display import HTML


def live_figure() -> go.FigureWidget:
    """An empty one, for `redraw`; to be placed in `stacked`."""
    figure = go.FigureWidget()
    figure._config = figure._config | {"responsive": True, "displayModeBar": False}
    return figure


def redraw(widget: go.FigureWidget, figure: go.Figure) -> None:
    """Make a FigureWidget show another figure with the same number of traces, its data in place."""
    with widget.batch_update():
        if not widget.data:
            widget.add_traces(figure.data)
        for old, new in zip(widget.data, figure.data, strict=True):
            old.update(new.to_plotly_json(), overwrite=True)
        widget.layout = figure.layout
    widget._repr_mimebundle_()  # updates the state that a page gets when it is loaded again


def live(draw: Callable[..., Sequence[str | go.Figure]], **controls: ipywidgets.Widget) -> ipywidgets.VBox:
    """Return the controls, and below them what `draw` makes of their values (by name): texts of HTML, and figures."""
    views: list[ipywidgets.Widget] = []

    def update(_=None) -> None:
        shown = draw(**{name: control.value for name, control in controls.items()})
        if not views:
            views.extend(ipywidgets.HTML() if isinstance(each, str) else live_figure() for each in shown)
        for view, each in zip(views, shown, strict=True):
            if isinstance(each, str):
                view.value = each
            else:
                redraw(view, each)

    for control in controls.values():
        if control.has_trait("continuous_update"):
            control.continuous_update = False  # one drawing per move, when the mouse lets go
        control.observe(update, names="value")
    update()
    return stacked(*controls.values(), *views)


def slider(value: float, least: float, most: float, name: str, step: float | None = None) -> ipywidgets.Widget:
    """A slider of whole numbers, or, with a step, of others."""
    kind, stepped = (ipywidgets.IntSlider, {}) if step is None else (ipywidgets.FloatSlider, {"step": step})
    return kind(value=value, min=least, max=most, description=name, style={"description_width": "initial"}, **stepped)


def static(*views: str | ipywidgets.Widget) -> tuple[HTML | go.Figure, ...]:
    """What figures and texts (widgets, or as they are) show now, without widgets."""
    return tuple(
        go.Figure(view) if isinstance(view, go.FigureWidget) else HTML(getattr(view, "value", view)) for view in views
    )


def stacked(*children: ipywidgets.Widget) -> ipywidgets.VBox:
    """The children below each other; figures anywhere in them take the column's width. Its last child is no sight."""
    return ipywidgets.VBox([*children, _Resizer(layout={"width": "100%"})])


class _Resizer(anywidget.AnyWidget):
    """An empty line that makes the figures above it as wide as itself. anywidget figures do not follow their place."""

    _esm = """
    export default { render({ el }) {
        const fit = () => {
            const figures = el.parentElement?.querySelectorAll(".js-plotly-plot") ?? [];
            figures.forEach(figure => delete figure.layout?.width);
            window.dispatchEvent(new Event("resize"));  // responsive figures take the width of their place
        };
        const observer = new ResizeObserver(fit);
        observer.observe(el);
        document.addEventListener("plotlywidget-after-render", fit);
        return () => { observer.disconnect(); document.removeEventListener("plotlywidget-after-render", fit); };
    } };
    """
