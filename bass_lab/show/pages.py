"""Execute notebooks, write them as offline HTML pages, and write figures as PNG."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bass_core.environment import write_whole
from bass_lab.show import browser

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from nbclient import NotebookClient
    from nbformat import NotebookNode

# Headless and offline; also runs as root in a container.
BROWSER_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=20000",
)  # fmt: skip

STATIC = "BASS_STATIC_FIGURES"  # environment variable: `live_figures` shows first states instead of widgets
WIDGET = "application/vnd.jupyter.widget-view+json"
PATIENCE = 600  # seconds per cell
FIGURE = "application/vnd.plotly.v1+json"
SCRIPT = "plotly.min.js"  # 5 MB, stored once per folder of pages


def execute(source: Path) -> NotebookNode:
    """Return the notebook after execution in its own folder, with figures instead of widgets. Raises nbclient's
    CellExecutionError and CellTimeoutError."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    # Kernels warn that they use TCP; here only this process connects.
    options = {"kernel_name": "python3", "extra_arguments": ["--log-level=ERROR"], "store_widget_state": False}
    client = NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": source.parent}}, **options)
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_execute(client, os.environ | {"PLOTLY_RENDERER": "plotly_mimetype", STATIC: "1"}))
    for cell in notebook.cells:
        if cell.get("outputs"):  # without finished progress bars
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    return notebook


def draw_figures(notebook: NotebookNode, script: str | None = None) -> None:
    """Turn the notebook's figures into offline HTML. script: address of `SCRIPT`; None embeds the script."""
    from plotly.io import to_html

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    included = False
    for output in outputs:
        if figure := output.get("data", {}).get(FIGURE):
            drawn = to_html(figure, full_html=False, include_plotlyjs=not included and (script or True), validate=False)
            output.data, included = {"text/html": drawn}, True


def write_script(folder: Path) -> None:
    """Write plotly's script to the folder of the pages."""
    from plotly.offline import get_plotlyjs

    write_whole(folder / SCRIPT, get_plotlyjs())


def as_page(notebook: NotebookNode, title: str = "") -> str:
    """Return an executed notebook as offline HTML without MathJax and require.js. Printed lines break between words.

    title: the first heading if empty.
    """
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": title or _title(notebook)}})
    body = body.replace("word-break: break-all;", "")
    return re.sub(r'<script\b[^>]*\bsrc="https?:[^>]*>\s*</script>', "", body)


class _Loop(asyncio.SelectorEventLoop):
    """Event loop that leaves Ctrl-C to asyncio. nbclient's handler would end the kernel during a cell and then fail."""

    def add_signal_handler(self, *arguments) -> None:
        raise RuntimeError("this loop has no signal handlers")  # as on platforms without them


async def _execute(client: NotebookClient, environment: Mapping[str, str]) -> None:
    work = asyncio.ensure_future(client.async_execute(env=environment))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:  # Ctrl-C
        client.shutdown_kernel = "immediate"  # a slower shutdown would print errors about closed sockets
        work.cancel()
        await asyncio.wait([work])
        work.exception()  # retrieved, so that asyncio does not log it
        raise


def _title(notebook: NotebookNode) -> str:
    lines = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    return next((line[2:].strip() for line in lines if line.startswith("# ")), "")


def picture(figure: go.Figure, path: Path, width: int = 900, scale: int = 2) -> None:
    """Write a figure as PNG with Chromium. Raises FileNotFoundError if Chromium is not installed."""
    chromium = browser.executable()
    height = figure.layout.height
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page, drawn = Path(folder) / "figure.html", Path(folder) / "figure.png"
        body = figure.update_layout(width=width).to_html(full_html=False, config={"displayModeBar": False})
        page.write_text(f"<!doctype html><meta charset='utf-8'><body style='margin:0'>{body}", encoding="utf-8")
        options = [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={drawn}"]
        command = [chromium, *BROWSER_FLAGS, f"--force-device-scale-factor={scale}", *options, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        write_whole(path, drawn.read_bytes())
