"""Draft-length policies replayed on recorded acceptance: what would each have cost, and how far is it from the best?

A replay (`replay`) takes texts from an `AcceptanceTrace`, tosses a coin for each of their positions (accepted, had it
been drafted), and lets a policy decode them as the engine would. No model runs.

**Exact or not.** Under token verification (and for greedy decoding) the accepted counts that a policy of history meets
here have the engine's law, see `acceptance`: fixed lengths, Algorithm 1, transformers' schedule, anything whose `plan`
reads rows and what `update` told it. Policies with `keep_drafting` are answered with the draft's distributions over the
text up to the first rejected draft, then with those of a recorded rollout. Within one replay a rollout is met once at
most (a rejection at a position settles it), so that these are simulated exactly too, as long as no step drafts further
past a rejection than the rollout is long; beyond it the rollout's last signals repeat. (Rollouts are kept in half
precision, which can tip a close decision about drafts after a rejected one.) Policies with `choose`, such as
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

from bass_core import inputs
from bass_core.draft_length import DraftLengthPolicy, RowsView, as_policy
from bass_core.generation import generate
from bass_core.models import ModelPair
from bass_core.policies.costs import Cost
from bass_core.trace import Trace
from bass_lab.study import recorded_acceptance
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, Step, decode, step_seconds

SHARES = np.linspace(0, 1, 5)  # of a step's least cost per row, see `hindsight_bound`
PRICES = np.linspace(1, 5, 9)  # of a second, in tokens of regular decoding, see `hindsight_schedule`


# --- policies replayed ----------------------------------------------------------------------------


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
    tokens_per_step (per step of a row, before truncation at its end), k (mean planned length), acceptance_rate
    (accepted / drafted), as in `Trace.summary`; seconds, seconds_per_token (their quotient with tokens: the inverse
    of the throughput); first_s, mean_s, last_s: when the first row had ended, the rows on average, and the last.
    """
    policy, lines = as_policy(policy), []
    name = repr(policy)
    for repeat in range(inputs.integer("repeats", repeats, least=1)):
        drawn = Replay.draw(trace, batch, max_new_tokens, seed, repeat)
        steps = decode(drawn, deepcopy(policy, {id(cost): cost}))
        lines.append({"repeat": repeat, "batch": len(drawn.ends), "policy": name} | _summary(drawn, steps, cost))
    return pd.DataFrame(lines)


def _summary(drawn: Replay, steps: Sequence[Step], cost: Cost) -> dict:
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
        "tokens_per_step": float((accepted + 1).mean()),
        "k": float(planned.mean()),
        "acceptance_rate": float(accepted.sum() / drafted.sum()) if drafted.any() else float("nan"),
        "seconds": float(until[-1]),
        "seconds_per_token": float(until[-1] / emitted.sum()),
        "first_s": float(ended.min()),
        "mean_s": float(ended.mean()),
        "last_s": float(ended.max()),
    }


def simulate_trace(
    trace: AcceptanceTrace,
    policy: int | DraftLengthPolicy,
    cost: Cost,
    *,
    batch: int | Sequence[int],
    max_new_tokens: int | None = None,
    seed: int = 0,
    repeat: int = 0,
) -> Trace:
    """One of `simulate`'s replays as a `Trace`, which figures and summaries of real runs take. Its prefill is free."""
    policy = deepcopy(as_policy(policy), {id(cost): cost})
    drawn = Replay.draw(trace, batch, max_new_tokens, seed, repeat)
    found = Trace("steps", verification="token", policy=repr(policy), simulated=True)
    steps = decode(drawn, policy)
    rows = np.arange(len(drawn.ends))
    first = {"kv_length": trace.prompt_lengths[drawn.sequences], "draft_ms": 0.0, "verify_ms": 0.0, "other_ms": 0.0}
    found.record_step(step=0, row=rows, kind="prefill", k=0, drafted=0, accepted=0, emitted=1, **first)
    times = 1e3 * step_seconds(steps, cost).T if steps else []
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


def simulate_steps(trace: AcceptanceTrace, policy: int | DraftLengthPolicy, cost: Cost, **options) -> pd.DataFrame:
    """`Trace.steps` of `simulate_trace`, with its options."""
    return simulate_trace(trace, policy, cost, **options).steps


# --- the best in hindsight ------------------------------------------------------------------------


