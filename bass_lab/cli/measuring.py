"""`bass bench`, `calibrate`, `record` and `eval`: measure speed, step costs, acceptance and quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bass_lab.cli import common
from bass_lab.cli.progress import Progress

BENCH_EXAMPLES = common.examples(
    "bass bench --batch-sizes 1 --batch-sizes 8 --prompts mini",
    "bass bench -t TARGET -d DRAFT --dtype bfloat16 --record mine.jsonl",
    "bass bench --record mine.jsonl --check-only",
)


def bench(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    batch_sizes: common.BatchSizes = [1, 2, 4, 8, 16],  # noqa: B006
    prompts: Annotated[
        list[str], typer.Option(metavar="SET", help="mini, library, edits, questions or FILE.jsonl; may be repeated")
    ] = [  # noqa: B006
        "mini",
        "library",
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="transformers, assisted, regular (required), single or batched; may be repeated; default: all that "
            "this pair supports",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="interleaved repeats")] = 7,
    max_new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="per row")] = 128,
    temperature: common.Temperature = 0.2,
    draft_length: Annotated[int, typer.Option(min=1, metavar="N", help="for single and batched")] = 5,
    also_length: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="add batched with this draft length")
    ] = None,
    also_draft: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="add batched with this draft (as --draft) and each length"),
    ] = None,
    also_default: Annotated[bool, typer.Option("--also-default", help="add batched with the default policy")] = False,
    vary_prompts: Annotated[bool, typer.Option("--vary-prompts", help="other prompts in every repeat")] = False,
    take_turns: Annotated[bool, typer.Option("--take-turns", help="interleave the methods' steps")] = False,
    record: Annotated[
        Path | None, typer.Option(**common.WRITTEN, help="append to this JSON Lines file, and check the whole file")
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="only check the --record")] = False,
    as_json: common.Json = False,
) -> None:
    """Time all decoding methods, interleaved.

    The methods: regular, single-sequence and batched speculative decoding, and transformers' regular and assisted
    generation. The field of --json: results, a record per method, batch size and prompt set.
    """
    from bass_core.loading.model_pair import embedded_draft, load_draft
    from bass_core.loading.quantization import SELF_DRAFTS, quantized
    from bass_core.prompts import check_context, token_ids
    from bass_lab import drafters
    from bass_lab.measure import benchmark, records
    from bass_lab.named_pairs import named_pair
    from bass_lab.texts.prompt_sets import label, prompt_set

    if check_only and record is None:
        raise ValueError("--check-only checks a record: name it with --record FILE")
    checked = []
    if record is not None:
        checked = records.read(record) if check_only else records.mended(record)
    if checked:
        typer.echo(f"{record}: {len(checked)} lines are valid", err=True)
    if check_only:
        if as_json:
            common.print_json({"results": checked})
        return
    batch_sizes = list(dict.fromkeys(batch_sizes))
    sets = {label(name): prompt_set(name, max(batch_sizes)) for name in prompts}
    if vary_prompts:
        sets = {label(name): prompt_set(name) for name in prompts}
    pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
    for texts in sets.values():  # fail before measuring
        check_context(pair, max(map(len, token_ids(pair, texts))), max_new_tokens)
    where, results = {"dtype": pair.target.dtype, "device": pair.device}, []
    others = {
        name: quantized(pair.target, SELF_DRAFTS[name])
        if name in SELF_DRAFTS
        else drafters.named(name) or load_draft(name if target else embedded_draft(name), **where)
        for name in also_draft or ()
    }
    with Progress() as progress:
        for lines in benchmark.bench(
            pair,
            sets,
            batches=batch_sizes,
            methods=methods or benchmark.methods_of(pair),
            repeats=repeats,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            draft_length=draft_length,
            other_lengths=[*(also_length or ()), *([None] if also_default else [])],
            other_drafts=others,
            vary_prompts=vary_prompts,
            take_turns=take_turns,
            progress=progress,
        ):
            results += lines
            if not as_json:
                with progress.aside():
                    _tell_speeds(lines)
            if record is not None and _is_exact(lines):  # the speed of wrong text is not recorded
                records.append(record, lines)
    if as_json:
        common.print_json({"results": results})
    if not _is_exact(results):
        raise typer.Exit(1)


def _is_exact(lines: list[dict]) -> bool:
    """Return True if all greedy rows of our methods equal transformers' rows."""
    from bass_lab.measure import records

    ours = (line["exactness"] for line in lines if line["method"] not in records.PEERS)
    return all(each["identical"] == each["rows"] for each in ours)


