"""The lessons run, say what they say, and look as they should; the demo ends as the README promises."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import lesson_runs
import nbformat
import pytest

import bass_core as bass
from bass_lab.lessons import l00_figures
from bass_lab.measure import benchmark
from bass_lab.show import pages, plots
from bass_lab.show.looks import LOOKS
from bass_lab.texts.prompt_sets import prompt_set

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def prompts():
    return prompt_set("mini", 3)


# --- hygiene ---


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_clean(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert path.stat().st_size < 200_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    for cell in code:
        assert not cell.outputs and cell.execution_count is None
        assert not re.search(r"^\s*[%!]|/(home|root|Users)/", cell.source, re.MULTILINE)
    lines = sorted(len(cell.source.splitlines()) for cell in code)
    assert lines[len(lines) // 2] <= 8
    for cell in code:
        uncut = "@triton.jit" in cell.source or "parameters" in cell.metadata.get(
            "tags", []
        )  # papermill fills one cell
        assert len(cell.source.splitlines()) <= (20 if uncut else 12)


# --- execution ---


@pytest.fixture(
    params=[
        pytest.param(lesson_runs.DEFAULTS, id="defaults", marks=pytest.mark.slow),
        pytest.param(lesson_runs.QUICKER, id="less"),
        pytest.param(lesson_runs.SMALLEST, id="least", marks=pytest.mark.slow),
        pytest.param(lesson_runs.HALF, id="bfloat16", marks=pytest.mark.slow),
    ]
)
def folder(request, tmp_path):
    """Copies of all lessons, with these parameters, in a folder of their own."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for path in NOTEBOOKS:
        lesson_runs.parameterized(path.stem, folder, **request.param.get(path.stem, {}))
    return folder


def test_every_cell_of_every_notebook_runs(folder):
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout", "600", "-q"]
    command += ["-n", "2", "--dist", "loadscope"]  # a notebook is a scope
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:]
    ran = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert ran >= sum(cell.cell_type == "code" for path in NOTEBOOKS for cell in nbformat.read(path, 4).cells)


@pytest.fixture(scope="module")
def demo():
    """`bass demo` as a user runs it: its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bass", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_demo_ends_with_the_promised_line(demo):
    last = demo.strip().splitlines()[-1]
    pattern = r"identical tokens: 8/8 \(greedy, float32\) · \d+\.\d× · open build/html/00_start_here\.html"
    assert re.fullmatch(pattern, last)


def test_demo_shows_generated_python_first(demo):
    assert demo.index("def ") < demo.index("Checking the text")


def test_page_draws_its_figures_in_a_browser(demo, tmp_path):
    page = ROOT / "build/html/00_start_here.html"
    command = [lesson_runs.chromium(), *pages.BROWSER_FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert dom.count('class="main-svg"') >= 2  # the raster and the speed chart are drawn
    assert "rows have identical tokens" in dom
    assert "Traceback" not in dom


# --- what the notebooks are made of ---


def test_moving_the_slider_redraws_the_raster(pair, prompts):
    slider, sentence, figure, _ = l00_figures.draft_length_slider(pair, prompts, value=2, max_new_tokens=24).children
    before = figure.data[0].z
    assert figure.data[0].zmax == 2 and "k = 2" in sentence.value
    slider.value = 4
    assert figure.data[0].zmax == 4 and "k = 4" in sentence.value
    assert figure.data[0].z.shape != before.shape or (figure.data[0].z != before).any()
    assert "same text as regular decoding ✓" in sentence.value


def test_race_shows_both_texts_and_counts_identical_rows(pair, prompts):
    race = l00_figures.Race(pair, prompts, max_new_tokens=24).run()
    assert race.identical == 3
    picture = race._repr_html_()
    assert "3 of 3 rows have identical tokens" in picture
    assert picture.count("<pre") == 2 and LOOKS["accepted"].colour in picture


def test_raster_has_a_cell_per_decode_step(pair, prompts):
    trace = bass.generate(pair, prompts, max_new_tokens=24).trace
    matrix = plots.raster_matrix(trace)
    decode = trace.steps.query("kind == 'decode'")
    assert matrix.shape == (3, decode.groupby("row").size().max())
    assert matrix.sum().sum() == decode.accepted.sum()


def test_coloured_text_keeps_every_character(pair):
    text = "def f(x):\n    return x < 1 and 'naïve → ☃'\n"
    tokens = pair.tokenizer(text)["input_ids"]
    shown = plots.coloured_text(tokens, ["accepted"] * len(tokens), pair.tokenizer)
    spans = re.findall(r"<span[^>]*>(.*?)</span>", shown, re.DOTALL)
    assert html.unescape("".join(spans)) == text and len(spans) == len(tokens)


def test_comparison_is_paired_and_checks_the_text(pair, prompts):
    comparison = benchmark.compare(pair, prompts, repeats=3, max_new_tokens=16)
    assert benchmark.identical_rows(pair, prompts, max_new_tokens=16) == 3
    assert len(comparison.runs) == 3 * 3 and set(comparison.runs.repeat) == {1, 2, 3}
    seconds = comparison.runs.pivot(index="repeat", columns="method", values="seconds")
    middle, low, high = comparison.ratio()
    assert middle == pytest.approx((seconds.regular / seconds.batched).median())
    assert low <= middle <= high
    table = comparison.summary().set_index("method")
    assert table.over_regular["regular"] == 1
    assert (comparison.runs.tokens == 3 * 16).all()


def test_index_lists_every_page(tmp_path):
    source = tmp_path / "07_example.ipynb"
    first = "# 07 · A <lesson>\n\n**What is it?**\n\nTakes a minute on 2.5 cores. No GPU.\n\n[next](08_other.ipynb)"
    cells = [nbformat.v4.new_markdown_cell(first), nbformat.v4.new_code_cell("print(6 * 7)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    before = source.read_bytes()
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"png")
    (page,) = pages.build([source], tmp_path / "html", picture=picture)
    assert "42" in page.read_text()
    assert 'href="08_other.html"' in page.read_text() and 'href="index.html"' in page.read_text()
    index = (tmp_path / "html/index.html").read_text()
    assert '<a href="07_example.html"><h2>07 · A &lt;lesson&gt;</h2><p>What is it?</p>' in index
    assert "<small>Takes a minute on 2.5 cores.</small>" in index
    assert '<img src="picture.png"' in index and (tmp_path / "html/picture.png").read_bytes() == b"png"
    assert source.read_bytes() == before


def test_a_page_says_where_a_live_control_was_and_shows_no_progress_bar(tmp_path):
    source = tmp_path / "07_example.ipynb"
    code = "import ipywidgets\nfrom tqdm.auto import tqdm\nlist(tqdm(range(3), disable=False))\nipywidgets.IntSlider(5)"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), source)
    (page,) = pages.build([source], tmp_path / "html")
    text = page.read_text()
    assert "A live control" in text and "IntSlider(value" not in text and "%|" not in text


def test_failing_cell_stops_the_build(tmp_path):
    source = tmp_path / "08_broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")]), source)
    with pytest.raises(Exception, match="AssertionError"):
        pages.build([source], tmp_path / "html")
