"""Notebooks executed and written as web pages, with an index; figures as pictures."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bass_core.environment import write_whole
from bass_lab.show import browser

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from nbclient import NotebookClient

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
STYLE = """
body { font: 17px/1.55 system-ui, sans-serif; color: #1b1f24; max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.2rem }
h1 { font-size: 2.1rem; margin: 0 } header p { max-width: 46rem } header img { width: 100%; border-radius: 6px }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; margin: 2rem 0 }
main a { display: block; padding: 1rem 1.2rem; border: 1px solid #d6dade; border-radius: 8px; color: inherit;
  text-decoration: none } main a:hover, main a:focus { border-color: #0072b2; box-shadow: 0 1px 8px #0072b233 }
h2 { font-size: 1.08rem; margin: 0 0 .4rem; color: #0072b2 } main p { margin: 0 0 .5rem }
small, footer { color: #57606a }
"""


def build(
    sources: list[Path],
    target: Path,
    progress: Callable[[str, float], None] = lambda doing, share: None,
    timeout: int = 600,
    picture: Path | None = None,
) -> list[Path]:
    """Execute each notebook where it lies and write it to `target`; the notebooks themselves stay as they are.

    progress: told what is executed and which share of all, 0 to 1, is done. picture: shown above the index. Returns the
    pages. Raises nbclient's CellExecutionError where a cell fails, ValueError without notebooks.
    """
    import nbformat
    from nbclient import NotebookClient

    if not sources:
        raise ValueError("no notebooks to build")
    target.mkdir(parents=True, exist_ok=True)
    pages = []
    for done, source in enumerate(sources):
        progress(f"executing {source.name}", done / len(sources))
        notebook = nbformat.read(source, as_version=4)
        # Every kernel warns that it talks TCP; here to this process only.
        options = {"kernel_name": "python3", "extra_arguments": ["--log-level=ERROR"], "store_widget_state": False}
        client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": source.parent}}, **options)
        # Figures come with plotly's script in the page, so that it works offline.
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(_execute(client, os.environ | {"PLOTLY_RENDERER": "notebook"}))
        _without_widgets(notebook)
        page = target / f"{source.stem}.html"
        write_whole(page, _linked(as_page(notebook, _title(notebook, source.stem))))
        pages.append(page)
    if picture is not None:
        write_whole(target / picture.name, picture.read_bytes())
    write_whole(target / "index.html", _index(sorted(target.glob("[0-9]*.html")), picture))
    return pages


def as_page(notebook, title: str) -> str:
    """An executed notebook as HTML that fetches nothing when it is opened.

    nbconvert and plotly load MathJax and require.js from the network. Nothing here needs either: notebooks write their
    formulas as text, and TeX stays as it is written.
    """
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": title}})
    return re.sub(r'<script\b[^>]*\bsrc="https?:[^>]*>\s*</script>', "", body)


class _Loop(asyncio.SelectorEventLoop):
    """Leaves Ctrl-C to asyncio. nbclient would end the kernel under the cell that it waits for, and then fail."""

    def add_signal_handler(self, *arguments) -> None:
        raise RuntimeError("there are no handlers of signals here")  # as on systems that have none


async def _execute(client: NotebookClient, environment: Mapping[str, str]) -> None:
    work = asyncio.ensure_future(client.async_execute(env=environment))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:  # Ctrl-C
        client.shutdown_kernel = "immediate"  # a kernel that had time would complain of closed sockets
        work.cancel()
        await asyncio.wait([work])
        work.exception()  # that its kernel died; seen, so that nobody is told
        raise


def _linked(body: str) -> str:
    """Links to other lessons lead to their pages, and one leads to the index."""
    body = re.sub(r'href="(\d\d_\w+)\.ipynb"', r'href="\1.html"', body)
    back = '<p style="margin:8px 0 0 84px"><a href="index.html">← all lessons</a></p>'
    return re.sub(r"<body[^>]*>", lambda match: match[0] + back, body, count=1)


def _without_widgets(notebook) -> None:
    """A widget lives in JupyterLab only: a page says so in its place, and finished progress bars go."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        for output in outputs:
            if WIDGET in output.get("data", {}):
                output.data = {"text/plain": output.data["text/plain"], "text/html": WIDGET_NOTE}
        if outputs:
            cell.outputs = [each for each in outputs if "%|" not in each.get("data", {}).get("text/plain", "")]


def _title(notebook, default: str) -> str:
    """The first heading."""
    lines = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    return next((line[2:].strip() for line in lines if line.startswith("# ")), default)


def _index(pages: list[Path], picture: Path | None = None) -> str:
    """The index of these pages (whatever was built earlier stays listed), with a picture above them."""
    lessons = "\n".join(map(_card, pages))
    drawn = "" if picture is None else f'<img src="{picture.name}" alt="Accepted draft tokens, per row and step">\n'
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>BASS, hands on</title><style>{STYLE}</style>\n<header><h1>BASS, hands on</h1>\n"
        "<p>Batched speculative decoding for ordinary <code>transformers</code> models: a small model drafts for many "
        "sequences at once, the large one checks, every sequence keeps what it earned, and the text has the same law "
        'as without. After <a href="https://arxiv.org/abs/2404.15778">arXiv 2404.15778</a>.</p>\n'
        f"{drawn}</header>\n<main>\n{lessons}\n</main>\n"
        "<footer>Every page was executed from its notebook. Live controls move in JupyterLab: <code>make lab</code>. "
        "First time here? Begin at the top; each lesson also stands on its own.</footer></html>\n"
    )


def _card(page: Path) -> str:
    """A lesson's title, question, and what it takes, from its first cell as it stands on its page."""
    text = page.read_text(encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", text, re.DOTALL)[1].strip()
    question = re.search(r"<p><strong>(.*?)</strong></p>", text, re.DOTALL)
    takes = re.search(r"Takes [^<]*?\.(?=\s)", text)
    lines = [f"<p>{question[1]}</p>"] if question else []
    lines += [f"<small>{takes[0]}</small>"] if takes else []
    return f'<a href="{page.name}"><h2>{title}</h2>{"".join(lines)}</a>'


def picture(figure: go.Figure, path: Path, width: int = 900, scale: int = 2) -> None:
    """Write a figure as PNG, drawn by Chromium. Raises FileNotFoundError where there is none."""
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
