"""Replace random numbers by an oracle that visits every branch and its probability.

`laws(run)` calls `run()` once per branch and sums the probabilities of equal outcomes. Using a random number twice is
an error. Only Gumbel noise may be used again, because draft and target share the noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable

import torch

from bass_core.exactness import randomness


class RepeatedKey(AssertionError):
    """Two decisions used the same random number."""


class Oracle:
    """Enumerate branches. thresholds(position, noise): values of g_0 - g_1 (Gumbel noise of two ids) at which an argmax
    changes, given the noise of earlier positions."""

    def __init__(self, thresholds: Callable[[int, dict[int, float]], list[float]] | None = None):
        self._thresholds = thresholds
        self._path: list[list[int]] = []  # [branch taken, branches] per decision

    def laws(self, run: Callable[[], Hashable]) -> dict[Hashable, float]:
        outcomes: dict[Hashable, float] = {}
        originals = randomness.draw, randomness.accept, randomness.noise
        randomness.draw, randomness.accept, randomness.noise = self._draw, self._accept, self._noise
        try:
            while True:
                self._cursor, self._weight, self._keys, self._noises = 0, 1.0, set(), {}
                outcome = run()
                outcomes[outcome] = outcomes.get(outcome, 0.0) + self._weight
                while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                    self._path.pop()
                if not self._path:
                    return outcomes
                self._path[-1][0] += 1
        finally:
            randomness.draw, randomness.accept, randomness.noise = originals

    def _choose(self, probabilities: list[float]) -> int:
        """Return the next branch among the outcomes of positive probability."""
        possible = [index for index, p in enumerate(probabilities) if p > 0]
        if len(possible) == 1:
            return possible[0]
        if self._cursor == len(self._path):
            self._path.append([0, len(possible)])
        branch, branches = self._path[self._cursor]
        assert branches == len(possible), "the engine is not a function of its random numbers"
        self._cursor += 1
        self._weight *= probabilities[possible[branch]]
        return possible[branch]

    def _use(self, *key) -> None:
        if key in self._keys:
            raise RepeatedKey(f"random number {key} was used twice")
        self._keys.add(key)

    def _draw(self, probs: torch.Tensor, key: randomness.Key) -> torch.Tensor:
        choices = []
        keys = key.stream.tolist(), key.counter.tolist()
        for row, stream, counter in zip(probs.double().tolist(), *keys, strict=True):
            self._use(stream, counter, key.purpose, key.slot)
            total = math.fsum(row)
            choices.append(self._choose([p / total for p in row]))
        return torch.tensor(choices)

    def _accept(self, probability: torch.Tensor, key: randomness.Key) -> torch.Tensor:
        answers = torch.zeros(probability.shape, dtype=torch.bool)
        for (row, hs), column in itertools.product(enumerate(probability.tolist()), range(probability.shape[1])):
            self._use(int(key.stream[row]), int(key.counter[row]), key.purpose, int(key.slot[column]))
            h = min(max(hs[column], 0.0), 1.0) if not math.isnan(hs[column]) else 0.0
            answers[row, column] = self._choose([1 - h, h]) == 1
        return answers

    def _noise(self, key: randomness.Key, size: int) -> torch.Tensor:
        """Return noise with one branch per interval between thresholds. Only g_0 - g_1 matters (logistic)."""
        assert size == 2
        noise = torch.zeros(len(key.stream), len(key.slot), 2, dtype=torch.float64)
        for row, column in itertools.product(range(noise.shape[0]), range(noise.shape[1])):
            stream, position = int(key.stream[row]), int(key.counter[row] + key.slot[column])
            if (stream, position) not in self._noises:
                self._noises[stream, position] = self._difference(stream, position)
            noise[row, column, 0] = self._noises[stream, position]
        return noise

    def _difference(self, stream: int, position: int) -> float:
        noise = {place: value for (row, place), value in self._noises.items() if row == stream}
        cuts = sorted(set(self._thresholds(position, noise)))
        edges = [-math.inf, *cuts, math.inf]
        cdf = [1 / (1 + math.exp(-cut)) if math.isfinite(cut) else float(cut > 0) for cut in edges]
        interval = self._choose([high - low for low, high in itertools.pairwise(cdf)])
        low, high = edges[interval], edges[interval + 1]
        if math.isinf(low) and math.isinf(high):
            return 0.0
        return high - 1 if math.isinf(low) else low + 1 if math.isinf(high) else (low + high) / 2
