"""`bass load`: serve requests at random arrival times, in process, by a server, or in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bass_lab.cli import common
from bass_lab.cli.progress import Progress

if TYPE_CHECKING:
    from bass_core.loading.model_pair import ModelPair
    from bass_core.policies.costs import CostModel
    from bass_core.policies.protocol import DraftLengthPolicy
    from bass_lab.load import LoadRun, Target, Workload

EXAMPLES = common.examples(
    "bass load --rate 5 --count 100",
    "bass load --url http://127.0.0.1:8000 --rate 2 --burst 4 --deadline 10",
    "bass load --simulate h100 --rate 80 --batch-size 64 --count 1000",
    "bass load --simulate here --highest --between-ms 40",
    "bass load --record load.jsonl --count 120",
)
HERE, H100 = "here", "h100"
POLICIES = {"none": 0, "default": None}


def load(
    context: typer.Context,
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="an OpenAI-compatible server; default: a session in this process")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="model of --url; default: its first model")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="BASS_API_KEY", show_envvar=False, metavar="KEY", help="API key of --url; or BASS_API_KEY"),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="COSTS", help="simulate with costs: here (this pair's), h100 (modelled) or FILE"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(**common.READ, help="trace of `bass record` for --simulate; default: built in")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, metavar="R", help="requests per second")] = 4.0,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="number of requests")] = 100,
    burst: Annotated[float, typer.Option(min=1, metavar="N", help="mean requests per arrival")] = 1.0,
    workload: Annotated[
        Path | None, typer.Option(**common.READ, help="requests (.jsonl), or arrivals and lengths (.csv)")
    ] = None,
    save: Annotated[Path | None, typer.Option(**common.WRITTEN, help="save the workload as .jsonl")] = None,
    prompts: common.Prompts = "mini",
    max_new_tokens: common.NewTokens = 64,
    least_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="draw new tokens from N to the maximum; default: maximum")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="seconds until a client cancels its request")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="rows decoded at once; not with --url")] = 8,
    draft_length: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="0: no drafting; default: a policy decides; not with --url")
    ] = None,
    temperature: common.Temperature = 0.0,
    seed: common.Seed = 0,
    between_ms: Annotated[
        float | None, typer.Option(min=0, metavar="MS", help="latency target: between tokens, 99% of requests")
    ] = None,
    first_ms: Annotated[float | None, typer.Option(min=0, metavar="MS", help="latency target: first token")] = None,
    end_ms: Annotated[float | None, typer.Option(min=0, metavar="MS", help="latency target: last token")] = None,
    warm_up: Annotated[float, typer.Option(min=0, max=0.9, metavar="X", help="share of requests to leave out")] = 0.1,
    highest: Annotated[bool, typer.Option("--highest", help="find the highest rate within the target")] = False,
    record: Annotated[
        Path | None,
        typer.Option(**common.WRITTEN, help="append the highest load with the default policy and without drafting"),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Serve requests at random arrival times, and time them.

    A session in this process, a server (--url) or a simulation (--simulate) serves the requests. The fields of --json:
    served, workload, metrics (metric, statistic, value, low and high of the 95% interval; times in ms), errors (failed
    requests; exit code 1 if any). --simulate adds costs. --highest adds rate, missed and tried; the other fields
    describe the run at this rate. --record adds the line.
    """
    from bass_core import checks
    from bass_lab.load import Poisson, Target, Workload, in_process, over_http
    from bass_lab.load import highest_load as highest_of

    limits = {"between_ms": between_ms, "first_ms": first_ms, "end_ms": end_ms}
    aim = Target(**limits) if any(limit is not None for limit in limits.values()) else None
    if rate == 0:
        raise ValueError("--rate must be above 0 requests per second")
    if highest and aim is None:
        raise ValueError("--highest needs a latency target: --between-ms, --first-ms or --end-ms")
    if save is not None and (save.suffix == ".csv" or (workload is not None and save.resolve() == workload.resolve())):
        raise ValueError(f"--save writes JSON lines and cannot use {save}: name another file with .jsonl")
    ours = {"--target": target, "--draft": draft, "--dtype": dtype, "--device": device, "--draft-length": draft_length}
    ours["--batch-size"] = _given(context, "batch_size")
    _exclude("--url", url, ours | {"--simulate": simulate, "--record": record})
    _exclude("--record", record, {"--highest": highest or None, "--end-ms": end_ms, "--draft-length": draft_length})
    if simulate is None:
        _exclude("a run without --simulate", True, {"--trace": trace})
    elif trace is None:
        _exclude("--simulate without --trace, for the embedded pair,", True, {"--target": target, "--draft": draft})
    _exclude("--simulate uses recorded texts and", simulate, {"--temperature": temperature or None})
    if url is None:
        _exclude("a run without --url", True, {"--model": model, "--api-key": _given(context, "api_key")})
    drawn = ("rate", "count", "burst", "max_new_tokens", "least_new_tokens", "deadline")
    _exclude("--workload", workload, {f"--{name.replace('_', '-')}": _given(context, name) for name in drawn})
    if workload is not None:
        asked = Workload.load(workload, prompts=prompts, seed=seed)
    else:
        lengths = range(least_new_tokens or max_new_tokens, max_new_tokens + 1)
        checks.integer("--max-new-tokens", max_new_tokens, least=least_new_tokens or 1)
        options = {"prompts": prompts, "max_new_tokens": lengths, "deadline": deadline, "seed": seed}
        asked = Workload.draw(Poisson(rate, burst), count, **options)
    if record is not None:
        from bass_lab.measure import records

        records.mended(record)  # fail before serving
    if save is not None:
        asked.save(save)
    own = {"temperature": temperature}
    pair, cost = (None, None) if url else _models_and_costs(target, draft, dtype, device, simulate)

    def serve(workload: Workload, policy: int | DraftLengthPolicy | None = draft_length) -> LoadRun:
        if url:
            return over_http(workload, url, model=model, api_key=api_key, **own)
        if simulate:
            return _simulated(workload, trace, prompts, cost, policy, batch_size, seed)
        return in_process(workload, pair, max_batch_size=batch_size, draft_length=policy, **own)

    served = f"by {url}" if url else "simulated" if simulate else "in process"
    document: dict = {"served": served, "workload": repr(asked)}
    if simulate:
        document["costs"] = cost.device
    with Progress() as progress:
        if record is not None:
            how = {"served": served, "max_batch_size": batch_size, **own, "costs": _told(cost)}
            found = _recorded(record, asked, pair, serve, limits, warm_up, how, progress)
            if as_json:
                common.print_json(document | {"line": found})
            else:
                with progress.aside():
                    _tell_record(found)
            return
        progress(f"{asked!r}", 0.0)
        if highest:

            def at(rate: float) -> LoadRun:
                progress(f"{rate:.3g} requests/s", 0.0)
                return serve(asked.at_rate(rate))

            if not simulate:
                _held_alone(serve, asked, aim)
            bound = highest_of(at, aim, first=asked.rate, warm_up=warm_up)
            document |= {"rate": bound.rate, "missed": bound.missed, "tried": bound.tried.to_dict("records")}
            if (run := bound.run) is not None:
                document["workload"] = repr(asked.at_rate(bound.rate))
        else:
            run = serve(asked)
    if run is not None:
        document["metrics"] = run.summary(aim, warm_up=warm_up).reset_index().to_dict("records")
        document["errors"] = len(run.meta.get("errors", ()))
    if as_json:
        common.print_json(document)
    else:
        _tell(document, run, aim, warm_up)
    if document.get("errors"):
        raise typer.Exit(1)


