"""The lessons run, say what they say, and look as they should; the demo ends as the README promises."""

import ast
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import lesson_runs
import nbformat
import notebook_kernels
import numpy as np
import pytest
import recorded_lessons

import bass_core as bass
from bass_core.trace import Trace
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_claims_are_checked_with_the_parameters_as_they_come(path):
    """Cells assert what they claim if `enough` was measured; a condition that defaults do not meet skips that in
    silence."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    defaults = {}
    exec(next(cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])), {}, defaults)
    for condition in _conditions(code):
        if {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)} <= set(defaults):
            told = ast.unparse(condition)
            assert eval(told, {}, defaults), told


def _conditions(code):
    """Each comparison by which a notebook tells whether to check its claims; tuples are taken apart."""
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assign)]
    flags = [node for node in nodes if ast.unparse(node.targets[0]) in ("own", "usual", "enough", "timed")]
    for each in (part for flag in flags for part in ast.walk(flag.value) if isinstance(part, ast.Compare)):
        if isinstance(each.left, ast.Tuple):
            for left, right in zip(each.left.elts, each.comparators[0].elts, strict=True):
                yield ast.Compare(left, each.ops, [right])
        else:
            yield each


# --- execution ---


@pytest.fixture(
    params=[
        pytest.param(lesson_runs.DEFAULTS, id="defaults", marks=pytest.mark.slow),
        pytest.param(lesson_runs.SMALLEST, id="least"),
        pytest.param(lesson_runs.HALF, id="bfloat16", marks=pytest.mark.slow),
        pytest.param(lesson_runs.QUICKER, id="recorded", marks=pytest.mark.slow),  # steps, as on a GPU
    ]
)
def folder(request, tmp_path):
    """Copies of all lessons, with these parameters, in a folder of their own."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for path in NOTEBOOKS:
        lesson_runs.parameterized(path.stem, folder, **request.param.get(path.stem, {}))
    if request.param is lesson_runs.QUICKER:  # kernels alone, in an interpreter that is asked for before torch comes
        (folder / "07_ragged_attention_kernels.ipynb").unlink()
    return folder


def test_every_cell_of_every_notebook_runs(folder, request, tmp_path):
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout", "600", "-q"]
    command += ["-n", "2", "--dist", "loadscope", "-p", "notebook_kernels"]  # a notebook is a scope
    environment = os.environ | {"PYTHONPATH": str(Path(notebook_kernels.__file__).parent)}
    if request.node.callspec.id == "recorded":
        environment |= recorded_lessons.put(tmp_path / "ipython")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    ran = int(re.search(r"(\d+) passed", done.stdout)[1])
    there = [cell for path in folder.glob("*.ipynb") for cell in nbformat.read(path, 4).cells]
    assert ran >= sum(cell.cell_type == "code" for cell in there)
    assert (tmp_path / "ipython" / recorded_lessons.MARK).exists() == (request.node.callspec.id == "recorded")


@pytest.fixture(scope="module")
def demo():
    """`bass demo` as a user runs it: its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bass", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_demo_ends_with_the_promised_line(demo):
    last = demo.strip().splitlines()[-1]
    pattern = r"identical tokens: 8/8 \(greedy, float32\) · \d+\.\d× · open build/lessons/00_start_here\.html"
    assert re.fullmatch(pattern, last)


@pytest.mark.slow
def test_demo_shows_generated_python_first(demo):
    assert demo.index("def ") < demo.index("Checking the text")


@pytest.mark.slow
def test_page_draws_its_figures_in_a_browser(demo, tmp_path):
    page = ROOT / "build/lessons/00_start_here.html"
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


def test_raster_has_no_draft_that_was_accepted_behind_the_end_of_the_text():
    trace = Trace()
    times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 0.0}
    counts = {"accepted": np.array([5, 2]), "emitted": np.array([3, 3])}
    trace.record_step(step=1, row=np.array([0, 1]), kind="decode", k=5, drafted=5, kv_length=9, **counts, **times)
    assert plots.raster_matrix(trace)[1].tolist() == [3, 2]  # row 0: the third is EOS


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


def notebook_of(folder: Path, *sources: str) -> Path:
    path = folder / "07_example.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)
    return path


def test_executing_leaves_the_notebook_as_it_was_and_a_page_is_called_by_its_heading(tmp_path):
    source = notebook_of(tmp_path, "print(6 * 7)")
    before = source.read_bytes()
    notebook = pages.execute(source)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("**What?**\n\n# 07 · A <lesson>"))
    page = pages.as_page(notebook)
    assert "42" in page and "<title>07 · A &lt;lesson&gt;</title>" in page
    assert "white-space: pre-wrap" in page and "break-all" not in page  # long lines break between words
    assert source.read_bytes() == before


def test_a_page_says_where_a_live_control_was_and_shows_no_progress_bar(tmp_path):
    code = "import ipywidgets\nfrom tqdm.auto import tqdm\nlist(tqdm(range(3), disable=False))\nipywidgets.IntSlider(5)"
    text = pages.as_page(pages.execute(notebook_of(tmp_path, code)))
    assert "A live control" in text and "IntSlider(value" not in text and "%|" not in text


@pytest.mark.parametrize("script", [None, "plotly.min.js"])
def test_the_script_that_draws_figures_is_in_a_page_once_or_beside_it(tmp_path, script):
    draw = "import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1]))"
    notebook = pages.execute(notebook_of(tmp_path, draw, draw))
    pages.draw_figures(notebook, script)
    page = pages.as_page(notebook)
    assert page.count('class="plotly-graph-div"') == 2
    assert page.count('src="plotly.min.js"') == (0 if script is None else 1)
    assert (len(page) > 3_000_000) == (script is None) and len(page) < 8_000_000


def test_failing_cell_stops_the_execution(tmp_path):
    with pytest.raises(Exception, match="AssertionError"):
        pages.execute(notebook_of(tmp_path, "assert False"))
