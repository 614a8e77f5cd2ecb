"""Simulate a `Session` under load in virtual time: the schedule of `Session`, recorded acceptance, costs from a table.

Before each step, arrived requests are queued and requests past their deadline end, as in `Session.step`. If batch slots
are free, all waiting requests that fit are prefilled in a single pass, as wide as the longest new prompt. Each distinct
prompt is read once. Otherwise live rows take a decode step (`replay.step`, with the time of `replay.step_seconds`). Not
modelled: time between steps, and tokens that the draft model reads after steps without drafts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pandas as pd

from bass_core import checks
from bass_core.policies.costs import Cost
from bass_core.policies.protocol import DraftLengthPolicy, as_policy
from bass_lab.load.result import PIECES, REQUESTS, STEPS, LoadRun
from bass_lab.load.workload import Workload
from bass_lab.study import replay
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, ReplayedStep, step_seconds, without_ended

WIDTH = 16  # query length in cost tables; a longer prompt costs as much as several rows of this length
COINS = 1  # part of the random seed, for the acceptance draws

Prefill = Callable[[int, int], float]  # (rows, tokens of the longest prompt) -> seconds


def simulate(
    workload: Workload,
    trace: AcceptanceTrace,
    cost: Cost,
    *,
    draft_length: int | DraftLengthPolicy = 0,
    max_batch_size: int = 8,
    prefill: Prefill | None = None,
    seed: int = 0,
) -> LoadRun:
    """Simulate `Session(max_batch_size=…, draft_length=…)` on the workload, with steps that take the time in `cost`.

    The text of a request with prompt number i is text i of the trace (modulo the number of texts), up to
    max_new_tokens. Acceptance is drawn from (seed, request, position), the same under every policy, rate and batch
    size. prefill: seconds by rows and tokens of the longest prompt (None: `prefill_seconds`). Raises ValueError for
    requests longer than the trace's texts.
    """
    limits = workload.requests.max_new_tokens.to_numpy(dtype=np.int64)
    sequences = workload.requests.number.to_numpy(dtype=np.int64) % len(trace.lengths)
    seeds = [(checks.integer("seed", seed), COINS, request) for request in range(len(limits))]
    rows = Replay.of_requests(trace, sequences, limits, seeds)
    policy = deepcopy(as_policy(draft_length), {id(cost): cost})
    read = prefill or (lambda batch, tokens: prefill_seconds(cost, batch, tokens))
    server = _Server(workload, rows, policy, max_batch_size, read, lambda step: float(step_seconds([step], cost).sum()))
    run = server.served()
    run.meta.update(simulated=True, policy=repr(policy), max_batch_size=max_batch_size, seed=seed)
    return run


def prefill_seconds(cost: Cost, batch: int, tokens: int) -> float:
    """Estimate the seconds of a prefill of `batch` prompts, padded to `tokens`, from decode costs: a target pass in
    rows of `WIDTH` tokens with half a prompt cached, a draft phase of length 1 (two tokens per row), and overhead."""
    if batch == 0:  # all prompts are already in the cache
        return float(cost.overhead(1, 0))
    width = min(tokens, WIDTH)
    rows = batch * tokens / width
    reading = cost.target(rows, width, tokens / 2) + cost.draft(batch * tokens / 2, 1, tokens / 2)
    return float(reading + cost.overhead(batch, 0))


class _Server:
    """The engine's schedule. prefill: seconds for rows and tokens. decode: seconds of a step."""

    def __init__(
        self,
        workload: Workload,
        rows: Replay,
        policy: DraftLengthPolicy,
        max_batch_size: int,
        prefill: Prefill,
        decode: Callable[[ReplayedStep], float],
    ):
        self.rows, self.policy = rows, policy
        self.places = checks.integer("max_batch_size", max_batch_size, least=1)
        self.prefill_seconds, self.decode_seconds = prefill, decode
        requests = workload.requests
        self.asked, self.arrived = requests, requests.arrived.to_numpy()
        self.leaves = self.arrived + np.where(requests.deadline.isna(), np.inf, requests.deadline)
        self.prompts = pd.factorize(requests.prompt.map(json.dumps))[0]
        count = len(requests)
        self.at, self.taken = np.zeros(count, np.int64), np.zeros(count, np.int64)  # tokens, decode steps
        self.started, self.first, self.ended = (np.full(count, np.nan) for _ in range(3))
        self.reasons: list[str | None] = [None] * count
        self.now, self.coming = 0.0, 0
        self.waiting: deque[int] = deque()
        self.live = np.zeros(0, np.int64)
        self.saved: set[int] = set()  # cached prompts of waiting requests
        self.pieces: list[tuple] = []
        self.steps: list[tuple] = []

    def served(self) -> LoadRun:
        """Serve all requests, from the first arrival to the last end."""
        count = len(self.arrived)
        while self.coming < count or self.waiting or len(self.live):
            if not self.waiting and not len(self.live):
                self.now = max(self.now, self.arrived[self.coming])
            while self.coming < count and self.arrived[self.coming] <= self.now:
                self.waiting.append(self.coming)
                self.coming += 1
            self._end_late()
            if self.waiting and len(self.live) < self.places:
                self._prefill()
            elif len(self.live):
                self._decode()
        columns = [
            range(count), self.arrived, self.started, self.first, self.ended, self.at,
            self.asked.max_new_tokens, self.asked.deadline, self.reasons, None,
        ]  # fmt: skip
        return LoadRun(
            pd.DataFrame(dict(zip(REQUESTS, columns, strict=True))),
            pd.DataFrame(self.pieces, columns=list(PIECES)),
            pd.DataFrame(self.steps, columns=list(STEPS)),
        )

    def _end_late(self) -> None:
        """End the rows of `Rows.expired`, one at a time."""
        for request in [request for request in (*self.live, *self.waiting) if self.leaves[request] <= self.now]:
            self.reasons[request], self.ended[request] = "budget", self.now
            self.live = without_ended(self.live, self.live == request)
            if request in self.waiting:
                self.waiting.remove(request)
        if not self.waiting:
            self.saved.clear()

    def _prefill(self) -> None:
        """Run `Session._prefill`: rows with a new prompt come first, then rows that share a prompt."""
        free = self.places - len(self.live)
        starting = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        leading: dict[int, int] = {}
        for request in starting:
            if self.prompts[request] not in self.saved:
                leading.setdefault(self.prompts[request], request)
        leaders = list(leading.values())
        new = np.array(leaders + [request for request in starting if request not in leaders])
        wanted = {self.prompts[request] for request in self.waiting}
        for prompt in self.prompts[starting]:
            (self.saved.add if prompt in wanted else self.saved.discard)(prompt)
        lengths = self.rows.trace.prompt_lengths[self.rows.sequences[leaders]] if leaders else np.zeros(0, np.int64)
        self.started[new] = self.now
        began = self._pass(self.prefill_seconds(len(leaders), int(lengths.max(initial=0))))
        none = np.zeros(len(new), np.int64)
        self._commit("prefill", began, ReplayedStep(new, none, none, none, none, emitted=none + 1, passes=0))
        self.live = np.concatenate([self.live, new])
        self._compact()
        if len(self.live):
            self.policy.start(self.rows.view(self.live, self.at, self.taken))

    def _decode(self) -> None:
        """Run `Session._decode`."""
        step = replay.step(self.rows, self.policy, self.live, self.at, self.taken)
        began = self._pass(self.decode_seconds(step))
        self._commit("decode", began, step)
        self.taken[step.rows] += 1
        self._compact()

    def _pass(self, seconds: float) -> float:
        """Advance the time by a step. Return the start of the step."""
        began, self.now = self.now, self.now + seconds
        return began

    def _commit(self, kind: str, began: float, step: ReplayedStep) -> None:
        rows, emitted = step.rows, step.emitted
        self.at[rows] += emitted
        if kind == "prefill":
            self.first[rows] = self.now
        self.pieces += [(row, self.now, tokens) for row, tokens in zip(rows.tolist(), emitted.tolist(), strict=True)]
        counts = step.planned.mean(), step.drafted.sum(), step.accepted.sum(), emitted.sum()
        self.steps.append((began, self.now, kind, len(rows), *counts))

    def _compact(self) -> None:
        """Run `Rows.compact` after a step: end the rows with a complete text."""
        done = self.at[self.live] >= self.rows.ends[self.live]
        for request in self.live[done].tolist():
            is_full = self.at[request] >= self.asked.max_new_tokens[request]
            self.reasons[request], self.ended[request] = "length" if is_full else "eos", self.now
        self.live = without_ended(self.live, done)
