"""Shared options, error handling and exit codes of the commands."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

DEBUG = "BASS_DEBUG"
MOST = 1_000_000  # maximum of every integer option except --seed
LONGEST = 1000  # characters of an error message
EXPECTED = (  # errors caused by the user, the system or files; other errors are faults, except lack of memory
    ValueError, TypeError, OSError, ArithmeticError, MemoryError, EOFError, RecursionError, ImportError, zlib.error
)  # fmt: skip

Target = Annotated[
    str | None, typer.Option("--target", "-t", metavar="NAME", help="hub name or folder; default: the embedded pair")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="NAME",
        help="hub name, folder, ngram, suffix, layers:N or target:int4; for the embedded target also feature_head, "
        "middle_draft or deep_draft; default: the embedded draft, or ngram for other targets",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="such as bfloat16; default: the checkpoint's on a GPU, float32 on a CPU"),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="such as cpu or cuda:1; default: a GPU if available")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        callback=lambda value: kinds(value),
        metavar="KIND",
        help="quantize linear layers: int8 or int4, or by model: draft=int4,target=int8",
    ),
]
READ = {"exists": True, "dir_okay": False, "metavar": "FILE"}
REGULAR = READ | {"callback": lambda path: input_file(path)}
WRITTEN = {"metavar": "FILE", "callback": lambda path: output_file(path)}
Prompts = Annotated[str, typer.Option(metavar="SET", help="mini, library, edits, questions or FILE.jsonl")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="rows decoded at once")]
DraftLength = Annotated[int | None, typer.Option(metavar="N", help="0 = regular decoding; default: a policy decides")]
BatchSizes = Annotated[list[int], typer.Option(min=1, metavar="N", help="rows decoded at once; may be repeated")]
NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="per row")]
Temperature = Annotated[float, typer.Option(min=0, metavar="T", help="0 = greedy")]
Verification = Annotated[str, typer.Option(metavar="RULE", help="token, block or coupled")]
Attention = Annotated[str, typer.Option(metavar="PATH", help="auto, ragged, pad, split or eager")]
Compile = Annotated[str, typer.Option(metavar="HOW", help="auto, off, compiled, graphs or compiled+graphs")]
Seed = Annotated[int, typer.Option(metavar="N", help="random seed")]
Json = Annotated[bool, typer.Option("--json", help="print only one JSON document")]

UsageError = typer.BadParameter.__base__


class CommandLine(TyperGroup):
    """The group of all commands. Errors become a single line and exit code 2."""

    def make_context(self, *arguments, **options) -> typer.Context:
        for early in (signal.SIG_DFL, signal.default_int_handler):
            _exchange_handlers(early, _at_interrupt)
        with ended_in_one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: typer.Context) -> Any:
        with ended_in_one_line():
            return super().invoke(ctx)


@contextmanager
def ended_in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        is_help = type(error).__name__ == "NoArgsIsHelpError"  # the text of `bass` alone
        nobody_reads = getattr(error, "errno", None) == errno.EPIPE
        if is_help or nobody_reads or isinstance(error, typer.Exit | typer.Abort) or os.environ.get(DEBUG):
            raise
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(2) from error


def _at_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Exit immediately inside an import: an interrupted import can raise other errors or crash in torch's C++ code."""
    calling = frame
    while calling is not None:
        if calling.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        calling = calling.f_back
    signal.default_int_handler(signal_number, frame)


def plain_interrupts() -> None:
    """Restore Python's Ctrl-C handler. asyncio, which executes notebooks, handles only this handler."""
    _exchange_handlers(_at_interrupt, signal.default_int_handler)


def _exchange_handlers(old: Callable, new: Callable) -> None:
    """Replace the handler `old`. Programs that ignore Ctrl-C (in the background of a script) still do."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


class Command(TyperCommand):
    """A command that checks its numbers (finite, in range) and sets torch's threads before it runs."""

    allow_extra_args = True  # for a better error message in `invoke`

    def invoke(self, ctx: typer.Context) -> Any:
        if ctx.args:
            has_models = any(option.name == "target" for option in self.params)
            how = "; name models with --target NAME and --draft NAME" if has_models else ""
            raise UsageError(f"Got unexpected argument {ctx.args[0]!r}{how}", ctx)
        for option in self.params:
            value = ctx.params.get(option.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, float) and not math.isfinite(each):
                    raise typer.BadParameter(f"{each} is not a finite number", ctx, option)
                if isinstance(each, int) and abs(each) > MOST and option.name != "seed":
                    raise typer.BadParameter(f"{each} is out of range; the maximum is {MOST:,}", ctx, option)
        from bass_lab.threads import settle_threads

        settle_threads(lambda sentence: typer.echo(sentence, err=True))
        return super().invoke(ctx)


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if the user wrote the option on the command line."""
    return context.get_parameter_source(name).name == "COMMANDLINE"


def examples(*lines: str) -> str:
    """Format the examples at the end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def one_line(error: Exception) -> str:
    """Return the error as a single line. Unexpected types of errors are reported as a fault in bass."""
    if isinstance(error, UsageError):  # of the command line
        usage = error.ctx.get_usage() if error.ctx else ""
        said = error.format_message()
        return " ".join(f"{said if said.endswith(('.', '?')) else said + '.'} {usage}".split())
    if hasattr(error, "ename"):  # an error in a notebook's cell; str(error) holds the cell and a coloured traceback
        marked = re.search(r"^-+> +\d+ (.*)", re.sub(r"\x1b\[[\d;]*m", "", str(error)), re.MULTILINE)
        where = f" in the line `{marked[1].strip()}`" if marked else ""
        return f"a cell failed: {error.ename}: {error.evalue}{where}"
    said = " ".join(str(error).split())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} …"
    short_of_memory = "out of memory" in said or "allocate memory" in said  # torch raises RuntimeError on a CPU
    if isinstance(error, EXPECTED) or short_of_memory:
        return said or type(error).__name__
    return f"a fault in bass: {type(error).__name__}: {said} (please report it; {DEBUG}=1 shows the traceback)"


def input_file(path: Path | str | None) -> Path | str | None:
    """Check an option's input file: an existing path must be a regular file. Other names pass."""
    if path is not None and Path(path).exists() and not Path(path).is_file():
        raise typer.BadParameter(f"{path} is not a regular file")
    return path


def output_file(path: Path | None) -> Path | None:
    """Check that an option's output file and its folder can be written."""
    if input_file(path) is not None:
        _check_folder(path.parent)
        if path.exists() and not os.access(path, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


def output_folder(path: Path | None) -> Path | None:
    """Check that an option's output folder can be made and written."""
    if path is not None:
        _check_folder(path)
    return path


def _check_folder(path: Path) -> None:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write into {there}: {error.strerror}") from error


def kinds(written: str | None) -> str | dict[str, str] | None:
    """Parse --quantize: a kind for both models, or kinds by role."""
    if written is None or "=" not in written:
        return written
    return dict(part.split("=", 1) if "=" in part else (part, "") for part in written.split(","))


def print_json(document: Any) -> None:
    """Print a JSON document on a single line of standard output. NaN and infinity become null."""
    typer.echo(json.dumps(_plain(document), allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
