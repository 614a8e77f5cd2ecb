"""`bass sweep`: run a notebook for all combinations of parameters, and report the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bass_lab.cli import common
from bass_lab.sweep import store
from bass_lab.sweep.run_process import NOTEBOOK

if TYPE_CHECKING:
    import pandas as pd

    from bass_lab.sweep.planning import SweepPlan

SHOWN = 3  # failures printed in full
LINES = 40  # lines of each failure
EXAMPLES = common.examples(
    "bass sweep notebooks/08_latency_and_utilization.ipynb \\",
    "    -p batch_size=1,2,4,8 -p draft_length=auto,4,7 --output runs/latency",
)


def sweep(
    notebook: Annotated[
        Path, typer.Argument(**common.REGULAR | {"metavar": "NOTEBOOK"}, help="a notebook with a `parameters` cell")
    ],
    output: Annotated[
        Path,
        typer.Option(callback=common.output_folder, metavar="FOLDER", help="folder of the results; repeat to resume"),
    ],
    values: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME=VALUE,…", help="values to combine; may be repeated"),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(**common.REGULAR, help="CSV or YAML with the parameters of one run per row"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="concurrent runs; keep 1 if runs measure time")] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="seconds per run; default: no limit")
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="more attempts if a run's process died or did not start")
    ] = 2,
    executor: Annotated[Literal["local", "ray"], typer.Option(help="executor of the runs")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="address of a Ray cluster; default: a new local cluster")
    ] = None,
    gpus_per_run: Annotated[
        int, typer.Option(min=0, metavar="N", help="GPUs reserved for each run; 0: every run sees all GPUs")
    ] = 0,
    html: Annotated[bool, typer.Option("--html", help="also write executed notebooks as pages")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show the runs")] = False,
) -> None:
    """Run a notebook for all combinations of parameters.

    The command checks names and values first, and lists the valid names after an unknown name. Finished runs are kept:
    start an interrupted or killed sweep again to resume it.
    """
    from bass_lab.show import tables
    from bass_lab.sweep import planning
    from bass_lab.sweep.executors import LocalExecutor, RayExecutor

    if ray_address and executor != "ray":
        raise ValueError(f"--ray-address {ray_address} needs --executor ray")
    try:
        plan = planning.plan(notebook, values or [], rows)
    except ValueError as error:  # the message lists valid values on separate lines
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if dry_run:
        table = plan.table(output)
        tables.show_table(table.to_dict("records"))
        typer.echo(f"{_counts(table)}; nothing was run")
        return
    if not plan.records:
        typer.echo(f"note: {notebook.name} has no parameter `output`: runs leave executed notebooks, but no records")
    ray = executor == "ray"
    place = RayExecutor(jobs, gpus_per_run, ray_address) if ray else LocalExecutor(jobs, gpus_per_run)
    progress = _Progress(plan)
    try:
        with progress.bar:
            found = planning.run(plan, output, place, timeout=timeout, retries=retries, progress=progress)
    except planning.SweepStopped as stop:
        typer.echo(f"stopped: {stop}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {progress.done} of {len(plan.runs)} runs are done; {planning.AGAIN}", err=True)
        raise typer.Exit(130) from None
    for page in _pages(output) if html else ():
        typer.echo(f"wrote {page}")
    failures = found[~found.status.isin(planning.FINISHED)]
    _tell_failures(failures, plan, output)
    _tell_all(found, plan, output)
    if len(failures) < len(found):
        typer.echo(f'to read the results: bass_lab.load_records("{output}"), or notebooks/12_sweep_report.ipynb')
    if len(failures):
        raise typer.Exit(1)


class _Progress:
    """Show a bar in a terminal, otherwise a line per run."""

    def __init__(self, plan: SweepPlan):
        from tqdm import tqdm

        self._plan, self.done = plan, 0
        self.bar = tqdm(total=len(plan.runs), unit="run", disable=None, smoothing=0)
        self._ended = 0

    def __call__(self, key: str, line: dict) -> None:
        from bass_lab.sweep import planning

        self._ended += 1
        self.bar.update()
        said = _named(self._plan.shown(key)) or key
        if line["status"] not in planning.FINISHED:
            self.bar.write(f"{line['status']}: {said}: {line['error']}")
            return
        self.done += 1
        if self.bar.disable and line["status"] == "done":
            typer.echo(f"{self._ended} of {len(self._plan.runs)}: {said} ({line['seconds']:.1f} s)", err=True)


def _tell_failures(failures: pd.DataFrame, plan: SweepPlan, out: Path) -> None:
    for line in failures.head(SHOWN).to_dict("records"):
        details = line["details"].rstrip().splitlines()[-LINES:]
        said = _named(plan.shown(line["run"]))
        typer.echo("\n".join([f"\n=== {line['run']} ({said}) {line['status']}: {line['error']}", *details]))
        typer.echo(f"=== kept in {line['kept']}")
    if len(failures) > SHOWN:
        typer.echo(f"=== {len(failures) - SHOWN} more failures are in {out / store.FAILED}")


def _tell_all(found: pd.DataFrame, plan: SweepPlan, out: Path) -> None:
    from bass_lab.show import tables

    table = found.reindex(columns=["run", *plan.varied, "status", "seconds", "attempts", "error"])
    table["seconds"] = table.seconds.map("{:.1f}".format, na_action="ignore")
    table["attempts"] = table.attempts.map("{:.0f}".format, na_action="ignore")
    typer.echo()
    tables.show_table(table.to_dict("records"))
    typer.echo(f"{_counts(table)} in {out}")


def _named(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in parameters.items())


def _counts(table: pd.DataFrame) -> str:
    return f"{len(table)} runs: " + ", ".join(
        f"{count} {status}" for status, count in table.status.value_counts().items()
    )


def _pages(folder: Path) -> list[Path]:
    """Write KEY/notebook.html for every finished run without a page. The pages share a script and work offline."""
    import nbformat

    from bass_core.environment import write_whole
    from bass_lab.show import pages

    written = []
    for run in store.finished_runs(folder):
        source = folder / run.key / NOTEBOOK
        page = source.with_suffix(".html")
        if page.exists() or not source.exists():
            continue
        notebook = nbformat.read(source, as_version=4)
        pages.draw_figures(notebook, f"../{pages.SCRIPT}")
        write_whole(page, pages.as_page(notebook, run.key))
        written.append(page)
    if written:
        pages.write_script(folder)
    return written
