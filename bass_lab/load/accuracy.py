"""Accuracy, latency and throughput under load: the share of requests with a correct answer in time.

Stored samples of `bass_lab.evaluation` hold the time, confidence and grade of each row of a problem. A request is a
problem. The simulated server decodes problems one after the other. It answers when all rows are done, after `budget`
seconds, or at the client's deadline, with the most confident finished row (Pass@First). Samples of another temperature
or with fewer rows are another serving method. `tail` names a method for requests that had to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from bass_core import checks
from bass_lab.evaluation import scores
from bass_lab.load.workload import Workload


def front(
    workload: Workload,
    samples: Mapping[str, pd.DataFrame],
    budgets: Sequence[float] = (np.inf,),
    *,
    tail: str | None = None,
) -> pd.DataFrame:
    """Return latency, throughput and Pass@First of each serving method at each budget.

    samples: `Evaluation.samples` by the name of the method. budgets: seconds of decoding per request. tail: the method
    for requests that have waited. Problem k answers prompt k of the workload, modulo the number of problems.

    Columns: way (the method), budget; p50_ms, p99_ms (arrival to answer, or until the client left); answered (share of
    requests with a finished row in time); requests_per_s (answered); pass_first (share answered correctly in time);
    front (True on the Pareto front of p99_ms, requests_per_s and pass_first).

    Raises ValueError for an unknown tail, methods with different problems, budgets that are not > 0, and cut-off rows
    of requests without deadline or budget.
    """
    if tail is not None:
        checks.one_of("tail", tail, samples)
    if not samples or any(not budget > 0 for budget in budgets):
        raise ValueError(f"needs samples and budgets > 0 seconds, got {list(budgets)} for {list(samples)}")
    problems = {way: list(each.problem.unique()) for way, each in samples.items()}
    if any(found != next(iter(problems.values())) for found in problems.values()):
        raise ValueError("all samples must be of the same problems, in the same order")
    known = {way: scores.matrices(each)[:3] for way, each in samples.items()}
    endless = [way for way, (finish, *_) in known.items() if np.isnan(finish).any()]
    if endless and np.isinf(budgets).any() and workload.requests.deadline.isna().any():
        raise ValueError(f"rows of {', '.join(endless)} were cut off; give finite budgets, or all requests deadlines")
    lines = []
    for way in samples:
        for budget in budgets:
            line = _served(workload, known[way], known[tail or way], budget)
            lines.append({"way": way, "budget": float(budget), **line})
    found = pd.DataFrame(lines)
    merits = np.stack([-found.p99_ms, found.requests_per_s, found.pass_first], axis=1)
    beaten = [((merits >= each).all(1) & (merits > each).any(1)).any() for each in merits]
    return found.assign(front=np.logical_not(beaten))


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # finish seconds (NaN: never), mean log-probability, passed: [P, N]


def _served(workload: Workload, own: Rows, waited: Rows, budget: float) -> dict:
    """Simulate a server, first come, first served. waited: rows of requests that found the server busy."""
    requests, free = workload.requests, 0.0
    latencies, answered, right = [], [], []
    for arrived, number, deadline in zip(requests.arrived, requests.number, requests.deadline, strict=True):
        begin = max(free, arrived)
        finish, sure, passed = (each[number % len(each)] for each in (waited if begin > arrived else own))
        left = np.inf if np.isnan(deadline) else arrived + deadline - begin
        done = finish <= min(budget, left)
        all_done = np.where(np.isnan(finish), np.inf, finish).max()
        free = begin + max(min(all_done, budget, left), 0.0)
        latencies.append(free - arrived if left > 0 else deadline)
        answered.append(done.any())
        right.append(bool(done.any() and passed[np.where(done, sure, -np.inf).argmax()]))
    last = (requests.arrived + np.array(latencies)).max()
    p50, p99 = 1e3 * np.quantile(latencies, [0.5, 0.99], method="inverted_cdf")
    line = {"p50_ms": float(p50), "p99_ms": float(p99), "answered": float(np.mean(answered))}
    return line | {"requests_per_s": sum(answered) / float(last), "pass_first": float(np.mean(right))}
