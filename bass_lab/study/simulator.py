"""Draft-length policies replayed on recorded acceptance: what would each have cost, and how far is it from the best?

A replay (`replay`) takes texts from an `AcceptanceTrace`, tosses a coin for each of their positions (accepted, had it
been drafted), and lets a policy decode them as the engine would. No model runs.

**Exact or not.** Under token verification (and for greedy decoding) the accepted counts that a policy of history meets
here have the engine's law, see `recorded_acceptance`: fixed lengths, Algorithm 1, transformers' schedule, whatever only
plans by rows and by what `update` told it. Policies with `keep_drafting` are answered with the draft's distributions
over the text up to the first rejected draft, then with those of a recorded rollout. Within one replay a rollout is met
once at most (a rejection at a position settles it), so that these are simulated exactly too, as long as no step drafts
further past a rejection than the rollout is long; beyond it the rollout's last signals repeat. (Rollouts are kept in
half precision, which can tip a close decision about drafts after a rejected one.) Policies with `choose`, such as
`RaggedBudget`, are shown what was drafted: the text's tokens up to the first rejected draft, that one, and those of its
rollout, with their own probabilities. What they submit counts as drafted. A draft that they drop leaves no trace, since
they never saw it, and one that they submit is settled: so these are exact to the same length. Replays of one trace
share its texts and rollouts: more replays lower the noise of the coins, not that of the texts. Block verification
accepts more, and is not simulated.

**Common random numbers.** The coin of a position is a function of (seed, repeat, copy, sequence, position) alone. A
draft there meets the same fate under every policy, batch size and limit, which is no approximation: the coins of
different positions are independent whatever the policy did before. Differences between policies are then far less noisy
than their times. A batch takes sequences in an order drawn per repeat, without repetition until all are used (`copy`
counts those rounds); a larger batch holds the rows of a smaller one.

**Time.** Of decode steps, by a cost model such as `costs.CostModel`: arrays in, seconds out. Prefills cost the same
under every policy and are left out. Where rows submit different numbers of tokens the target's pass is packed, at the
price of its tokens (`replay.step_seconds`).
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
    """Replays of a batch under a policy, one line each; every replay starts with a copy of the policy as it is given.

    batch: how many sequences of the trace each replay draws, or which (their numbers, in order). max_new_tokens: at
    most the trace's (None).

    Columns: repeat, batch, policy; steps of the batch; tokens that they emitted (the prefill's first ones not counted);
    tokens_per_step (emitted, per step of a row), k (mean planned length), acceptance_rate (accepted /
    drafted), as in `Trace.summary`; seconds, seconds_per_token (their quotient with tokens: the inverse
    of the throughput); first_s, mean_s, last_s: when the first row had ended, the rows on average, and the last.
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
    """One of `simulate`'s replays as a `Trace`, which figures and summaries of real runs take. Its prefill is free.

    options: of `Replay.draw`; `repeat` says which one.
    """
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

    One line per batch size and policy: means over the repeats of tokens_per_step, k, seconds, seconds_per_token,
    bound_s (the optimum at batch 1, a lower bound beyond: `hindsight.bound`), schedule_s (what foresight was seen to
    reach: `hindsight.schedule`) and regret, and regret's 95% interval low … high (normal, over the repeats). For a
    batch the bound is loose; how loose at most, schedule_s / bound_s says. It knows of no packed passes: a policy that
    drafts for each row its own number of tokens may come closer than others can, or stay below.
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

    For each seed the engine decodes the prompts as one batch under the policy (token verification, running on after
    EOS); its texts, which have the target's law, are recorded and replayed as one batch `repeats` times. Given the
    texts, the engine's accepted counts and the replays' have the same law, so that the mean of `difference` is zero up
    to chance; its error shows in the spread over seeds.

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
