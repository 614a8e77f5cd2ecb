"""Summarize a measured `CostModel` in a table, and compare predicted times with real runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import pandas as pd

from bass_core.loading.measured_costs import check_costs
from bass_core.loading.model_pair import ModelPair
from bass_core.policies.costs import CostModel
from bass_core.policies.protocol import FixedLength
from bass_core.prompts import token_ids
from bass_lab.measure.modelled_costs import best_fixed_length, predict
from bass_lab.measure.plan import PlannedMethod
from bass_lab.measure.repeated_way import WARM_UPS, RepeatedWay
from bass_lab.study.calibration import PROMPT, prompts_of
from bass_lab.texts.prompt_sets import prompt_set

SHOWN_KV, SHOWN_ALPHAS = 256, (0.6, 0.8, 0.9)


class _Unpredicted(FixedLength):
    """Fixed draft length whose steps are not launched ahead, as under a policy that plans each step."""

    def predict_next(self) -> int | None:
        return 0 if self.k == 0 else None


def summary(cost: CostModel) -> pd.DataFrame:
    """Return one line per batch size at `SHOWN_KV` positions: ms of a target pass, growth to six tokens, ms of a draft
    pass and of the overhead at k = 5, and the best draft length for each α of `SHOWN_ALPHAS`."""
    lines = []
    for batch in cost.target_passes.axes["batch"]:
        one, six = cost.target(batch, np.array([1, 6]), SHOWN_KV)
        first, second = cost.draft(batch, np.array([1, 2]), SHOWN_KV)
        line = {"batch": batch, "T(1), ms": 1e3 * one, "T(6)/T(1)": six / one, "draft pass, ms": 1e3 * (second - first)}
        line["overhead k=5, ms"] = 1e3 * cost.overhead(batch, 5)
        best = {f"best k at α {alpha}": best_fixed_length(cost, batch, alpha, SHOWN_KV)[0] for alpha in SHOWN_ALPHAS}
        lines.append(line | best)
    return pd.DataFrame(lines)


def check(
    cost: CostModel,
    pair: ModelPair,
    *,
    batches: Sequence[int] = (1, 4, 8),
    draft_lengths: Sequence[int] = (0, 3, 5),
    repeats: int = 5,
    max_new_tokens: int = 96,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> pd.DataFrame:
    """Return predicted and real decode times of interleaved greedy runs on the mini prompt set (ids without a
    tokenizer).

    Columns: batch, k; predicted_ms, real_ms, ratio (predicted ÷ real), medians over the repeats after two warm-up runs;
    relative, the ratio divided by the median ratio. Decode time: end of prefill to last token, past EOS. Raises
    ValueError if the costs belong to another pair.
    """
    check_costs(cost, pair)
    runs, ways = [], {}
    with ExitStack() as stack:
        for batch, k in itertools.product(batches, draft_lengths):
            prompts = token_ids(pair, prompt_set("mini", batch)) if pair.tokenizer else prompts_of(batch, PROMPT)
            way = RepeatedWay(
                pair, PlannedMethod("batched", k, attention="auto", compile="auto"), prompts, None, max_new_tokens
            )
            way.session.policy = _Unpredicted(k)
            stack.callback(way.close)
            ways[batch, k] = way
        for repeat in range(repeats + WARM_UPS):
            progress("comparing predicted with real decode times", repeat / (repeats + WARM_UPS))
            for (batch, k), way in ways.items():
                real, predicted = way.once().seconds, predict(cost, way.session.trace)
                run = {"batch": batch, "k": k, "predicted_ms": 1e3 * predicted, "real_ms": 1e3 * real}
                runs.append(run | {"ratio": predicted / real, "repeat": repeat})
    counted = pd.DataFrame(runs).query("repeat >= @WARM_UPS").drop(columns="repeat")
    found = counted.groupby(["batch", "k"], as_index=False).median()
    return found.assign(relative=found.ratio / found.ratio.median())
