import ast
import copy
import html
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest

import bass_core as bass
from bass_core.loop.trace import Trace
from bass_lab.lessons import l00_figures
from bass_lab.show import live_figures, looks, pages, plots, token_views
from bass_lab.texts.prompt_sets import prompt_set

DRAW = "import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1]))"
CONTROL = """
from tqdm.auto import tqdm
from bass_lab.show import live_figures, looks
list(tqdm(range(3), disable=False))
figure = looks.empty_figure("", "", "", 300)
live_figures.live(lambda k: [f"<b>{k + 1}</b>", figure], k=live_figures.slider(5, 1, 9, "k"))
"""


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
    assert "live controls" in page and "k: 5" in page and "<b>6</b>" in page and "VBox(" not in page
    assert script is None or "%|" not in page  # no progress bar
    assert page.count('class="plotly-graph-div"') == 3
    assert page.count('src="plotly.min.js"') == (0 if script is None else 1)
    assert (len(page) > 3_000_000) == (script is None) and len(page) < 8_000_000


def test_failing_cell_stops_the_execution(tmp_path):
    with pytest.raises(Exception, match="AssertionError"):
        pages.execute(notebook_of(tmp_path, "assert False"))


def test_slider_redraws_the_raster(pair, prompts):
    runs = l00_figures.runs_by_length(pair, prompts, [2, 4], max_new_tokens=12)
    assert list(l00_figures.lengths_table(runs).index) == [0, 2, 4]
    slider, sentence, figure, _ = l00_figures.draft_length_slider(runs, value=2).children
    before = figure.data[0].z
    assert figure.data[0].zmax == 2 and "k = 2" in sentence.value
    slider.value = 4
    assert figure.data[0].zmax == 4 and "k = 4" in sentence.value
    assert figure.data[0].z.shape != before.shape or (figure.data[0].z != before).any()
    assert "same text as regular decoding ✓" in sentence.value
    slider.value = 0
    assert "nothing drafted" in sentence.value and figure.data[0].showscale is False


def test_view_shows_a_busy_sign_while_it_draws():
    signs = []

    def draw(k):
        signs.append("bass-busy" in getattr(view, "_dom_classes", ()))
        return [f"{6 / (k - 3)}"]

    view = None
    view = live_figures.live(draw, k=live_figures.slider(1, 1, 3, "k"))
    slider, text, _ = view.children
    slider.value = 2
    assert text.value == "-6.0" and "bass-busy" not in view._dom_classes
    with pytest.raises(ZeroDivisionError):
        slider.value = 3
    assert signs == [False, True, True] and "bass-busy" not in view._dom_classes


def test_figures_share_one_copy_of_the_drawing_script():
    states = [live_figures.live_figure().get_state() for _ in range(2)]
    assert states[0]["_script"] == states[1]["_script"] != "" and len(states[0]["_esm"]) < 2000


WITHOUT_WIDGETS = """
import sys
sys.modules["ipywidgets"] = None
import bass_core as bass
from bass_lab.lessons import l00_figures, l01_figures, l02_figures, l05_figures, l06_figures, l07_figures, l09_figures
from bass_lab import evaluation
from bass_lab.lessons import l11_figures
from bass_lab.measure.records import shipped
from bass_lab.lessons.l03_explorer import AcceptanceExplorer
from bass_lab.lessons.l04_explorer import LengthExplorer
from bass_lab.show import live_figures
from bass_lab.texts.prompt_sets import prompt_set

pair, prompts = bass.load_pair(dtype="float32"), prompt_set("mini", 2)
explorer = AcceptanceExplorer(pair, batch_size=2, max_new_tokens=6, live=False)
explorer.run(draft_length=3)
explorer.controls["row"].value = 1
runs = l00_figures.runs_by_length(pair, prompts, [2], max_new_tokens=6)
views = [l00_figures.draft_length_slider(runs, value=2), l02_figures.lock_step_explorer(), explorer.widget]
replayed = AcceptanceExplorer.replay(explorer.out.trace, pair.tokenizer)
views += [LengthExplorer(batch=2, repeats=2).widget, replayed.widget]
views += [l09_figures.budget_explorer(evaluation.load(shipped("quality_embedded_cpu")), {})]  # without a value
for view in views:
    shown = []
    live_figures.display = lambda *parts: shown.extend(parts)
    view._ipython_display_()
    print([getattr(part, "data", "") if type(part).__name__ == "HTML" else type(part).__name__ for part in shown])
"""


def test_views_without_ipywidgets_are_plain_figures():
    found = subprocess.run([sys.executable, "-c", WITHOUT_WIDGETS], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    slider, lock_step, explorer, lengths, replayed, budgets = map(ast.literal_eval, found.stdout.splitlines()[-6:])
    assert budgets[1].startswith("problem: ") and budgets.count("Figure") == 1
    assert slider[1] == "draft length: 2" and "<b>k = 2</b>" in slider[2] and slider[3] == "Figure"
    assert lock_step.count("Figure") == 1 and "batch size: 8" in lock_step
    assert "draft length: 3" in explorer and explorer.count("Figure") == 2 and "row: 1" in explorer
    assert any("same text as regular decoding" in part for part in explorer) and replayed.count("Figure") == 2
    assert lengths.count("Figure") == 2 and "batch size: 2" in lengths and any("Fastest" in part for part in lengths)


def test_race_counts_identical_rows(pair, prompts):
    race = l00_figures.Race(pair, prompts, max_new_tokens=12).run()
    picture = race._repr_html_()
    assert race.identical == 3 and "3 of 3 rows have identical tokens" in picture
    assert picture.count("<pre") == 2 and looks.LOOKS["accepted"].colour in picture


def test_raster_has_a_cell_per_decode_step(pair, prompts):
    trace = bass.generate(pair, prompts, max_new_tokens=12).trace
    matrix, decode = plots.raster_matrix(trace), trace.steps.query("kind == 'decode'")
    assert matrix.shape == (3, decode.groupby("row").size().max())
    assert matrix.sum().sum() == decode.accepted.sum()


def test_step_without_drafts_differs_from_a_step_without_acceptance():
    trace = Trace()
    times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 0.0}
    counts = {"drafted": np.array([1, 0, 1]), "accepted": np.array([0, 0, 1]), "emitted": np.array([1, 1, 2])}
    trace.record_step(step=1, row=np.arange(3), kind="decode", k=1, kv_length=9, **counts, **times)
    drafted, regular = plots.acceptance_raster(trace).data
    assert [line[0] for line in drafted.z] == [0, None, 1] and [line[0] for line in regular.text] == ["", "·", ""]
    assert drafted.colorbar.dtick == 1  # the colour bar of k = 1 has the ticks 0 and 1
    _, accepted, none = token_views.policy_figure({"one": trace}).data
    assert list(accepted.y) == [0, 1] and list(none.y) == [0] and accepted.marker.symbol != none.marker.symbol


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
    assert looks.projector(20).data.count("20px") == 4
    figure = looks.panels(1, 1, ["a panel"], "a title", 300)
    assert figure.layout.template.layout.font.size == 20 and figure.layout.annotations[0].font.size is None
    sized = re.compile(r"font_size=\d|font\w*\"?(=|: )\{[^}]*\"size\"")
    places = [path.name for path in Path(looks.__file__).parents[1].rglob("*.py") if sized.search(path.read_text())]
    assert places == ["looks.py"]