def _held_alone(serve: Callable[[Workload], LoadRun], asked: Workload, aim: Target) -> None:
    """Raise ValueError if a single request misses the target twice, because then every rate misses the target."""
    from bass_lab.load import Workload

    one = Workload(asked.requests.head(1).assign(arrived=0.0), asked.meta)
    runs = [serve(one), serve(one)]  # the first run warms the server up
    if not any(run.met(aim).all() for run in runs):
        found = runs[-1].latencies.iloc[0]
        took = ", ".join(f"{name} {found[name]:.4g}" for name in aim.limits if name in found)
        why = next(iter(runs[-1].meta.get("errors", {}).values()), f"it takes {took}")
        raise ValueError(f"a single request already misses the target: {why}")


def _exclude(name: str, given: object, others: dict[str, object]) -> None:
    """Raise ValueError if one of `others` is given together with the option `name`."""
    for other, value in others.items():
        if given is not None and value is not None:
            raise ValueError(f"{name} does not take {other}: leave it out")


def _given(context: typer.Context, name: str) -> bool | None:
    """Return True if the user wrote the option, else None."""
    return common.is_given(context, name) or None


def _models_and_costs(
    target: str | None, draft: str | None, dtype: str | None, device: str | None, simulate: str | None
) -> tuple[ModelPair, CostModel | None]:
    """Return the pair, and the costs for the default policy and the simulator."""
    from bass_core.loading.measured_costs import costs_like
    from bass_core.policies.costs import CostModel
    from bass_lab.measure.modelled_costs import modelled_h100
    from bass_lab.named_pairs import named_pair

    pair = named_pair(target, draft, dtype=dtype, device=device)
    if simulate == H100:
        return pair, modelled_h100()
    if simulate not in (None, HERE):
        if not Path(simulate).is_file():
            raise ValueError(f"--simulate must be {HERE}, {H100} or a file of costs; got {simulate!r}")
        return pair, CostModel.load(simulate)
    cost = costs_like(pair)
    if cost is None and simulate:
        raise ValueError("no measured costs of this pair on this device; run `bass calibrate`")
    return pair, cost


