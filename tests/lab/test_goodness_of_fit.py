import numpy as np
import pytest
from scipy import stats

from bass_lab.checks import goodness_of_fit as fit

LEVEL = 5e-5


def skewed_law(cells=200, seed=0):
    p = np.random.default_rng(seed).dirichlet(np.full(cells, 0.5))
    return {(index,): float(value) for index, value in enumerate(p)}


def p_value(law, p, samples, rng):
    counts = rng.multinomial(samples, p)
    return fit.g_test([cell for cell, count in zip(law, counts, strict=True) for _ in range(count)], law)["p_value"]


def test_chi_square_tail_is_scipys():
    for statistic, freedom in ((0.0, 3), (3.2, 1), (80.0, 60), (300.0, 120)):
        assert fit.chi_square_tail(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_g_test_is_scipys_with_williams_correction():
    counts, p = [30, 50, 20], [0.2, 0.5, 0.3]
    statistic = stats.power_divergence(counts, np.multiply(100, p), lambda_="log-likelihood").statistic
    williams = 1 + (sum(1 / each for each in p) - 1) / (6 * 100 * 2)
    outcomes = [(cell,) for cell, count in enumerate(counts) for _ in range(count)]
    found = fit.g_test(outcomes, {(cell,): each for cell, each in enumerate(p)})
    assert found["p_value"] == pytest.approx(stats.chi2.sf(statistic / williams, 2))


def test_p_values_are_uniform_for_the_true_distribution():
    law, rng = skewed_law(), np.random.default_rng(1)
    found = [p_value(law, list(law.values()), 2000, rng) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    assert fit._cells(law, 2000)[0].min() >= 5  # expected counts: rare outcomes are pooled


def test_detectable_total_variation_is_detected():
    law, samples, rng = skewed_law(cells=60), 4000, np.random.default_rng(2)
    distance = fit.detectable(law, samples, LEVEL)
    freedom = len(fit._cells(law, samples)[0]) - 1
    critical = stats.chi2.isf(LEVEL, freedom)
    assert stats.ncx2.sf(critical, freedom, samples * (2 * distance) ** 2) == pytest.approx(fit.POWER, abs=0.02)
    p = np.array(list(law.values()))
    order = p.argsort()[::-1]
    shifted = p.copy()
    shifted[order[::2]] *= 1 - distance / p[order[::2]].sum()
    shifted[order[1::2]] *= 1 + distance / p[order[1::2]].sum()
    assert np.mean([p_value(law, shifted, samples, rng) < LEVEL for _ in range(40)]) > 0.7


def test_impossible_outcome_has_p_value_0():
    assert fit.g_test([(0,), (9,)], {(0,): 0.5, (1,): 0.5})["p_value"] == 0


def test_holm_stops_at_the_first_accepted_hypothesis():
    assert fit.holm({"a": 0.04, "b": 0.02, "c": 0.9}, 0.05) == []
    assert fit.holm({"a": 0.026, "b": 0.01, "c": 0.9}, 0.05) == ["b"]
    assert fit.holm({"a": 0.024, "b": 0.01, "c": 0.9}, 0.05) == ["b", "a"]
