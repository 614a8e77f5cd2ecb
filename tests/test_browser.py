"""The lessons in a real browser: JupyterLab runs them, a slider moves by keyboard, the figure follows."""

import os
import shutil
from pathlib import Path

import pytest

from bass_core import browser

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "build/screenshots"
DATA = "figure => JSON.stringify(figure.data, (_, value) => ArrayBuffer.isView(value) ? Array.from(value) : value)"
CHANGED = f"([figure, before]) => ({DATA})(figure) !== before"
FITS = "figure => Math.abs(figure._fullLayout.width - figure.parentElement.clientWidth) <= 1"
TITLED = "([figure, title]) => figure.layout.title.text.startsWith(title)"
# Where on the page a cell of a heatmap is drawn.
PLACE = """(figure, [x, y]) => {
    const [box, {xaxis, yaxis}] = [figure.getBoundingClientRect(), figure._fullLayout];
    return [box.x + xaxis._offset + xaxis.d2p(x), box.y + yaxis._offset + yaxis.d2p(y)];
}"""
WIDE, NARROW = {"width": 1200, "height": 1600}, {"width": 700, "height": 2200}
LESSONS = {  # with these parameters: what the defaults give is tested without a browser
    "00_start_here": {"batch_size": 2, "max_new_tokens": 16, "repeats": 2},
    "03_acceptance_explorer": {"batch_size": 2, "max_new_tokens": 16},
}


@pytest.fixture(scope="module")
def chromium():
    if shutil.which("chromium") is None:
        assert not os.environ.get("CI"), "CI installs chromium: this test may not be skipped there"
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with browser.launched() as running:
        yield running


@pytest.fixture(scope="module")
def lab():
    with browser.lab(ROOT / "notebooks", LESSONS) as address:
        yield address


def errors(page):
    """What a reader would see go wrong: errors, warnings, widgets that do not appear."""
    outputs = [output for cell in page.evaluate(browser.CELLS) for output in cell.get("outputs", [])]
    wrong = [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    return wrong + [text for text in ("Error displaying widget", "Loading widget...") if page.get_by_text(text).count()]


def wait_until_changed(page, figure, before):
    page.wait_for_function(CHANGED, arg=[figure.element_handle(), before])


def take_picture(page, widget, name, size):
    """Of the widget in a window of that size; build/screenshots keeps it, to be looked at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size(size)
    page.wait_for_timeout(1000)
    widget.screenshot(path=SCREENSHOTS / f"{name}_{size['width']}.png")


@pytest.mark.parametrize("name", LESSONS)
def test_lesson_runs_and_its_slider_moves_the_figure(chromium, lab, name):
    with browser.executed(chromium, lab(name), WIDE) as page:
        assert errors(page) == []
        widget = browser.first_widget(page)
        figure = widget.locator(".js-plotly-plot").first
        before = figure.evaluate(DATA)
        widget.locator(".noUi-handle").first.focus()
        page.keyboard.press("ArrowRight")
        wait_until_changed(page, figure, before)
        take_picture(page, widget, name, WIDE)
        if name.startswith("03"):
            check_that_clicks_choose_steps(page, widget, figure)
            page.set_viewport_size(NARROW)
            page.wait_for_function(FITS, arg=figure.element_handle())
        take_picture(page, widget, name, NARROW)
        assert errors(page) == []


def check_that_clicks_choose_steps(page, widget, raster):
    bars = widget.locator(".js-plotly-plot").nth(1).element_handle()
    page.wait_for_function(FITS, arg=raster.element_handle())
    raster.scroll_into_view_if_needed()
    for row, step in ((0, 1), (1, 2)):
        page.mouse.click(*raster.evaluate(PLACE, [step, row]))
        page.wait_for_function(TITLED, arg=[bars, f"Row {row}, step {step}:"])
