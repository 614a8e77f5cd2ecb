"""The best in hindsight: what a replay takes at least, and what a schedule that knows all coins takes."""

from __future__ import annotations

import numpy as np

from bass_core.policies.costs import Cost
from bass_core.policies.protocol import DraftLengthPolicy, RowsView
from bass_lab.study.replay import Replay, decode, step_seconds

SHARES = np.linspace(0, 1, 5)  # of a step's least cost per row, see `bound`
PRICES = np.linspace(1, 5, 9)  # of a second, in tokens of regular decoding, see `schedule`


def bound(drawn: Replay, cost: Cost) -> float:
    """Seconds that no policy can stay below in this replay, though it knew all coins.

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
    return _optimum(drawn, cost) if len(drawn.ends) == 1 else _lower_bound(drawn, cost)


def _optimum(drawn: Replay, cost: Cost) -> float:
    """Least seconds of one row."""
    generated = np.arange(1, drawn.limit)
    k = np.arange(drawn.limit - 1)
    kv_length = drawn.trace.prompt_lengths[drawn.sequences[0]] + generated - 1
    seconds = np.broadcast_to(cost.step(1, k[None], kv_length[:, None]), (len(generated), len(k)))
    allowed = k[None] <= drawn.limit - generated[:, None] - 1
    return float(_least(np.where(allowed, seconds, np.inf)[:, None], drawn)[0])


def _lower_bound(drawn: Replay, cost: Cost) -> float:
    """Return the seconds that a batch needs at least."""
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


def schedule(drawn: Replay, cost: Cost) -> float:
    """Return the seconds of a good schedule that knew all coins: found, not proven best.

    Each step takes the k of most tokens (rows weighted by the square of what is left) less the step's time at a price
    in tokens per second; the best of some prices counts. The optimum lies between `bound` and this.
    """
    batch, k = np.arange(1, len(drawn.ends) + 1)[:, None], np.arange(drawn.limit)
    middle = drawn.trace.prompt_lengths[drawn.sequences].mean() + drawn.limit / 2
    seconds = np.broadcast_to(cost.step(batch, k, middle), (len(batch), len(k)))
    in_tokens = seconds / seconds[-1, 0]  # of regular decoding, a row's tokens in the same time
    schedules = [decode(drawn, _Foresight(drawn, price * in_tokens)) for price in PRICES]
    return min(float(step_seconds(steps, cost).sum()) for steps in schedules)
