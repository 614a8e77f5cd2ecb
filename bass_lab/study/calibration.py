"""Measure a `CostModel` on the current machine.

Passes are `Runner.feed` and `feed_last` over a full ragged cache. Overhead is the time of real steps minus their
passes. If steps are replayed as CUDA graphs, the phases of real steps are timed instead. Grid points are interleaved,
so that a slow moment affects all points, and are estimated together (`mixed_model`).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from bass_core import checks
from bass_core.generation import generate
from bass_core.loading.measured_costs import device_name
from bass_core.loading.model_pair import ModelPair, fingerprints
from bass_core.loop.phases import Stopwatch
from bass_core.model import probe
from bass_core.model.encoder_decoder import made_up
from bass_core.model.runner import Runner
from bass_core.policies.costs import OVERHEAD_AXES, PASS_AXES, PHASE_AXES, CostModel, Table
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import RowsView
from bass_core.prompts import token_ids
from bass_core.session import Session
from bass_lab.measure.clocks import passes_marked
from bass_lab.measure.modelled_costs import modelled_h100
from bass_lab.pairs import context_of, name_of
from bass_lab.provenance import describe_environment
from bass_lab.study import mixed_model
from bass_lab.study.mixed_model import Sample
from bass_lab.synthetic_acceptance import SyntheticAcceptance
from bass_lab.texts.prompt_sets import prompt_set

KV_LENGTHS = (64, 256, 768, 2048)  # lengths beyond the context are left out
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)  # grid of draft phases and overheads
PROMPT = 16  # prompt tokens of the rows in timed steps
SOURCE = 64  # source tokens of rows of an encoder-decoder model
REPLAYS = 3  # timed steps of each draft length, if steps are captured
RECORDING = 2  # untimed steps before: the first runs eagerly, the second is captured
QUIET = 0.25  # largest spread of samples on an idle machine
FEWEST = 4  # samples of a point with a spread
OFTEN = 4  # visits of a draft phase or a step per visit of an equally long target pass, because there are fewer
LOOKED_AT, WRITTEN, ASKED = 4, 32, 4  # `_acceptance`: prompts per set, tokens per row, draft length

Taken = tuple[str, tuple[int, ...], float]  # table, point of its grid, seconds


class Turn(NamedTuple):
    """take: measures some points. often: relative number of visits among turns of equal duration."""

    take: Callable[[], Iterator[Taken]]
    often: int = 1


@torch.inference_mode()
def calibrate(
    pair: ModelPair,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    query_lengths: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17),
    kv_lengths: Sequence[int] | None = None,
    *,
    seconds: float = 42.0,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> CostModel:
    """Return a cost model from times of both models' passes and of the rest of a step, measured on a grid.

    batches, query_lengths, kv_lengths (cached positions; None: `KV_LENGTHS` within the context): increasing integers.
    Caches hold max(batches) rows of max(kv_lengths) positions. seconds: time limit. Each point is measured at least
    once.

    `measured` contains samples per point, their `_spread` (above `QUIET` the machine was busy) and `acceptance`
    (`_acceptance`). Raises ValueError if the grid exceeds the context or does not increase.
    """
    end = time.perf_counter() + seconds
    accepted = _acceptance(pair)
    with Session(pair, max_batch_size=1) as session:
        recorded = session.device_step.records
    axes = _axes(pair, batches, query_lengths, kv_lengths, recorded)
    with ExitStack() as stack:
        watch = stack.enter_context(passes_marked(pair))
        warm, longer = _turns(pair, axes, watch, stack, recorded)

        def tell(now: float) -> None:
            progress("timing passes and steps", 1.0 if now >= end else 1 - (end - now) / seconds)

        tell(time.perf_counter())
        for turn in warm:
            list(turn.take())
        samples = _take_turns(warm + longer, end, tell)
    found = mixed_model.times(samples)
    tables = {name: Table.of(axes[name], lambda *point, name=name: found[name, point]) for name in axes}
    counts = pd.DataFrame(samples).groupby(["table", "point"]).size()
    how = {
        "device_type": pair.device.type,
        "compile": "graphs" if recorded else "off",
        "temperature": 0.0,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "acceptance": accepted,
        "samples": {"least": int(counts.min()), "most": int(counts.max())},
        "spread": _spread(samples),
    }
    how = describe_environment(pair.device) | how
    return CostModel(device_name(pair.device), _described(pair), measured=how, **{"draft_phases": None} | tables)


def _spread(samples: Sequence[Sample]) -> float | None:
    """Return interquartile range ÷ median of a point's times, the median over points with at least `FEWEST` samples, or
    None without such a point."""
    by_point = pd.DataFrame(samples).groupby(["table", "point"]).seconds
    spreads = (by_point.quantile(0.75) - by_point.quantile(0.25)) / by_point.median()
    known = spreads[by_point.size() >= FEWEST]
    return None if known.empty else float(known.median())


def spread_of(cost: CostModel) -> str:
    """Return a sentence on the spread of a calibration's times."""
    spread = cost.measured["spread"]
    if spread is None:
        return f"no step was timed {FEWEST} times, so the spread of the times is unknown"
    return f"repeated times of the same step varied by {spread:.0%}"


