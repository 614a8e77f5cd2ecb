"""Ablation of the default policy's constants by replay: time without each constant relative to time with it.

Run `python -m bass_lab.policies.ablation`. Replays are deterministic and do not depend on the machine's load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np

from bass_core.policies import goodput
from bass_core.policies.goodput import Goodput
from bass_lab import load
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.study.recorded_acceptance import AcceptanceTrace, shipped
from bass_lab.study.replay import Replay, decode, step_seconds

INFINITE = 10**9
NEUTRAL = {  # constant of `goodput`: value that switches the constant off
    "PRIOR": (1e-3, 1e-3),
    "FORMER": 1e-3,
    "DECAY": 1.0,
    "LEAN": INFINITE,
    "SPREAD": INFINITE,
    "STRAGGLING": 0,
    "PROBED": 1,
    "RECHECK": INFINITE,
}
BATCHES, TOKENS = (1, 2, 4, 8, 16, 32), 128
LOADS = {0.06: 30, 1.2: 60}  # request rate relative to a full batch without drafts: number of requests


def texts() -> dict[str, tuple[AcceptanceTrace, tuple[int, ...]]]:
    """Return traces and their batch sizes: recorded texts, a useless draft, mixed rows, mixed passages."""
    made = {"length": TOKENS, "sequences": 64}
    useless, easy, hard = (AcceptanceTrace.synthetic(alpha=alpha, **made) for alpha in (0.01, 0.95, 0.5))
    mixed = replace(easy, q=np.where(np.arange(64)[:, None] % 2, easy.q, hard.q))
    turning = AcceptanceTrace.synthetic(alpha=0.45, length=384, sequences=64, regimes=(0.44, 150))
    recorded = {name: (shipped(name).past_eos(), BATCHES) for name in ("mini", "library")}
    return recorded | {"useless": (useless, BATCHES), "mixed": (mixed, (2, 8, 32)), "turning": (turning, (1, 8, 32))}


def seconds() -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield each setting (costs, texts, rows) and its seconds: total of replayed batches, or mean per request."""
    for device, cost, places in (("CPU", measured_cpu(), 16), ("H100", modelled_h100(), 64)):
        for name, (trace, batches) in texts().items():
            for batch in batches:
                repeats, rows = range(max(8, 16 // batch)), np.arange(batch)
                limits = np.geomspace(8, TOKENS, batch).astype(int)
                drawn = {f"{batch}": [Replay.draw(trace, batch, repeat=repeat) for repeat in repeats]}
                if batch > 1 and name != "turning":
                    drawn[f"{batch} uneven"] = [
                        Replay.of_requests(trace, rows + 2 * repeat, limits, [(repeat, row) for row in rows])
                        for repeat in repeats
                    ]
                for kind, replays in drawn.items():
                    steps = [step_seconds(decode(replay, Goodput(cost)), cost).sum() for replay in replays]
                    yield (device, name, kind), float(sum(steps))
            for share, requests in LOADS.items():
                asked = load.Workload.draw(load.Poisson(1.0), requests, max_new_tokens=range(16, TOKENS), seed=1)
                rate = share * places / float(cost.step(places, 0, 160)) / (TOKENS / 2)
                run = load.simulate(asked.at_rate(rate), trace, cost, draft_length=Goodput(cost), max_batch_size=places)
                yield (device, name, f"load {share}"), float((run.requests.ended - run.requests.started).mean())


if __name__ == "__main__":
    today = dict(seconds())
    for name, value in NEUTRAL.items():
        with mock.patch.object(goodput, name, value):
            ratios = {setting: found / today[setting] for setting, found in seconds()}
        worst = max(ratios, key=ratios.get)
        print(
            f"{name:10}  median {np.median(list(ratios.values())):.3f}  worst {ratios[worst]:.3f} in {', '.join(worst)}"
        )
