"""The `bass` command."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from bass_lab.cli import common, sweep

app = typer.Typer(cls=common.Program, no_args_is_help=True, add_completion=False)
command = functools.partial(app.command, cls=common.Command)
DEMO = Path("build/html")  # the demo's page
LESSONS = Path("build/lessons")  # executed; `make docs` makes pages of them
PICTURE = Path("pictures/acceptance_raster.png")  # the README's

command()(sweep.sweep)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bass {importlib.metadata.version('bass-hands-on')}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="and exit")] = False,
) -> None:
    """Batched speculative decoding, hands on. With BASS_DEBUG=1 an error shows where it was raised."""
    if "--help" not in sys.argv:
        from bass_lab.threads import settle_threads

        settle_threads(lambda sentence: typer.echo(sentence, err=True))


@command()
def demo(rows: Annotated[int, typer.Option(min=1, help="prompts decoded at once")] = 8) -> None:
    """Generate with the embedded pair, check the text, time it, and build the first lesson."""
    lesson = _lessons()[0]
    typer.echo("Loading the embedded pair …")
    import bass_core as bass
    from bass_core.environment import write_whole
    from bass_lab.measure import benchmark
    from bass_lab.show import pages, terminal
    from bass_lab.texts.prompt_sets import prompt_set

    prompts = prompt_set("mini", rows)
    pair = bass.load_pair(dtype="float32")
    typer.echo(f"Decoding {rows} Python prompts at once; row 0:\n")
    out = terminal.stream(pair, prompts, max_new_tokens=96)
    typer.echo(f"\n{terminal.summary_line(out.trace)}")

    typer.echo("\nChecking the text against transformers, timing both ways …")
    identical = benchmark.identical_rows(pair, prompts)
    options = {"methods": ("regular", "batched"), "repeats": 5, "max_new_tokens": 64}
    comparison = benchmark.compare(pair, prompts, **options, progress=lambda message: typer.echo(f"  {message}"))
    typer.echo(f"Building the first lesson ({lesson}) …")
    common.plain_interrupts()
    notebook = pages.execute(lesson)
    pages.draw_figures(notebook)
    page = DEMO / f"{lesson.stem}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, pages.as_page(notebook))
    ratio, low, high = comparison.ratio()
    spread = f"95% interval {low:.2f}-{high:.2f}, {options['repeats']} paired runs"
    typer.echo(f"\nbatched speculative over regular decoding: {ratio:.2f}× ({spread})")
    typer.echo(f"identical tokens: {identical}/{rows} (greedy, float32) · {ratio:.1f}× · open {page}")
    if identical != rows:
        raise typer.Exit(1)


def _lessons() -> list[Path]:
    """The notebooks, in order. Raises BadParameter outside the repository."""
    found = sorted(Path("notebooks").glob("*.ipynb"))
    if not found:
        raise typer.BadParameter("there is no notebooks/ here: run this in the root of the repository")
    return found


@command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="standard input if none")] = None,
    target: common.TargetOption = None,
    draft: common.Draft = None,
    max_new_tokens: int = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off")] = 1.0,
    seed: int = 0,
    num_return_sequences: Annotated[int, typer.Option(help="samples per prompt")] = 1,
    draft_length: Annotated[int | None, typer.Option(help="0 = regular decoding; a policy decides if none")] = None,
    verification: common.Verification = "token",
    attention: Annotated[str, typer.Option(help="auto, ragged, pad, split or eager")] = "auto",
    compile: Annotated[str, typer.Option(help="auto, off, compiled, graphs or compiled+graphs")] = "auto",
    stop: Annotated[list[str] | None, typer.Option(help="text that ends a row; may be given several times")] = None,
    show_accepted: Annotated[bool, typer.Option(help="colour tokens by origin (in a terminal, at the end)")] = False,
) -> None:
    """Continue every prompt; one row streams, more are printed when all are done. Figures go to standard error."""
    prompts = prompts or [_standard_input()]
    import bass_core as bass
    from bass_lab.named_pairs import named_pair
    from bass_lab.show import terminal

    pair = named_pair(target, draft)
    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "num_return_sequences": num_return_sequences, "draft_length": draft_length, "verification": verification,
        "attention": attention, "compile": compile, "stop": stop or (),
    }  # fmt: skip
    coloured = show_accepted and _is_terminal(sys.stdout)
    if len(prompts) * num_return_sequences == 1 and not coloured:
        out = terminal.stream(pair, prompts, **options)
    else:
        out = bass.generate(pair, prompts, **options, trace="tokens" if coloured else "steps")
        terminal.print_rows(pair.tokenizer, prompts, out, options["stop"], coloured)
    typer.echo(terminal.summary_line(out.trace), err=True)


def _standard_input() -> str:
    """All of it, as one prompt. Raises BadParameter without one and at a terminal, where nobody knows that they are to
    type."""
    if sys.stdin is None or _is_terminal(sys.stdin):
        raise typer.BadParameter("give a prompt, or pipe one into standard input", param_hint="PROMPT")
    return sys.stdin.read()


def _is_terminal(stream) -> bool:
    return stream is not None and stream.isatty()


@command()
def doctor(
    target: common.Target = None,
    draft: common.Draft = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document as the last line")] = False,
) -> None:
    """What is installed here, what the devices can do, and which attention paths these models get."""
    from bass_lab.checks.doctor import diagnose, report

    document = diagnose(target, draft)
    typer.echo(report(document))
    if as_json:
        common.last_line(document)
    if document["problem"] is not None:
        typer.echo(f"error: {document['problem']}", err=True)
        raise typer.Exit(1)


@command()
def bench(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    rows: common.Rows = [1, 2, 4, 8, 16],  # noqa: B006
    prompts: Annotated[list[str], typer.Option(help="prompt sets: mini, library, FILE.jsonl")] = ["mini", "library"],  # noqa: B006
    methods: Annotated[list[str] | None, typer.Option(help="ways to decode; none: all that this pair can")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="interleaved repeats")] = 7,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    temperature: common.Temperature = 0.2,
    draft_length: Annotated[int, typer.Option(min=1)] = 5,
    also_length: Annotated[list[int] | None, typer.Option(min=1, help="batched again with this draft length")] = None,
    also_default: Annotated[bool, typer.Option("--also-default", help="batched again with the default policy")] = False,
    vary_prompts: Annotated[bool, typer.Option("--vary-prompts", help="other prompts in every repeat")] = False,
    take_turns: Annotated[bool, typer.Option("--take-turns", help="methods alternate step by step")] = False,
    record: Annotated[
        Path | None,
        typer.Option(callback=common.output_file, help="append to this file of JSON lines, and check all of it"),
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="check the --record, measure nothing")] = False,
) -> None:
    """Time regular, single-sequence and batched speculative decoding, and transformers' own; the last line is JSON."""
    from bass_core import inputs
    from bass_lab.measure import benchmark, records
    from bass_lab.named_pairs import named_pair
    from bass_lab.texts.prompt_sets import label, prompt_set

    if check_only and record is None:
        raise ValueError("--check-only checks a record: name it with --record FILE")
    if record is not None and not check_only and record.exists():
        records.mend(record)
    if record is not None and (check_only or record.exists()):
        typer.echo(f"{record}: {len(records.read(record))} lines are as they should be", err=True)
    if check_only:
        return
    sets = {label(name): prompt_set(name, max(rows)) for name in prompts}
    if vary_prompts:
        sets = {label(name): prompt_set(name) for name in prompts}
    pair = named_pair(target, draft, dtype=dtype)
    for texts in sets.values():  # before the first is measured
        inputs.check_context(pair, max(map(len, inputs.token_ids(pair, texts))), max_new_tokens)
    results = []
    for lines in benchmark.bench(
        pair,
        sets,
        models=f"{target} + {draft or 'n-gram'}" if target else "embedded pair",
        batches=rows,
        methods=methods or benchmark.methods_of(pair),
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        draft_length=draft_length,
        other_lengths=[*(also_length or ()), *([None] if also_default else [])],
        vary_prompts=vary_prompts,
        take_turns=take_turns,
        progress=common.progress,
    ):
        typer.echo(benchmark.table(lines))
        results += lines
        if record is not None:
            records.append(record, lines)
    common.last_line({"results": results})


