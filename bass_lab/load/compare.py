"""Simulated against served: the same workload in a session of this process and in virtual time, at several loads.

`python -m bass_lab.load.compare` records what the embedded pair's drafts are worth, and then, in each of some rounds,
measures what steps and prefills cost here and serves a workload at three shares of the rate that the simulator finds it
to bear. It says how far the simulator is off, by the median of the rounds. On a machine that has other things to do, or
changes its pace, it is off for that reason.
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
SHARES = (0.25, 0.5, 0.75)  # of the rate at which requests come no faster than they are served; near that, queues
# multiply whatever a step was wrong by


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
                    session.step()  # decodes: a prefill between decode steps takes longer than one after another
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
    measure: Callable[[], CostModel],
    *,
    policies: Sequence[int | None] = (0, None),
    shares: Sequence[float] = SHARES,
    count: int = 150,
    rounds: int = 3,
    max_batch_size: int = 8,
    temperature: float = 0.2,
    seed: int = 0,
) -> pd.DataFrame:
    """One line per round, policy (None: `Goodput` by the round's costs), load and metric: round, policy, share, rate,
    then as `side_by_side`. measure: the costs of steps, asked in each round. Texts go on past EOS, so that both write
    as many tokens."""
    prompts = prompt_set("mini", PROMPTS)
    trace = recording.record(pair, prompts, max_new_tokens=64, temperature=temperature, seed=seed).past_eos()
    drawn = Workload.draw(Poisson(1.0), count, prompts=prompts, max_new_tokens=range(16, 65), seed=seed)
    most: dict[int | None, float] = {}  # what each policy bears, by the first round's costs
    lines = []
    for number in range(rounds):
        cost, read = measure(), measured_prefill(pair, max_batch_size)
        for policy in policies:
            chosen = Goodput(cost) if policy is None else policy
            how = {"draft_length": chosen, "max_batch_size": max_batch_size}

            def in_virtual_time(
                workload: Workload,
                how: dict = how,
                cost: CostModel = cost,
                read: Callable[[int, int], float] = read,
            ) -> LoadRun:
                return simulate(workload, trace, cost, prefill=read, seed=seed, **how)

            if policy not in most:
                most[policy] = bearable_rate(in_virtual_time, drawn)
            for share in shares:
                asked = drawn.at_rate(share * most[policy])
                served = in_process(asked, pair, temperature=temperature, eos_token_id=(), **how)
                about = {"round": number, "policy": "default" if policy is None else f"k={policy}", "share": share}
                lines += [
                    {**about, "rate": asked.rate, **line} for line in side_by_side(served, in_virtual_time(asked))
                ]
    return pd.DataFrame(lines)


def medians(lines: pd.DataFrame) -> pd.DataFrame:
    """One line per policy, load and metric: the medians over the rounds."""
    return lines.groupby(["policy", "share", "metric"], sort=False).median().drop(columns="round").reset_index()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.load.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=150, help="requests per load")
    parser.add_argument("--max-batch-size", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=42.0, help="time to measure costs in, in each round")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    given = parser.parse_args(arguments)
    settle_threads(lambda sentence: None)
    inputs.integer("count", given.count, least=10)
    inputs.integer("rounds", given.rounds, least=1)
    pair = load_pair()
    batches = [size for size in (1, 2, 4, 8, 16, 32) if size <= max(given.max_batch_size, 2)]
    found = compare(
        pair,
        lambda: calibration.calibrate(pair, batches, seconds=given.seconds),
        count=given.count,
        rounds=given.rounds,
        max_batch_size=given.max_batch_size,
    )
    if given.json:
        print(json.dumps({"lines": found.to_dict("records")}))
        return
    told = medians(found)
    off = (told.ratio - 1).abs()
    print(told.round(3).to_string(index=False))
    near = f"{(off <= 0.1).sum()} of {len(told)} within a tenth"
    print(f"medians of {given.rounds} rounds: {near}, the farthest {off.max():.0%} off")


if __name__ == "__main__":
    main()
