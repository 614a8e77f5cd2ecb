"""Draft-length policies replayed on recorded acceptance: what would each have cost, and how far is it from the best?

A replay (`replay`) takes texts from an `AcceptanceTrace`, tosses a coin for each of their positions (accepted, had it
been drafted), and lets a policy decode them as the engine would. No model runs.

**Exact or not.** Under token verification (and for greedy decoding) policies of history meet accepted counts of the
engine's law, see `recorded_acceptance`. Policies with `keep_drafting` see the draft's distributions over the text up to
the first rejected draft, then those of a recorded rollout, which a replay meets once at most: exact as long as no step
drafts further past a rejection than the rollout is long; beyond it the last signals repeat. Policies with `choose`,
such as `RaggedBudget`, see the drafted tokens' own probabilities, and are exact to the same length; what they submit
counts as drafted. More replays of one trace lower the noise of the coins, not that of the texts. Block verification is
not simulated.

**Common random numbers.** The coin of a position is a function of (seed, repeat, copy, sequence, position) alone: a
draft there meets the same fate under every policy, batch size and limit, so that differences between policies are far
less noisy than their times. A batch takes sequences in an order drawn per repeat, without repetition until all are used
(`copy` counts those rounds); a larger batch holds the rows of a smaller one.

**Time.** Of decode steps, by a cost model such as `costs.CostModel`; prefills are left out. Where rows submit different
numbers of tokens the target's pass is packed (`replay.step_seconds`).
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
    """Replay a batch under a policy, one line each; every replay starts with a copy of the policy.

    batch: how many sequences of the trace, or which. max_new_tokens: at most the trace's (None).

    Columns: repeat, batch, policy; steps of the batch; tokens that they emitted; tokens_per_step, k and acceptance_rate
    as in `Trace.summary`; seconds, seconds_per_token; first_s, mean_s, last_s: when the first row had ended, the rows
    on average, and the last.
    """
    drawn = Replay.draws(trace, batch=batch, max_new_tokens=max_new_tokens, seed=seed, repeats=repeats)
    return _replayed(drawn, policy, cost)


def _replayed(replays: Sequence[Replay], policy: int | DraftLengthPolicy, cost: Cost) -> pd.DataFrame:
    """`simulate` on these replays."""
    policy, lines = as_policy(policy), []
    for repeat, drawn in enumerate(replays):
        steps = decode(drawn, deepcopy(policy, {id(cost): cost}))
        line = {"repeat": repeat, "batch": len(drawn.ends), "policy": repr(policy)}
        lines.append(line | _summary(drawn, steps, cost))
    return pd.DataFrame(lines)


def _summary(drawn: Replay, steps: Sequence[ReplayedStep], cost: Cost) -> dict:
    """A replay's counts and times."""
    if not steps:  # every row ended with its first token
        return {"steps": 0, "tokens": 0, "seconds": 0.0, "first_s": 0.0, "mean_s": 0.0, "last_s": 0.0}
    planned, drafted, accepted, emitted = (
        np.concatenate([getattr(step, name) for step in steps])
        for name in ("planned", "drafted", "accepted", "emitted")
    )
    until = step_seconds(steps, cost).sum(0).cumsum()  # [steps]
    ended = np.zeros(len(drawn.ends))
    for step, now in zip(steps, until, strict=True):
        ended[step.rows] = now  # the last step that a row takes part in
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
    """Return one of `simulate`'s replays as a `Trace`; its prefill is free. options: of `Replay.draw`."""
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
    """How much longer than the bound each policy takes, T / T_bound - 1, on the same replays (options: `simulate`'s).

    One line per batch size and policy: means of tokens_per_step, k, seconds, seconds_per_token, bound_s
    (`hindsight.bound`: the optimum at batch 1, else a loose lower bound), schedule_s (`hindsight.schedule`) and regret,
    with its 95% interval low … high (normal, over the repeats). The bound knows of no packed passes.
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
            error = 1.96 * ratio.sem()
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
    """The engine and the simulator on the same texts: one line per seed.

    The engine decodes the prompts as one batch under the policy (token verification, past EOS); its texts are recorded
    and replayed `repeats` times. Both have the same law given the texts, so `difference` is zero on average.

    Columns: policy, seed; real and simulated (tokens per step), difference = simulated / real - 1.
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
    """Emitted, per step of a row."""
    return float(np.concatenate([step.emitted for step in steps]).mean())
