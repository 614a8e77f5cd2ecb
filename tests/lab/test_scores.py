from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pandas as pd
import pytest

from bass_lab.evaluation.scores import difference, pass_at_k, quartiles, score, table

INF = float("inf")


def sample(problem, row, finish, logprob, passed, tokens=10):
    finished = np.isfinite(finish)
    times = {"finish_seconds": finish if finished else float("nan"), "finished": finished, "tokens": tokens}
    return {"problem": problem, "row": row, "logprob_sum": logprob * tokens, "passed": passed} | times


def random_samples(seed: int, problems: int = 12) -> pd.DataFrame:
    """Return problems of 1 to 6 shuffled rows, some unfinished, with many ties in time and log-probability."""
    rng = np.random.default_rng(seed)

    def drawn(problem, row):
        finish, logprob = rng.choice([0.5, 1.0, 1.5, 2.0, INF]), -float(rng.integers(1, 4))
        return sample(f"p{problem}", row, finish, logprob, bool(rng.random() < 0.4), int(rng.integers(1, 20)))

    lines = [drawn(problem, row) for problem in range(problems) for row in range(rng.integers(1, 7))]
    return pd.DataFrame(lines).sample(frac=1, random_state=seed)


def values(scores: pd.DataFrame, metric: str) -> np.ndarray:
    return scores[scores.metric == metric].sort_values("budget").value.to_numpy()


def by_definition(samples: pd.DataFrame, budget: float) -> tuple[float, float]:
    firsts, alls = [], []
    for _, rows in samples.groupby("problem"):
        done = [r for r in rows.sort_values("row").itertuples() if r.finished and r.finish_seconds <= budget]
        best = max(done, key=lambda r: r.logprob_sum / r.tokens, default=None)  # the first of equal rows
        firsts.append(best is not None and best.passed)
        alls.append(any(r.passed for r in done))
    return float(np.mean(firsts)), float(np.mean(alls))


def test_pass_at_k_equals_enumeration():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations(range(n), k))
                share = sum(min(draw) < c for draw in draws) / len(draws)
                assert abs(pass_at_k(n, c, k) - share) < 1e-12


def test_pass_at_k_of_many_samples_is_exact():
    for n, c, k in ((200, 3, 100), (1000, 1, 1), (1000, 5, 700), (164, 80, 10)):
        assert abs(pass_at_k(n, c, k) - float(1 - Fraction(comb(n - c, k), comb(n, k)))) < 1e-12


def test_pass_at_k_refuses_impossible_counts():
    for counts in ((3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)):
        with pytest.raises(ValueError, match=r"pass@k needs"):
            pass_at_k(*counts)


def test_k_beyond_the_rows_of_a_problem_is_dropped():
    samples = pd.DataFrame([sample("a", row, 1, -1, True) for row in range(3)] + [sample("b", 0, 1, -1, False)])
    assert set(score(samples, [2], ks=(1, 2, 3)).metric) == {"Pass@First", "Pass@All", "pass@1"}


@pytest.mark.parametrize("seed", range(6))
def test_scores_equal_their_definition_in_any_order_of_lines(seed):
    samples = random_samples(seed)
    budgets = [0.0, 0.5, 0.75, 1.0, 1.5, 2.0, INF]
    scores = score(samples, budgets, resamples=50)
    first, every = values(scores, "Pass@First"), values(scores, "Pass@All")
    assert np.allclose([by_definition(samples, budget) for budget in budgets], np.stack([first, every], axis=1))
    assert (first <= every).all()
    assert (np.diff(every) >= 0).all() and (np.diff(values(scores, "pass@1")) >= 0).all()
    assert first[0] == every[0] == 0
    assert (scores.low <= scores.high).all() and scores[["low", "high"]].stack().between(0, 1).all()
    shuffled = samples.sample(frac=1, random_state=seed + 1)
    assert np.allclose(score(samples, [1, INF]).value, score(shuffled, [1, INF]).value)


