"""Best times in hindsight: a lower bound for a replay, and a good schedule with all coins known."""

from __future__ import annotations

import numpy as np

from bass_core.policies.costs import Cost
from bass_core.policies.protocol import DraftLengthPolicy, RowsView
from bass_lab.study.replay import Replay, decode, step_seconds

SHARES = np.linspace(0, 1, 5)  # shares of a step's least cost per row, see `bound`
PRICES = np.linspace(1, 5, 9)  # prices of a second in tokens of regular decoding, see `schedule`


def bound(drawn: Replay, cost: Cost) -> float:
    """Return a lower bound on the seconds of any policy in this replay, even a policy with all coins known.

    Assumptions: a longer draft takes no less draft time. For a batch, a step gets no cheaper with growing KV lengths,
    and a step costs as much as its longest row. A packed pass over rows of different lengths costs less
    (`replay.step_seconds`), so the bound of a batch holds only for passes without packing.

    **One row: the optimum.** At t generated tokens, let r be the length of the following run of acceptances. Then
    V(t) = min over k of c(k, t) + V(t + min(k, r) + 1), for all k within the row's limit, and V = 0 at the end of the
    text. c(k, t) is the cost at the row's KV length. A length k > r is optimal only if costs fall with k.

    **A batch: a lower bound.** Let c(b, k) be the cost of a step with b live rows and longest draft k, at the KV length
    of the shortest prompt. Take any d(k) with 0 <= b · d(k) <= c(b, k) for all b. Let a(k) be the minimum over b of
    c(b, k) - (b - 1) d(k). A step with row i live costs at least a(k) + (b - 1) d(k); any other step costs at least
    b · d(k). So row i pays a(k), and each other live row pays d(k). Row j pays at least D_j[w], the minimum of the sum
    of w(k) over all choices of k for row j alone. (This includes rows that drafted fewer than k tokens: these rows
    advance no further than with k. A row further on has no more to pay, because the same k reaches at least as far from
    a later position of a run.) Hence the time is at least

        D_i[a] + sum over j ≠ i of D_j[d].

    The result is the largest value over i and d = s · min over b of c(b, k)/b, with s = 0 … 1 in quarters. s = 0 gives
    the slowest row alone; s = 1 shares every step among all rows. The bound is loose for unequal rows, because each row
    chooses its own draft lengths.
    """
    return _optimum(drawn, cost) if len(drawn.ends) == 1 else _lower_bound(drawn, cost)


def _optimum(drawn: Replay, cost: Cost) -> float:
    generated = np.arange(1, drawn.limit)
    k = np.arange(drawn.limit - 1)
    kv_length = drawn.trace.prompt_lengths[drawn.sequences[0]] + generated - 1
    seconds = np.broadcast_to(cost.step(1, k[None], kv_length[:, None]), (len(generated), len(k)))
    allowed = k[None] <= drawn.limit - generated[:, None] - 1
    return float(_least(np.where(allowed, seconds, np.inf)[:, None], drawn)[0])


def _lower_bound(drawn: Replay, cost: Cost) -> float:
    batch = np.arange(1, len(drawn.ends) + 1)[:, None]
    k = np.arange(drawn.limit - 1)
    shortest = drawn.trace.prompt_lengths[drawn.sequences].min()
    seconds = np.broadcast_to(cost.step(batch, k, shortest), (len(batch), len(k)))  # [B, K]
    per_row = (seconds / batch).min(0)  # [K]
    shared = _least(np.broadcast_to(per_row, (drawn.limit - 1, 1, len(k))), drawn)  # [B], D_j[per_row]
    bounds = []
    for share in SHARES:
        rest = (seconds - (batch - 1) * share * per_row).min(0)
        alone = _least(np.broadcast_to(rest, (drawn.limit - 1, 1, len(k))), drawn)
        bounds.append(share * shared.sum() + (alone - share * shared).max())
    return float(max(bounds))


def _least(seconds: np.ndarray, drawn: Replay) -> np.ndarray:
    """Return the least total of each row, [B]. seconds: [limit - 1, B or 1, K]; [t - 1, row, k] is the cost of a step
    at t generated tokens and draft length k.
    """
    if drawn.limit == 1:  # every row ended with its first token
        return np.zeros(len(drawn.ends))
    most = min(int(drawn.run.max()) + 1, seconds.shape[-1])  # beyond the longest run, k only changes the cost
    seconds = np.concatenate([seconds[..., : most - 1], seconds[..., most - 1 :].min(-1, keepdims=True)], axis=-1)
    rows, k = np.arange(len(drawn.ends))[:, None], np.arange(most)
    value = np.zeros((len(rows), drawn.limit + 1))
    for t in range(drawn.limit - 1, 0, -1):
        reached = np.minimum(t + np.minimum(k, drawn.run[:, t, None]) + 1, drawn.limit)
        best = (seconds[t - 1] + value[rows, reached]).min(1)
        value[:, t] = np.where(t < drawn.ends, best, 0.0)
    return value[:, 1]


class _Foresight(DraftLengthPolicy):
    """Policy with known coins: maximize weighted tokens per row minus the step's price. Rows further behind weigh more.

    prices: [B, K], of a step with 1 … B live rows and draft length 0 … K - 1, in tokens of a row.
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
    """Return the seconds of a good schedule with all coins known. The optimum lies between `bound` and this time.

    Each step maximizes its tokens (rows weighted by squared remaining tokens) minus its time at a price in tokens per
    second. The result is the best of several prices.
    """
    batch, k = np.arange(1, len(drawn.ends) + 1)[:, None], np.arange(drawn.limit)
    middle = drawn.trace.prompt_lengths[drawn.sequences].mean() + drawn.limit / 2
    seconds = np.broadcast_to(cost.step(batch, k, middle), (len(batch), len(k)))
    in_tokens = seconds / seconds[-1, 0]  # a row's tokens of regular decoding in the same time
    schedules = [decode(drawn, _Foresight(drawn, price * in_tokens)) for price in PRICES]
    return min(float(step_seconds(steps, cost).sum()) for steps in schedules)