def hindsight_bound(
    trace: AcceptanceTrace,
    cost: Cost,
    *,
    batch: int | Sequence[int],
    max_new_tokens: int | None = None,
    seed: int = 0,
    repeats: int = 8,
) -> np.ndarray:
    """Seconds [repeats] that no policy can stay below in the replays of `simulate`, though it knew all coins.

    Taken for granted: drafting longer takes the draft model no less time; for a batch also that no step gets cheaper as
    the rows' KV lengths grow, and that a step costs what its longest row does. Where rows of different lengths are
    packed (`replay.step_seconds`) it costs less, and a batch's bound is one of passes that are not.

    **One row: the optimum.** With t tokens generated and r drafts in a row that would be accepted from there, V(t) =
    min over k of c(k, t) + V(t + min(k, r) + 1), over all k that the row may still draft, V = 0 at the end of its text.
    c is the cost at the row's own KV length; k beyond r is only worth it where costs fall.

    **A batch: a lower bound.** Let c(b, k) be the cost of a step with b live rows, the longest draft k, at the KV
    length of the shortest prompt. Take any d(k) with 0 <= b · d(k) <= c(b, k) for all b, and let a(k) be the minimum
    over b of c(b, k) - (b - 1) d(k). A step in which row i is live costs at least a(k) + (b - 1) d(k), any other at
    least b · d(k): as if row i paid a(k) and each other live row d(k). Whatever the batch does, row j pays no less than
    if it chose every k for itself alone, D_j[w] = min over paths of the sum of w(k). (This holds for rows that drafted
    fewer than k, too: they got no further than with k, and a row that is further on has no more to pay, because from
    a later place in a run of acceptances the same k reaches at least as far.) Hence the time is at least

        D_i[a] + sum over j ≠ i of D_j[d].

    Computed for d = s · min over b of c(b, k)/b with s = 0 … 1 in quarters; the largest over s and i counts. s = 0 is
    the row that needs longest, were it alone; s = 1 shares every step among all rows. The bound lets each row choose
    its draft lengths for itself, though a step has one: it is loose where rows differ.
    """
    options = max_new_tokens, seed
    drawn = [Replay.draw(trace, batch, *options, repeat) for repeat in range(repeats)]
    one = _optimum if len(drawn[0].ends) == 1 else _lower_bound
    return np.array([one(each, cost) for each in drawn])


def _optimum(drawn: Replay, cost: Cost) -> float:
    """Least seconds of one row."""
    generated = np.arange(1, drawn.limit)
    k = np.arange(drawn.limit - 1)
    kv_length = drawn.trace.prompt_lengths[drawn.sequences[0]] + generated - 1
    seconds = np.broadcast_to(cost.step(1, k[None], kv_length[:, None]), (len(generated), len(k)))
    allowed = k[None] <= drawn.limit - generated[:, None] - 1
    return float(_least(np.where(allowed, seconds, np.inf)[:, None], drawn)[0])


def _lower_bound(drawn: Replay, cost: Cost) -> float:
    """Seconds that a batch needs at least."""
    batch = np.arange(1, len(drawn.ends) + 1)[:, None]
    k = np.arange(drawn.limit - 1)
    shortest = drawn.trace.prompt_lengths[drawn.sequences].min()
    seconds = np.broadcast_to(cost.step(batch, k, shortest), (len(batch), len(k)))  # [B, K]
    per_row = (seconds / batch).min(0)  # [K]
    shared = _least(np.broadcast_to(per_row, (drawn.limit - 1, 1, len(k))), drawn)  # [B], D_j of all of per_row
    bounds = []
    for share in SHARES:
        rest = (seconds - (batch - 1) * share * per_row).min(0)
        alone = _least(np.broadcast_to(rest, (drawn.limit - 1, 1, len(k))), drawn)
        bounds.append(share * shared.sum() + (alone - share * shared).max())
    return float(max(bounds))


def _least(seconds: np.ndarray, drawn: Replay) -> np.ndarray:
    """Each row's least total [B] if a step that drafts k from t generated tokens on costs seconds[t - 1, row, k].

    seconds: [limit - 1, B or 1, K].
    """
    if drawn.limit == 1:  # every row ended with its first token
        return np.zeros(len(drawn.ends))
    most = min(int(drawn.run.max()) + 1, seconds.shape[-1])  # beyond the longest run only the cost matters
    seconds = np.concatenate([seconds[..., : most - 1], seconds[..., most - 1 :].min(-1, keepdims=True)], axis=-1)
    rows, k = np.arange(len(drawn.ends))[:, None], np.arange(most)
    value = np.zeros((len(rows), drawn.limit + 1))
    for t in range(drawn.limit - 1, 0, -1):
        reached = np.minimum(t + np.minimum(k, drawn.run[:, t, None]) + 1, drawn.limit)
        best = (seconds[t - 1] + value[rows, reached]).min(1)
        value[:, t] = np.where(t < drawn.ends, best, 0.0)
    return value[:, 1]


class _Foresight(DraftLengthPolicy):
    """Knows the coins: the k of most tokens per row in this step, rows that are behind weighted more, less its price.

    prices: [B, K], in a row's tokens, of a step with 1 … B live rows that drafts 0 … K - 1.
    """

    def __init__(self, drawn: Replay, prices: np.ndarray):
        self.drawn, self.prices = drawn, prices

    def plan(self, rows: RowsView) -> int:
        run = self.drawn.run[rows.ids, rows.generated]
        k = np.arange(min(int(rows.remaining.max()), int(run.max()) + 1))
        left = self.drawn.ends[rows.ids] - rows.generated
        tokens = np.minimum(np.minimum(k, run[:, None]) + 1, left[:, None])  # [B, K]
        weights = left**2 / (left**2).sum()
        return int(np.argmax(weights @ tokens - self.prices[len(rows.ids) - 1, : len(k)]))


