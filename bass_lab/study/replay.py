"""One replay: a policy decodes recorded texts as the engine would, without a model.

`step` is `Session._decode` without passes, and `step_seconds` returns the cost of steps. `decode` runs a batch to its
end. `bass_lab.load.simulate` also adds and removes rows between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bass_core import checks
from bass_core.model.runner import packs
from bass_core.policies.costs import Cost, CostModel
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, Signals, cut_lengths, planned_lengths
from bass_lab.study.recorded_acceptance import AcceptanceTrace

# Share of the left-out tokens' time that a packed pass saves. Measured on two CPU cores, batches of 2 to 8, half of
# the tokens left out: 0.92 to 0.97 of the rectangular pass. A rectangular pass over half of them took 0.81 to 0.91.
PACKING = 0.4


@dataclass(frozen=True)
class Replay:
    """Rows of a replay: sequences [B], ends of the texts [B], token limit (int or [B]), and run [B, T], the length of
    the run of acceptances from each position."""

    trace: AcceptanceTrace
    sequences: np.ndarray
    ends: np.ndarray
    limit: int | np.ndarray
    run: np.ndarray

    @classmethod
    def draw(
        cls,
        trace: AcceptanceTrace,
        batch: int | Sequence[int],
        max_new_tokens: int | None = None,
        seed: int = 0,
        repeat: int = 0,
    ) -> Replay:
        """Return one replay. batch: number or indices of sequences. max_new_tokens: by default the trace's length."""
        n, t = trace.p.shape
        limit = t if max_new_tokens is None else checks.integer("max_new_tokens", max_new_tokens, least=1)
        if limit > t:
            raise ValueError(f"max_new_tokens={limit}, but the trace's texts have {t} tokens")
        wanted = checks.integer("batch", batch, least=1) if np.ndim(batch) == 0 else None
        orders, fates = [], []
        for copy in range(-(-(wanted or n) // n)):
            generator = np.random.default_rng([checks.integer("seed", seed), repeat, copy])
            fates.append(generator.random((n, t)) < trace.accept)
            orders.append(generator.permutation(n))
        if wanted is None:
            sequences, fates = np.asarray(batch, dtype=np.int64), fates[0][np.asarray(batch)]
        else:
            sequences = np.concatenate(orders)[:wanted]
            fates = np.concatenate([tossed[order] for tossed, order in zip(fates, orders, strict=True)])[:wanted]
        ends = np.minimum(trace.lengths[sequences], limit)
        return cls(trace, sequences, ends, limit, _runs(fates))

    @classmethod
    def of_requests(
        cls, trace: AcceptanceTrace, sequences: np.ndarray, limits: np.ndarray, seeds: Sequence[Sequence[int]]
    ) -> Replay:
        """Return rows with given sequences [B], token limits [B], and random seeds of their coins.

        Raises ValueError for a limit beyond the trace's texts.
        """
        length = trace.p.shape[1]
        if limits.max() > length:
            raise ValueError(f"max_new_tokens={limits.max()}, but the trace's texts have {length} tokens")
        coins = np.stack([np.random.default_rng(seed).random(length) for seed in seeds])
        ends = np.minimum(trace.lengths[sequences], limits)
        return cls(trace, sequences, ends, limits, _runs(coins < trace.accept[sequences]))

    @classmethod
    def draws(cls, trace: AcceptanceTrace, *, repeats: int = 8, **options) -> list[Replay]:
        """Return `draw` for each repeat, with its options."""
        return [
            cls.draw(trace, repeat=repeat, **options) for repeat in range(checks.integer("repeats", repeats, least=1))
        ]

    def view(self, live: np.ndarray, at: np.ndarray, steps: np.ndarray) -> RowsView:
        """Return live rows as in `Rows.view`. live: row numbers; at, steps [B]: tokens and decode steps of all rows."""
        lengths = self.trace.prompt_lengths[self.sequences[live]] + at[live]
        remaining = (self.limit if isinstance(self.limit, int) else self.limit[live]) - at[live]
        return RowsView(live.copy(), steps[live], lengths, at[live], remaining)

    def signals(self, live: np.ndarray, at: np.ndarray, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft's entropies and maxima before x_1 … x_most of each live row: [most, B] each."""
        trace, slots = self.trace, np.arange(most)
        recorded = (trace.entropy, trace.rollout_entropy), (trace.maximum, trace.rollout_maximum)
        entropy, maximum = (self._along(live, at, slots, *each).T.astype(float, order="C") for each in recorded)
        return torch.from_numpy(entropy), torch.from_numpy(maximum)

    def _along(
        self, live: np.ndarray, at: np.ndarray, slots: np.ndarray, on_text: np.ndarray, after: np.ndarray
    ) -> np.ndarray:
        """Return recorded values for the draft tokens in `slots` [K] of the live rows: [B, K]. Values are from on_text
        [N, T] up to the rejection, then from the rollout, after [N, T, R]. Its last value repeats."""
        sequences, starts = self.sequences[live][:, None], at[live][:, None]
        run, last = self.run[live, at[live]][:, None], self.trace.p.shape[1] - 1
        past = slots - run - 1  # drafts since the rejected one; negative before a rejection
        since = np.clip(past, 0, after.shape[-1] - 1)
        beyond = after[sequences, np.minimum(starts + run, last), since]
        return np.where(past < 0, on_text[sequences, np.minimum(starts + slots, last)], beyond)


class ReplayedStep(NamedTuple):
    """One step: an array per field over the rows. lengths: tokens before the step. passes: draft passes (int)."""

    rows: np.ndarray
    lengths: np.ndarray
    planned: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    passes: int


def _runs(fates: np.ndarray) -> np.ndarray:
    """Return the length of the run of True from each position: bool [B, T] -> int64 [B, T]."""
    places = np.arange(fates.shape[1])
    stops = np.where(fates, fates.shape[1], places)
    return np.minimum.accumulate(stops[:, ::-1], axis=1)[:, ::-1] - places


def decode(replay: Replay, policy: DraftLengthPolicy) -> list[ReplayedStep]:
    """Return the decode steps of a replay. All rows begin together. The policy's state changes."""
    at = np.ones(len(replay.ends), dtype=np.int64)  # the prefill gives every row its first token
    taken = np.zeros_like(at)
    live = without_ended(np.arange(len(at)), at >= replay.ends)
    steps: list[ReplayedStep] = []
    if len(live):
        policy.start(replay.view(live, at, taken))
    while len(live):
        steps.append(step(replay, policy, live, at, taken))
        at[live] += steps[-1].emitted
        taken[live] += 1
        live = without_ended(live, at[live] >= replay.ends[live])
    return steps


def step(
    replay: Replay, policy: DraftLengthPolicy, live: np.ndarray, at: np.ndarray, taken: np.ndarray
) -> ReplayedStep:
    """Return one step of the live rows. at, taken: generated tokens and decode steps of all rows."""
    view = replay.view(live, at, taken)
    planned, drafted = planned_lengths(policy.plan(view), view)
    passes = int(drafted.max())
    if passes and policy.keep_drafting is not None:
        drafted, passes = _ask(policy, replay, live, at, drafted)
    accepted = np.minimum(drafted, replay.run[live, at[live]])
    policy.update(torch.from_numpy(drafted.copy()), torch.from_numpy(accepted.copy()))
    emitted = np.minimum(accepted + 1, replay.ends[live] - at[live])
    return ReplayedStep(live, view.lengths, planned, drafted, accepted, emitted, passes)


def _ask(
    policy: DraftLengthPolicy, replay: Replay, live: np.ndarray, at: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the lengths [B] after the policy's answers during drafting, and the number of draft passes."""
    drafted, passes = lengths.copy(), 1
    entropy, maximum = replay.signals(live, at, int(lengths.max()))
    for slot in range(len(entropy)):
        if drafted.max() <= slot:
            break
        drafting = torch.from_numpy(drafted > slot)
        answer = policy.keep_drafting(Signals(slot, entropy[slot], maximum[slot], drafting))
        drafted = cut_lengths(drafted, answer, slot)
        passes += slot + 1 < drafted.max()
    return drafted, int(passes)


def without_ended(live: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the live rows in the engine's order: the last row takes the place of an ended row (`Rows.compact`)."""
    if not ended.any():
        return live
    places = live.tolist()
    for place in np.flatnonzero(ended)[::-1]:
        places[place] = places[-1]
        places.pop()
    return np.array(places, dtype=np.int64)


def step_seconds(steps: Sequence[ReplayedStep], cost: Cost) -> np.ndarray:
    """Return draft, target and other seconds of each step: [3, steps].

    The KV length of a step is the longest (`kv_of_rows` "max") or the mean of the rows. A stopped draft phase includes
    its last pass. If the engine packs the target pass (`runner.packs`), a
    modelled cost is the cost of a rectangular pass over as many tokens. A measured cost saves the share `PACKING` of
    the left-out tokens' time.
    """
    if not steps:  # every row ended with its first token
        return np.zeros((3, 0))
    packing, by_longest = _packing(cost), getattr(cost, "kv_of_rows", "mean") == "max"
    sizes = []
    for step in steps:
        batch, lengths = len(step.rows), step.lengths
        # This pass writes the last token's keys and values.
        kv_length = (int(lengths.max()) if by_longest else int(lengths.sum()) / batch) - 1
        sizes.append((batch, step.passes, _query_length((step.drafted + 1).tolist(), packing), kv_length))
    # For a single step, as in simulations, plain numbers are faster.
    columns = sizes[0] if len(sizes) == 1 else map(np.array, zip(*sizes, strict=True))
    batch, passes, query_length, kv_length = columns
    verifying = cost.target(batch, query_length, kv_length)
    parts = cost.draft(batch, passes, kv_length), verifying, cost.overhead(batch, passes)
    return np.stack([np.broadcast_to(part, len(sizes)) for part in parts])


def _packing(cost: Cost) -> float:
    """Return the share of the left-out tokens' time that packing saves."""
    models, measured = getattr(cost, "models", None), getattr(cost, "measured", {})
    eager = models is not None and models["target"]["attention"] == "eager"
    if eager or measured.get("compile") == "graphs":  # eager attention cannot pack; captured passes have fixed shapes
        return 0.0
    return PACKING if isinstance(cost, CostModel) and not cost.is_synthetic else 1.0


def _query_length(submitted: list[int], packing: float) -> float:
    """Return the tokens per row of the rectangular pass with the same cost. submitted: tokens of each row."""
    longest = max(submitted)
    if not packing or not packs(submitted, longest):
        return longest
    return longest - packing * (longest - sum(submitted) / len(submitted))
