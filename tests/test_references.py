"""References to code in documents, docstrings, comments and lessons must name existing files, modules and members."""

from pathlib import Path

import pytest
from documents import DOCUMENTS
from references import ROOT, Code, prose

FOREIGN = ("docs/MODELS.md", "docs/SUPPORT.md")  # tables with names of other libraries
PAGES = [name for name in DOCUMENTS if name not in FOREIGN]
PLACES = [*PAGES, "kernels", "bass_core", "bass_lab", "notebooks", "tests", "Makefile", "pyproject.toml"]


@pytest.fixture(scope="module")
def code():
    return Code()


@pytest.mark.ci
@pytest.mark.parametrize("place", PLACES)
def test_references_resolve(code, place):
    files = [
        name for name in code.files if f"{name}/".startswith(f"{place}/") and Path(name).name != Path(__file__).name
    ]
    read = [ROOT / name for name in files if Path(name).suffix in (".py", ".md", ".ipynb") or name == place]
    assert read
    found = {path.relative_to(ROOT): list(code.stale(prose(path), path.parent)) for path in read}
    assert not {str(path): stale for path, stale in found.items() if stale}


@pytest.mark.parametrize(
    "text",
    [
        "as in `bass_core/no_such.py`",
        "[the kernels](kernels/NO_SUCH.md)",
        "run `python -m bass_lab.no_such`",
        "`Session.no_such(row)`",
        "`bass_core.policies.costs.no_such`",
        "`_no_such`, which decides",
    ],
)
def test_stale_reference_is_found(code, text):
    assert len(set(code.stale(text))) == 1
