"""Notebooks executed and written as web pages, with an index."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path


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
    pages, titles = [], []
    for source in sources:
        progress(f"executing {source.name}")
        notebook = nbformat.read(source, as_version=4)
        executor = ExecutePreprocessor(timeout=timeout, kernel_name="python3", store_widget_state=False)
        executor.preprocess(notebook, {"metadata": {"path": str(source.parent)}})
        body, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": source.stem}})
        page = target / f"{source.stem}.html"
        page.write_text(body, encoding="utf-8")
        pages.append(page)
        titles.append(_title(notebook, source.stem))
    (target / "index.html").write_text(_index(pages, titles), encoding="utf-8")
    return pages


def _title(notebook, default: str) -> str:
    """The first heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return line[2:].strip()
    return default


def _index(pages: list[Path], titles: list[str]) -> str:
    items = "\n".join(
        f'<li><a href="{page.name}">{html.escape(title)}</a></li>' for page, title in zip(pages, titles, strict=True)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>BASS, hands on</title><style>body{font:17px/1.6 system-ui,sans-serif;max-width:42rem;margin:3rem auto;"
        "padding:0 1rem}</style><h1>BASS, hands on</h1><p>Batched speculative decoding, from the idea to the "
        f"measurements. Every page was executed from its notebook.</p><ol start='0'>\n{items}\n</ol></html>\n"
    )
