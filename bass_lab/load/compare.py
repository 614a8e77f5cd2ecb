"""Simulated against served: the same workload in a session of this process and in virtual time, at several loads.

`python -m bass_lab.load.compare` measures what steps and prefills of the embedded pair cost here, records what its
drafts are worth, serves a workload at three shares of the rate that the simulator finds it to bear, and says how far
the simulator is off. On a machine that has other things to do it is off for that reason.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch

from bass_core import inputs
from bass_core.engine import Session
from bass_core.models import ModelPair, load_pair
from bass_core.policies.costs import CostModel, Table
from bass_core.policies.goodput import Goodput
from bass_lab.load.capacity import bearable_rate
from bass_lab.load.in_process import in_process
from bass_lab.load.result import LoadRun
from bass_lab.load.simulation import simulate
from bass_lab.load.workload import Poisson, Workload
from bass_lab.study import calibration, recording
from bass_lab.texts.prompt_sets import prompt_set
from bass_lab.threads import settle_threads

METRICS = (("first_ms", "p50"), ("between_ms", "p50"), ("between_ms", "p99"), ("end_ms", "p50"), ("end_ms", "p99"))
PROMPTS = 48  # of the set, recorded
WIDTHS = (16, 64, 128)  # tokens of the prompts whose prefill is timed
SHARES = (0.3, 0.6, 0.9)  # of the rate at which requests come no faster than they are served


def measured_prefill(pair: ModelPair, max_batch_size: int, repeats: int = 5) -> Callable[[int, int], float]:
    """Seconds of prefills of so many rows and tokens, for `simulate`: medians of real ones, linear in between."""
    batches = (*(size for size in (1, 2, 4, 8, 16, 32) if size < max_batch_size), max_batch_size)
    taken: dict[tuple[int, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for batch in batches:
            for width in WIDTHS:
                with Session(pair, max_batch_size=batch, draft_length=0) as session, session.prepared():
                    session.reserve(width + 2)
                    for row in range(batch):
                        session.submit(torch.arange(width) % (2 + row), max_new_tokens=2)
                    began = time.perf_counter()
                    session.step()
                    if repeat:
                        taken.setdefault((batch, width), []).append(time.perf_counter() - began)
    table = Table.of({"batch": batches, "tokens": WIDTHS}, lambda *point: float(np.median(taken[point])))
    return lambda batch, tokens: float(table(batch, tokens)) if batch else 0.0


def side_by_side(served: LoadRun, simulated: LoadRun) -> list[dict]:
    """A line per metric: real and simulated milliseconds, and their ratio."""
    real, found = (run.summary(resamples=2).value for run in (served, simulated))
    return [
        {
            "metric": " ".join(name),
            "real": float(real[name]),
            "simulated": float(found[name]),
            "ratio": float(found[name] / real[name]),
        }
        for name in METRICS
    ]


def compare(
    pair: ModelPair,
    cost: CostModel,
    *,
    policies: Sequence[int | None] = (0, None),
    shares: Sequence[float] = SHARES,
    count: int = 150,
    max_batch_size: int = 8,
    temperature: float = 0.2,
    seed: int = 0,
) -> pd.DataFrame:
    """One line per policy (None: `Goodput` by these costs), load and metric: policy, share, rate, then as
    `side_by_side`. Texts go on past EOS, so that both write as many tokens."""
    prompts = prompt_set("mini", PROMPTS)
    trace = recording.record(pair, prompts, max_new_tokens=64, temperature=temperature, seed=seed).past_eos()
    read = measured_prefill(pair, max_batch_size)
    drawn = Workload.draw(Poisson(1.0), count, prompts=prompts, max_new_tokens=range(16, 65), seed=seed)
    lines = []
    for policy in policies:
        chosen = Goodput(cost) if policy is None else policy
        how = {"draft_length": chosen, "max_batch_size": max_batch_size}

        def in_virtual_time(workload: Workload, how: dict = how) -> LoadRun:
            return simulate(workload, trace, cost, prefill=read, seed=seed, **how)

        most = bearable_rate(in_virtual_time, drawn)
        for share in shares:
            asked = drawn.at_rate(share * most)
            served = in_process(asked, pair, temperature=temperature, eos_token_id=(), **how)
            for line in side_by_side(served, in_virtual_time(asked)):
                name = "default" if policy is None else f"k={policy}"
                lines.append({"policy": name, "share": share, "rate": asked.rate, **line})
    return pd.DataFrame(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.load.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=150, help="requests per load")
    parser.add_argument("--max-batch-size", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--seconds", type=float, default=42.0, help="time to measure costs in")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    given = parser.parse_args(arguments)
    settle_threads(lambda sentence: None)
    inputs.integer("count", given.count, least=10)
    pair = load_pair()
    batches = [size for size in (1, 2, 4, 8, 16, 32) if size <= max(given.max_batch_size, 2)]
    cost = calibration.calibrate(pair, batches, seconds=given.seconds)
    found = compare(pair, cost, count=given.count, max_batch_size=given.max_batch_size)
    if given.json:
        print(json.dumps({"lines": found.to_dict("records"), "spread": cost.measured["spread"]}))
        return
    print(found.round(3).to_string(index=False))
    print(f"costs varied by {cost.measured['spread']:.0%}; off by at most {(found.ratio - 1).abs().max():.0%}")


if __name__ == "__main__":
    main()
