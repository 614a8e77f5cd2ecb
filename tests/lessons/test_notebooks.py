"""Notebooks are committed clean, every cell runs, and their claims are checked. The demo works."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import lesson_runs
import nbformat
import notebook_kernels
import pytest
import recorded_lessons

from bass_lab.show import pages

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def has_parameters(cell):
    return "parameters" in cell.metadata.get("tags", [])


@every_notebook
def test_notebook_is_committed_clean(path):
    notebook, code = nbformat.read(path, as_version=4), code_cells(path)
    assert path.stat().st_size < 200_000
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert sum(map(has_parameters, code)) == 1
    for cell in code:
        assert not cell.outputs and cell.execution_count is None
        assert not re.search(r"^\s*[%!]|/(home|root|Users)/", cell.source, re.MULTILINE)
        whole = "@triton.jit" in cell.source or has_parameters(cell)
        assert len(cell.source.splitlines()) <= (20 if whole else 12)
    lines = sorted(len(cell.source.splitlines()) for cell in code)
    assert lines[len(lines) // 2] <= 8


@every_notebook
def test_no_cell_rebinds_an_imported_name(path):
    """Otherwise a second run of the cell in the same kernel fails."""
    nodes = [node for cell in code_cells(path) for node in ast.walk(ast.parse(cell.source))]
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    local = {name for node in nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target)}
    names = [node for node in nodes if isinstance(node, ast.Name) and node not in local]
    stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    assert not stored & {alias.asname or alias.name for alias in imports}


@every_notebook
def test_default_parameters_check_every_claim(path):
    """Cells assert a claim only if the parameters meet a condition. The defaults must meet all conditions."""
    code, defaults = code_cells(path), {}
    exec(next(cell.source for cell in code if has_parameters(cell)), {}, defaults)
    for condition in _conditions(code):
        if {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)} <= set(defaults):
            assert eval(ast.unparse(condition), {}, defaults), ast.unparse(condition)


def _conditions(code):
    """Yield the conditions of claims, one per element of compared tuples."""
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assign)]
    flags = [node for node in nodes if ast.unparse(node.targets[0]) in ("own", "usual", "enough", "timed")]
    for each in (part for flag in flags for part in ast.walk(flag.value) if isinstance(part, ast.Compare)):
        if isinstance(each.left, ast.Tuple):
            for left, right in zip(each.left.elts, each.comparators[0].elts, strict=True):
                yield ast.Compare(left, each.ops, [right])
        else:
            yield each


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(lesson_runs.SMALLEST, id="smallest"),
        pytest.param(lesson_runs.DEFAULTS, id="defaults", marks=pytest.mark.slow),
        pytest.param(lesson_runs.HALF, id="bfloat16", marks=pytest.mark.slow),
        pytest.param(lesson_runs.TWICE, id="twice", marks=pytest.mark.slow),
    ],
)
@every_notebook
def test_every_cell_runs(path, settings, tmp_path):
    notebook = lesson_runs.parameterized(path.stem, tmp_path, **settings.get(path.stem, {}))
    if settings is lesson_runs.TWICE:  # each cell twice at once, and again after the last cell
        again = [cell for cell in notebook.cells if "parameters" not in str(cell.metadata)]
        notebook.cells = [cell for cell in notebook.cells for _ in range(2)] + again
    if settings == lesson_runs.SMALLEST and path.stem in lesson_runs.PREPARED:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(lesson_runs.PREPARED[path.stem]))
    interpreted = path.stem.startswith("07")  # Triton's interpreter must be selected before the import
    assert notebook_kernels.run_cells(notebook, tmp_path, fresh=interpreted) > 5


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if not path.stem.startswith("07")], ids=lambda p: p.stem)
def test_every_cell_runs_with_recorded_steps(path, tmp_path):
    notebook = lesson_runs.parameterized(path.stem, tmp_path, **lesson_runs.QUICKER.get(path.stem, {}))
    notebook_kernels.run_cells(notebook, tmp_path, **recorded_lessons.put(tmp_path / "ipython"))
    if path.stem.startswith("00"):
        assert (tmp_path / "ipython" / recorded_lessons.MARK).exists()


def test_failing_cell_fails_with_its_traceback(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ("x = 1", "assert x == 2")]
    with pytest.raises(AssertionError, match="assert x == 2"):
        notebook_kernels.run_cells(nbformat.v4.new_notebook(cells=cells), tmp_path)


@pytest.mark.ci
def test_demo_writes_a_page_that_draws_its_figures(tmp_path):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bass", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    last = r"identical tokens: 8/8 \(greedy, float32\) · \d+\.\d× · open build/lessons/00_start_here\.html"
    assert re.fullmatch(last, done.stdout.strip().splitlines()[-1])
    assert done.stdout.index("def ") < done.stdout.index("Comparing the text")
    page = ROOT / "build/lessons/00_start_here.html"
    command = [lesson_runs.chromium(), *pages.BROWSER_FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert dom.count('class="main-svg"') >= 2  # the raster and the speed chart
    assert "rows have identical tokens" in dom and "Traceback" not in dom