def _tell_speeds(lines: list[dict]) -> None:
    from bass_lab.measure import benchmark
    from bass_lab.show import tables

    heading, rows, notes = benchmark.table(lines)
    tables.show_table(rows, heading)
    tables.show(f"{notes}\n")


def calibrate(
    target: common.Target = None,
    draft: common.Draft = None,
    weights: Annotated[
        str, typer.Option(metavar="KIND", help="hub, or dummy: random weights for a named pair")
    ] = "hub",
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    batch_sizes: common.BatchSizes = [1, 2, 4, 8, 16, 32],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0, metavar="S", help="seconds for the measurement")] = 42.0,
    output: Annotated[
        Path | None, typer.Option(**common.WRITTEN, help="output file; default: the cache that policies read")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="compare predicted with real decode times afterwards")] = False,
    as_json: common.Json = False,
) -> None:
    """Measure step costs for the default policy.

    With these costs the default policy chooses the draft length with the most expected tokens per second, for these
    models on this device. The fields of --json: saved (the file), device, models, acceptance (accepted and rejected
    drafts in a few texts; null without a tokenizer), batches and, with --check, check (rows of the tables).
    """
    from bass_core.loading import measured_costs
    from bass_lab.named_pairs import named_pair
    from bass_lab.show import tables
    from bass_lab.study import calibration, cost_check

    common.output_file(output or measured_costs.cache_folder() / "costs.json")
    pair = named_pair(target, draft, weights=weights, dtype=dtype, device=device, quantize=quantize)
    compared = None
    with Progress() as progress:
        cost = calibration.calibrate(pair, sorted(set(batch_sizes)), seconds=seconds, progress=progress)
        path = output or measured_costs.cache_folder() / cost.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        cost.save(path)
    if check:
        with Progress() as progress:
            compared = cost_check.check(cost, pair, progress=progress)
    found = cost_check.summary(cost)
    if (spread := cost.measured["spread"]) is None or spread > calibration.QUIET:
        typer.echo(f"warning: {calibration.spread_of(cost)}; measure again, longer or on an idle machine", err=True)
    document = {"saved": str(path), "device": cost.device, "models": cost.models}
    document |= {"acceptance": cost.acceptance, "batches": found.to_dict("records")}
    document |= {} if compared is None else {"check": compared.to_dict("records")}
    if as_json:
        common.print_json(document)
        return
    tables.show_table(document["batches"], f"{cost.device}, {cost_check.SHOWN_KV} cached positions")
    if check:
        tables.show_table(document["check"], "\npredicted and real decode time")
    if cost.acceptance is not None:
        kept, lost = cost.acceptance
        typer.echo(f"α {kept / (kept + lost):.2f} in a few texts: the initial estimate of the default policy")
    typer.echo(f"saved {path}")


