"""Scores of stored samples at any time budget: pass@k, Pass@First, Pass@All, with intervals over problems.

The names are the paper's, the definitions ours. A *sample* is a row of a problem; samples are a DataFrame with a line
per sample and the columns `COLUMNS`. All rows of a problem share a clock that starts with the call. A row counts at a
budget if the row finished within the budget. *Pass@First*: the counted row with the highest mean log-probability
passes. *Pass@All*: any counted row passes. A problem without counted rows fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

RESAMPLES = 10_000
CONFIDENCE = 0.95

COLUMNS = {
    "problem": "task_id",
    "row": "0 … n - 1 within the problem; of equal mean log-probabilities, the lowest row is chosen",
    "finish_seconds": "from the call to the end of the row; NaN if the row did not finish",
    "finished": "ended by EOS, a stop string or the length limit, not by a budget or an error",
    "tokens": "number of emitted tokens, including EOS",
    "logprob_sum": "sum over the emitted tokens of the target's log-probability at temperature 1, in nats",
    "passed": "True if the problem's tests pass",
}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, include one of c passing samples.

    The probability is 1 - C(n-c, k) / C(n, k), computed as a product to avoid overflow and cancellation (Chen et al.
    2021, arXiv 2107.03374, section 2.1). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def score(
    samples: pd.DataFrame,
    budgets: Sequence[float] = (np.inf,),
    *,
    ks: Sequence[int] = (1,),
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """Return a line per (budget, metric): budget in seconds, metric, and value, low, high as shares of problems.

    metrics: "Pass@First", "Pass@All", and "pass@k" for each k up to the smallest number of rows of a problem.
    Unfinished rows fail. low, high: 95% percentile bootstrap over problems, with the same resamples for all lines.
    Raises ValueError for no samples, a repeated row, or a budget that is not >= 0.
    """
    lines, values = _values(samples, budgets, ks)
    return _with_intervals(lines, values, resamples)


def difference(
    samples: pd.DataFrame,
    others: pd.DataFrame,
    budgets: Sequence[float],
    *,
    ks: Sequence[int] = (1,),
) -> pd.DataFrame:
    """Return the `score` of samples minus the `score` of others, with paired 95% intervals of the difference. Raises as
    `score`, and ValueError unless both have the same problems in the same order."""
    if list(samples.problem.unique()) != list(others.problem.unique()):
        raise ValueError("samples and others must have the same problems, in the same order")
    lines, values = _values(samples, budgets, ks)
    lines_of_others, values_of_others = _values(others, budgets, ks)
    if lines != lines_of_others:
        raise ValueError(f"pass@k needs k rows of every problem in samples and others; too few rows for some of k={ks}")
    return _with_intervals(lines, values - values_of_others)


def _values(
    samples: pd.DataFrame, budgets: Sequence[float], ks: Sequence[int]
) -> tuple[list[tuple[float, str]], np.ndarray]:
    """Return (budget, metric) of every column, and the columns: [P, budgets × metrics]."""
    if any(not budget >= 0 for budget in budgets):
        raise ValueError(f"budgets must be seconds >= 0, got {list(budgets)}")
    finish, confidence, passed, rows = matrices(samples)  # [P, N] each; rows [P]
    kept = [k for k in ks if k <= rows.min()]
    lines, columns = [], []
    for budget in budgets:
        columns += _per_problem(finish <= budget, confidence, passed, rows, kept)
        lines += [(float(budget), metric) for metric in ("Pass@First", "Pass@All", *(f"pass@{k}" for k in kept))]
    return lines, np.stack(columns, axis=1)


def drawn(units: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the draws of each problem or prompt in each bootstrap resample: int64 [resamples, units]."""
    return np.random.default_rng(0).multinomial(units, np.full(units, 1 / units), size=resamples)


def interval(resampled: np.ndarray) -> np.ndarray:
    """Return the ends of the 95% percentile interval of values [resamples, …]: [2, …]."""
    return np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)


def _with_intervals(lines: list[tuple[float, str]], values: np.ndarray, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Return a line per column of values [P, M]: the mean over problems, and the percentile bootstrap interval."""
    problems = len(values)
    low, high = interval(drawn(problems, resamples) @ values / problems)
    found = pd.DataFrame(lines, columns=["budget", "metric"])
    return found.assign(value=values.mean(0), low=low, high=high)


def _per_problem(
    in_time: np.ndarray, confidence: np.ndarray, passed: np.ndarray, rows: np.ndarray, ks: Sequence[int]
) -> list[np.ndarray]:
    """Return every metric at a budget, each [P] in [0, 1]."""
    ranked = np.where(in_time, confidence, -np.inf)
    chosen = ranked.argmax(1)  # ties go to the lowest row
    right = in_time & passed
    first = right[np.arange(len(right)), chosen]
    counts = right.sum(1)
    at_k = [np.array([pass_at_k(n, c, k) for n, c in zip(rows.tolist(), counts.tolist(), strict=True)]) for k in ks]
    return [first.astype(float), right.any(1).astype(float), *at_k]


def matrices(samples: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return finish seconds, mean log-probability and passed, each [P, N] by row index, and the number of rows [P].

    Unfinished and missing rows finish at NaN, which is within no budget.
    """
    missing = [name for name in COLUMNS if name not in samples]
    if missing or samples.empty:
        raise ValueError(f"samples need at least one line and the columns {', '.join(COLUMNS)}; missing: {missing}")
    repeated = samples[samples.duplicated(["problem", "row"])]
    if len(repeated):
        raise ValueError(f"row {repeated.row.iloc[0]} of problem {repeated.problem.iloc[0]} occurs twice")
    problems = pd.factorize(samples.problem.to_numpy())[0]
    places = samples.groupby("problem").row.rank().to_numpy(dtype=int) - 1
    shape = problems.max() + 1, places.max() + 1
    finish, confidence, passed = np.full(shape, np.nan), np.zeros(shape), np.zeros(shape, dtype=bool)
    seconds = samples.finish_seconds.to_numpy(dtype=float)
    finish[problems, places] = np.where(samples.finished.to_numpy(dtype=bool), seconds, np.nan)
    tokens = samples.tokens.to_numpy().clip(1)  # a row that was cut off before the prefill has no tokens
    confidence[problems, places] = samples.logprob_sum.to_numpy(dtype=float) / tokens
    passed[problems, places] = samples.passed.to_numpy(dtype=bool)
    return finish, confidence, passed, np.bincount(problems)


def quartiles(samples: pd.DataFrame, limit: float | None = None) -> list[float]:
    """Return the quartiles and maximum of the finish times up to `limit`: seconds, ascending, distinct. [0.0] if there
    are no such rows."""
    seconds = samples.finish_seconds[samples.finished.astype(bool)].to_numpy(dtype=float)
    seconds = seconds[seconds <= (np.inf if limit is None else limit)]
    if not len(seconds):
        return [0.0]
    return sorted(set(np.quantile(seconds, [0.25, 0.5, 0.75, 1.0], method="inverted_cdf").tolist()))


def table(scores: pd.DataFrame) -> list[dict[str, str]]:
    """Return scores with a column `method` as text: a line per (budget, method), shares with intervals."""
    lines = []
    for (budget, method), group in scores.groupby(["budget", "method"], sort=False):
        line = {"seconds": f"{budget:.3g}", "method": method}
        for found in group.itertuples():
            line[found.metric] = f"{found.value:.1%} ({100 * found.low:.1f}-{found.high:.1%})"
        lines.append((budget, line))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]
