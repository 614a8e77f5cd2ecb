import copy
import html
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest

import bass_core as bass
import bass_lab as lab
from bass_core.loop.trace import Trace
from bass_lab.lessons import l00_figures
from bass_lab.show import looks, pages, plots
from bass_lab.show.looks import LOOKS
from bass_lab.texts.prompt_sets import prompt_set

DRAW = "import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1]))"
CONTROL = "import ipywidgets\nfrom tqdm.auto import tqdm\nlist(tqdm(range(3), disable=False))\nipywidgets.IntSlider(5)"


@pytest.fixture(scope="module")
def prompts():
    return prompt_set("mini", 3)


def notebook_of(folder, *sources):
    path = folder / "07_example.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)
    return path


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    source = notebook_of(tmp_path_factory.mktemp("source"), "print(6 * 7)", CONTROL, DRAW, DRAW)
    before = source.read_bytes()
    notebook = pages.execute(source)
    assert source.read_bytes() == before
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("**What?**\n\n# 07 · A <lesson>"))
    return notebook


@pytest.mark.parametrize("script", [None, "plotly.min.js"])
def test_page_shows_outputs_and_has_the_drawing_script_once(executed, script):
    notebook = copy.deepcopy(executed)
    pages.draw_figures(notebook, script)
    page = pages.as_page(notebook)
    assert "42" in page and "<title>07 · A &lt;lesson&gt;</title>" in page
    assert "A live control" in page and "IntSlider(value" not in page
    assert script is None or "%|" not in page  # no progress bar
    assert page.count('class="plotly-graph-div"') == 2
    assert page.count('src="plotly.min.js"') == (0 if script is None else 1)
    assert (len(page) > 3_000_000) == (script is None) and len(page) < 8_000_000


def test_failing_cell_stops_the_execution(tmp_path):
    with pytest.raises(Exception, match="AssertionError"):
        pages.execute(notebook_of(tmp_path, "assert False"))


def test_slider_redraws_the_raster(pair, prompts):
    slider, sentence, figure, _ = l00_figures.draft_length_slider(pair, prompts, value=2, max_new_tokens=12).children
    before = figure.data[0].z
    assert figure.data[0].zmax == 2 and "k = 2" in sentence.value
    slider.value = 4
    assert figure.data[0].zmax == 4 and "k = 4" in sentence.value
    assert figure.data[0].z.shape != before.shape or (figure.data[0].z != before).any()
    assert "same text as regular decoding ✓" in sentence.value


def test_race_counts_identical_rows(pair, prompts):
    race = l00_figures.Race(pair, prompts, max_new_tokens=12).run()
    picture = race._repr_html_()
    assert race.identical == 3 and "3 of 3 rows have identical tokens" in picture
    assert picture.count("<pre") == 2 and LOOKS["accepted"].colour in picture


def test_raster_has_a_cell_per_decode_step(pair, prompts):
    trace = bass.generate(pair, prompts, max_new_tokens=12).trace
    matrix, decode = plots.raster_matrix(trace), trace.steps.query("kind == 'decode'")
    assert matrix.shape == (3, decode.groupby("row").size().max())
    assert matrix.sum().sum() == decode.accepted.sum()


def test_raster_leaves_out_drafts_behind_the_end_of_the_text():
    trace = Trace()
    times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 0.0}
    counts = {"accepted": np.array([5, 2]), "emitted": np.array([3, 3])}
    trace.record_step(step=1, row=np.array([0, 1]), kind="decode", k=5, drafted=5, kv_length=9, **counts, **times)
    assert plots.raster_matrix(trace)[1].tolist() == [3, 2]  # row 0: the third token is EOS


def test_coloured_text_keeps_every_character(pair):
    text = "def f(x):\n    return x < 1 and 'naïve → ☃'\n"
    tokens = pair.tokenizer(text)["input_ids"]
    shown = plots.coloured_text(tokens, ["accepted"] * len(tokens), pair.tokenizer)
    spans = re.findall(r"<span[^>]*>(.*?)</span>", shown, re.DOTALL)
    assert html.unescape("".join(spans)) == text and len(spans) == len(tokens)


def test_projector_sets_the_size_of_all_text(monkeypatch):
    looks.pio.templates["tried"] = copy.deepcopy(looks.pio.templates[looks.TEMPLATE])
    monkeypatch.setattr(looks, "TEMPLATE", "tried")
    assert lab.projector(20).data.count("20px") == 4
    figure = looks.panels(1, 1, ["a panel"], "a title", 300)
    assert figure.layout.template.layout.font.size == 20 and figure.layout.annotations[0].font.size is None
    sized = re.compile(r"font_size=\d|font\w*\"?(=|: )\{[^}]*\"size\"")
    places = [path.name for path in Path(lab.__file__).parent.rglob("*.py") if sized.search(path.read_text())]
    assert places == ["looks.py"]
