"""Cases to measure: attention shapes of three models, with query and KV lengths of speculative decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from math import exp
from statistics import NormalDist

import torch

from bass_lab.measure import roofline
from bass_lab.measure.roofline import StepWork

BATCHES = (1, 2, 4, 8, 16, 32)
QUERY_LENGTHS = (1, 5)
LONG_QUERY_LENGTHS = (9, 17)  # measured on a subset
KV_LENGTHS = (2048, 8192, 512)
DISTRIBUTIONS = ("ragged", "uniform", "lognormal")
SPREAD = 0.6  # standard deviation of the logarithm of a lognormal length
PAGE = 256  # slots come in whole pages; newer flash kernels of torch accept no smaller page


MODELS = list(roofline.MODELS)
# Only heads and layers matter, since layers share a plan. tiny: the dry run.
WORK = roofline.MODELS | {"tiny": StepWork(0, 0, layers=2, heads=4, kv_heads=2, head_dim=16, element=4)}


@dataclass(frozen=True)
class Case:
    """One attention call of one layer. `kv_length` is the mean over the rows, including new tokens."""

    model: str
    batch: int
    query_length: int
    kv_length: int
    distribution: str
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        work = self.work
        return (
            f"{self.model} ({work.heads}/{work.kv_heads} heads of {work.head_dim}), batch {self.batch}, "
            f"{self.query_length} queries, {self.kv_length} keys {self.distribution}, {self.dtype}"
        )

    @property
    def work(self) -> StepWork:
        """Return the work of the model's attention in this case's dtype."""
        return replace(WORK[self.model], element=getattr(torch, self.dtype).itemsize)

    def lengths(self, seed: int) -> list[int]:
        """Return the KV length of every row, with mean `kv_length` up to rounding. The seed only shuffles the rows.

        uniform: all equal. ragged: evenly spread from 0.25 to 1.75 of the mean. lognormal: the quantiles
        (i + 1/2) / batch of a lognormal distribution; the longest of 32 rows is about 3 times the mean.
        """
        if self.distribution == "uniform" or self.batch == 1:
            shares = [1.0] * self.batch
        elif self.distribution == "ragged":
            shares = [0.25 + 1.5 * i / (self.batch - 1) for i in range(self.batch)]
        else:
            quantiles = [NormalDist().inv_cdf((i + 0.5) / self.batch) for i in range(self.batch)]
            raw = [exp(SPREAD * quantile) for quantile in quantiles]
            shares = [share * self.batch / sum(raw) for share in raw]
        lengths = [max(self.query_length, round(share * self.kv_length)) for share in shares]
        random.Random(seed).shuffle(lengths)
        return lengths

    def slots(self, seed: int) -> int:
        """Return the slots per row of the cache: the longest row, rounded up to whole pages."""
        return -(-max(self.lengths(seed)) // PAGE) * PAGE

    def kv_bytes(self, seed: int) -> int:
        """Return the bytes of all rows' keys and values, read once. Queries and output add less than 1%."""
        return self._layer_bytes(sum(self.lengths(seed)))

    def cache_bytes(self, seed: int) -> int:
        """Return the bytes of a KV set, padding included."""
        return self._layer_bytes(self.batch * self.slots(seed))

    def _layer_bytes(self, positions: int) -> int:
        return self.work.cache_bytes(positions) // self.work.layers


def tiny_case() -> Case:
    """Return the case of a dry run on a CPU."""
    return Case("tiny", 3, 3, 40, "ragged", "float32")


def quick_cases() -> list[Case]:
    """Return cases for a minute on an H100: each model at batch 8, and the largest and smallest read of Llama."""
    llama, mha, opt = MODELS
    return [
        Case(llama, 8, 5, 2048, "ragged"),
        Case(llama, 8, 1, 2048, "ragged"),
        Case(mha, 8, 5, 2048, "ragged"),
        Case(opt, 8, 5, 2048, "ragged"),
        Case(llama, 32, 5, 8192, "ragged"),
        Case(llama, 1, 5, 512, "uniform"),
    ]


def default_cases(models: list[str], batches: list[int] | None = None) -> list[Case]:
    """Return cases for minutes on an H100, the most informative first, because a run may be interrupted."""
    common = list(product(KV_LENGTHS, QUERY_LENGTHS, models))
    found = [Case(model, 8, queries, keys, "ragged") for keys, queries, model in common]
    found += [Case(model, 8, queries, 2048, "ragged") for queries, model in product(LONG_QUERY_LENGTHS, models)]
    for keys, queries, model in common:
        found += [Case(model, 1, queries, keys, "uniform"), Case(model, 32, queries, keys, "ragged")]
    found += [Case(model, 8, queries, keys, "uniform") for keys, queries, model in common]
    found += [Case(model, 8, queries, 2048, "lognormal") for queries, model in product(QUERY_LENGTHS, models)]
    return [case for case in found if batches is None or case.batch in batches]


def all_cases(models: list[str], batches: list[int] | None = None) -> list[Case]:
    """Return every combination. A single row has only the uniform distribution."""
    return [
        Case(model, batch, query_length, kv_length, distribution)
        for batch, kv_length, distribution, query_length, model in product(
            batches or BATCHES, KV_LENGTHS, DISTRIBUTIONS, QUERY_LENGTHS + LONG_QUERY_LENGTHS, models
        )
        if (batch > 1 or distribution == "uniform")
        and (query_length in QUERY_LENGTHS or (batch == 8 and distribution == "ragged"))
    ]
