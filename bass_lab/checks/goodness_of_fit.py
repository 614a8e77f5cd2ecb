"""Test samples against a known discrete distribution: the G-test, its detectable distance, and Holm's correction.

The two special functions come from torch, so scipy is not required.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

POWER = 0.9  # probability that a distribution at the distance `detectable` is rejected


def g_test(outcomes: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> dict:
    """Return the p-value of the G-test with Williams' correction (Williams 1976) and the number of cells. An outcome
    outside `law` gives p = 0. Raises ValueError if `law` has one cell."""
    place = {outcome: index for index, outcome in enumerate(sorted(law, key=law.get))}
    if any(outcome not in place for outcome in outcomes):
        return {"p_value": 0.0, "cells": len(law), "impossible": True}
    expected, pooled = _cells(law, len(outcomes))
    observed = np.bincount([max(0, place[outcome] - pooled) for outcome in outcomes], minlength=len(expected))
    freedom, seen = len(expected) - 1, observed > 0
    if freedom == 0:
        raise ValueError("the target's distribution has only one likely outcome, and a G-test needs two or more")
    g = 2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum()
    williams = 1 + ((len(outcomes) / expected).sum() - 1) / (6 * len(outcomes) * freedom)
    return {"p_value": chi_square_tail(g / williams, freedom), "cells": len(expected), "impossible": False}


def _cells(law: dict[tuple[int, ...], float], samples: int) -> tuple[np.ndarray, int]:
    """Return expected counts and the index shift. The rarest outcomes are pooled until all counts are >= 5."""
    expected = samples * np.sort(np.array(list(law.values())))
    pooled = max(1, int((expected < 5).sum()))
    while expected[:pooled].sum() < 5:
        pooled += 1
    return np.concatenate([[expected[:pooled].sum()], expected[pooled:]]), pooled - 1


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(chi-square > statistic)."""
    half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable(law: dict[tuple[int, ...], float], samples: int, level: float) -> float:
    """Return the total variation that the test at `level` detects with probability POWER. G is then noncentral
    chi-square with parameter samples * sum((p' - p)^2 / p) >= samples * (2 TV)^2 (Cauchy-Schwarz)."""
    freedom = len(_cells(law, samples)[0]) - 1
    z_level, z_power = torch.special.ndtri(torch.tensor([1 - level, POWER], dtype=torch.float64)).tolist()
    critical = freedom * (1 - 2 / (9 * freedom) + z_level * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson & Hilferty
    # Normal approximation: mean freedom + x, variance 2 (freedom + 2 x). Solve for x: mean - z_power sd = critical.
    excess = critical - freedom
    shift = excess + 2 * z_power**2
    parameter = shift + math.sqrt(shift**2 - excess**2 + 2 * z_power**2 * freedom)
    return math.sqrt(parameter / samples) / 2


def holm(p_values: dict[str, float], alpha: float) -> list[str]:
    """Return the names rejected at family-wise level alpha (Holm 1979)."""
    rejected = []
    for done, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > alpha / (len(p_values) - done):
            break
        rejected.append(name)
    return rejected
