"""Print generated text on a terminal: one row as it grows, or all rows coloured by token origin."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from transformers import PreTrainedTokenizerBase

from bass_core.detokenizer import FinalText
from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.options import stop_strings
from bass_core.prompts import PromptLike

ORIGINS = {"accepted": "green", "recovered": "red", "bonus": "cyan", "regular": None}  # colours


def stream(pair: ModelPair, prompts: list[PromptLike], stop: Sequence[str] = (), **options) -> Generation:
    """Generate, print the first row (and its text prompt) as the row grows, and return the Generation."""
    text = FinalText(pair.tokenizer, stop_strings(stop, pair.tokenizer))
    before = "" if pair.reads_sources else _before(prompts[0])
    shown = []

    def on_step(event) -> None:
        if 0 in event.rows:
            begins = "" if shown else before  # printed only after all input checks
            shown.append(text.feed(event.new_tokens[event.rows.index(0)]))
            typer.echo(begins + shown[-1], nl=False)

    out = generate(pair, prompts, stop=stop, on_step=on_step, **options)
    typer.echo(text.feed(ended=True) if shown else before)
    return out


def _before(prompt: PromptLike) -> str:
    """Return the prompt text that the row continues, or "" for a conversation."""
    return prompt if isinstance(prompt, str) else ""


def summary_line(trace: Trace) -> str:
    """Return tokens, steps, tokens per step, α and tokens per second in one line, without missing values."""
    summary = trace.summary()
    seconds = sum(summary[f"{part}_s"] for part in ("prefill", "draft", "verify", "other"))
    rows = f"{summary['rows']} row{'s' * (summary['rows'] != 1)}"
    line = f"{summary['tokens']} tokens for {rows} in {summary['steps']} steps"
    if summary["steps"]:
        line += f"; {summary['tokens_per_step']:.2f} tokens per step and row after the first"
    if summary["acceptance_rate"] >= 0:  # NaN without draft tokens
        line += f" (α = {summary['alpha']:.2f})"
    return line + (f"; {summary['tokens'] / seconds:,.0f} tokens/s" if seconds else "")


def print_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[PromptLike],
    out: Generation,
    stop: Sequence[str],
    coloured: bool,
) -> None:
    """Print every row under a heading, after its text prompt."""
    samples = len(out.texts) // len(prompts)
    for row, text in enumerate(out.texts):
        ended = out.finish_reasons[row] or "interrupted"
        heading = f"row {row}: prompt {row // samples}, sample {row % samples} ({ended})"
        typer.secho(heading, bold=True)
        shown = _coloured(tokenizer, out, row, stop) if coloured else text
        typer.echo(f"{_before(prompts[row // samples])}{shown}\n")
    if coloured:
        typer.echo(" ".join(typer.style(kind, fg=colour) for kind, colour in ORIGINS.items()), err=True)


def _coloured(tokenizer: PreTrainedTokenizerBase, out: Generation, row: int, stop: Sequence[str]) -> str:
    tokens = out.trace.tokens
    tokens = tokens[(tokens.row == row) & (tokens.kind != "rejected")].sort_values("position")
    texts = FinalText(tokenizer, stop_strings(stop, tokenizer)).token_texts(tokens.token, ended=True)
    return "".join(typer.style(text, fg=ORIGINS[kind]) for text, kind in zip(texts, tokens.kind, strict=False))
