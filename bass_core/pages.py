"""Notebooks executed and written as web pages, with an index; figures as pictures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Headless, offline, and willing to run as root in a container.
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_NOTE = "<p><i>A live control: open the notebook in JupyterLab to move it. What it shows follows below.</i></p>"


def build(
    sources: list[Path], target: Path, progress: Callable[[str], None] = lambda message: None, timeout: int = 600
) -> list[Path]:
    """Execute each notebook where it lies and write it to `target`; the notebooks themselves stay as they are.

    Returns the pages. Raises nbclient's CellExecutionError where a cell fails, ValueError without notebooks.
    """
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    if not sources:
        raise ValueError("no notebooks to build")
    target.mkdir(parents=True, exist_ok=True)
    pages = []
    for source in sources:
        progress(f"executing {source.name}")
        notebook = nbformat.read(source, as_version=4)
        executor = ExecutePreprocessor(timeout=timeout, kernel_name="python3", store_widget_state=False)
        with _figures_as_html():
            executor.preprocess(notebook, {"metadata": {"path": str(source.parent)}})
        _without_widgets(notebook)
        body, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": _title(notebook, source.stem)}})
        page = target / f"{source.stem}.html"
        page.write_text(body, encoding="utf-8")
        pages.append(page)
    (target / "index.html").write_text(_index(sorted(target.glob("[0-9]*.html"))), encoding="utf-8")
    return pages


def _without_widgets(notebook) -> None:
    """A widget lives in JupyterLab only: a page says so in its place, and finished progress bars go."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        for output in outputs:
            if WIDGET in output.get("data", {}):
                output.data = {"text/plain": output.data["text/plain"], "text/html": WIDGET_NOTE}
        if outputs:
            cell.outputs = [each for each in outputs if "%|" not in each.get("data", {}).get("text/plain", "")]


@contextmanager
def _figures_as_html() -> Iterator[None]:
    """Kernels started inside draw plotly's figures with the script in the page, so that it works offline."""
    before = os.environ.get("PLOTLY_RENDERER")
    os.environ["PLOTLY_RENDERER"] = "notebook"
    try:
        yield
    finally:
        del os.environ["PLOTLY_RENDERER"]
        if before is not None:
            os.environ["PLOTLY_RENDERER"] = before


def _title(notebook, default: str) -> str:
    """The first heading."""
    lines = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    return next((line[2:].strip() for line in lines if line.startswith("# ")), default)


def _title_of_page(page: Path) -> str:
    """A page's title, as HTML."""
    return re.search(r"<title>(.*?)</title>", page.read_text(encoding="utf-8"), re.DOTALL)[1].strip()


def _index(pages: list[Path]) -> str:
    """The index of these pages (whatever was built earlier stays listed)."""
    items = "\n".join(f'<li><a href="{page.name}">{_title_of_page(page)}</a></li>' for page in pages)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>BASS, hands on</title><style>body{font:17px/1.6 system-ui,sans-serif;max-width:42rem;margin:3rem auto;"
        "padding:0 1rem}</style><h1>BASS, hands on</h1><p>Batched speculative decoding, from the idea to the "
        f"measurements. Every page was executed from its notebook.</p><ol start='0'>\n{items}\n</ol></html>\n"
    )


def picture(figure: go.Figure, path: Path, width: int = 900, scale: int = 2) -> None:
    """Write a figure as PNG, drawn by Chromium. Raises FileNotFoundError where there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("pictures are drawn by Chromium, and there is no chromium here: install it")
    height = figure.layout.height
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        body = figure.update_layout(width=width).to_html(full_html=False, config={"displayModeBar": False})
        page.write_text(f"<!doctype html><meta charset='utf-8'><body style='margin:0'>{body}", encoding="utf-8")
        options = [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={path}"]
        command = [browser, *BROWSER_FLAGS, f"--force-device-scale-factor={scale}", *options, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