def _simulated(
    workload: Workload,
    trace: Path | None,
    prompts: str,
    cost: CostModel,
    policy: int | DraftLengthPolicy | None,
    max_batch_size: int,
    seed: int,
) -> LoadRun:
    from bass_core.policies.goodput import Goodput
    from bass_lab.load import simulate
    from bass_lab.study.recorded_acceptance import AcceptanceTrace, shipped

    recorded = shipped(prompts) if trace is None else AcceptanceTrace.load(trace)
    chosen = Goodput(cost) if policy is None else policy
    return simulate(workload, recorded, cost, draft_length=chosen, max_batch_size=max_batch_size, seed=seed)


def _recorded(
    path: Path,
    asked: Workload,
    pair: ModelPair,
    serve: object,
    limits: dict,
    warm_up: float,
    how: dict,
    progress: Progress,
) -> dict:
    """Measure, append the line to the record, and return the line."""
    from bass_lab.load import measurement
    from bass_lab.measure import records

    measured = measurement.measure(
        lambda workload, way: serve(workload, POLICIES[way]),
        asked,
        between_ms=limits["between_ms"],
        first_ms=limits["first_ms"],
        warm_up=warm_up,
        progress=lambda doing: progress(doing, 0.0),
    )
    line = measurement.record_line(measured, asked, pair, **how)
    records.append(path, [line])
    return line


def _told(cost: CostModel | None) -> dict | None:
    from bass_lab.measure.benchmark import COSTS

    return None if cost is None else {"device": cost.device} | {name: cost.measured.get(name) for name in COSTS[1:]}


def _tell(document: dict, run: LoadRun | None, aim: Target | None, warm_up: float) -> None:
    from bass_lab.show import tables

    if "tried" in document:
        tables.show_table(document["tried"], "rates tried, requests per second")
        rate, missed = document["rate"], document["missed"]
        misses = f"lowest rate above it: {missed:.4g}/s" if math.isfinite(missed) else "no tried rate missed it"
        tables.show(f"highest rate within the target: {rate:.4g}/s; {misses}\n")
    if run is None:
        return
    served = f"{document['served']} with costs of {document['costs']}" if "costs" in document else document["served"]
    tables.show_table(run.table(aim, warm_up=warm_up), f"{document['workload']}, {served}; ms, 95% intervals")
    tables.show_facts(run.rates(aim, warm_up=warm_up), "")
    if document["errors"]:
        first = next(iter(run.meta["errors"].values()))
        tables.show(f"{document['errors']} requests failed, first error: {first}", "bold red")


def _tell_record(line: dict) -> None:
    from bass_lab.show import tables

    names = {"between_ms": "between", "first_ms": "first", "end_ms": "end"}
    shown = [
        {"rate": each["rate"]}
        | {f"{way} {name}": each[f"{way}_{field}"] for field, name in names.items() for way in ("none", "default")}
        | {"over none": each["over_none"]}
        for each in line["tried"]
    ]
    tables.show_table(
        shown, f"{line['models']}, {line['served']}; ms: between tokens and to the first (p99), end (mean)"
    )
    ratio = "-" if line["ratio"] is None else f"{line['ratio']:.2f}×"
    aim, highest = line["target"], line["highest"]
    tables.show(
        f"highest load with {aim['between_ms']:.3g} ms between tokens and {aim['first_ms']:.3g} ms to the first: "
        f"{highest['none']:.3g}/s without drafting, {highest['default']:.3g}/s with the default policy, {ratio}; "
        f"lowest ratio at any load {line['least_over_none']:.2f}×"
    )
