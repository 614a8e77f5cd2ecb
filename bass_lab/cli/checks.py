"""`bass doctor` and `bass verify`: describe the installation, check that decoding is exact."""

from __future__ import annotations

from typing import Annotated

import typer

from bass_lab.cli import common
from bass_lab.cli.progress import Progress

EXAMPLES = common.examples(
    "bass verify",
    "bass verify -t Qwen/Qwen2.5-Coder-7B -d Qwen/Qwen2.5-Coder-0.5B \\",
    "    --dtype bfloat16",
    "bass verify --json | python -m json.tool",
)


def doctor(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    as_json: common.Json = False,
) -> None:
    """Describe the installation and these models.

    Shows versions, devices with dtypes, optional packages, and the models' sizes, caches and attention paths. Exit
    code 1: the models cannot be used.
    """
    from bass_lab.checks.doctor import diagnose, report
    from bass_lab.show import tables

    document = diagnose(target, draft, dtype=dtype, device=device, quantize=quantize)
    if as_json:
        common.print_json(document)
    else:
        for number, (about, facts) in enumerate(report(document).items()):
            tables.show_facts(facts, heading=f"\n{about}" if number else about)
    if document["problem"] is not None:
        typer.echo(f"error: {document['problem']}", err=True)
        raise typer.Exit(1)


def verify(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    quantize: common.Quantize = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="may be repeated; none: built-in prompts")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="SET", help="or the first 8 of mini, library, edits, questions or FILE.jsonl")
    ] = None,
    samples: Annotated[int, typer.Option(min=1000, metavar="N", help="rows of each sampled test")] = 6144,
    seed: common.Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Check that decoding is exact for these models.

    Compares greedy text with transformers, sampled text with the exact distribution, coupled text with draft length 0,
    and checks half precision. Exit code 1: decoding is not exact.
    """
    from bass_lab.checks import exactness
    from bass_lab.named_pairs import named_pair
    from bass_lab.texts.prompt_sets import prompt_set

    if prompts is not None:
        prompt = [*(prompt or ()), *prompt_set(prompts)[:8]]
    pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
    with Progress() as progress:
        report = exactness.verify(pair, prompt, samples=samples, seed=seed, progress=progress)
    if as_json:
        typer.echo(report.to_json())
    else:
        _tell(report)
    if not report.passed:
        raise typer.Exit(1)


def _tell(report) -> None:
    from bass_lab.show import tables

    tables.show(f"{report.models}\n")
    tables.show_facts(
        [(_verdict(check.passed), f"{check.name} ({check.seconds:.1f} s)\n{check.tested}") for check in report.checks],
        indent=0,
    )
    if divergences := report.checks[-1].details.get("divergences"):
        tables.show_table(divergences, heading=f"\n{report.checks[-1].name}, first of each row")
    verdict = _verdict(report.passed)
    tables.show(f"\n{verdict}", tables.VERDICTS[verdict])


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"
