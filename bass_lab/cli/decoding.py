"""`bass generate`: continue prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bass_lab.cli import common

if TYPE_CHECKING:
    from bass_core.prompts import PromptLike

EXAMPLES = common.examples(
    'bass generate "def add(a, b):" --max-new-tokens 64',
    "bass generate -t Qwen/Qwen2.5-7B-Instruct -d Qwen/Qwen2.5-0.5B-Instruct \\",
    '    --dtype bfloat16 --chat "Why is the sky blue?"',
    "bass generate --input prompts.jsonl --json > rows.json",
)


SAMPLED = ("top_k", "top_p", "seed", "num_return_sequences")  # options without effect at temperature 0


def generate(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="default: standard input")] = None,
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="format each prompt as a user message with the chat template")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--input", **common.REGULAR, help='JSON lines with {"prompt": TEXT} or {"messages": [...]}'),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="per row")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 = greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="0 = off")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="1 = off")] = 1.0,
    seed: common.Seed = 0,
    num_return_sequences: Annotated[int, typer.Option(metavar="N", help="samples per prompt")] = 1,
    draft_length: common.DraftLength = None,
    verification: common.Verification = "token",
    attention: common.Attention = "auto",
    compile: common.Compile = "auto",
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="text that ends a row; may be repeated")
    ] = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="colour tokens by origin (in a terminal, without streaming)")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Continue prompts: one row streams, several print at the end.

    A summary goes to standard error. The fields of --json: prompts; rows, prompt-major, each with prompt and sample
    (from 0), text, tokens (count), logprob (sum in nats), finish_reason (eos, stop or length; null if Ctrl-C
    interrupted the row); summary: counts, rates and seconds.
    """
    if as_json and show_accepted:
        raise ValueError("--json prints no colours: leave out --show-accepted")
    asked = _asked(prompts, source, chat)
    import bass_core as bass
    from bass_lab.named_pairs import named_pair
    from bass_lab.show import terminal

    pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "num_return_sequences": num_return_sequences, "draft_length": draft_length, "verification": verification,
        "attention": attention, "compile": compile, "stop": stop or (),
    }  # fmt: skip
    coloured, interrupted = show_accepted and is_terminal(sys.stdout), False
    if len(asked) * num_return_sequences == 1 and not coloured and not as_json:
        out = terminal.stream(pair, asked, **options)
    else:
        try:
            out = bass.generate(pair, asked, **options, trace="tokens" if coloured else "steps")
        except bass.Interrupted as stopped:  # print the rows so far
            out, interrupted = stopped.generation, True
        if as_json:
            rows, summary = out.to_pandas().to_dict("records"), out.trace.summary()
            common.print_json({"prompts": asked, "rows": rows, "summary": summary})
        else:
            shown = [""] * len(asked) if pair.reads_sources else asked  # an encoder-decoder's text is no continuation
            terminal.print_rows(pair.tokenizer, shown, out, options["stop"], coloured)
    typer.echo(terminal.summary_line(out.trace), err=True)
    if temperature == 0 and (passed_over := [name for name in SAMPLED if common.is_given(context, name)]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in passed_over)
        typer.echo(f"note: without effect at temperature 0: {names}; add --temperature T", err=True)
    if interrupted:
        typer.echo("interrupted: the rows are incomplete", err=True)
        raise typer.Exit(130)


def _asked(prompts: list[str] | None, source: Path | None, chat: bool) -> list[PromptLike]:
    """Return the prompts of the command line, a file or standard input; with --chat as conversations."""
    if prompts and source:
        raise typer.BadParameter("give prompts on the command line or with --input FILE; leave one out")
    if source:
        from bass_lab.texts.prompt_sets import prompts_in

        asked = prompts_in(source)
    else:
        asked = prompts or [_standard_input()]
    return [[{"role": "user", "content": each}] if chat and isinstance(each, str) else each for each in asked]


def _standard_input() -> str:
    """Return standard input as one prompt. Raises BadParameter at a terminal or if standard input is closed."""
    if sys.stdin is None or is_terminal(sys.stdin):
        raise typer.BadParameter("give a prompt, or pipe one into standard input", param_hint="PROMPT")
    return sys.stdin.read()


def is_terminal(stream) -> bool:
    return stream is not None and stream.isatty()