def hindsight_schedule(
    trace: AcceptanceTrace,
    cost: Cost,
    *,
    batch: int | Sequence[int],
    max_new_tokens: int | None = None,
    seed: int = 0,
    repeats: int = 8,
) -> np.ndarray:
    """Seconds [repeats] of a good schedule that knew all coins, in the replays of `simulate`: found, not proven best.

    Each step takes the k of most tokens (rows weighted by the square of what they still have to emit, since the last
    one counts) less the step's time at a price in tokens per second (time at a middle KV length); the best of some
    prices counts. The optimum lies between `hindsight_bound` and this.
    """
    found = []
    for repeat in range(repeats):
        drawn = Replay.draw(trace, batch, max_new_tokens, seed, repeat)
        batch_sizes, k = np.arange(1, len(drawn.ends) + 1)[:, None], np.arange(drawn.limit)
        middle = trace.prompt_lengths[drawn.sequences].mean() + drawn.limit / 2
        seconds = np.broadcast_to(cost.step(batch_sizes, k, middle), (len(batch_sizes), len(k)))
        in_tokens = seconds / seconds[-1, 0]  # of regular decoding, a row's tokens in the same time
        schedules = [decode(drawn, _Foresight(drawn, price * in_tokens)) for price in PRICES]
        found.append(min(float(step_seconds(steps, cost).sum()) if steps else 0.0 for steps in schedules))
    return np.array(found)


def regret(
    trace: AcceptanceTrace,
    policies: Mapping[str, int | DraftLengthPolicy] | Sequence[int | DraftLengthPolicy],
    cost: Cost,
    batches: Sequence[int],
    repeats: int = 32,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """How much longer than the bound each policy takes, T / T_bound - 1, on the same replays.

    policies: by name, or a sequence (named by their repr). One line per batch size and policy: means over the repeats
    of tokens_per_step, k, seconds, seconds_per_token, bound_s (the optimum at batch 1, a lower bound beyond:
    `hindsight_bound`), schedule_s (what foresight was seen to reach: `hindsight_schedule`) and regret, and regret's 95%
    interval low … high (normal, over the repeats). For a batch the bound is loose; how loose at most,
    schedule_s / bound_s says. It knows of no packed passes: a policy that drafts for each row its own number of tokens
    may come closer than others can, or stay below.
    """
    named = policies if isinstance(policies, Mapping) else {repr(as_policy(policy)): policy for policy in policies}
    lines = []
    for batch in batches:
        options = {"batch": batch, "max_new_tokens": max_new_tokens, "seed": seed, "repeats": repeats}
        least, schedule = (find(trace, cost, **options) for find in (hindsight_bound, hindsight_schedule))
        for name, policy in named.items():
            runs = simulate(trace, policy, cost, **options)
            ratio = runs.seconds / least - 1
            error = 1.96 * ratio.sem()
            means = runs[["tokens_per_step", "k", "seconds", "seconds_per_token"]].mean()
            line = {"batch": batch, "policy": name, **means}
            line |= {"bound_s": least.mean(), "schedule_s": schedule.mean(), "regret": ratio.mean()}
            lines.append(line | {"low": ratio.mean() - error, "high": ratio.mean() + error})
    return pd.DataFrame(lines)


# --- against the engine ---------------------------------------------------------------------------


def compare_with_real(
    pair: ModelPair,
    prompts: Sequence[str],
    policy: int | DraftLengthPolicy,
    cost: Cost | None = None,
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

    Columns: policy, seed; real and simulated (tokens per step), difference = simulated / real - 1; with a cost model
    also real_s, simulated_s (of decode steps).
    """
    lines = []
    for seed in seeds:
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        real = generate(pair, prompts, draft_length=deepcopy(policy), eos_token_id=(), **options)
        counts = real.trace.summary()
        recorded = recorded_acceptance.teacher_forced(
            pair, prompts, real.sequences, temperature=temperature, seed=seed, rollout=rollout
        )
        recorded = recorded.past_eos()  # as the engine
        runs = simulate(recorded, policy, cost or _NoTime(), batch=range(len(prompts)), seed=seed, repeats=repeats)
        line = {"policy": repr(as_policy(policy)), "seed": seed, "real": counts["tokens_per_step"]}
        line |= {"simulated": runs.tokens_per_step.mean()}
        line |= {"difference": line["simulated"] / line["real"] - 1}
        if cost is not None:
            line |= {"real_s": sum(counts[f"{part}_s"] for part in ("draft", "verify", "other"))}
            line |= {"simulated_s": runs.seconds.mean()}
        lines.append(line)
    return pd.DataFrame(lines)


class _NoTime:
    """Costs of a comparison of counts alone."""

    def draft(self, batch, k, kv_length):
        return np.zeros(np.shape(batch))

    target = draft

    def overhead(self, batch, k):
        return np.zeros(np.shape(batch))
