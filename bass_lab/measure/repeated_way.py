"""One way to decode, again and again on the same prompts: what it took, and which part of that the host had alone."""

from __future__ import annotations

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

CYCLES = 2e9  # of a GPU in a second, at most
WARM_UPS = 2  # of a way: the first time compiles, the second records
RESTED = 3  # runs in which the device rests before it works


class Repeat(NamedTuple):
    """seconds: of decoding, as `Clock.decoding_seconds`. steps: of the trace, empty for transformers."""

    seconds: float
    clock: Clock
    steps: pd.DataFrame


class RepeatedWay(HasSession):
    """A way that decodes the same prompts again and again; a session of ours keeps its caches and recordings."""

    def __init__(
        self, pair: ModelPair, way: PlannedMethod, prompts: Sequence[Tensor], cost: CostModel | None, new: int
    ):
        """cost: of the policies that go by it, and of the best fixed length."""
        self.pair, self.way, self.prompts, self.new = pair, way, prompts, new
        policy = policy_of(way, len(prompts), cost, sum(map(len, prompts)) / len(prompts) + new / 2)
        self.policy = f"k={policy}" if isinstance(policy, int) else str(way.draft)
        self.runs = 0  # so far
        self.session = None
        if way.method == "transformers":  # generate would make a cache each time, and record the passes over it anew
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

    def once(self) -> Repeat:
        """Decode the prompts."""
        clock, trace = Clock(), Trace("steps")
        if self.session is None:
            with torch.inference_mode():
                self.cache.reset()
            options = {"max_new_tokens": self.new, "temperature": 0.0, "seed": 0, "clock": clock}
            transformers_generate(self.pair, self.prompts, **options, **{CACHE: self.cache})
        else:
            self.session.trace = trace
            for row, prompt in enumerate(self.prompts):  # the same numbers each time: the same counts, the same shapes
                self.session.submit(prompt, max_new_tokens=self.new, row=row)
            with self.session.prepared():
                while not self.session.idle:
                    clock.stepped(self.session.step())
        self.runs += 1
        return Repeat(clock.decoding_seconds(one_by_one=self.way.method == "single"), clock, trace.steps)

    def warm_up(self) -> None:
        while self.runs < WARM_UPS:
            self.once()

    def host_share(self, counted: Sequence[Repeat]) -> float | None:
        """Return the share of these repeats' decode time in which the device works on no pass, a median. None if it is
        unknown: where passes are launched operation by operation, a GPU waits for the host inside them, too.

        Spans of a GPU include the time that it waits for the host. So its work is taken from further runs, the median
        of `RESTED`, in which it rests at the beginning of every step until the host has launched all of it: not longer,
        since after a rest it is faster than it was (`Rest`). No step is launched ahead in them, which takes other
        recordings where rows end one by one.
        """
        taken = float(np.median([run.seconds for run in counted]))
        if self.pair.device.type == "cuda":
            if self.way.compile == "off":
                return None
            longest = 2 * taken / counted[-1].steps.step.nunique()
            Session.on_phase = Rest(longest, lambda seconds: torch.cuda._sleep(int(seconds * CYCLES)))
            try:
                for _ in range(WARM_UPS):
                    self.once()
                rested = counted_repeats(lambda _: self.once(), RESTED, lambda: self.recordings)
                counted = [run for run, _ in rested]
            finally:
                Session.on_phase = None
        return 1 - float(np.median([_pass_seconds(run.steps) for run in counted])) / taken


class Rest:
    """Told of a session's phases: at the beginning of a step lets the device rest for twice as long as the host took to
    launch the last one; at first, and at most, for `longest` seconds."""

    def __init__(self, longest: float, sleep: Callable[[float], None], clock: Callable[[], float] = time.perf_counter):
        self.longest = self.seconds = longest
        self._sleep, self._clock = sleep, clock
        self._began: float | None = None  # a prefill has no plan

    def __call__(self, session: Session, step: int, phase: str) -> None:
        if phase == "plan":
            self._sleep(self.seconds)
            self._began = self._clock()
        elif phase == "commit" and self._began is not None:
            self.seconds, self._began = min(2 * (self._clock() - self._began), self.longest), None


def _pass_seconds(steps: pd.DataFrame) -> float:
    """What the spans of both models' passes take in the decode steps of a run."""
    decode = steps[steps.kind == "decode"].drop_duplicates("step")
    return float(decode[["draft_ms", "verify_ms"]].to_numpy().sum()) / 1e3