@command()
def calibrate(
    target: common.Target = None,
    draft: common.Draft = None,
    weights: Annotated[str, typer.Option(help="hub; or dummy: random ones in models of a known name")] = "hub",
    dtype: common.Dtype = None,
    rows: common.Rows = [1, 2, 4, 8, 16, 32],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0, help="time to measure in")] = 42.0,
    output: Annotated[
        Path | None, typer.Option(callback=common.output_file, help="file to save to; none: where policies look for it")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="compare predicted with real decode times afterwards")] = False,
) -> None:
    """Measure what a decode step of these models costs on this device, once; the last line is JSON."""
    from bass_core.policies import costs
    from bass_lab.named_pairs import named_pair
    from bass_lab.study import calibration

    common.output_file(output or costs.cache_folder() / "costs.json")
    pair = named_pair(target, draft, weights=weights, dtype=dtype)
    cost = calibration.calibrate(pair, sorted(set(rows)), seconds=seconds, progress=common.progress)
    path = output or costs.cache_folder() / cost.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    cost.save(path)
    found = calibration.summary(cost)
    document = {"saved": str(path), "device": cost.device, "models": cost.models, "batches": found.to_dict("records")}
    typer.echo(f"{cost.device}, {calibration.SHOWN_KV} cached positions\n{found.round(2).to_string(index=False)}")
    if (spread := cost.measured["spread"]) > calibration.QUIET:
        typer.echo(f"warning: times varied by {spread:.0%}; measure again when the machine is idle", err=True)
    if check:
        compared = calibration.check(cost, pair, progress=common.progress)
        document["check"] = compared.to_dict("records")
        typer.echo(f"\npredicted and real decode time\n{compared.round(2).to_string(index=False)}")
    typer.echo(f"saved {path}")
    common.last_line(document)