def _acceptance(pair: ModelPair) -> list[int] | None:
    """Return the accepted draft tokens of greedy runs on both prompt sets, and the row-steps that accepted fewer than
    planned. Return None if the pair has no tokenizer or the prompts do not fit."""
    if pair.tokenizer is None:
        return None
    prompts = [*prompt_set("mini", LOOKED_AT), *prompt_set("library", LOOKED_AT)]
    if not (fitting := [ids for ids in token_ids(pair, prompts) if len(ids) + WRITTEN <= context_of(pair)]):
        return None
    steps = generate(pair, fitting, draft_length=ASKED, max_new_tokens=WRITTEN, eos_token_id=()).trace.steps
    remaining = WRITTEN - steps.groupby("row").emitted.cumsum() + steps.emitted
    wanted = steps.k.clip(upper=remaining - 1)
    found = [int(steps.accepted.sum()), int((steps.accepted < wanted).sum())]
    return found if any(found) else None


def _axes(
    pair: ModelPair,
    batches: Sequence[int],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int] | None,
    recorded: bool,
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the grid of each table by name. Raises ValueError if a grid exceeds the context or does not increase."""
    batches, query_lengths = _increasing("batches", batches), _increasing("query_lengths", query_lengths)
    most, context = max(query_lengths), context_of(pair)
    room = context - (_growth(_recorded_lengths(query_lengths)) if recorded else max(most, 2))
    kv_lengths = _increasing("kv_lengths", kv_lengths or [n for n in KV_LENGTHS if n <= room] or [max(room // 2, 1)])
    if max(kv_lengths) > room:
        raise ValueError(f"kv_lengths up to {max(kv_lengths)} plus {most} new tokens exceed the context of {context}")
    axes = {"target_passes": dict(zip(PASS_AXES, (batches, query_lengths, kv_lengths), strict=True))}
    lengths = _draft_lengths(query_lengths)
    if isinstance(pair.draft, PreTrainedModel):
        axes["draft_phases"] = dict(zip(PHASE_AXES, (batches, lengths[1:], kv_lengths), strict=True))
    return axes | {"overheads": dict(zip(OVERHEAD_AXES, (batches, lengths), strict=True))}


def _draft_lengths(query_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the draft lengths of draft phases and overheads that some target pass verifies."""
    return tuple(k for k in DRAFT_LENGTHS if k < max(*query_lengths, 2))


def _recorded_lengths(query_lengths: Sequence[int]) -> list[int]:
    return sorted({n - 1 for n in query_lengths} | set(_draft_lengths(query_lengths)))


def _increasing(name: str, points: Sequence[int]) -> tuple[int, ...]:
    points = tuple(checks.integer(name, point, least=1) for point in points)
    if not points or any(b <= a for a, b in itertools.pairwise(points)):
        raise ValueError(f"{name} must be increasing integers >= 1, got {list(points)}")
    return points


def _described(pair: ModelPair) -> dict[str, dict[str, str | None]]:
    """Return name, fingerprint and attention path of both models in the format of `CostModel`."""
    marks = fingerprints(pair)
    return {
        role: {
            "name": name_of(model),
            "fingerprint": marks[role],
            "attention": probe.resolve(model) if isinstance(model, PreTrainedModel) else None,
        }
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }


