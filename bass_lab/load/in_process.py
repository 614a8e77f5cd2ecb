"""Serve a workload with a `Session` of this process, in real time. A single thread submits due requests and steps."""

from __future__ import annotations

import math
import time

import numpy as np
import pandas as pd

from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Request
from bass_core.prompts import check_context, model_pair, saying_which, token_ids
from bass_core.session import Session
from bass_lab.load.result import PIECES, REQUESTS, STEPS, LoadRun
from bass_lab.load.workload import Workload

WARM_UP = 8  # tokens of warm-up rows: attention paths are probed, buffers allocated and shapes compiled
AWAKE = 0.001  # seconds before an arrival spent awake: a sleep ends about half a millisecond late


def in_process(workload: Workload, pair: ModelPair, *, max_batch_size: int = 8, **options: object) -> LoadRun:
    """Serve the whole workload with `Session(pair, max_batch_size=…, **options)`.

    Request i becomes row i, submitted at the arrival time with its seed and deadline. Prompts are tokenized in advance.
    `meta["sequences"]` holds the token ids of the texts. Raises as `Session` and `submit`, before the clock starts.
    """
    requests = workload.requests
    prompts = token_ids(model_pair(pair), requests.prompt)
    for index, (ids, most) in enumerate(zip(prompts, requests.max_new_tokens, strict=True)):
        with saying_which(index):
            check_context(pair, len(ids), int(most))
    with Session(pair, max_batch_size=max_batch_size, **options) as session, session.prepared():
        session.reserve(max(len(ids) + int(most) for ids, most in zip(prompts, requests.max_new_tokens, strict=True)))
        for rows in _warm_ups(session, min(max_batch_size, len(prompts))):
            for row, ids in enumerate(prompts[:rows]):
                new = min(WARM_UP, int(requests.max_new_tokens[row]))
                session.submit(ids, max_new_tokens=new, row=len(prompts) + row)
            while not session.idle:
                session.step()
        session.drafter.forget()
        return _served(workload, prompts, session)


def _warm_ups(session: Session, most: int) -> list[int]:
    """Return the batch sizes of the warm-up runs. With CUDA graphs, every power of two runs twice."""
    if not session.device_step.records:
        return [most]
    return 2 * [*(1 << bits for bits in range((most - 1).bit_length())), most]


def _served(workload: Workload, prompts: list, session: Session) -> LoadRun:
    requests, handles = workload.requests, []
    arrived, deadlines = requests.arrived.to_numpy(), requests.deadline.to_numpy()
    started, first, ended = (np.full(len(prompts), np.nan) for _ in range(3))
    running: dict[int, Request] = {}
    pieces, spans = [], {}
    zero = time.perf_counter()

    def due() -> None:
        """Submit the requests that have arrived."""
        while len(handles) < len(prompts) and arrived[len(handles)] <= time.perf_counter() - zero:
            row = len(handles)
            left = None
            if not math.isnan(deadlines[row]):
                left = max(arrived[row] + deadlines[row] - (time.perf_counter() - zero), 0.0)
            own = {"max_new_tokens": int(requests.max_new_tokens[row]), "seed": int(requests.seed[row])}
            handles.append(session.submit(prompts[row], row=row, deadline=left, **own))
            running[row] = handles[-1]

    while len(handles) < len(prompts) or not session.idle:
        due()
        if session.idle:
            time.sleep(max(arrived[len(handles)] - (time.perf_counter() - zero) - AWAKE, 0.0))
            continue
        began = time.perf_counter() - zero
        event = session.step()
        now = time.perf_counter() - zero
        if event.rows:
            spans[event.step] = began, now
        for row, tokens in zip(event.rows, event.new_tokens, strict=True):
            if np.isnan(first[row]):
                started[row], first[row] = began, now
            pieces.append((row, now, len(tokens)))
        for row in [row for row, handle in running.items() if handle.finish_reason is not None]:
            ended[row] = now if row in event.rows else began  # a row past its deadline ends at the start of a step
            del running[row]
    results = [session.result(handle) for handle in handles]
    columns = [
        range(len(handles)), arrived, started, first, ended, [len(result.sequence) for result in results],
        requests.max_new_tokens, deadlines, [result.finish_reason for result in results],
        [result.decoded for result in results],
    ]  # fmt: skip
    return LoadRun(
        pd.DataFrame(dict(zip(REQUESTS, columns, strict=True))),
        pd.DataFrame(pieces, columns=list(PIECES)),
        _steps(session, spans),
        {"simulated": False, "policy": repr(session.policy), "max_batch_size": session.rows.max_rows}
        | {"sequences": [result.sequence.tolist() for result in results]},
    )


def _steps(session: Session, spans: dict[int, tuple[float, float]]) -> pd.DataFrame:
    """Return the trace's steps in `spans`; empty with trace="off"."""
    steps = session.trace.steps
    by_step = steps[steps.step.isin(list(spans))].groupby("step", as_index=False)
    found = by_step.agg(
        kind=("kind", "first"), rows=("row", "size"), k=("k", "mean"), drafted=("drafted", "sum"),
        accepted=("accepted", "sum"), emitted=("emitted", "sum"),
    )  # fmt: skip
    began, now = np.array([spans[step] for step in found.step]).reshape(-1, 2).T
    return found.assign(started=began, ended=now)[list(STEPS)]
