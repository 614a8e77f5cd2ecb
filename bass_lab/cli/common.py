"""What the commands share: options, and how they end, well or with an error that the user can mend."""

from __future__ import annotations

import errno
import json
import math
import os
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
MOST = 1_000_000  # of rows, tokens, repeats, …
LONGEST = 1000  # characters of an error
EXPECTED = (  # what the user, the system and files can be the reason of; others of torch's are checked for memory
    ValueError, TypeError, OSError, ArithmeticError, MemoryError, EOFError, RecursionError, ImportError, zlib.error
)  # fmt: skip

Target = Annotated[
    str | None, typer.Option("--target", "-t", metavar="NAME", help="hub name or folder; none: the embedded pair")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="NAME",
        help="hub name, folder, ngram, suffix, layers:N or target:int4; of the embedded target also feature_head, "
        "middle_draft or deep_draft; none: its own draft, of others ngram",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="of the models, such as bfloat16; none: their own on a GPU, else float32"),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="such as cpu or cuda:1; none: a GPU if there is one")
]
Quantize = Annotated[
    str | None,
    typer.Option(
        callback=lambda value: kinds(value),
        metavar="KIND",
        help="linear layers in int8 or int4, of both models or one: draft=int4,target=int8",
    ),
]
READ = {"exists": True, "dir_okay": False, "metavar": "FILE"}
REGULAR = READ | {"callback": lambda path: input_file(path)}
WRITTEN = {"metavar": "FILE", "callback": lambda path: output_file(path)}
Prompts = Annotated[str, typer.Option(metavar="SET", help="mini, library or FILE.jsonl")]
MaxBatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="rows decoded at once")]
DraftLength = Annotated[int | None, typer.Option(metavar="N", help="0 = regular decoding; a policy decides if none")]
Rows = Annotated[list[int], typer.Option(min=1, metavar="N", help="batch sizes; may be repeated")]
NewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="per row")]
Temperature = Annotated[float, typer.Option(min=0, metavar="T", help="0 = greedy")]
Verification = Annotated[str, typer.Option(metavar="RULE", help="token, block or coupled")]
Attention = Annotated[str, typer.Option(metavar="PATH", help="auto, ragged, pad, split or eager")]
Compile = Annotated[str, typer.Option(metavar="HOW", help="auto, off, compiled, graphs or compiled+graphs")]
Seed = Annotated[int, typer.Option(metavar="N", help="of what is sampled")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document, and nothing else")]

UsageError = typer.BadParameter.__base__


class CommandLine(TyperGroup):
    """All commands. Here alone errors of the user, of the system and of a model become one line and exit code 2."""

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
    """End at once inside an import: interrupted, it may end in another error, or with a crash in torch's C++ code."""
    calling = frame
    while calling is not None:
        if calling.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        calling = calling.f_back
    signal.default_int_handler(signal_number, frame)


def plain_interrupts() -> None:
    """Ctrl-C as Python has it: asyncio, which executes notebooks, takes care of nothing else."""
    _exchange_handlers(_at_interrupt, signal.default_int_handler)


def _exchange_handlers(old: Callable, new: Callable) -> None:
    """A program that was told to ignore Ctrl-C (one in the background of a script) goes on doing so."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


class Command(TyperCommand):
    """One command, whose numbers are finite and in range. torch's threads are settled before its work, not its help."""

    allow_extra_args = True  # to say here what they should have been

    def invoke(self, ctx: typer.Context) -> Any:
        if ctx.args:
            has_models = any(option.name == "target" for option in self.params)
            how = "; models are named by --target NAME and --draft NAME" if has_models else ""
            raise UsageError(f"Got unexpected argument {ctx.args[0]!r}{how}", ctx)
        for option in self.params:
            value = ctx.params.get(option.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, float) and not math.isfinite(each):
                    raise typer.BadParameter(f"{each} is no finite number", ctx, option)
                if isinstance(each, int) and abs(each) > MOST and option.name != "seed":
                    raise typer.BadParameter(f"{each} is out of range; {MOST:,} is the most", ctx, option)
        from bass_lab.threads import settle_threads

        settle_threads(lambda sentence: typer.echo(sentence, err=True))
        return super().invoke(ctx)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written, rather than left at its default."""
    return context.get_parameter_source(name).name == "COMMANDLINE"


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def one_line(error: Exception) -> str:
    """What went wrong. A kind of error that no check of ours raises is a fault in here, and is called one."""
    if isinstance(error, UsageError):  # of the command line
        usage = error.ctx.get_usage() if error.ctx else ""
        said = error.format_message()
        return " ".join(f"{said if said.endswith(('.', '?')) else said + '.'} {usage}".split())
    if hasattr(error, "ename"):  # of a notebook's cell, whose text is all of the cell
        return f"a cell failed: {error.ename}: {error.evalue}"
    said = " ".join(str(error).split())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} …"
    short_of_memory = "out of memory" in said or "allocate memory" in said  # torch's, a RuntimeError on a CPU
    if isinstance(error, EXPECTED) or short_of_memory:
        return said or type(error).__name__
    return f"a fault in bass: {type(error).__name__}: {said} (a report helps; {DEBUG}=1 shows where it is)"


def input_file(path: Path | str | None) -> Path | str | None:
    """For options: a file that is to be read, if there is one of that name, and not a folder or a device."""
    if path is not None and Path(path).exists() and not Path(path).is_file():
        raise typer.BadParameter(f"{path} is no regular file")
    return path


def output_file(path: Path | None) -> Path | None:
    """For options: a file that can be written, in a folder that can be made."""
    if input_file(path) is not None:
        _check_folder(path.parent)
        if path.exists() and not os.access(path, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


def output_folder(path: Path | None) -> Path | None:
    """For options: a folder that can be made and written into."""
    if path is not None:
        _check_folder(path)
    return path


def _check_folder(path: Path) -> None:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise typer.BadParameter(f"nothing can be written into {there}: {error.strerror}") from error


def models_named(target: str | None, draft: str | None) -> str:
    """What records call the models of these options."""
    if target:
        return f"{target} + {draft or 'n-gram'}"
    return f"embedded pair, {draft}" if draft else "embedded pair"


def kinds(written: str | None) -> str | dict[str, str] | None:
    """What is quantized how, from a command line: one kind, or kinds by role."""
    if written is None or "=" not in written:
        return written
    return dict(part.split("=", 1) if "=" in part else (part, "") for part in written.split(","))


def print_json(document: Any) -> None:
    """One JSON document on one line of standard output; NaN becomes null."""
    typer.echo(json.dumps(_plain(document), allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