def _turns(
    pair: ModelPair, axes: dict, watch: Stopwatch, stack: ExitStack, recorded: bool
) -> tuple[list[Turn], list[Turn]]:
    """Return the turns that run once as warm-up, and the turns without warm-up. Caches live until `stack` closes."""
    batches, query_lengths, kv_lengths = axes["target_passes"].values()
    draft_lengths = axes["overheads"]["draft_length"]
    if recorded:
        lengths, shapes = _recorded_lengths(query_lengths), itertools.product(batches, kv_lengths)
        return [], [Turn(partial(_recorded_steps, pair, *shape, lengths)) for shape in shapes]
    target, draft = (_full_runner(model, stack, axes["target_passes"]) for model in (pair.target, pair.draft))
    warm = [Turn(partial(_steps, watch, pair, batch, draft_lengths), OFTEN) for batch in batches]
    longer: list[Turn] = []
    for kv_length, batch in itertools.product(kv_lengths, batches):
        turns = warm if kv_length == kv_lengths[0] else longer
        turns += [Turn(partial(_target_pass, watch, target, batch, n, kv_length)) for n in query_lengths]
        if draft is not None:
            phase = partial(_draft_phase, watch, target, draft, batch, draft_lengths[1:], kv_length)
            turns.append(Turn(phase, OFTEN))
    return warm, longer


def _full_runner(model: object, stack: ExitStack, axes: dict) -> Runner | None:
    """Return a runner prepared for these points, or None if `model` is not a transformers model. The cache is filled,
    because unwritten memory pages are faster."""
    if not isinstance(model, PreTrainedModel):
        return None
    capacity = max(axes["kv_length"]) + max(*axes["query_length"], 2)
    runner = stack.enter_context(Runner(model, probe.resolve(model), max(axes["batch"]), capacity))
    stack.enter_context(runner.prepared())
    rows = max(axes["batch"])
    if model.config.is_encoder_decoder:
        runner.read([made_up(model, SOURCE)] * rows, range(rows))
    runner.feed_last(torch.ones(rows, 1, dtype=torch.int64, device=model.device), [1] * rows, 1)  # allocates the cache
    for buffer in runner.cache.buffers():
        buffer.normal_()
    return runner


def _target_pass(watch: Stopwatch, target: Runner, *point: int) -> Iterator[Taken]:
    yield "target_passes", point, _feed(watch, target, *point)


def _draft_phase(
    watch: Stopwatch, target: Runner, draft: Runner, batch: int, draft_lengths: Sequence[int], kv_length: int
) -> Iterator[Taken]:
    """Time a target pass, then the longest draft phase. Its prefixes give the shorter draft phases."""
    yield "target_passes", (batch, 1, kv_length), _feed(watch, target, batch, 1, kv_length)
    spent = 0.0
    for k in range(1, max(draft_lengths) + 1):
        if k == 1:
            spent += _feed(watch, draft, batch, 2, kv_length - 1, last_only=True)
        else:
            spent += _feed(watch, draft, batch, 1, kv_length + k - 1)
        if k in draft_lengths:
            yield "draft_phases", (batch, k, kv_length), spent


def _feed(
    watch: Stopwatch, runner: Runner, batch: int, query_length: int, kv_length: int, last_only: bool = False
) -> float:
    """Return the seconds of a pass over `query_length` tokens of rows with `kv_length` cached positions. Every other
    row has one position less, so that attention needs a mask."""
    device, starts = runner.model.device, [max(kv_length - row % 2, 0) for row in range(batch)]
    watch.start()
    if last_only:
        ends = [start + query_length for start in starts]
        runner.feed_last(torch.ones(batch, max(ends), dtype=torch.int64, device=device), ends, query_length)
    else:
        ids = torch.ones(batch, query_length, dtype=torch.int64, device=device)
        runner.feed(ids, torch.tensor(starts, device=device), [query_length] * batch, starts_host=starts)
    _, inside = watch.intervals()
    return inside / 1e3


class _InTurn(Goodput):
    """Policy of the given draft lengths in order. The default policy plans before each length except 0, because
    planning is part of a step."""

    def __init__(self, lengths: Sequence[int]):
        super().__init__(modelled_h100())
        self.lengths = deque(lengths)

    def predict_next(self) -> int | None:
        return 0 if self.last == 0 and self.lengths and self.lengths[0] == 0 else None

    def plan(self, rows: RowsView) -> int:
        k = self.last = self.lengths.popleft()
        if k > 0:
            super().plan(rows)
            self.wanted = np.minimum(k, rows.remaining - 1)
        return k


