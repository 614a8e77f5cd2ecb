"""Distance between two target models, such as a quantized model and its original: distributions, texts, programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.prompts import token_ids
from bass_lab.evaluation import Problem, compare, scores
from bass_lab.evaluation.scores import drawn, interval
from bass_lab.pairs import require_decoder
from bass_lab.study.written import Written


class Distance(NamedTuple):
    """summary: value, low and high of each measure (95%, percentile bootstrap over prompts):

    * tv: total variation of the two next-token distributions, 0 … 1, mean over positions;
    * kl: Kullback–Leibler divergence of the second from the first, in nats, mean over positions;
    * other argmax: share of positions with different likeliest tokens;
    * greedy texts that differ: share of prompts;
    * pass@1, first / second / difference: only with problems; the difference is paired (second minus first).

    positions: one line per position with prompt, position, tv, kl and same_argmax. first_difference: index of the first
    differing token of the greedy texts, per prompt; NaN for equal texts.
    """

    summary: pd.DataFrame
    positions: pd.DataFrame
    first_difference: pd.Series


def distance(
    first: ModelPair,
    second: ModelPair,
    prompts: Sequence[str | Tensor],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    problems: Sequence[Problem] | None = None,
    samples: int = 4,
    seed: int = 0,
) -> Distance:
    """Return the distance of the second pair's target from the first pair's target on texts by the first target.

    Draft models are not used. temperature: of the texts and of both distributions. problems: the sandbox runs `samples`
    programs of each target per problem, at temperature 0.2, with the same random numbers for both.

    Raises ValueError for encoder-decoder targets, different vocabularies, no prompts, or temperature 0. Also raises the
    errors of `generate` and, with problems, of `bass_lab.evaluation.compare`.
    """
    for pair in (first, second):
        require_decoder(pair)
    sizes = [pair.target.config.get_text_config().vocab_size for pair in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the targets have {sizes[0]} and {sizes[1]} ids; use targets with the same vocabulary")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy texts are always compared")
    ids = token_ids(first, prompts)
    if not ids:
        raise ValueError("prompts are empty; give at least one")
    texts = Written.by(first, ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    laws = zip(texts.p, texts.read_by(second.target), strict=True)
    lines = [_distances(p, q).assign(prompt=row) for row, (p, q) in enumerate(laws)]
    positions = pd.concat(lines, ignore_index=True)[["prompt", "position", "tv", "kl", "same_argmax"]]
    options = {"max_new_tokens": max_new_tokens, "seed": seed, "trace": "off"}
    greedy = [generate(pair, ids, **options).sequences for pair in (first, second)]
    differs = pd.Series([_first_difference(a, b) for a, b in zip(*greedy, strict=True)], name="first_difference")
    sums = positions.assign(other=~positions.same_argmax).groupby("prompt")[["tv", "kl", "other"]].sum()
    summary = _means(sums, positions.groupby("prompt").size())
    summary.loc["greedy texts that differ"] = _means(differs.notna().to_frame("share"), 1).loc["share"]
    summary = summary.rename(index={"other": "other argmax"})
    if problems is not None:
        summary = pd.concat([summary, _passed(first, second, problems, samples, seed)])
    return Distance(summary, positions, differs)


def _distances(p: Tensor, q: Tensor) -> pd.DataFrame:
    """Return one line per token from the two next-token distributions p, q [T, V]."""
    found = {
        "position": range(len(p)),
        "tv": (p - q).abs().sum(-1) / 2,
        "kl": (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1),
        "same_argmax": p.argmax(-1) == q.argmax(-1),
    }
    return pd.DataFrame({name: np.asarray(value) for name, value in found.items()})


def _first_difference(one: Tensor, other: Tensor) -> float:
    """Return the index of the first token at which two texts differ or one text ends; NaN for equal texts."""
    both = min(len(one), len(other))
    apart = (one[:both] != other[:both]).nonzero()
    if len(apart):
        return float(apart[0])
    return float("nan") if len(one) == len(other) else float(both)


def _means(sums: pd.DataFrame, counts: pd.Series | int) -> pd.DataFrame:
    """Return means and intervals over prompts. sums: [P, M] per prompt; counts: terms per prompt."""
    values, prompts = sums.to_numpy(float), len(sums)
    counts = np.broadcast_to(np.asarray(counts, float), prompts)
    times = drawn(prompts)
    low, high = interval(times @ values / (times @ counts)[:, None])
    return pd.DataFrame({"value": values.sum(0) / counts.sum(), "low": low, "high": high}, index=sums.columns)


def _passed(first: ModelPair, second: ModelPair, problems: Sequence[Problem], samples: int, seed: int) -> pd.DataFrame:
    one, other = (
        compare(pair, problems, methods=["batched"], n=samples, seed=seed)["batched"].samples
        for pair in (first, second)
    )
    found = {
        "pass@1, first": scores.score(one),
        "pass@1, second": scores.score(other),
        "pass@1, difference": scores.difference(other, one, [np.inf]),
    }
    lines = {name: table.set_index("metric").loc["pass@1", ["value", "low", "high"]] for name, table in found.items()}
    return pd.DataFrame(lines).T.astype(float)
