"""The site has every page, every lesson and every public name."""

import re
import runpy
import sys
from unittest.mock import MagicMock

import yaml
from documents import ROOT

import bass_core
import bass_lab


class Loader(yaml.SafeLoader):
    """Load mkdocs.yml with its !ENV tags."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def pages(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in nav for page in pages(list(each.values()) if isinstance(each, dict) else each)]


def test_the_navigation_has_every_document_and_lesson_once():
    named = pages(CONFIG["nav"])
    assert len(named) == len(set(named)) and all((ROOT / page).is_file() for page in named)
    globs = ("docs/**/*.md", "kernels/*.md", "notebooks/*.ipynb")
    expected = [path.relative_to(ROOT).as_posix() for pattern in globs for path in ROOT.glob(pattern)]
    assert set(expected) | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= set(named)


def test_configured_files_exist():
    assert all((ROOT / path).is_file() for path in [*CONFIG["hooks"], *CONFIG["extra_css"]])
    assert CONFIG["theme"]["font"] is False  # pages load nothing from a network


def test_the_reference_has_every_public_name_once():
    text = (ROOT / "docs/REFERENCE.md").read_text()
    for library in (bass_core, bass_lab):
        lists = re.findall(rf"^::: {library.__name__}\n    options:\n      members: \[(.*)\]$", text, re.MULTILINE)
        named = [name for each in lists for name in each.split(", ")]
        assert sorted(named) == sorted(set(library.__all__) - {"__version__"})


def test_lessons_link_to_services_by_the_address_of_the_repository(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", MagicMock(Extension=object))  # only `make docs` installs griffe
    add, page, uri = runpy.run_path(str(ROOT / "docs/site.py"))["on_page_content"], MagicMock(), "notebooks/00.ipynb"
    page.file.src_uri = uri
    added = add("", page, {"repo_url": "https://github.com/me/bass"}, None)
    assert f'"https://mybinder.org/v2/gh/me/bass/main?urlpath=lab/tree/{uri}"' in added
    assert f'"https://colab.research.google.com/github/me/bass/blob/main/{uri}"' in added
    assert 'git+https://github.com/me/bass"' in added and add("", page, {"repo_url": ""}, None) == ""