def test_pass_at_n_is_pass_at_all():
    rng = np.random.default_rng(1)
    places = [(problem, row) for problem in range(20) for row in range(4)]
    samples = pd.DataFrame([sample(*at, rng.choice([1.0, 2.0, INF]), -1, bool(rng.random() < 0.3)) for at in places])
    scores = score(samples, [1, 2], ks=(1, 4))
    assert values(scores, "pass@4") == pytest.approx(values(scores, "Pass@All"))
    expected = (samples.passed & (samples.finish_seconds <= 1)).mean()
    assert values(scores, "pass@1")[0] == pytest.approx(expected)


def test_intervals_are_the_bootstrap_of_the_mean():
    samples = pd.DataFrame([sample(p, 0, 1, -1, p < 50) for p in range(200)])
    (line,) = score(samples, [1]).query("metric == 'Pass@All'").itertuples()
    assert line.value == 0.25
    assert (line.low, line.high) == pytest.approx((0.25 - 0.06, 0.25 + 0.06), abs=0.006)  # 1.96 √(p (1 - p) / 200)
    assert score(samples, [1]).equals(score(samples, [1]))


def test_quartiles_are_times_at_which_rows_finish():
    samples = pd.DataFrame([sample("a", row, finish, -1, True) for row, finish in enumerate([1, 2, 3, 4, INF])])
    assert quartiles(samples) == [1, 2, 3, 4]
    assert quartiles(samples, limit=2.5) == [1, 2]
    assert quartiles(samples[~samples.finished]) == quartiles(samples, limit=0.5) == [0.0]


def test_table_has_a_line_per_budget_and_method():
    samples = random_samples(0)
    both = pd.concat([score(samples, [2, 1]).assign(method=method) for method in ("regular", "batched")])
    lines = table(both)
    assert all({"Pass@First", "pass@1"} < line.keys() for line in lines)
    named = [(line["seconds"], line["method"]) for line in lines]
    assert named == [(budget, method) for budget in "12" for method in ("regular", "batched")]


def test_bad_samples_are_refused():
    good = random_samples(0)
    for wrong, reason in (
        (good.iloc[:0], "at least one line"),
        (good.drop(columns="tokens"), "tokens"),
        (pd.concat([good, good.iloc[:1]]), "twice"),
    ):
        with pytest.raises(ValueError, match=reason):
            score(wrong)
    with pytest.raises(ValueError, match="budgets must be seconds"):
        score(good, [float("nan")])


def two_methods(seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    chance = np.random.default_rng(seed)
    places = [(f"p{problem}", row) for problem in range(30) for row in range(4)]

    def drawn(at):
        return sample(*at, chance.uniform(0, 2), -chance.uniform(0.1, 0.9), chance.random() < 0.4)

    return tuple(pd.DataFrame([drawn(at) for at in places]) for _ in range(2))


def test_difference_equals_the_scores_difference():
    one, other = two_methods(1)
    found = difference(one, other, [0.5, 1.0], ks=(1, 2))
    expected = score(one, [0.5, 1.0], ks=(1, 2)).value - score(other, [0.5, 1.0], ks=(1, 2)).value
    assert np.allclose(found.value, expected, atol=1e-12)
    assert (found.low <= found.value).all() and (found.value <= found.high).all()
    mirrored = difference(other, one, [0.5, 1.0], ks=(1, 2))
    assert np.allclose(mirrored.value, -found.value) and np.allclose(mirrored.low, -found.high, atol=1e-9)


def test_difference_is_paired():
    one, _ = two_methods(2)
    same = difference(one, one.copy(), [1.0])
    assert (same[["value", "low", "high"]] == 0).all(axis=None)
    better = one.assign(passed=True)
    gain, alone = difference(better, one, [1.0]), score(better, [1.0])
    assert (gain.value > 0).all() and (gain.value < alone.value).all()


def test_difference_needs_the_same_problems():
    one, other = two_methods(3)
    with pytest.raises(ValueError, match="same problems"):
        difference(one, other[other.problem != "p3"], [1.0])
    with pytest.raises(ValueError, match="pass@k needs k rows"):
        difference(one, other[other.row < 2], [1.0], ks=(3,))
