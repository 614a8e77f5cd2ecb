"""`bass head`: train a feature head for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bass_lab.cli import common

EXAMPLES = common.examples(
    "bass head -t Qwen/Qwen2.5-Coder-7B --dtype bfloat16 \\",
    "    --minutes 240 --output head",
    "bass bench -t Qwen/Qwen2.5-Coder-7B -d head --dtype bfloat16",
)


def head(
    output: Annotated[Path, typer.Option(callback=common.output_folder, metavar="FOLDER", help="for the head")],
    minutes: Annotated[float, typer.Option(min=0, metavar="M", help="time limit for texts and training")],
    target: common.Target = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    texts: Annotated[
        Path | None,
        typer.Option(**common.REGULAR, help="a beginning of a text per line; default: the chat template, or nothing"),
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=1, metavar="N", help="most ids that the head drafts")] = 16384,
    seed: common.Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Train a feature head for a target.

    The target writes texts, and the head learns to predict them. Training ends with the time, or when the tokens per
    step on held-out texts no longer rise. Meant for a GPU: twenty minutes on two CPU cores train too little for a model
    of 135M parameters. --draft FOLDER uses the head. The fields of --json: saved (the folder), draft_ids,
    written_tokens, trained_tokens, written_per_second and trained_per_second, acceptance (by draft position, held out),
    tokens_per_step, memory_gb and seconds.
    """
    from bass_lab.named_pairs import named_pair
    from bass_lab.pair.head import train_head

    lines = None if texts is None else [line for line in texts.read_text(encoding="utf-8").splitlines() if line]
    pair = named_pair(target, None, dtype=dtype, device=device)
    options = {"minutes": minutes, "texts": lines, "vocabulary": vocabulary, "seed": seed}
    found = train_head(pair, output, **options, say=lambda text: typer.echo(text, err=True))
    if as_json:
        common.print_json({"saved": str(output), **found})
    else:
        typer.echo(f"saved {output}: {found['tokens_per_step']:.2f} tokens per step on held-out texts")