@command()
def record(
    output: Annotated[Path, typer.Argument(callback=common.output_file, help="file to save to, such as trace.npz")],
    target: common.TargetOption = None,
    draft: Annotated[str | None, typer.Option(help="hub name or folder of the draft model")] = None,
    dtype: common.Dtype = None,
    prompts: Annotated[str, typer.Option(help="prompt set: mini, library or FILE.jsonl")] = "mini",
    count: Annotated[int, typer.Option(min=1, help="prompts of it")] = 96,
    samples: Annotated[int, typer.Option(min=1, help="texts per prompt")] = 1,
    max_new_tokens: common.NewTokens = 128,
    temperature: common.Temperature = 0.2,
    seed: int = 0,
) -> None:
    """Record what these models' drafts would have had accepted, for `bass_lab.simulate`; the last line is JSON."""
    from bass_lab.named_pairs import named_pair
    from bass_lab.pairs import name_of
    from bass_lab.provenance import describe_environment
    from bass_lab.study import recording
    from bass_lab.texts.prompt_sets import label, prompt_set

    texts = prompt_set(prompts, count)
    pair = named_pair(target, draft, dtype=dtype)
    limits = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    trace = recording.record(pair, texts, rollout=12, **limits)
    models = [name_of(model) for model in (pair.target, pair.draft)]
    trace.meta.update(describe_environment(), prompt_set=label(prompts), models=models)
    output.parent.mkdir(parents=True, exist_ok=True)
    trace.save(output)
    common.last_line({"saved": str(output), "texts": len(trace.lengths), "alpha": trace.alpha})


@command("eval")
def evaluate(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    problems: Annotated[
        str | None,
        typer.Option(callback=common.input_file, help="file of JSON lines, or openai_humaneval; none: the mini set"),
    ] = None,
    trust_problems: Annotated[
        bool,
        typer.Option(
            "--trust-problems",
            help="for a file other than HumanEval's: grading runs its code (prompt, test) outside the sandbox, as you",
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many problems only")] = None,
    methods: Annotated[list[str], typer.Option(help="regular, single, batched")] = ["regular", "single", "batched"],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="rows per problem")] = 8,
    budgets: Annotated[
        list[float] | None, typer.Option(min=0, help="seconds to score at; none: quartiles of the finish times")
    ] = None,
    cut_off: Annotated[
        float | None, typer.Option(min=0, help="seconds after which rows are cut off; none: all end")
    ] = None,
    max_new_tokens: common.NewTokens = 128,
    temperature: common.Temperature = 0.2,
    draft_length: Annotated[int | None, typer.Option(min=1, help="a policy decides if none")] = None,
    verification: common.Verification = "token",
    seed: int = 0,
    output: Annotated[
        Path | None,
        typer.Option(callback=common.output_folder, help="folder for METHOD.jsonl; a second start goes on there"),
    ] = None,
    texts: Annotated[bool, typer.Option(help="store completions and reasons, too; scores need neither")] = True,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="run programs also where the sandbox is not complete; recorded")
    ] = False,
) -> None:
    """Score what the methods write within a time budget (Pass@First, Pass@All); the last line is JSON."""
    import pandas as pd

    from bass_lab.evaluation import SandboxUnavailable, compare, load_problems, scores
    from bass_lab.named_pairs import named_pair

    chosen = load_problems(problems, trust_problems=trust_problems)[:limit]
    pair = named_pair(target, draft, dtype=dtype)
    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "draft_length": draft_length,
        "verification": verification, "folder": output, "texts": texts, "unsafe": unsafe,
    }  # fmt: skip
    try:
        runs = compare(pair, chosen, methods=methods, n=samples, budget=cut_off, **options)
    except SandboxUnavailable as error:
        raise ValueError(f"{error} (the option here is --unsafe; the results say so)") from error
    budgets = budgets or scores.quartiles(pd.concat([run.samples for run in runs.values()]), cut_off)
    found = pd.concat([run.scores(budgets).assign(method=method) for method, run in runs.items()])
    typer.echo(f"{len(chosen)} problems, {samples} rows each; share of problems (95% interval)\n{scores.table(found)}")
    settings = {method: run.settings for method, run in runs.items()}
    common.last_line({"scores": found.to_dict("records"), "settings": settings})


