"""The executed notebooks of a sweep as web pages that share one copy of plotly's script and work offline."""

from __future__ import annotations

import json
from pathlib import Path

from bass_lab.sweep import store
from bass_lab.sweep.one_run import NOTEBOOK

SCRIPT = "plotly.min.js"  # 5 MB: once per sweep, not per page
FIGURE = "application/vnd.plotly.v1+json"


def build(folder: Path) -> list[Path]:
    """Write KEY/notebook.html for every finished run that has none; the pages that were written."""
    pages = []
    for result in store.results(folder):
        source = folder / result.key / NOTEBOOK
        page = source.with_suffix(".html")
        if source.exists() and not page.exists():
            page.write_text(_page(source), encoding="utf-8")
            pages.append(page)
    if pages and not (folder / SCRIPT).exists():
        from plotly.offline import get_plotlyjs

        (folder / SCRIPT).write_text(get_plotlyjs(), encoding="utf-8")
    return pages


def _page(source: Path) -> str:
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if FIGURE in output.get("data", {}):
                output.data = {"text/html": _figure(output.data[FIGURE])}
    return HTMLExporter().from_notebook_node(notebook)[0]


def _figure(data: dict) -> str:
    import plotly.io

    return plotly.io.to_html(
        json.loads(json.dumps(data)), full_html=False, include_plotlyjs=f"../{SCRIPT}", validate=False
    )
