"""Widgets of `live_figures`: figures with one shared copy of plotly's script, and a line to resize the figures."""

from __future__ import annotations

import functools
from pathlib import Path

import anywidget
import ipywidgets
import plotly
import plotly.graph_objects as go
from traitlets import Unicode, default


class _Script(ipywidgets.Widget):
    """Plotly's script (5 MB), sent to the page once."""

    text = Unicode().tag(sync=True)


@functools.cache
def _script() -> _Script:
    path = Path(plotly.__file__).parent / "package_data" / "widgetbundle.js"
    return _Script(text=path.read_text(encoding="utf-8"))


class Figure(go.FigureWidget):
    """FigureWidget with the script of `_Script`.

    Each FigureWidget of plotly loads 5 MB. anywidget drops all updates of a widget after two seconds without a script,
    and then two figures stay empty on a busy machine. A script loaded in `initialize` has no such limit.
    """

    _script = Unicode().tag(sync=True)
    _esm = """
    const script = model => globalThis.bassFigures ??= model.widget_manager.get_model(model.get("_script")).then(
        found => import(URL.createObjectURL(new Blob([found.get("text")], { type: "text/javascript" }))));
    const made = async model => {
        const figure = (await script(model)).default();
        await figure.initialize({ model });
        return figure;
    };
    export default () => {
        let figure;
        return {
            initialize({ model }) { figure = made(model); },
            async render(context) { return (await figure).render(context); },
        };
    };
    """

    @default("_script")
    def _shared_script(self) -> str:
        return _script().model_id

    def __init__(self):
        super().__init__()
        self._config = self._config | {"responsive": True, "displayModeBar": False}


class Resizer(anywidget.AnyWidget):
    """Empty line. The figures above take the width of this line, because figures of anywidget do not resize. The line
    also carries the style of sliders and the busy sign."""

    _css = """
    .bass-live .widget-hslider { width: auto; }
    .bass-live .slider-container { flex: 0 0 250px; }
    .bass-busy { cursor: progress; }
    .bass-busy .js-plotly-plot, .bass-busy .widget-html { opacity: 0.5; }
    .bass-busy::before {
        content: "computing …"; position: sticky; top: 4px; z-index: 1001; align-self: flex-end; height: 30px;
        margin-bottom: -30px; padding: 0 12px; background: #0072B2; color: white; font: bold 16px/30px sans-serif;
    }
    """
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