def _steps(watch: Stopwatch, pair: ModelPair, batch: int, draft_lengths: Sequence[int]) -> Iterator[Taken]:
    """Time a step of each draft length over a new batch, without the passes of the step."""
    limit = 1 + sum(k + 1 for k in draft_lengths)  # no row ends before its last step
    with _started(pair, prompts_of(batch, PROMPT), limit, draft_length=_InTurn(draft_lengths)) as session:
        for k in draft_lengths:
            watch.start()
            session.step()
            watch.mark()
            yield "overheads", (batch, k), sum(watch.intervals()[::2]) / 1e3


def _recorded_steps(pair: ModelPair, batch: int, kv_length: int, lengths: Sequence[int]) -> Iterator[Taken]:
    """Time the phases of captured steps at about `kv_length` cached positions. No draft token is accepted."""
    turns, walls = _recorded_turns(lengths), []
    prompts = prompts_of(batch, max(kv_length + 1 - len(turns) // 2, 2))
    options = {"draft_length": _InTurn([k for k, _ in turns]), "acceptance": SyntheticAcceptance.named("synthetic:0")}
    has_table = isinstance(pair.draft, PreTrainedModel)  # otherwise drafting is part of the overhead
    with _started(pair, prompts, _growth(lengths), **options) as session:
        for _ in turns:
            started = time.perf_counter()
            session.step()
            walls.append(time.perf_counter() - started)
        phases = session.trace.steps.query("kind == 'decode'").drop_duplicates("step")
    spans = phases.draft_ms / 1e3, phases.verify_ms / 1e3
    for (k, turn), drafting, verifying, wall in zip(turns, *spans, walls, strict=True):
        if RECORDING <= turn < RECORDING + REPLAYS:
            yield "target_passes", (batch, k + 1, kv_length), verifying
            if k and has_table:
                yield "draft_phases", (batch, k, kv_length), drafting
            rest = wall - verifying - drafting * has_table
            yield "overheads", (batch, k), max(rest, 0.0)  # a pass of a step launched ahead may begin earlier


@contextmanager
def _started(pair: ModelPair, prompts: Sequence[torch.Tensor], new: int, **options: object) -> Iterator[Session]:
    """Yield a session after the prefill of these prompts."""
    with Session(pair, max_batch_size=len(prompts), eos_token_id=(), **options) as session, session.prepared():
        for prompt in prompts:
            session.submit(prompt, max_new_tokens=new)
        session.step()
        yield session


def prompts_of(batch: int, length: int) -> list[torch.Tensor]:
    """Return prompts of about `length` ids that differ between rows."""
    return [torch.arange(length + row % 2) % (2 + row) for row in range(batch)]


def _growth(lengths: Sequence[int]) -> int:
    """Return the token limit of rows in `_recorded_steps`: the first, one per step, and the longest draft."""
    return len(_recorded_turns(lengths)) + max(lengths) + 2


def _recorded_turns(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (draft length, index of the step among steps of this length) of each step. Length 0 has an additional
    step, because its steps launch the next step."""
    return [(k, turn) for k in lengths for turn in range(RECORDING + REPLAYS + (k == 0))]


def _take_turns(turns: Sequence[Turn], end: float, tell: Callable[[float], None] = lambda now: None) -> list[Sample]:
    """Return the turns' samples. Each turn runs at least once, and turns repeat until `end` (of perf_counter).

    Next is the turn with the smallest product of visits and square root of its duration, divided by `often`. This order
    minimizes the sum of squared relative errors for a given time. tell: receives the time before each turn.
    """
    samples: list[Sample] = []
    queue = [(0.0, index) for index in range(len(turns))]
    while (now := time.perf_counter()) < end or queue[0][0] == 0:
        spent, index = queue[0]
        tell(now)
        samples += [Sample(name, point, time.perf_counter(), taken) for name, point, taken in turns[index].take()]
        spent += (time.perf_counter() - now) ** 0.5 / turns[index].often
        heapq.heapreplace(queue, (spent, index))
    return samples
