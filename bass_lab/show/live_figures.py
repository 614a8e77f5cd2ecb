"""Figures that live in a notebook: redrawn in place, as wide as the page lets them be.

A plotly FigureWidget by itself is 700 pixels wide for good, and empty after a page is loaded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # optional packages; imported where they are used
    import ipywidgets
    import plotly.graph_objects as go


def live_figure() -> go.FigureWidget:
    """An empty one, for `redraw`; to be placed in `stacked`."""
    import plotly.graph_objects as go

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


def stacked(*children: ipywidgets.Widget) -> ipywidgets.VBox:
    """The children below each other; figures anywhere in them take the column's width. Its last child is no sight."""
    from ipywidgets import VBox

    return VBox([*children, _resizer()])


def _resizer() -> ipywidgets.DOMWidget:
    """An empty line that makes the figures above it as wide as itself, now and whenever its own width changes.

    As an anywidget a figure is not told of its place in the page, and every new layout with a height fixes the width.
    """
    import anywidget

    class Resizer(anywidget.AnyWidget):
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

    return Resizer(layout={"width": "100%"})
