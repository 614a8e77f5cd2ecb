"""Run JupyterLab in a browser, for the browser test and the README's pictures. Needs Chromium and playwright."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bass_core.environment import write_whole

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

PATIENCE = 240  # seconds, enough for a busy machine
# All cells are in the page, not only the visible cells. JupyterLab makes no network requests.
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}

# The server exposes the application to scripts, and the notebook's model contains the outputs.
PANEL = "window.jupyterapp?.shell.currentWidget"
IDLE = f"() => {PANEL}?.sessionContext?.session?.kernel?.status === 'idle'"
CELLS = f"() => {PANEL}.content.model.sharedModel.cells.map(cell => cell.toJSON())"
ENDED = f"""() => {{
    const cells = ({CELLS})().filter(cell => cell.cell_type === 'code');
    const failed = cells.some(cell => cell.outputs.some(output => output.output_type === 'error'));
    return failed || (cells.every(cell => cell.execution_count) && ({IDLE})());
}}"""


def executable() -> str:
    """Return the path of Chromium. Raises FileNotFoundError if Chromium is not installed."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise FileNotFoundError("Chromium was not found; install it (apt-get install chromium)")
    return found


@contextmanager
def launched() -> Iterator[Browser]:
    """Yield a headless Chromium. Raises FileNotFoundError if Chromium is not installed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def lab(notebooks: Path, parameters: Mapping[str, dict]) -> Iterator[Callable[[str], str]]:
    """Run JupyterLab on a copy of this folder, and yield a function from notebook name to URL. parameters: papermill
    parameters of each notebook."""
    import papermill

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        copy = shutil.copytree(notebooks, home / "notebooks")
        for name, changed in parameters.items():
            path = copy / f"{name}.ipynb"
            papermill.execute_notebook(path, path, changed, prepare_only=True, progress_bar=False)
        for name, text in SETTINGS.items():
            path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        folders = {
            "JUPYTER_CONFIG_DIR": home / "config",
            "JUPYTER_RUNTIME_DIR": home / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": home / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
            "IPYTHONDIR": home / "ipython",
        }
        environment = os.environ | {name: str(folder) for name, folder in folders.items()}
        environment["OMP_NUM_THREADS"] = "1"  # with more threads, such small matrices are many times slower
        root = Path(__file__).parents[2]
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with _server(copy, environment, home / "server.log") as address:
            yield address


@contextmanager
def _server(folder: Path, environment: dict[str, str], log: Path) -> Iterator[Callable[[str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    options = {"ServerApp.ip": "127.0.0.1", "ServerApp.port": port, "ServerApp.port_retries": 0,
               "ServerApp.open_browser": False, "ServerApp.root_dir": folder, "ServerApp.allow_root": True,
               "LabApp.expose_app_in_browser": True}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    environment = environment | {"JUPYTER_TOKEN": token}  # other users can read the arguments of a command
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/status?token={token}", server, log)
        yield lambda notebook: f"{address}/doc/tree/{notebook}.ipynb?token={token}"
    finally:
        server.terminate()  # also ends the kernels
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()  # kernels end when the server is gone
            server.wait()


def _wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start. Its log ends with: {log.read_text()[-3000:]}")


@contextmanager
def executed(browser: Browser, address: str, size: Mapping[str, int]) -> Iterator[Page]:
    """Yield the notebook in a page of this size, after all cells ran or a cell failed."""
    page = browser.new_page(viewport=dict(size))
    page.set_default_timeout(PATIENCE * 1000)
    try:
        page.goto(address)
        page.wait_for_function(IDLE)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_function(ENDED)
        yield page
    finally:
        page.close()


def first_widget(page: Page) -> Locator:
    """Return the output of the first cell with a slider, after its figures were drawn."""
    output = page.locator(".jp-CodeCell:has(.noUi-handle) .jp-OutputArea-output").first
    output.scroll_into_view_if_needed()
    output.locator(".js-plotly-plot .main-svg").first.wait_for()
    return output


def picture(notebook: Path, path: Path, parameters: dict, size: Mapping[str, int]) -> None:
    """Write the notebook's first widget as PNG, drawn by JupyterLab in a window of this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = notebook.stem
    with (
        launched() as browser,
        lab(notebook.parent, {name: parameters}) as address,
        executed(browser, address(name), size) as page,
    ):
        widget = first_widget(page)
        page.wait_for_timeout(1000)  # until figures fill the width
        write_whole(path, widget.screenshot())
