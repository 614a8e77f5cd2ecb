"""`bass sweep`: what a sweep says to the person who started it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bass_lab.sweep import store

if TYPE_CHECKING:
    import pandas as pd

    from bass_lab.sweep.executors import LocalExecutor, RayExecutor
    from bass_lab.sweep.planning import Plan

SHOWN = 3  # failures told in full; the others lie in the folder
LINES = 40  # of each


class Executor(StrEnum):
    local = "local"
    ray = "ray"


def sweep(
    notebook: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a notebook with a `parameters` cell")],
    out: Annotated[Path, typer.Option(help="folder of the results; a second start goes on there")],
    values: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME=VALUE,…", help="values to combine; may be repeated"),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="CSV or YAML file, a run's parameters in each row")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; keep 1 where runs measure time")] = 1,
    timeout: Annotated[float | None, typer.Option(min=0.1, help="seconds for each run; none: no limit")] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="more attempts for a run whose process died or did not start")
    ] = 2,
    executor: Annotated[Executor, typer.Option(help="where runs take place")] = Executor.local,
    ray_address: Annotated[
        str | None, typer.Option(help="of a Ray cluster; none: one on this machine, for the sweep")
    ] = None,
    gpus_per_run: Annotated[int, typer.Option(min=0, help="GPUs that a run has to itself; 0: it sees all")] = 0,
    html: Annotated[bool, typer.Option("--html", help="write each executed notebook as a page, too")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the runs, and do nothing")] = False,
) -> None:
    """Run a notebook for every combination of parameters, each once: what is done stays done.

    Names and values are checked first. An interrupted or killed sweep goes on where it was when it is started again.
    """
    try:
        failed = _sweep(
            notebook,
            out,
            values or [],
            rows,
            jobs,
            timeout,
            retries,
            executor,
            ray_address,
            gpus_per_run,
            html,
            dry_run,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if failed:
        raise typer.Exit(1)


def _sweep(
    notebook: Path, out: Path, values: list[str], rows: Path | None, jobs: int, timeout: float | None, retries: int,
    executor: Executor, ray_address: str | None, gpus_per_run: int, html: bool, dry_run: bool,
) -> bool:  # fmt: skip
    """Whether a run has no result."""
    from bass_lab.sweep import planning as sweeping
    from bass_lab.sweep import run_pages

    if ray_address and executor is not Executor.ray:
        raise ValueError(f"--ray-address {ray_address} needs --executor ray")
    plan = sweeping.plan(notebook, values, rows)
    if dry_run:
        table = plan.table(lambda key: (out / key / store.MARK).exists())
        typer.echo(f"{table.to_string(index=False)}\n{_counts(table)}; nothing was run")
        return False
    if not plan.records:
        typer.echo(f"note: {notebook.name} has no parameter `output`, so it leaves executed notebooks and no records")
    place = _executor(executor, jobs, gpus_per_run, ray_address)
    progress = _Progress(plan)
    try:
        found = sweeping.run(plan, out, place, timeout=timeout, retries=retries, progress=progress)
    except sweeping.SweepStopped as stop:
        progress.close()
        typer.echo(f"stopped: {stop}", err=True)
        return True
    except KeyboardInterrupt:
        progress.close()
        typer.echo(f"interrupted: {progress.done} of {len(plan.runs)} runs are done; {sweeping.AGAIN}", err=True)
        raise typer.Exit(130) from None
    progress.close()
    for page in run_pages.build(out) if html else ():
        typer.echo(f"wrote {page}")
    _report(found, plan, out)
    return bool((~found.status.isin(sweeping.FINISHED)).any())


def _executor(executor: Executor, jobs: int, gpus: int, address: str | None) -> LocalExecutor | RayExecutor:
    from bass_lab.sweep.executors import LocalExecutor, RayExecutor

    return RayExecutor(jobs, gpus, address) if executor is Executor.ray else LocalExecutor(jobs, gpus)


class _Progress:
    """A bar in a terminal, a line per run elsewhere."""

    def __init__(self, plan: Plan):
        from tqdm import tqdm

        self._plan, self.done = plan, 0
        self._bar = tqdm(total=len(plan.runs), unit="run", disable=None, smoothing=0)
        self._ended = 0

    def __call__(self, key: str, line: dict) -> None:
        from bass_lab.sweep import planning as sweeping

        self._ended += 1
        self._bar.update()
        good = line["status"] in sweeping.FINISHED
        self.done += good
        said = ", ".join(
            f"{name}={value}" for name, value in sweeping.shown(self._plan.runs[key], self._plan.varied).items()
        )
        if not good:
            self._bar.write(f"{line['status']}: {said or key}: {line['error']}")
        elif self._bar.disable and line["status"] == "done":
            typer.echo(f"{self._ended} of {len(self._plan.runs)}: {said or key} ({line['seconds']:.1f} s)", err=True)

    def close(self) -> None:
        self._bar.close()


def _report(found: pd.DataFrame, plan: Plan, out: Path) -> None:
    """What went wrong, then the summary."""
    from bass_lab.sweep import planning as sweeping

    failures = found[~found.status.isin(sweeping.FINISHED)]
    for line in failures.head(SHOWN).to_dict("records"):
        said = ", ".join(f"{name}={line[name]}" for name in plan.varied)
        details = line["details"].rstrip().splitlines()[-LINES:]
        typer.echo("\n".join([f"\n=== {line['run']} ({said}) {line['status']}: {line['error']}", *details]))
        typer.echo(f"=== kept in {line['kept']}")
    if len(failures) > SHOWN:
        typer.echo(f"=== {len(failures) - SHOWN} more failures lie in {out / store.FAILED}")
    columns = ["run", *plan.varied, "status", *(name for name in ("seconds", "attempts", "error") if name in found)]
    table = found[columns].copy()
    if "error" in table:
        table["error"] = table.error.fillna("").str.slice(0, 60)
    for name, digits in (("seconds", 1), ("attempts", 0)):
        if name in table:
            table[name] = table[name].map(lambda value, digits=digits: "" if value != value else f"{value:.{digits}f}")
    typer.echo(f"\n{table.to_string(index=False)}\n{_counts(table)} in {out}")
    if len(failures) < len(found):
        typer.echo(f'read it: bass_core.load_records("{out}"), or notebooks/12_sweep_report.ipynb')


def _counts(table: pd.DataFrame) -> str:
    return f"{len(table)} runs: " + ", ".join(
        f"{count} {status}" for status, count in table.status.value_counts().items()
    )
