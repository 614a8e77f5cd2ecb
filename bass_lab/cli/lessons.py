"""`bass demo`, `notebooks` and `pictures`: the demonstration, the lessons, the README's pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from bass_lab.cli import common
from bass_lab.cli.progress import Progress

DISTRIBUTION = "bass-hands-on"
NOTEBOOKS = Path("notebooks")
BUILT = Path("build/lessons")  # executed notebooks and pages; `make docs` builds a site from the notebooks
PICTURE = Path("pictures/acceptance_raster.png")  # the README's


def demo(batch_size: common.BatchSize = 8) -> None:
    """Decode with the embedded pair, check the text, time it.

    In the root of the repository, the command also builds the first lesson.
    """
    lesson = next(iter(_shipped()), None)
    if lesson is not None:
        common.output_folder(BUILT)
    typer.echo("Loading the embedded pair …")
    import bass_core as bass
    from bass_lab.measure import benchmark
    from bass_lab.show import terminal
    from bass_lab.texts.prompt_sets import prompt_set

    prompts = prompt_set("mini", batch_size)
    pair = bass.load_pair(dtype="float32")
    typer.echo(f"Decoding {batch_size} Python prompts at once; row 0:\n")
    out = terminal.stream(pair, prompts, max_new_tokens=96)
    typer.echo(f"\n{terminal.summary_line(out.trace)}")

    typer.echo("\nComparing the text with transformers, timing both methods …")
    identical = benchmark.identical_rows(pair, prompts)
    options = {"methods": ("regular", "batched"), "repeats": 5, "max_new_tokens": 64}
    with Progress() as progress:
        comparison = benchmark.compare(pair, prompts, **options, progress=progress)
    page = _first_page(lesson)
    ratio, low, high = comparison.ratio()
    spread = f"95% interval {low:.2f}-{high:.2f}, {options['repeats']} paired runs"
    typer.echo(f"\nbatched speculative over regular decoding: {ratio:.2f}× ({spread})")
    opens = f" · open {page}" if page else ""
    typer.echo(f"identical tokens: {identical}/{batch_size} (greedy, float32) · {ratio:.1f}×{opens}")
    if identical != batch_size:
        raise typer.Exit(1)


def _first_page(lesson: Path | None) -> Path | None:
    if lesson is None or importlib.util.find_spec("nbconvert") is None:
        typer.echo("To build the lessons, run this in the root of the repository, after pip install '.[notebooks]'.")
        return None
    typer.echo(f"Building the first lesson ({lesson}) …")
    return _built([lesson])[0]


def notebooks(
    numbers: Annotated[
        list[str] | None, typer.Argument(metavar="LESSON", help="such as 03; may be repeated; default: all")
    ] = None,
) -> None:
    """Execute lessons into build/lessons.

    The folder receives a notebook and a page per lesson. `make docs` builds a site of all lessons.
    """
    chosen = _lessons(numbers or [])
    common.output_folder(BUILT)
    for page in _built(chosen):
        typer.echo(f"open {page}")


def _built(lessons: list[Path]) -> list[Path]:
    """Execute lessons and return the paths of their pages."""
    import nbformat

    from bass_core.environment import write_whole
    from bass_lab.show import pages

    common.plain_interrupts()
    BUILT.mkdir(parents=True, exist_ok=True)
    pages.write_script(BUILT)
    built = [BUILT / lesson.with_suffix(".html").name for lesson in lessons]
    with Progress() as progress:
        for done, (lesson, page) in enumerate(zip(lessons, built, strict=True)):
            progress(f"executing {lesson.name}", done / len(lessons))
            notebook = pages.execute(lesson)
            pages.draw_figures(notebook, pages.SCRIPT)
            write_whole(BUILT / lesson.name, nbformat.writes(notebook))
            write_whole(page, pages.as_page(notebook))
    return built


def _shipped() -> list[Path]:
    """Return the lessons in order, or no lessons outside the root of this repository."""
    project = Path("pyproject.toml")
    ours = project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(encoding="utf-8")
    return sorted(NOTEBOOKS.glob("*.ipynb")) if ours else []


def _lessons(numbers: list[str]) -> list[Path]:
    """Return the notebooks of these numbers in order (no numbers: all). Raises BadParameter for an unknown number."""
    found = {path.stem.partition("_")[0]: path for path in _shipped()}
    if not found:
        raise typer.BadParameter("this folder has no lessons: run this in the root of the repository")
    wanted = {number.zfill(3 if number[-1:].isalpha() else 2) for number in numbers}  # 4b is 04b
    if unknown := sorted(wanted - found.keys()):
        raise typer.BadParameter(f"no lesson {', '.join(unknown)}; the lessons are {', '.join(found)}")
    return [path for number, path in found.items() if number in wanted or not wanted]


def pictures() -> None:
    """Draw the README's pictures again (needs Chromium).

    The pictures show real runs and a live widget in JupyterLab.
    """
    lesson = _lessons(["03"])[0]
    common.output_folder(PICTURE.parent)
    import pandas as pd

    import bass_core as bass
    from bass_lab import evaluation
    from bass_lab.lessons import l09_figures
    from bass_lab.measure import records
    from bass_lab.show import browser, pages, plots
    from bass_lab.texts.prompt_sets import prompt_set

    out = bass.generate(bass.load_pair(dtype="float32"), prompt_set("mini", 8), max_new_tokens=96)
    pages.picture(plots.acceptance_raster(out.trace), PICTURE)
    explorer = PICTURE.with_name("acceptance_explorer.png")
    browser.picture(lesson, explorer, {"batch_size": 6, "max_new_tokens": 48}, {"width": 1300, "height": 1600})
    record = evaluation.load(records.shipped("quality_embedded_cpu"))
    curve = pd.concat(run.scores(l09_figures.BUDGETS).assign(method=method) for method, run in record.items())
    quality = PICTURE.with_name("quality_within_a_budget.png")
    pages.picture(l09_figures.budget_figure(curve), quality, width=800)
    for path in (PICTURE, explorer, quality):
        typer.echo(f"wrote {path} ({path.stat().st_size // 1000} kB)")
