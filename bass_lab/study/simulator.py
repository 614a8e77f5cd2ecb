"""Replay draft-length policies on recorded acceptance, and compare their times with the optimum.

A replay (`replay`) takes texts from an `AcceptanceTrace` and tosses a coin per position: would a draft token at this
position be accepted? A policy then decodes the texts as the engine would. No model runs.

**Exactness.** Under token verification or in greedy decoding, accepted lengths have the engine's distribution if the
policy uses only the past (`recorded_acceptance`). Policies with `keep_drafting` see the draft's distributions over the
text up to the first rejection, then the distributions of a recorded rollout. A replay uses each rollout at most once.
The replay is exact as long as no step drafts further past a rejection than the rollout's length. Beyond that length,
the last signals repeat. More replays of one trace reduce the noise of the coins, but not of the texts. Block
verification is not simulated.

**Common random numbers.** A coin depends only on (seed, repeat, copy, sequence, position). A draft token has the same
outcome under every policy, batch size and limit. Differences between policies are therefore far less noisy than times.
A batch takes sequences in an order drawn per repeat, without repetition until all are used (`copy` counts the rounds).
A larger batch contains the rows of a smaller batch.

**Time.** Times are decode steps under a cost model such as `costs.CostModel`, without prefills. If rows submit
different numbers of tokens, the target pass is packed (`replay.step_seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import numpy as np
import pandas as pd

from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.policies.costs import Cost
from bass_core.policies.protocol import DraftLengthPolicy, as_policy
from bass_lab.measure.ratios import half_width
from bass_lab.study import hindsight, recording
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, ReplayedStep, decode, step_seconds


def simulate(
    trace: AcceptanceTrace,
    policy: int | DraftLengthPolicy,
    cost: Cost,
    *,
    batch: int | Sequence[int],
    max_new_tokens: int | None = None,
    seed: int = 0,
    repeats: int = 8,
) -> pd.DataFrame:
    """Return one line per replay of a batch under a policy. Every replay starts with a copy of the policy.

    batch: number or indices of sequences. max_new_tokens: by default the trace's length.

    Columns: repeat, batch, policy; steps of the batch; tokens emitted; tokens_per_step, k and acceptance_rate as in
    `Trace.summary`; seconds, seconds_per_token; first_s, mean_s, last_s, the end times of the rows: first, mean, last.
    """
    drawn = Replay.draws(trace, batch=batch, max_new_tokens=max_new_tokens, seed=seed, repeats=repeats)
    return _replayed(drawn, policy, cost)


def _replayed(replays: Sequence[Replay], policy: int | DraftLengthPolicy, cost: Cost) -> pd.DataFrame:
    policy, lines = as_policy(policy), []
    for repeat, drawn in enumerate(replays):
        steps = decode(drawn, deepcopy(policy, {id(cost): cost}))
        line = {"repeat": repeat, "batch": len(drawn.ends), "policy": repr(policy)}
        lines.append(line | _summary(drawn, steps, cost))
    return pd.DataFrame(lines)


def _summary(drawn: Replay, steps: Sequence[ReplayedStep], cost: Cost) -> dict:
    if not steps:  # every row ended with its first token
        return {"steps": 0, "tokens": 0, "seconds": 0.0, "first_s": 0.0, "mean_s": 0.0, "last_s": 0.0}
    planned, drafted, accepted, emitted = (
        np.concatenate([getattr(step, name) for step in steps])
        for name in ("planned", "drafted", "accepted", "emitted")
    )
    until = step_seconds(steps, cost).sum(0).cumsum()  # [steps]
    ended = np.zeros(len(drawn.ends))
    for step, now in zip(steps, until, strict=True):
        ended[step.rows] = now  # overwritten until the row's last step
    return {
        "steps": len(steps),
        "tokens": int(emitted.sum()),
        "tokens_per_step": _tokens_per_step(steps),
        "k": float(planned.mean()),
        "acceptance_rate": float(accepted.sum() / drafted.sum()) if drafted.any() else float("nan"),
        "seconds": float(until[-1]),
        "seconds_per_token": float(until[-1] / emitted.sum()),
        "first_s": float(ended.min()),
        "mean_s": float(ended.mean()),
        "last_s": float(ended.max()),
    }


def simulate_trace(trace: AcceptanceTrace, policy: int | DraftLengthPolicy, cost: Cost, **options) -> Trace:
    """Return one replay as a `Trace` with a prefill of 0 ms. options: of `Replay.draw`."""
    policy = deepcopy(as_policy(policy), {id(cost): cost})
    drawn = Replay.draw(trace, **options)
    found = Trace("steps", verification="token", policy=repr(policy), simulated=True)
    steps = decode(drawn, policy)
    rows = np.arange(len(drawn.ends))
    first = {"kv_length": trace.prompt_lengths[drawn.sequences], "draft_ms": 0.0, "verify_ms": 0.0, "other_ms": 0.0}
    found.record_step(step=0, row=rows, kind="prefill", k=0, drafted=0, accepted=0, emitted=1, **first)
    times = 1e3 * step_seconds(steps, cost).T
    for number, (step, (drafting, verifying, other)) in enumerate(zip(steps, times, strict=True), 1):
        found.record_step(
            step=number,
            row=step.rows,
            kind="decode",
            k=step.planned,
            drafted=step.drafted,
            accepted=step.accepted,
            emitted=step.emitted,
            kv_length=step.lengths,
            draft_ms=drafting,
            verify_ms=verifying,
            other_ms=other,
        )
    return found


def regret(
    trace: AcceptanceTrace,
    policies: Mapping[str, int | DraftLengthPolicy],
    cost: Cost,
    batches: Sequence[int],
    repeats: int = 32,
    **options,
) -> pd.DataFrame:
    """Return the regret of each policy, T / T_bound - 1, on the same replays. options: of `simulate`.

    One line per batch size and policy: means of tokens_per_step, k, seconds, seconds_per_token, bound_s
    (`hindsight.bound`: the optimum at batch 1, else a loose lower bound), schedule_s (`hindsight.schedule`) and regret,
    with the 95% interval low … high of the regret (Student's t, over the repeats). The bound ignores packed passes.
    """
    lines = []
    for batch in batches:
        replays = Replay.draws(trace, batch=batch, repeats=repeats, **options)
        least, schedule = (
            np.array([find(drawn, cost) for drawn in replays]) for find in (hindsight.bound, hindsight.schedule)
        )
        for name, policy in policies.items():
            runs = _replayed(replays, policy, cost)
            ratio = runs.seconds / least - 1
            error = half_width(ratio)
            means = runs[["tokens_per_step", "k", "seconds", "seconds_per_token"]].mean()
            line = {"batch": batch, "policy": name, **means}
            line |= {"bound_s": least.mean(), "schedule_s": schedule.mean(), "regret": ratio.mean()}
            lines.append(line | {"low": ratio.mean() - error, "high": ratio.mean() + error})
    return pd.DataFrame(lines)


def compare_with_real(
    pair: ModelPair,
    prompts: Sequence[str],
    policy: int | DraftLengthPolicy,
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seeds: Sequence[int] = range(4),
    repeats: int = 32,
    rollout: int = 8,
) -> pd.DataFrame:
    """Return tokens per step of engine and simulator on the same texts, one line per seed.

    The engine decodes the prompts as one batch under the policy (token verification, past EOS). The texts are recorded
    and replayed `repeats` times. Both have the same distribution given the texts, so `difference` is 0 on average.

    Columns: policy, seed; real and simulated (tokens per step); difference = simulated / real - 1.
    """
    policy, lines = as_policy(policy), []
    for seed in seeds:
        sampled = {"temperature": temperature, "seed": seed}
        out = generate(
            pair, prompts, draft_length=deepcopy(policy), max_new_tokens=max_new_tokens, eos_token_id=(), **sampled
        )
        recorded = recording.teacher_forced(pair, prompts, out.sequences, rollout=rollout, **sampled)
        replays = Replay.draws(recorded.past_eos(), batch=range(len(prompts)), seed=seed, repeats=repeats)
        simulated = float(np.mean([_tokens_per_step(decode(drawn, deepcopy(policy))) for drawn in replays]))
        real = out.trace.summary()["tokens_per_step"]
        line = {"policy": repr(policy), "seed": seed, "real": real, "simulated": simulated}
        lines.append(line | {"difference": simulated / real - 1})
    return pd.DataFrame(lines)


def _tokens_per_step(steps: Sequence[ReplayedStep]) -> float:
    return float(np.concatenate([step.emitted for step in steps]).mean())
