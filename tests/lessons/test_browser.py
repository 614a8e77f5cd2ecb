"""Lessons in a real browser: JupyterLab runs them, and figures follow sliders moved by keyboard."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lesson_runs
import nbformat
import pytest

from bass_lab.show import browser, pages

DATA = "figure => JSON.stringify(figure.data, (_, value) => ArrayBuffer.isView(value) ? Array.from(value) : value)"
FITS = "figure => Math.abs(figure._fullLayout.width - figure.parentElement.clientWidth) <= 1"
TITLE = "figure => figure.layout.title.text"
WIDTHS = "() => [...document.querySelectorAll('.slider-container')].map(slider => slider.getBoundingClientRect().width)"
WATCH = """() => new MutationObserver(() => { window.wasBusy ||= !!document.querySelector(".bass-busy"); }).observe(
    document.body, { subtree: true, attributeFilter: ["class"] })"""
# Position on the page of a heatmap's cell.
PLACE = """(figure, [x, y]) => {
    const [box, {xaxis, yaxis}] = [figure.getBoundingClientRect(), figure._fullLayout];
    return [box.x + xaxis._offset + xaxis.d2p(x), box.y + yaxis._offset + yaxis.d2p(y)];
}"""
WIDE, NARROW = {"width": 1200, "height": 1600}, {"width": 700, "height": 2200}
LESSON = "03_acceptance_explorer"


@pytest.fixture(scope="module")
def chromium():
    lesson_runs.chromium()
    with browser.launched() as running:
        yield running


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab with a lesson up to its first widget. test_notebooks.py runs the other cells."""
    folder = tmp_path_factory.mktemp("lessons")
    notebook = nbformat.read(lesson_runs.NOTEBOOKS / f"{LESSON}.ipynb", as_version=4)
    first = next(at for at, cell in enumerate(notebook.cells) if "\nexplorer = AcceptanceExplorer(" in cell.source)
    notebook.cells = notebook.cells[: first + 1]
    nbformat.write(notebook, folder / f"{LESSON}.ipynb")
    with browser.lab(folder, {LESSON: {"batch_size": 2, "max_new_tokens": 8}}) as address:
        yield address


def errors(page):
    outputs = [output for cell in page.evaluate(browser.CELLS) for output in cell.get("outputs", [])]
    wrong = [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    return wrong + [text for text in ("Error displaying widget", "Loading widget...") if page.get_by_text(text).count()]


def wait_until(page, holds, widget):
    """Poll until `holds` is true. The page may draw a widget again during layout."""
    for _ in range(5 * browser.PATIENCE):
        if holds():
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"nothing came in {browser.PATIENCE} s; the widget says: {widget.inner_text()}")


def move(page, slider, widget):
    value = slider.get_attribute("aria-valuenow")

    def moved():
        slider.press("ArrowRight")
        return slider.get_attribute("aria-valuenow") != value

    wait_until(page, moved, widget)


def test_servers_token_is_in_no_process_arguments(lab):
    token = lab("any").partition("token=")[2]
    assert len(token) > 20
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            assert token.encode() not in arguments.read_bytes()


@pytest.mark.slow
def test_page_needs_no_network(chromium, tmp_path):
    drawing = "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 3, 2]), {'title': '$a_1$'})"
    cells = [nbformat.v4.new_markdown_cell("# Formula\n\nIt is $\\alpha^k$."), nbformat.v4.new_code_cell(drawing)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_drawn.ipynb")
    with ThreadPoolExecutor() as elsewhere:  # the browser's event loop runs in this thread
        notebook = elsewhere.submit(pages.execute, tmp_path / "01_drawn.ipynb").result()
    pages.draw_figures(notebook)
    built = tmp_path / "01_drawn.html"
    built.write_text(pages.as_page(notebook))
    asked = []
    page = chromium.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(built.as_uri())
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert "It is $\\alpha^k$." in page.inner_text("body")
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert not re.search(r'(src|href)="https?:[^"]*\.js', built.read_text())


def test_slider_and_clicks_change_the_figures(chromium, lab):
    with browser.executed(chromium, lab(LESSON), WIDE) as page:
        assert errors(page) == []
        widget = browser.first_widget(page)
        figure = widget.locator(".js-plotly-plot").first
        assert set(page.evaluate(WIDTHS)) == {250}
        page.evaluate(WATCH)
        before = figure.evaluate(DATA)
        move(page, widget.locator(".noUi-handle").first, widget)
        wait_until(page, lambda: figure.evaluate(DATA) != before, widget)
        assert page.evaluate("window.wasBusy")
        check_that_clicks_choose_steps(page, widget, figure)
        page.set_viewport_size(NARROW)
        wait_until(page, lambda: figure.evaluate(FITS), widget)
        assert errors(page) == []


def check_that_clicks_choose_steps(page, widget, raster):
    bars = widget.locator(".js-plotly-plot").nth(1)
    wait_until(page, lambda: raster.evaluate(FITS), widget)
    raster.scroll_into_view_if_needed()
    for row, step in ((0, 1), (1, 2)):
        page.mouse.click(*raster.evaluate(PLACE, [step, row]))
        title = f"Row {row}, step {step}:"
        wait_until(page, lambda title=title: bars.evaluate(TITLE).startswith(title), widget)