@command()
def verify(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    prompt: Annotated[list[str] | None, typer.Option(help="may be repeated; none: some that come with it")] = None,
    prompts: Annotated[str | None, typer.Option(help="or the first 8 of mini, library or FILE.jsonl")] = None,
    samples: Annotated[int, typer.Option(min=1000, help="rows of each sampled test")] = 6144,
    seed: Annotated[int, typer.Option(help="of the sampled tests")] = 0,
) -> None:
    """Check that decoding is exact for these models; exit code 1 if it is not. The last line is JSON."""
    from bass_lab.checks import exactness
    from bass_lab.named_pairs import named_pair
    from bass_lab.texts.prompt_sets import prompt_set

    if prompts is not None:
        prompt = [*(prompt or ()), *prompt_set(prompts)[:8]]
    pair = named_pair(target, draft, dtype=dtype)
    report = exactness.verify(
        pair, prompt, samples=samples, seed=seed, progress=lambda name: typer.echo(f"checking {name} …", err=True)
    )
    typer.echo(f"{report.models}\n")
    for check in report.checks:
        typer.echo(f"{'PASS' if check.passed else 'FAIL'}  {check.name} ({check.seconds:.1f} s)\n      {check.tested}")
    if divergences := report.checks[-1].details.get("divergences"):
        import pandas as pd

        typer.echo(f"\n{report.checks[-1].name}, first of each row\n{pd.DataFrame(divergences).to_string(index=False)}")
    typer.echo(f"\n{'PASS' if report.passed else 'FAIL'}")
    typer.echo(report.to_json())
    if not report.passed:
        raise typer.Exit(1)


@command()
def notebooks() -> None:
    """Execute every lesson into build/lessons; `make docs` makes a site of them."""
    import nbformat

    from bass_core.environment import write_whole
    from bass_lab.show import pages

    common.plain_interrupts()
    LESSONS.mkdir(parents=True, exist_ok=True)
    pages.write_script(LESSONS)
    for lesson in _lessons():
        typer.echo(f"executing {lesson.name}")
        notebook = pages.execute(lesson)
        pages.draw_figures(notebook, pages.SCRIPT)
        write_whole(LESSONS / lesson.name, nbformat.writes(notebook))


@command()
def pictures() -> None:
    """Draw the README's pictures: figures of real runs, and a widget live in JupyterLab (needs Chromium)."""
    import pandas as pd

    import bass_core as bass
    from bass_lab import evaluation
    from bass_lab.lessons import l09_figures
    from bass_lab.measure import records
    from bass_lab.show import browser, pages, plots
    from bass_lab.texts.prompt_sets import prompt_set

    out = bass.generate(bass.load_pair(dtype="float32"), prompt_set("mini", 8), max_new_tokens=96)
    pages.picture(plots.acceptance_raster(out.trace), PICTURE)
    explorer = PICTURE.with_name("acceptance_explorer.png")
    lesson = next(path for path in _lessons() if path.stem.startswith("03"))
    browser.picture(lesson, explorer, {"batch_size": 6, "max_new_tokens": 48}, {"width": 1300, "height": 1600})
    record = evaluation.load(records.shipped("quality_embedded_cpu"))
    curve = pd.concat(run.scores(l09_figures.BUDGETS).assign(method=method) for method, run in record.items())
    quality = PICTURE.with_name("quality_within_a_budget.png")
    pages.picture(l09_figures.budget_figure(curve), quality, width=800)
    for path in (PICTURE, explorer, quality):
        typer.echo(f"wrote {path} ({path.stat().st_size // 1000} kB)")


if __name__ == "__main__":
    app(prog_name="bass")
