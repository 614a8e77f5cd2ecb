"""Estimate the times of grid points from few, noisy samples, with a linear mixed model of log seconds.

    log seconds = trend + stairs + drift + noise

trend: quadratic in the logarithms of a table's axes. stairs: step functions on each subset of the axes, for devices
that round shapes up. drift: speed of the machine in a time span. Stairs and drift are normal around 0, noise is
Student's t. Expectation maximization estimates all variances (Laird and Ware 1982), so noisy points borrow from their
neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

SPAN = 0.4  # seconds of constant machine speed
SPANS = 150  # largest number of spans
FREEDOM = 5.0  # degrees of freedom of Student's t
ROUNDS = 20  # rounds of expectation maximization
STAIR, NOISE = 0.05, 0.1  # initial standard deviations
FLAT = 1e-4  # precision of the trend's coefficients: a flat prior
LEAST = 1e-7  # lower limit of samples (seconds) and of variances


class Sample(NamedTuple):
    """table: name of the grid; point: coordinates >= 0; when: clock time in seconds; seconds: measured duration."""

    table: str
    point: tuple[float, ...]
    when: float
    seconds: float


def times(samples: Sequence[Sample]) -> dict[tuple[str, tuple[float, ...]], float]:
    """Return the estimated seconds of each sampled point, by table and point."""
    points, where = _index([(sample.table, sample.point) for sample in samples])
    when = np.array([sample.when for sample in samples])
    span = max(SPAN, float(np.ptp(when)) / SPANS)
    _, moment = _index(((when - when.min()) // span).tolist())
    _, table = _index([table for table, _ in points])
    logs = np.log(np.maximum([sample.seconds for sample in samples], LEAST))
    fitted = _fit(*_design(points), table, where, moment, logs)
    return dict(zip(points, np.exp(fitted).tolist(), strict=True))


def _index(items: Sequence[Hashable]) -> tuple[list, np.ndarray]:
    """Return the distinct items in order, and the index of each item in this list."""
    different = sorted(set(items))
    places = {item: place for place, item in enumerate(different)}
    return different, np.array([places[item] for item in items])


def _design(points: Sequence[tuple[str, tuple[float, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the design matrix [points, terms], and the kind of each term (-1 for trend terms)."""
    columns, kinds, kind = [], [], 0
    for table in sorted({table for table, _ in points}):
        rows = [row for row, point in enumerate(points) if point[0] == table]
        grid = np.array([points[row][1] for row in rows], dtype=float)
        trend = _trend(np.log(np.maximum(grid, 0.5)))  # log 0.5 for draft length 0
        terms, own = [trend], [-1] * trend.shape[1]
        for size in range(1, grid.shape[1] + 1):
            for axes in combinations(range(grid.shape[1]), size):
                levels = np.unique(grid[:, axes], axis=0)
                terms.append((grid[:, None, axes] >= levels).all(-1).astype(float))
                own += [kind] * len(levels)
                kind += 1
        block = np.zeros((len(points), len(own)))
        block[rows] = np.concatenate(terms, 1)
        columns.append(block)
        kinds += own
    return np.concatenate(columns, 1), np.array(kinds)


def _trend(logs: np.ndarray) -> np.ndarray:
    """Return the trend terms [points, terms]: 1, each axis, and products of two axes if the points allow."""
    wide = [axis - axis.mean() for axis in logs.T if np.ptp(axis) > 0]
    wide = [axis / np.ptp(axis) for axis in wide]
    curved = [axis * axis for axis in wide if len(np.unique(axis)) > 2]
    crossed = [one * other for one, other in combinations(wide, 2)]
    return np.stack([np.ones(len(logs)), *wide, *curved, *crossed], 1)


def _fit(
    terms: np.ndarray, kinds: np.ndarray, table: np.ndarray, where: np.ndarray, moment: np.ndarray, logs: np.ndarray
) -> np.ndarray:
    """Return log seconds of each point. table: of each point; where, moment, logs: point, time span and log seconds of
    each sample. Sums over cells (point, time span) replace single samples."""
    count, moments = terms.shape[1], int(moment.max()) + 1
    shape = len(terms), moments
    cells = np.ravel_multi_index((where, moment), shape)
    kinds = np.concatenate([kinds, np.full(moments, kinds.max() + 1)])
    groups = [kinds == kind for kind in range(kinds.max() + 1)]
    variances, noise = np.full(len(groups), STAIR**2), np.full(table.max() + 1, NOISE**2)
    of, trust = table[where], np.ones(len(logs))
    for _ in range(ROUNDS):
        weights = trust / noise[of]
        weight = np.bincount(cells, weights, np.prod(shape)).reshape(shape)
        pull = np.bincount(cells, weights * logs, np.prod(shape)).reshape(shape)
        crossed = terms.T @ weight
        known = np.block([[(terms.T * weight.sum(1)) @ terms, crossed], [crossed.T, np.diag(weight.sum(0))]])
        covariance = np.linalg.inv(known + np.diag(np.where(kinds < 0, FLAT, 1 / variances[kinds])))
        effects = covariance @ np.concatenate([terms.T @ pull.sum(1), pull.sum(0)])
        errors = logs - (terms @ effects[:count])[where] - effects[count:][moment]

        own = covariance.diagonal()
        variances = np.array([max(np.mean(effects[group] ** 2 + own[group]), LEAST) for group in groups])
        unsure = ((terms @ covariance[:count, :count]) * terms).sum(1)[:, None]
        unsure = unsure + 2 * terms @ covariance[:count, count:] + own[count:]
        squares = trust * (errors**2 + unsure[where, moment])
        noise = np.maximum(np.bincount(of, squares) / np.bincount(of), LEAST)
        trust = (FREEDOM + 1) / (FREEDOM + errors**2 / noise[of])
    return terms @ effects[:count]
