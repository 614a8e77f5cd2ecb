"""Do samples follow an exactly known discrete law? The G-test, what it would have found, and Holm's correction.

torch has the two special functions that this needs, so that the library does not depend on scipy for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

POWER = 0.9  # chance that a law as far off as `detectable` says is rejected


def g_test(outcomes: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> dict:
    """Return p_value of the G-test with Williams' correction (Williams 1976), and its number of cells. An outcome that
    the law lacks gives p = 0. Raises ValueError for a law of one cell."""
    place = {outcome: index for index, outcome in enumerate(sorted(law, key=law.get))}
    if any(outcome not in place for outcome in outcomes):
        return {"p_value": 0.0, "cells": len(law), "impossible": True}
    expected, pooled = _cells(law, len(outcomes))
    observed = np.bincount([max(0, place[outcome] - pooled) for outcome in outcomes], minlength=len(expected))
    freedom, seen = len(expected) - 1, observed > 0
    if freedom == 0:
        raise ValueError("the target is nearly certain of these tokens: a law of one outcome tests nothing")
    g = 2 * (observed[seen] * np.log(observed[seen] / expected[seen])).sum()
    williams = 1 + ((len(outcomes) / expected).sum() - 1) / (6 * len(outcomes) * freedom)
    return {"p_value": chi_square_tail(g / williams, freedom), "cells": len(expected), "impossible": False}


def _cells(law: dict[tuple[int, ...], float], samples: int) -> tuple[np.ndarray, int]:
    """Return expected counts, the rarest outcomes pooled first until all are >= 5, and how far others moved."""
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
    """Return the total variation that is found with probability POWER at that level. G is then noncentral chi-square
    with parameter samples * sum((p' - p)^2 / p) >= samples * (2 TV)^2 (Cauchy-Schwarz)."""
    freedom = len(_cells(law, samples)[0]) - 1
    z_level, z_power = torch.special.ndtri(torch.tensor([1 - level, POWER], dtype=torch.float64)).tolist()
    critical = freedom * (1 - 2 / (9 * freedom) + z_level * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson & Hilferty
    # Normal approximation: mean freedom + x, variance 2 (freedom + 2 x); x where z_power deviations lie above critical.
    excess = critical - freedom
    shift = excess + 2 * z_power**2
    parameter = shift + math.sqrt(shift**2 - excess**2 + 2 * z_power**2 * freedom)
    return math.sqrt(parameter / samples) / 2


def holm(p_values: dict[str, float], alpha: float) -> list[str]:
    """The names rejected at family-wise level alpha (Holm 1979)."""
    rejected = []
    for done, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > alpha / (len(p_values) - done):
            break
        rejected.append(name)
    return rejected
