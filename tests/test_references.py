"""What the README, docstrings, comments and lessons say of the code exists: files, modules, classes, their members."""

from pathlib import Path

import pytest
from documents import DOCUMENTS
from references import ROOT, Code, prose

FOREIGN = ("docs/MODELS.md", "docs/SUPPORT.md")  # tables of what transformers and others call things
PAGES = [name for name in DOCUMENTS if name not in FOREIGN]
PLACES = [*PAGES, "kernels", "bass_core", "bass_lab", "notebooks", "tests", "Makefile", "pyproject.toml"]


@pytest.fixture(scope="module")
def code():
    return Code()


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
        "in `bass_core/verification.py`, `verification.py`, tests/law/test_enumeration.py, tests/*/test_gpu*.py",
        "03_acceptance_explorer.ipynb, and notebooks/03_acceptance_explorer.ipynb.",
        "[the kernels](kernels/README.md) and [a paper](https://arxiv.org/abs/2404.15778)",
        "`python -m bass_lab.pair.training`, PYTHONPATH=.:kernels python -m bench, and python -m pytest",
        "`Session.step`, `Session.step()`, `verification.token`, `bass_core.verification.token`",
        "`bass_core.policies.costs.CostModel`, `CostModel.load`, `costs.CostModel.load`",
        "bass.generate(pair), and lab.verify",
        "`Trace.steps`, `trace.steps.step`, a field; `ModelPair.target`",
        "`describe_environment`, `max_new_tokens`: functions and arguments",
        "`torch.no_such`, `policy.no_such`, `model.no_such`, `no_such.thing`, `x`, `numpy`, `__no_such__`",
        "build/site/index.html, runs/latency, `<kind>_<device>.jsonl`, /usr/lib/python",
    ],
)
def test_what_exists_or_is_not_ours_is_not_stale(code, text):
    assert list(code.stale(text)) == []


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ("as in `bass_core/no_such.py`", "bass_core/no_such.py"),
        ("as in no_such.py.", "no_such.py"),
        ("(tests/no_such/test_enumeration.py)", "tests/no_such/test_enumeration.py"),
        ("the folder `bass_core/no_such/`", "bass_core/no_such/"),
        ("lesson 99_no_such.ipynb", "99_no_such.ipynb"),
        ("[the kernels](kernels/NO_SUCH.md)", "kernels/NO_SUCH.md"),
        ("run `python -m bass_lab.no_such`", "bass_lab.no_such"),
        ("`Session.no_such`", "Session.no_such"),
        ("`Session.no_such(row)`", "Session.no_such"),
        ("`verification.no_such`", "verification.no_such"),
        ("`bass_core.policies.costs.no_such`", "bass_core.policies.costs.no_such"),
        ("`costs.CostModel.no_such`", "costs.CostModel.no_such"),
        ("call bass.no_such(pair)", "bass.no_such"),
        ("`trace.no_such`", "trace.no_such"),
        ("`_no_such`, which decides", "_no_such"),
        ("`no_such_rule`, which decides", "no_such_rule"),
    ],
)
def test_what_does_not_exist_is_stale(code, text, stale):
    assert set(code.stale(text)) == {stale}


def test_prose_of_a_module_is_its_docstrings_and_comments(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""First."""\n\n\ndef f():\n    """Second."""\n    return "no prose"  # third\n')
    assert sorted(prose(path).splitlines()) == [" # third", "First.", "Second."]
