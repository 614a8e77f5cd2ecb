"""Draft-length policies for tests: what the interface allows, used to the full."""

from __future__ import annotations

import torch

from bass_core import DraftLengthPolicy


class StopWhenUnsure(DraftLengthPolicy):
    """Stops inside a step, by the draft's distribution before x_j is drawn."""

    def __init__(self, most: int = 3, at_least: float = 0.6):
        self.most, self.at_least = most, at_least

    def plan(self, rows):
        return self.most

    def keep_drafting(self, signals):
        return signals.maximum > self.at_least


class PerRow(DraftLengthPolicy):
    """Another length for every row and step, from the past of *all* rows; 0 among them."""

    def __init__(self, most: int = 2):
        self.most = most

    def plan(self, rows):
        return torch.from_numpy((rows.generated.sum() + rows.ids + rows.steps) % (self.most + 1))


class Alternating(DraftLengthPolicy):
    """`zeros` steps of regular decoding, then one with k: the draft has to catch up."""

    def __init__(self, k: int = 3, zeros: int = 1):
        self.k, self.zeros = k, zeros

    def start(self, rows):
        self._count = 0

    def plan(self, rows):
        self._count += 1
        return self.k if self._count % (self.zeros + 1) == 0 else 0
