"""Find the highest request rate at which a service meets a target, and compare policies over a range of rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from bass_core.policies.protocol import DraftLengthPolicy
from bass_lab.load.result import FINISHED, LoadRun, Target
from bass_lab.load.workload import Workload

HALVINGS = 12  # maximum halvings of the first rate before the search gives up


@dataclass(frozen=True)
class HighestLoad:
    """rate: highest tried rate that met the target, in requests per second (0.0: none). missed: lowest rate that missed
    it (inf: none). tried: a line per rate: rate, the target's metrics at its share, held. run: the run at `rate`."""

    rate: float
    missed: float
    tried: pd.DataFrame
    run: LoadRun | None = field(repr=False)


def highest_load(
    run: Callable[[float], LoadRun],
    target: Target,
    *,
    first: float = 1.0,
    most: float = 1e4,
    within: float = 0.02,
    warm_up: float = 0.1,
) -> HighestLoad:
    """Search for the highest rate that meets the target. run(rate) serves the same requests at a rate per second.

    The search doubles `first` until the target is missed (up to `most`), or halves `first` until the target is met.
    Bisection by ratio then narrows the bracket to a relative width `within`. Use the same requests at every rate
    (`Workload.at_rate`) as common random numbers. Raises ValueError for non-positive rates, or `first` above `most`.
    """
    if not (0 < first <= most < math.inf and within > 0):
        raise ValueError(f"needs 0 < first <= most and within > 0, got {first}, {most}, {within}")
    tried: list[dict] = []
    best: tuple[float, LoadRun | None] = (0.0, None)
    missed = math.inf

    def holds(rate: float) -> None:
        nonlocal best, missed
        found = run(rate)
        values = {name: found.quantile(name, target.share, warm_up) for name in target.limits}
        held = found.holds(target, warm_up)
        tried.append({"rate": rate, **values, "held": held})
        if held:
            best = (rate, found)
        else:
            missed = rate

    rate = first
    holds(rate)
    while best[0] and math.isinf(missed) and rate < most:
        rate = min(2 * rate, most)
        holds(rate)
    for _ in range(HALVINGS):
        if best[0]:
            break
        rate /= 2
        holds(rate)
    while best[0] and not math.isinf(missed) and missed / best[0] > 1 + within:
        holds(math.sqrt(best[0] * missed))
    return HighestLoad(best[0], missed, pd.DataFrame(tried).sort_values("rate", ignore_index=True), best[1])


def bearable_rate(run: Callable[[Workload], LoadRun], workload: Workload) -> float:
    """Return the requests per second served when all arrive at once and no client leaves. ValueError if none ends."""
    patient = Workload(workload.requests.assign(deadline=math.nan), workload.meta)
    requests = run(patient.at_rate(1e6)).requests
    finished = requests[requests.finish_reason.isin(FINISHED)]
    if finished.empty:
        reasons = ", ".join(sorted(requests.finish_reason.astype(str).unique()))
        raise ValueError(f"none of {len(requests)} simultaneous requests was served; finish reasons: {reasons}")
    return len(finished) / float(finished.ended.max())


def over_rates(
    run: Callable[[float, int | DraftLengthPolicy | None], LoadRun],
    policies: Mapping[str, int | DraftLengthPolicy | None],
    rates: Sequence[float],
    *,
    warm_up: float = 0.1,
) -> pd.DataFrame:
    """Compare policies on the same requests, with run(rate, policy). Return a line per rate and policy.

    Columns: rate, policy; between_ms, first_ms and end_ms (means); between_p99_ms and end_p99_ms; tokens_per_s,
    tokens_per_step, batch; over_none: end_ms without drafting (policy "none") divided by end_ms with the policy.
    """
    lines = []
    for rate in rates:
        for name, policy in policies.items():
            found = run(rate, policy)
            values = found.summary(warm_up=warm_up, resamples=2).value
            line = {"rate": rate, "policy": name}
            line |= {metric: values.get((metric, "mean")) for metric in ("first_ms", "between_ms", "end_ms")}
            line |= {f"{name}_p99_ms": values.get((f"{name}_ms", "p99")) for name in ("between", "end")}
            rest = ("tokens_per_s", "tokens_per_step", "batch")
            lines.append(line | {metric: values.get((metric, "mean")) for metric in rest})
    found = pd.DataFrame(lines)
    none = found[found.policy == "none"].set_index("rate").end_ms
    return found.assign(over_none=found.rate.map(none).astype(float) / found.end_ms)
