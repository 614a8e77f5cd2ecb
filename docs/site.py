"""Prepare this repository for MkDocs: stage pages, link to the code's host, format docstrings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from griffe import Extension, Module, Object

ROOT = Path(__file__).parents[1]
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/teaching/*.md",
    "docs/*.css",
    "docs/explorer/*",
    "pictures/*.png",
    "kernels/*.md",
    "bass_core/assets/DATA_CARD.md",
    "bass_core/assets/target/*",  # from here on: what docs/explorer/worker.js fetches
    "bass_core/assets/draft/[cm]*",
    "bass_core/assets/unaligned_draft/[cm]*",
    "bass_core/assets/costs/amd-epyc-2-threads-dfc6af2c9333.json",
    "bass_lab/assets/records/costs_h200.json",
    "bass_lab/assets/mini_set.jsonl",
)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?!https?:|#)[^)#\s]+)(?:#[^)\s]*)?\)")
CPU_INDEX = re.search(r"--extra-index-url \S+", (ROOT / "environment.yml").read_text("utf-8"))[0]
RUN = f"""<p>Run this lesson
<a href="https://mybinder.org/v2/gh/{{name}}/main?urlpath=lab/tree/{{lesson}}">in Binder</a>, or
<a href="https://colab.research.google.com/github/{{name}}/blob/main/{{lesson}}">in Colab</a> after this cell:</p>
<pre><code>%pip install -q "bass-hands-on[notebooks] @ git+https://github.com/{{name}}" {CPU_INDEX}</code></pre>
"""
ARGUMENTS = re.compile(r"^(?=[a-z]\w*(?:, [a-z]\w*)*(?: \([^)\n]*\))?(?:, \w+ \([^)\n]*\))*: )", re.MULTILINE)


def on_config(config):
    """Copy all pages of the site into one folder for MkDocs."""
    staged = ROOT / "build/site-source"
    shutil.rmtree(staged, ignore_errors=True)
    for path in (path for pattern in FILES for path in ROOT.glob(pattern)):
        _copy(path, staged / path.relative_to(ROOT))
    for path in (each for pattern in ("*.ipynb", "*.js") for each in (ROOT / "build/lessons").glob(pattern)):
        _copy(path, staged / "notebooks" / path.name)
    explorer = staged / "docs/explorer/index.html"
    explorer.write_text(explorer.read_text("utf-8").replace(".ipynb", ".html"), "utf-8")
    config["docs_dir"] = str(staged)
    return config


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def on_page_markdown(markdown, page, config, files):
    """Point links outside the site to the code's host, or remove the link if there is no host."""

    def linked(match: re.Match) -> str:
        there = (ROOT / page.file.src_uri).parent / match["target"]
        uri = there.resolve().relative_to(ROOT).as_posix()
        if files.get_file_from_path(uri) is not None or not there.exists():  # MkDocs reports missing files
            return match[0]
        return f"[{match['text']}]({config['repo_url']}/blob/main/{uri})" if config["repo_url"] else match["text"]

    return LINK.sub(linked, markdown)


def on_page_content(html, page, config, files):
    """Point links of lessons to pages of the site, remove scripts from a network, and link to Binder and Colab."""
    name = (config["repo_url"] or "").partition("https://github.com/")[2].rstrip("/")
    if name and page.file.src_uri.endswith(".ipynb"):
        html = RUN.format(name=name, lesson=page.file.src_uri) + html
    html = re.sub(r'href="((?:\.\./)*[\w/]+)\.(?:ipynb|md)(#[^"]*)?"', r'href="\1.html\2"', html)
    return re.sub(r'<script\b[^>]*\bsrc="https?:[^>]*>\s*</script>', "", html)


class ArgumentsAsList(Extension):
    """Format the arguments of docstrings (`name: description`) as a list."""

    def on_object(self, *, obj: Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)

    def on_package(self, *, pkg: Module, **kwargs) -> None:
        pkg.docstring = None  # the package docstring describes the code's folders


def as_list(docstring: str) -> str:
    """Return the docstring with the `name: description` lines as a Markdown list."""
    lines = re.sub(r"(?<=[.!?]) (?=[a-z]\w*: )", "\n", docstring)
    return re.sub(r"^(?!- )(.+\n)(?=- )", r"\1\n", ARGUMENTS.sub("- ", lines), flags=re.MULTILINE)
