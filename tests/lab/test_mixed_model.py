import numpy as np
import pytest

from bass_lab.study.mixed_model import Sample, times

BATCHES, LENGTHS, CACHED = (1, 2, 4), (1, 2, 3, 4, 5, 6, 8), (64, 256, 768)


def passes(stairs=0.0):
    return {
        (b, q, kv): 1e-2 * (1 + 0.1 * b * q + 0.0005 * b * kv) * (1 + stairs * (q > 4))
        for b in BATCHES
        for q in LENGTHS
        for kv in CACHED
    }


def sampled(truth, seed, each=3, noise=0.0, drift=0.0, slow=0.0, table="passes"):
    """Return `each` samples of every point in random order, 50 ms apart. noise, drift: standard deviations of log
    times, per sample and per second. slow: share of samples with ten times the time."""
    rng = np.random.default_rng(seed)
    points = [point for point in truth for _ in range(each)]
    machine = rng.normal(0, drift, len(points) // 20 + 1)
    samples = []
    for turn, index in enumerate(rng.permutation(len(points))):
        factor = np.exp(rng.normal(0, noise) + machine[turn // 20]) * (10 if rng.random() < slow else 1)
        samples.append(Sample(table, points[index], 0.05 * turn, truth[points[index]] * factor))
    return samples


def medians(samples):
    by_point = {}
    for sample in samples:
        by_point.setdefault((sample.table, sample.point), []).append(sample.seconds)
    return {key: np.median(values) for key, values in by_point.items()}


def error(found, truth, table="passes"):
    logs = np.array([np.log(found[table, point] / seconds) for point, seconds in truth.items()])
    return (logs - np.median(logs)).std()


def test_exact_samples_give_every_point():
    rng = np.random.default_rng(0)
    truth = {point: seconds * rng.uniform(0.5, 2) for point, seconds in passes().items()}
    found = times(sampled(truth, 0))
    assert set(found) == {("passes", point) for point in truth}
    for point, seconds in truth.items():
        assert found["passes", point] == pytest.approx(seconds, rel=2e-3)


def test_noisy_samples_borrow_from_their_neighbours():
    truth = passes()
    samples = sampled(truth, 0, noise=0.15, drift=0.15)
    assert error(times(samples), truth) < 0.4 * error(medians(samples), truth)


def test_stairs_above_the_noise_are_kept():
    truth = passes(stairs=0.4)
    samples = sampled(truth, 0, noise=0.1, drift=0.1)
    found = times(samples)
    assert error(found, truth) < 0.6 * error(medians(samples), truth)
    for b in BATCHES:
        step = np.mean([found["passes", (b, 5, kv)] / found["passes", (b, 4, kv)] for kv in CACHED])
        assert step == pytest.approx(np.mean([truth[b, 5, kv] / truth[b, 4, kv] for kv in CACHED]), rel=0.1)


def test_drift_of_the_machine_is_removed():
    truth = passes()
    samples = sampled(truth, 0, noise=0.03, drift=0.3)
    assert error(times(samples), truth) < 0.15 * error(medians(samples), truth)


def test_a_slow_moment_counts_little():
    truth = passes()
    samples = sampled(truth, 0, noise=0.05, slow=0.05)
    assert error(times(samples), truth) < 0.03
    assert times(samples)["passes", (2, 4, 256)] == pytest.approx(truth[2, 4, 256], rel=0.05)


def test_noisy_table_does_not_smooth_another():
    rng = np.random.default_rng(0)
    truth = {point: seconds * rng.uniform(0.8, 1.25) for point, seconds in passes().items()}
    overheads = {(b, k): 1e-3 * (1 + 0.1 * k) for b in BATCHES for k in (0, 1, 2, 4)}
    samples = sampled(truth, 0, noise=0.02)
    both = times(samples + sampled(overheads, 1, noise=2.0, table="overheads"))
    assert error(both, truth) < 1.2 * error(times(samples), truth)
    assert {point for table, point in both if table == "overheads"} == set(overheads)


def test_zero_and_negative_samples_give_positive_times():
    drawn = [((1, 0), 0.0, 0.0), ((1, 1), 0.1, -1e-5), ((2, 0), 0.2, 1e-6)]
    found = times([Sample("rest", *each) for each in drawn])
    assert all(0 < seconds < 1e-5 for seconds in found.values())
