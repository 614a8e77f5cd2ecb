"""Compare simulated with real serving: the same workload in a session and in virtual time, at several loads.

`python -m bass_lab.load.compare` serves a workload at three shares of the simulated maximum rate. Costs are measured
before and after each serving, and each cost table gives a simulation, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from bass_core import checks
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.policies.costs import CostModel, Table
from bass_core.policies.goodput import Goodput
from bass_core.session import Session
from bass_lab.load.capacity import bearable_rate
from bass_lab.load.in_process import in_process
from bass_lab.load.result import LoadRun
from bass_lab.load.simulation import simulate
from bass_lab.load.workload import Poisson, Workload
from bass_lab.study import calibration, recording
from bass_lab.texts.prompt_sets import prompt_set
from bass_lab.threads import settle_threads

METRICS = (("first_ms", "p50"), ("between_ms", "p50"), ("between_ms", "p99"), ("end_ms", "p50"), ("end_ms", "p99"))
PROMPTS = 48  # recorded prompts of the set
WIDTHS = (16, 64, 128)  # prompt lengths of the timed prefills
GRID = {"query_lengths": (1, 2, 4, 6, 9, 13, 17), "kv_lengths": (32, 128)}  # cost grid that covers the workload
SHARES = (0.2, 0.4, 0.6)  # of the maximum rate; close to this rate, queues multiply the errors of step times


def measured_prefill(pair: ModelPair, max_batch_size: int, repeats: int = 3) -> Callable[[int, int], float]:
    """Return the `prefill` argument of `simulate`: linear interpolation of median measured prefill times."""
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
                    session.step()  # a decode step: a prefill after a decode step takes longer than after a prefill
    table = Table.of({"batch": batches, "tokens": WIDTHS}, lambda *point: float(np.median(taken[point])))
    return lambda batch, tokens: float(table(batch, tokens)) if batch else 0.0


def side_by_side(served: LoadRun, *simulated: LoadRun) -> list[dict]:
    """Return a line per metric: real milliseconds, mean simulated milliseconds, and simulated divided by real."""
    real, *found = (run.summary(resamples=2).value for run in (served, *simulated))
    lines = []
    for name in METRICS:
        mean = float(np.mean([values[name] for values in found]))
        lines.append({"metric": " ".join(name), "real": float(real[name]), "simulated": mean})
        lines[-1]["ratio"] = mean / lines[-1]["real"]
    return lines


def compare(
    pair: ModelPair,
    measure: Callable[[], CostModel],
    *,
    policies: Sequence[int | None] = (0, None),
    shares: Sequence[float] = SHARES,
    count: int = 150,
    rounds: int = 7,
    max_batch_size: int = 8,
    seed: int = 0,
) -> pd.DataFrame:
    """Return a line per round, policy (None: `Goodput`), load and metric: round, policy, share, rate, and the fields of
    `side_by_side`. measure: returns step costs; called before the first serving and after each. Decoding is greedy and
    ignores EOS."""
    prompts = prompt_set("mini", PROMPTS)
    trace = recording.record(pair, prompts, max_new_tokens=64, temperature=0.0, seed=seed).past_eos()
    drawn = Workload.draw(Poisson(1.0), count, prompts=prompts, max_new_tokens=range(16, 65), seed=seed)
    most: dict[int | None, float] = {}  # maximum rate of each policy under the first round's costs
    lines = []

    def costs() -> dict:
        return {"cost": measure(), "prefill": measured_prefill(pair, max_batch_size)}

    after = costs()
    for number, policy, share in itertools.product(range(rounds), policies, shares):
        before = after
        how = {"draft_length": Goodput(before["cost"]) if policy is None else policy, "max_batch_size": max_batch_size}
        simulated = partial(simulate, trace=trace, seed=seed, **how)
        if policy not in most:
            most[policy] = bearable_rate(partial(simulated, **before), drawn)
        asked = drawn.at_rate(share * most[policy])
        served = in_process(asked, pair, temperature=0.0, eos_token_id=(), **how)
        after = costs()
        found = [simulated(asked, **each) for each in (before, after)]
        about = {"round": number, "policy": "default" if policy is None else f"k={policy}", "share": share}
        lines += [{**about, "rate": asked.rate, **line} for line in side_by_side(served, *found)]
    return pd.DataFrame(lines)


def medians(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the medians over the rounds: a line per policy, load and metric."""
    return lines.groupby(["policy", "share", "metric"], sort=False).median().drop(columns="round").reset_index()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.load.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=150, help="requests per load")
    parser.add_argument("--batch-size", type=int, default=8, help="rows decoded at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each cost measurement")
    parser.add_argument("--json", action="store_true", help="print only a JSON document")
    given = parser.parse_args(arguments)
    settle_threads(lambda sentence: None)
    checks.integer("count", given.count, least=10)
    checks.integer("rounds", given.rounds, least=1)
    pair = load_pair()
    batches = [size for size in (1, 2, 4, 8, 16, 32) if size <= max(given.batch_size, 2)]
    found = compare(
        pair,
        lambda: calibration.calibrate(pair, batches, **GRID, seconds=given.seconds),
        count=given.count,
        rounds=given.rounds,
        max_batch_size=given.batch_size,
    )
    if given.json:
        print(json.dumps({"lines": found.to_dict("records")}))
        return
    told = medians(found)
    off = (told.ratio - 1).abs()
    print(told.round(3).to_string(index=False))
    near = f"{(off <= 0.1).sum()} of {len(told)} within 10%"
    print(f"medians of {given.rounds} rounds: {near}, largest deviation {off.max():.0%}")


if __name__ == "__main__":
    main()
