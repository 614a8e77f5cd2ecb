"""The `bass` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Batched speculative decoding, hands on.")
PAGES = Path("build/html")


@app.callback()
def main() -> None:
    """Batched speculative decoding, hands on."""


@app.command()
def demo(rows: Annotated[int, typer.Option(min=1, help="prompts decoded at once")] = 8) -> None:
    """Generate with the embedded pair, check the text, time it, and build the first lesson."""
    lesson = _lessons()[0]
    typer.echo("Loading the embedded pair …")
    import bass_core as bass
    from bass_core import benchmark, corpus, pages

    pair = bass.load_pair(dtype="float32")
    prompts = corpus.function_prompts(rows, seed=0)
    typer.echo(f"Decoding {rows} Python prompts at once; row 0:\n")
    _stream_first_row(pair, prompts)

    typer.echo("\nChecking the text against transformers, timing both ways …")
    identical = benchmark.identical_rows(pair, prompts)
    comparison = benchmark.compare(
        pair, prompts, methods=("regular", "speculative"), progress=lambda message: typer.echo(f"  {message}")
    )
    typer.echo(f"Building the first lesson ({lesson}) …")
    (page,) = pages.build([lesson], PAGES, lambda message: typer.echo(f"  {message}"))
    ratio, low, high = comparison.ratio()
    typer.echo(f"\nspeculative over regular decoding: {ratio:.2f}× (95% interval {low:.2f}-{high:.2f}, 7 paired runs)")
    typer.echo(f"identical tokens: {identical}/{rows} (greedy, float32) · {ratio:.1f}× · open {page}")
    if identical != rows:
        raise typer.Exit(1)


def _lessons() -> list[Path]:
    """The notebooks, in order. Raises BadParameter outside the repository."""
    found = sorted(Path("notebooks").glob("*.ipynb"))
    if not found:
        raise typer.BadParameter("there is no notebooks/ here: run this in the root of the repository")
    return found


def _stream_first_row(pair, prompts: list[str]) -> None:
    """Print row 0 as it grows."""
    import bass_core as bass

    typer.echo(prompts[0], nl=False)
    tokens, shown = [], ""

    def on_step(event) -> None:
        nonlocal shown
        if 0 in event.rows:
            tokens.extend(event.new_tokens[event.rows.index(0)])
            text = pair.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("�")  # half a character waits
            typer.echo(text[len(shown) :], nl=False)
            shown = text

    out = bass.generate(pair, prompts, max_new_tokens=96, on_step=on_step)
    summary = out.trace.summary()
    typer.echo(
        f"\n\n{summary['tokens']} tokens for {summary['rows']} rows in {summary['steps']} steps; "
        f"{summary['tokens_per_step']:.2f} tokens per step and row (α = {summary['alpha']:.2f})"
    )


@app.command()
def bench(
    rows: Annotated[list[int], typer.Option(help="batch sizes")] = [1, 8],  # noqa: B006 (typer reads it, nobody writes)
    repeats: Annotated[int, typer.Option(min=1, help="interleaved repeats")] = 7,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    draft_length: Annotated[int, typer.Option(min=1)] = 5,
    record: Annotated[Path | None, typer.Option(help="append the results to this file of JSON lines")] = None,
) -> None:
    """Time regular and speculative decoding of the embedded pair on both prompt sets; the last line is JSON."""
    import bass_core as bass
    from bass_core import benchmark, corpus

    pair, exact_pair = bass.load_pair(), bass.load_pair(dtype="float32")
    sets = {"functions": lambda n: corpus.function_prompts(n, seed=0), "library": corpus.library_prompts}
    results = []
    for name, prompts in sets.items():
        for batch in rows:
            typer.echo(f"{name}, batch {batch}", err=True)
            comparison = benchmark.compare(
                pair, prompts(batch), repeats=repeats, temperature=temperature, draft_length=draft_length
            )
            table = comparison.summary()
            typer.echo(f"\n{name} prompts, batch {batch}\n{table.round(3).to_string(index=False)}")
            identical = benchmark.identical_rows(exact_pair, prompts(batch), draft_length=draft_length)
            typer.echo(f"identical to transformers, greedy, float32: {identical} of {batch} rows")
            exactness = {"dtype": "float32", "identical": identical, "rows": batch}
            common = {"prompt_set": name, "batch": batch, "exactness": exactness}
            results += [common | line for line in table.astype(object).where(table.notna(), None).to_dict("records")]
    common = {"models": "embedded pair", "dtype": str(pair.target.dtype), "k": draft_length, "repeats": repeats}
    document = benchmark.environment() | common | {"temperature": temperature, "results": results}
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps(document, allow_nan=False) + "\n")
    typer.echo(json.dumps(document, allow_nan=False))


@app.command()
def notebooks() -> None:
    """Execute every lesson and write it to build/html, with an index."""
    from bass_core import pages

    built = pages.build(_lessons(), PAGES, lambda message: typer.echo(message))
    typer.echo(f"open {PAGES / 'index.html'} ({len(built)} pages)")


@app.command()
def pictures() -> None:
    """Draw the README's picture from a real run of the embedded pair (needs Chromium)."""
    import bass_core as bass
    from bass_core import corpus, pages, plots

    out = bass.generate(bass.load_pair(dtype="float32"), corpus.function_prompts(8, seed=0), max_new_tokens=96)
    path = Path("pictures/acceptance_raster.png")
    pages.picture(plots.acceptance_raster(out.trace), path)
    typer.echo(f"wrote {path} ({path.stat().st_size // 1000} kB)")
