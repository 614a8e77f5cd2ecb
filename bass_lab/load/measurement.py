"""Measure the gain of the default policy under load: the highest request rate within a target, relative to no drafting.

Both methods serve the same requests at every tried rate. The gain at each rate is `over_none`.
"""

from __future__ import annotations

from collections.abc import Callable

from bass_core.loading.model_pair import ModelPair
from bass_lab.load.capacity import bearable_rate, highest_load
from bass_lab.load.result import LoadRun, Target
from bass_lab.load.workload import Workload
from bass_lab.provenance import describe_run

NONE, DEFAULT = "none", "default"
SLACK = 2.0  # default target: limit between tokens, relative to a request alone
QUEUE = 20.0  # default target: limit to the first token, relative to a request alone
ALONE = 0.1  # share of the maximum rate at which few requests overlap

Serve = Callable[[Workload, str], LoadRun]  # by "none" or "default"


def measure(
    serve: Serve,
    workload: Workload,
    *,
    between_ms: float | None = None,
    first_ms: float | None = None,
    within: float = 0.05,
    warm_up: float = 0.1,
    progress: Callable[[str], None] = lambda doing: None,
) -> dict:
    """Return the highest rates of both methods and the ratio, in the fields of a record of kind "load".

    serve(workload, way): a run with the method "none" or "default". between_ms, first_ms: limits of the 99th
    percentiles (None: `SLACK` and `QUEUE` times the medians at a low rate without drafting). Fields: target; highest
    and missed, by method; ratio (of the highest rates); tried (a line per rate); least_over_none (the worst gain).
    """
    progress("all at once")
    bearable = bearable_rate(lambda asked: serve(asked, NONE), workload)
    if between_ms is None or first_ms is None:
        progress("nearly alone")
        alone = serve(workload.at_rate(ALONE * bearable), NONE)
        between_ms = between_ms or SLACK * alone.quantile("between_ms", 0.5, warm_up)
        first_ms = first_ms or QUEUE * alone.quantile("first_ms", 0.5, warm_up)
    target = Target(between_ms=between_ms, first_ms=first_ms)
    runs: dict[float, dict[str, LoadRun]] = {}

    def run(rate: float, way: str) -> LoadRun:
        if rate not in runs:
            progress(f"{rate:.3g} requests/s")
            asked = workload.at_rate(rate)
            runs[rate] = {each: serve(asked, each) for each in (NONE, DEFAULT)}
        return runs[rate][way]

    first = bearable / 2
    found = {
        way: highest_load(
            lambda rate, way=way: run(rate, way), target, first=first, most=64 * first, within=within, warm_up=warm_up
        )
        for way in (NONE, DEFAULT)
    }
    tried = [_line(rate, both, target, warm_up) for rate, both in sorted(runs.items())]
    missed = {way: each.missed if each.missed < float("inf") else None for way, each in found.items()}
    none, default = found[NONE].rate, found[DEFAULT].rate
    return {
        "target": {**target.limits, "share": target.share},
        "highest": {way: each.rate for way, each in found.items()},
        "missed": missed,
        "ratio": default / none if none else None,
        "tried": tried,
        "least_over_none": min(line["over_none"] for line in tried),
    }


def _line(rate: float, both: dict[str, LoadRun], target: Target, warm_up: float) -> dict:
    """Return the results of a rate in ms: each method's target metrics at the target's share, and mean end_ms."""
    line: dict = {"rate": rate}
    for way, run in both.items():
        line |= {f"{way}_{name}": run.quantile(name, target.share, warm_up) for name in target.limits}
        line[f"{way}_end_ms"] = float(run.latencies.end_ms[run.counted(warm_up)].mean())
    return line | {"over_none": line[f"{NONE}_end_ms"] / line[f"{DEFAULT}_end_ms"]}


def record_line(measured: dict, workload: Workload, pair: ModelPair, **how: object) -> dict:
    """Return `measured` as a line of kind "load". how: served, max_batch_size, temperature, costs."""
    line = {"schema": "load", **measured, **how, **describe_run(pair)}
    line |= {"prompt_set": workload.meta.get("prompts", ""), "arrivals": workload.meta.get("arrivals", "recorded")}
    line |= {"requests": len(workload), "new_tokens": float(workload.requests.max_new_tokens.mean())}
    return line | {"seed": workload.meta.get("seed", 0)}
