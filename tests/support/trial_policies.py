"""Draft-length policies for tests of the whole interface."""

from collections.abc import Callable

import numpy as np
import torch

import bass_core as bass
import bass_lab as lab
from bass_core import DraftLengthPolicy
from bass_lab.policies import Objective
from bass_lab.policies.objective import first_finished


class StopWhenUnsure(DraftLengthPolicy):
    """Stop inside a step by the draft's distribution before x_j is drawn. counts: answer with draft lengths."""

    def __init__(self, most: int = 3, at_least: float = 0.6, counts: bool = False):
        self.most, self.at_least, self.counts = most, at_least, counts

    def plan(self, rows):
        return self.most

    def keep_drafting(self, signals):
        sure = signals.maximum > self.at_least
        return torch.where(sure, self.most, signals.slot) if self.counts else sure


class PerRow(DraftLengthPolicy):
    """Choose another length (also 0) for every row and step, from the past of *all* rows."""

    def __init__(self, most: int = 2):
        self.most = most

    def plan(self, rows):
        return torch.from_numpy((rows.generated.sum() + rows.ids + rows.steps) % (self.most + 1))


class Alternating(DraftLengthPolicy):
    """Take `zeros` regular steps, then one step with k: the draft has to catch up."""

    def __init__(self, k: int = 3, zeros: int = 1):
        self.k, self.zeros, self._count = k, zeros, 0

    def start(self, rows):
        self._count = 0

    def plan(self, rows):
        self._count += 1
        return self.k if self._count % (self.zeros + 1) == 0 else 0


class Fickle(Alternating):
    def plan(self, rows):
        self._last = super().plan(rows)
        return self._last

    def predict_next(self):
        return self._last


class TakingTurns(DraftLengthPolicy):
    """Let one row draft k tokens, each step another row. The other rows are not fed, and catch up later."""

    def __init__(self, k: int = 3):
        self.k = k

    def plan(self, rows):
        return torch.from_numpy(self.k * (rows.ids == rows.ids[rows.steps.max() % len(rows.ids)]))


class Line:
    draft_phases = ()  # drafts take passes

    def __init__(self, draft: float = 0.1, verify: float = 0.05):
        self.per_draft, self.per_token = draft, verify

    def draft(self, batch, k, kv_length):
        return self.per_draft * np.broadcast_to(k, np.broadcast(batch, k, kv_length).shape)

    def target(self, batch, query_length, kv_length):
        return 1 + self.per_token * (
            np.broadcast_to(query_length, np.broadcast(batch, query_length, kv_length).shape) - 1
        )

    def overhead(self, batch, k):
        return 0.0

    def step(self, batch, k, kv_length):
        return self.draft(batch, k, kv_length) + self.target(batch, np.add(k, 1), kv_length)


CHEAP, DEAR = Line(), Line(draft=0.5, verify=0.2)


def library_policies(limit: int) -> dict[str, Callable[[], DraftLengthPolicy]]:
    """Return every adaptive policy of the library, in states that use all its branches, with at most `limit` drafts."""
    return {
        "algorithm 1": lambda: bass.BassHeuristic(initial=2),
        "hugging face": lambda: lab.HuggingFaceHeuristic(initial=2),
        "goodput": lambda: bass.Goodput(CHEAP, limit=limit),
        "goodput, drafts dear": lambda: bass.Goodput(DEAR, limit=limit, probe=1),
        "objective": lambda: Objective(CHEAP, limit=limit, weights=first_finished(4)),
        "stops at a count": lambda: StopWhenUnsure(limit, counts=True),
    }
