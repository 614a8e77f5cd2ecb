"""What the commands share: options, and how they end, well or with an error that the user can mend."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

Target = Annotated[str | None, typer.Argument(help="hub name or folder; none: the embedded pair")]
TargetOption = Annotated[str | None, typer.Option("--target", help="hub name or folder; none: the embedded pair")]
Draft = Annotated[str | None, typer.Option(help="hub name or folder; with a target alone: n-gram drafting")]
Dtype = Annotated[str | None, typer.Option(help="of the models, such as bfloat16; none: their own on a GPU")]
Rows = Annotated[list[int], typer.Option(min=1, help="batch sizes; may be repeated")]
NewTokens = Annotated[int, typer.Option(min=1)]
Temperature = Annotated[float, typer.Option(min=0, help="0 = greedy")]
Verification = Annotated[str, typer.Option(help="token, block or coupled")]


def user_errors(*more: type[Exception], one_line: bool = True) -> Callable[[Callable], Callable]:
    """What the user can mend (`more` besides) ends the command with a message and exit status 2, not a traceback."""
    kinds = (ValueError, TypeError, FileNotFoundError, FloatingPointError, MemoryError, *more)

    def decorator(command: Callable) -> Callable:
        @functools.wraps(command)
        def ended(*arguments, **options) -> None:
            import torch

            try:
                command(*arguments, **options)
            except (*kinds, torch.OutOfMemoryError) as error:
                typer.echo(f"error: {' '.join(str(error).split()) if one_line else error}", err=True)
                raise typer.Exit(2) from error

        return ended

    return decorator


def progress(message: str) -> None:
    """A line about what is being done, beside the output."""
    typer.echo(f"  {message}", err=True)


def last_line(document: Any) -> None:
    """One JSON document, for programs that read the output's last line."""
    typer.echo(json.dumps(document, allow_nan=False))