def record(
    output: Annotated[Path, typer.Option(**common.WRITTEN, help="output file, such as trace.npz")],
    target: common.Target = None,
    draft: Annotated[
        str | None, typer.Option("--draft", "-d", metavar="NAME", help="hub name or folder of the draft model")
    ] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    prompts: common.Prompts = "mini",
    count: Annotated[int, typer.Option(min=1, metavar="N", help="number of prompts")] = 96,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="texts per prompt")] = 1,
    max_new_tokens: common.NewTokens = 128,
    temperature: common.Temperature = 0.2,
    seed: common.Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Record acceptance for `bass_lab.simulate`.

    The fields of --json: saved (the file), texts (count), alpha (the probability that a draft token is accepted if all
    draft tokens before it were accepted).
    """
    from bass_lab.named_pairs import named_pair
    from bass_lab.provenance import describe_run
    from bass_lab.study import recording
    from bass_lab.texts.prompt_sets import label, prompt_set

    texts = prompt_set(prompts, count)
    pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
    limits = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with Progress() as progress:
        trace = recording.record(pair, texts, rollout=12, **limits, progress=progress)
    trace.meta.update(describe_run(pair), prompt_set=label(prompts))
    output.parent.mkdir(parents=True, exist_ok=True)
    trace.save(output)
    if as_json:
        common.print_json({"saved": str(output), "texts": len(trace.lengths), "alpha": trace.alpha})
    else:
        typer.echo(f"saved {output}: {len(trace.lengths)} texts, α = {trace.alpha:.2f}")


def evaluate(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    problems: Annotated[
        str | None,
        typer.Option(callback=common.input_file, metavar="FILE", help="JSON Lines or openai_humaneval; default: mini"),
    ] = None,
    trust_problems: Annotated[
        bool,
        typer.Option(
            "--trust-problems",
            help="accept a file other than HumanEval: grading runs its prompts and tests unsandboxed, as your user",
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="only the first N problems")] = None,
    methods: Annotated[
        list[str], typer.Option(metavar="METHOD", help="regular, single or batched; may be repeated")
    ] = ["regular", "single", "batched"],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="rows per problem")] = 8,
    budgets: Annotated[
        list[float] | None,
        typer.Option(
            min=0, metavar="S", help="time budget in seconds; may be repeated; default: quartiles of finish times"
        ),
    ] = None,
    cut_off: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="seconds until rows are cut off; default: no limit")
    ] = None,
    max_new_tokens: common.NewTokens = 128,
    temperature: common.Temperature = 0.2,
    draft_length: Annotated[int | None, typer.Option(min=1, metavar="N", help="default: a policy decides")] = None,
    verification: common.Verification = "token",
    seed: common.Seed = 0,
    output: Annotated[
        Path | None,
        typer.Option(callback=common.output_folder, metavar="FOLDER", help="for METHOD.jsonl; repeat to resume"),
    ] = None,
    no_texts: Annotated[
        bool, typer.Option("--no-texts", help="store no completions and no reasons (scores need neither)")
    ] = False,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="run programs in an incomplete sandbox, too; the results say so")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Score correct programs within a time budget.

    Measures Pass@First and Pass@All on problems with tests, for regular, single-sequence and batched speculative
    decoding. The fields of --json: scores (budget in seconds; value, low and high: share of problems and 95% interval)
    and settings by method.
    """
    import pandas as pd

    from bass_lab.evaluation import SandboxUnavailable, compare, load_problems, scores
    from bass_lab.named_pairs import named_pair
    from bass_lab.show import tables

    if cut_off is not None and budgets and max(budgets) > cut_off:
        raise ValueError(f"--budgets {max(budgets):g} is beyond --cut-off {cut_off:g}: write at most {cut_off:g}")
    chosen = load_problems(problems, trust_problems=trust_problems)[:limit]
    pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "draft_length": draft_length,
        "verification": verification, "folder": output, "texts": not no_texts, "unsafe": unsafe,
    }  # fmt: skip
    try:
        with Progress() as progress:
            runs = compare(pair, chosen, methods=methods, n=samples, budget=cut_off, progress=progress, **options)
    except SandboxUnavailable as error:
        raise ValueError(f"{error} (on the command line: --unsafe; the results say so)") from error
    except KeyboardInterrupt:
        left = "nothing was stored" if output is None else f"repeat the command to resume {output}"
        typer.echo(f"interrupted: {left}", err=True)
        raise typer.Exit(130) from None
    budgets = budgets or scores.quartiles(pd.concat([run.samples for run in runs.values()]), cut_off)
    found = pd.concat([run.scores(budgets).assign(method=method) for method, run in runs.items()])
    if as_json:
        settings = {method: run.settings for method, run in runs.items()}
        common.print_json({"scores": found.to_dict("records"), "settings": settings})
    else:
        heading = f"{len(chosen)} problems, {samples} rows each; share of problems (95% interval)"
        tables.show_table(scores.table(found), heading)
