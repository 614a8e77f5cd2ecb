"""Costs that are easy to compute by hand, and traces with certain outcomes, for tests of replays."""

from dataclasses import replace

import numpy as np
import pandas as pd

from bass_lab.load import LoadRun, Workload
from bass_lab.load.result import PIECES, REQUESTS, STEPS
from bass_lab.study.recorded_acceptance import AcceptanceTrace


class Linear:
    """A target pass costs 1, plus costs per token and per cached position. A draft token costs `per_draft`.

    Rows of unequal lengths are packed, except on the attention path "eager".
    """

    def __init__(self, per_token=0.0, per_draft=0.1, per_key=0.0, other=0.0, kv_of_rows="mean", attention="eager"):
        self.models = {"target": {"attention": attention}}
        self.per_token, self.per_draft, self.per_key, self.other = per_token, per_draft, per_key, other
        self.kv_of_rows = kv_of_rows

    def target(self, batch, query_length, kv_length):
        return 1 + np.multiply(batch, self.per_token * np.asarray(query_length) + self.per_key * np.asarray(kv_length))

    def draft(self, batch, k, kv_length):
        return self.per_draft * np.asarray(k) + np.zeros(np.broadcast(batch, kv_length).shape)

    def overhead(self, batch, k):
        return self.other

    def step(self, batch, k, kv_length):
        return self.target(batch, np.add(k, 1), kv_length) + self.draft(batch, k, kv_length) + self.overhead(batch, k)


class Stairs(Linear):
    """Costs that fall and rise with k, and rise with the batch and the KV length."""

    def __init__(self, seed):
        super().__init__()
        self.by_k = np.random.default_rng(seed).uniform(0.5, 2.0, 200)

    def target(self, batch, query_length, kv_length):
        return self.by_k[np.asarray(query_length)] * np.add(3, batch) ** 0.5 + 0.001 * np.asarray(kv_length)


def trace_of(*patterns, prompt=10, lengths=None):
    """Return a trace with certain outcomes from the second generated token on: "1" accepted, "0" rejected."""
    fates = np.array([[1, *map(int, pattern)] for pattern in patterns])
    made = AcceptanceTrace.synthetic(alpha=0.5, length=fates.shape[1], sequences=len(fates), prompt_length=prompt)
    return replace(made, q=fates.astype(np.float32), lengths=np.array(lengths or [fates.shape[1]] * len(fates)))


def workload(arrived, new=5, numbers=None, deadline=np.nan, prompts=None):
    numbers = range(len(arrived)) if numbers is None else numbers
    columns = {"arrived": arrived, "prompt": prompts or [f"prompt {number}" for number in numbers], "number": numbers}
    return Workload(pd.DataFrame(columns | {"max_new_tokens": new, "deadline": deadline, "seed": 0}))


def run_of(ended, first=None, arrived=None, tokens=5, reasons=None, deadline=np.nan, pieces=None, steps=()):
    count = len(ended)
    arrived = np.arange(count, dtype=float) if arrived is None else np.array(arrived)
    first = arrived + 0.1 if first is None else np.array(first)
    columns = [
        range(count), arrived, arrived + 0.05, first, ended, tokens, 9, deadline, reasons or ["length"] * count, None,
    ]  # fmt: skip
    whole = [(row, at, size) for row in range(count) for at, size in ((first[row], 1), (ended[row], 4))]
    return LoadRun(
        pd.DataFrame(dict(zip(REQUESTS, columns, strict=True))),
        pd.DataFrame(whole if pieces is None else pieces, columns=list(PIECES)),
        pd.DataFrame(list(steps), columns=list(STEPS)),
    )
