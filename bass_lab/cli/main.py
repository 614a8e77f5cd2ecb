"""The `bass` command and its subcommands."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Annotated

import typer

from bass_lab.cli import checks, common, decoding, lessons, load, measuring, serving, sweep, training

app = typer.Typer(
    cls=common.CommandLine,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: more text in 80 columns, and the same output in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)
command = functools.partial(app.command, cls=common.Command)

command()(lessons.demo)
command(epilog=decoding.EXAMPLES)(decoding.generate)
command(epilog=serving.EXAMPLES)(serving.serve)
command()(checks.doctor)
command(epilog=checks.EXAMPLES)(checks.verify)
command(epilog=measuring.BENCH_EXAMPLES)(measuring.bench)
command()(measuring.calibrate)
command()(measuring.record)
command("eval")(measuring.evaluate)
command(epilog=load.EXAMPLES)(load.load)
command(epilog=training.EXAMPLES)(training.head)
command(epilog=sweep.EXAMPLES)(sweep.sweep)
command()(lessons.notebooks)
command()(lessons.pictures)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bass {importlib.metadata.version('bass-hands-on')}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Batched speculative decoding, hands on.

    --target and --draft select models; the default is the embedded pair. With --json a command prints only one JSON
    document. Progress and errors go to standard error. Exit code 1: a check failed; 2: invalid options or input. With
    BASS_DEBUG=1 an error prints its traceback.
    """


if __name__ == "__main__":
    app(prog_name="bass")
