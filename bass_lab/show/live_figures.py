"""Interactive figures in a notebook: controls redraw them in place, at the width of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anywidget
import ipywidgets
import plotly.graph_objects as go
from IPython.display import HTML


def live_figure() -> go.FigureWidget:
    """Return an empty figure for `redraw`. Place the figure inside `stacked`."""
    figure = go.FigureWidget()
    figure._config = figure._config | {"responsive": True, "displayModeBar": False}
    return figure


def redraw(widget: go.FigureWidget, figure: go.Figure) -> None:
    """Show another figure with the same number of traces in a FigureWidget."""
    with widget.batch_update():
        if not widget.data:
            widget.add_traces(figure.data)
        for old, new in zip(widget.data, figure.data, strict=True):
            old.update(new.to_plotly_json(), overwrite=True)
        widget.layout = figure.layout
    widget._repr_mimebundle_()  # updates the saved state for page reloads


def live(draw: Callable[..., Sequence[str | go.Figure]], **controls: ipywidgets.Widget) -> ipywidgets.VBox:
    """Return controls, with the HTML texts and figures below that `draw` returns for the controls' values (by name)."""
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
            control.continuous_update = False  # redraw once, when the mouse is released
        control.observe(update, names="value")
    update()
    return stacked(*controls.values(), *views)


def slider(value: float, least: float, most: float, name: str, step: float | None = None) -> ipywidgets.Widget:
    """Return a slider for integers, or for floats if a step is given."""
    kind, stepped = (ipywidgets.IntSlider, {}) if step is None else (ipywidgets.FloatSlider, {"step": step})
    return kind(value=value, min=least, max=most, description=name, style={"description_width": "initial"}, **stepped)


def static(*views: str | ipywidgets.Widget) -> tuple[HTML | go.Figure, ...]:
    """Return the current contents of figures and texts as plain figures and HTML."""
    return tuple(
        go.Figure(view) if isinstance(view, go.FigureWidget) else HTML(getattr(view, "value", view)) for view in views
    )


def stacked(*children: ipywidgets.Widget) -> ipywidgets.VBox:
    """Return the children in a column. Figures inside take the column's width; an invisible last child resizes them."""
    return ipywidgets.VBox([*children, _Resizer(layout={"width": "100%"})])


class _Resizer(anywidget.AnyWidget):
    """Empty line that sets the figures above to its own width. anywidget figures do not resize by themselves."""

    _esm = """
    export default { render({ el }) {
        const fit = () => {
            const figures = el.parentElement?.querySelectorAll(".js-plotly-plot") ?? [];
            figures.forEach(figure => delete figure.layout?.width);
            window.dispatchEvent(new Event("resize"));  // responsive figures take the available width
        };
        const observer = new ResizeObserver(fit);
        observer.observe(el);
        document.addEventListener("plotlywidget-after-render", fit);
        return () => { observer.disconnect(); document.removeEventListener("plotlywidget-after-render", fit); };
    } };
    """
