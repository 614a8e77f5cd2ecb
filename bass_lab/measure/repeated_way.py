"""Repeat one decoding method on the same prompts: decode times, and the share of time without GPU work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import StaticCache

from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.model.transformers_internals import CACHE
from bass_core.policies.costs import CostModel
from bass_core.session import Session
from bass_lab.kept_session import HasSession
from bass_lab.measure.clocks import Clock
from bass_lab.measure.plan import PlannedMethod, policy_of
from bass_lab.measure.ratios import counted_repeats
from bass_lab.measure.timed_runs import transformers_generate
from bass_lab.synthetic_acceptance import SyntheticAcceptance

CYCLES = 2e9  # upper bound on a GPU's clock cycles per second
WARM_UPS = 2  # the first run compiles, the second captures
RESTED = 3  # runs with `Rest`


class Repeat(NamedTuple):
    """One run. seconds: `Clock.decoding_seconds`. steps: of the trace, empty for transformers. draw: of the accepted
    lengths."""

    seconds: float
    clock: Clock
    steps: pd.DataFrame
    draw: int = 0


class RepeatedWay(HasSession):
    """A method that decodes the same prompts repeatedly. This engine's session keeps caches and captured graphs. Every
    run draws other accepted lengths."""

    def __init__(
        self, pair: ModelPair, way: PlannedMethod, prompts: Sequence[Tensor], cost: CostModel | None, new: int
    ):
        """cost: for policies that need costs, and for the best fixed length."""
        self.pair, self.way, self.prompts, self.new = pair, way, prompts, new
        policy = policy_of(way, len(prompts), cost, sum(map(len, prompts)) / len(prompts) + new / 2)
        self.policy = f"k={policy}" if isinstance(policy, int) else str(way.draft)
        self.runs = 0
        self.session = None
        if way.method == "transformers":  # with a new cache, generate would capture the passes again
            room = max(map(len, prompts)) + new
            self.cache = StaticCache(config=pair.target.config, max_cache_len=room)
        else:
            self.session = Session(
                pair,
                max_batch_size=1 if way.method == "single" else len(prompts),
                draft_length=policy,
                attention=way.attention,
                compile=way.compile,
                acceptance=None if way.alpha is None else SyntheticAcceptance.named(f"synthetic:{way.alpha}"),
                eos_token_id=(),
            )
            self.session.reserve(max(map(len, prompts)) + new)

    def once(self, draw: int | None = None) -> Repeat:
        """Decode the prompts with this draw of accepted lengths, or with another draw than in earlier runs."""
        draw = self.runs if draw is None else draw
        clock, trace = Clock(), Trace("steps")
        if self.session is None:
            with torch.inference_mode():
                self.cache.reset()
            options = {"max_new_tokens": self.new, "temperature": 0.0, "seed": 0, "clock": clock}
            transformers_generate(self.pair, self.prompts, **options, **{CACHE: self.cache})
        else:
            self.session.trace = trace
            for row, prompt in enumerate(self.prompts):
                self.session.submit(prompt, max_new_tokens=self.new, row=row, seed=draw)
            with self.session.prepared():
                while not self.session.idle:
                    clock.stepped(self.session.step())
        self.runs += 1
        return Repeat(clock.decoding_seconds(one_by_one=self.way.method == "single"), clock, trace.steps, draw)

    def warm_up(self) -> None:
        while self.runs < WARM_UPS:
            self.once()

    def host_share(self, counted: Sequence[Repeat]) -> float | None:
        """Return the share of decode time in which the device works on no pass. None on a GPU with compile="off": there
        the GPU also waits for the host inside passes.

        The spans of GPU passes include waiting for the host. The GPU's work is therefore the median of `RESTED` further
        runs. At the beginning of every step of these runs, the GPU rests until the host has launched the whole step.
        The rest is not longer, because a rested GPU is faster (`Rest`). These runs launch no step ahead and may need
        further captured graphs, hence the warm-ups.
        """
        taken = float(np.median([run.seconds for run in counted]))
        if self.pair.device.type == "cuda":
            if self.way.compile == "off":
                return None
            longest = 2 * taken / counted[-1].steps.step.nunique()
            Session.on_phase = Rest(longest, lambda seconds: torch.cuda._sleep(int(seconds * CYCLES)))
            try:
                draws = itertools.cycle([run.draw for run in counted])
                for _ in range(WARM_UPS):
                    self.once(counted[0].draw)
                rested = counted_repeats(lambda _: self.once(next(draws)), RESTED, lambda: self.recordings)
                counted = [run for run, _ in rested]
            finally:
                Session.on_phase = None
        return 1 - float(np.median([_pass_seconds(run.steps) for run in counted])) / taken


class Rest:
    """Listener for `Session.on_phase` that rests the device at the beginning of each step, for twice as long as the
    host took to launch the last step. The first and longest rest is `longest` seconds."""

    def __init__(self, longest: float, sleep: Callable[[float], None], clock: Callable[[], float] = time.perf_counter):
        self.longest = self.seconds = longest
        self._sleep, self._clock = sleep, clock
        self._began: float | None = None  # None in a prefill, which has no phase "plan"

    def __call__(self, session: Session, step: int, phase: str) -> None:
        if phase == "plan":
            self._sleep(self.seconds)
            self._began = self._clock()
        elif phase == "commit" and self._began is not None:
            self.seconds, self._began = min(2 * (self._clock() - self._began), self.longest), None


def _pass_seconds(steps: pd.DataFrame) -> float:
    """Return the seconds of draft and verify spans in the decode steps of a run."""
    decode = steps[steps.kind == "decode"].drop_duplicates("step")
    return float(decode[["draft_ms", "verify_ms"]].to_numpy().sum()) / 1e3
