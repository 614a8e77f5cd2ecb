"""How fast is it here? Interleaved repeats of several ways to decode, with paired ratios and intervals.

Every repeat runs all methods one after the other on the same prompts with the same limits, so that a slow moment of the
machine slows all of them; a speed-up is the ratio within a repeat. Where few percent are asked for on a machine that is
not quiet, this engine's methods can take turns step by step instead: a decode takes a second, and machines change their
mind within it. The baseline is this engine with draft length 0: the same cache and the same loop without speculative
work. `transformers.generate` is quoted beside it.

| method | what it is |
| --- | --- |
| `transformers` | `model.generate` on the left-padded batch |
| `assisted` | `model.generate(assistant_model=draft)` with its own defaults; takes one sequence, so rows take turns |
| `regular` | this engine, draft length 0 |
| `single` | this engine, one row at a time |
| `batched` | this engine, all rows at once: BASS |
| `other_draft` | the same with drafts that come from elsewhere |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core import checks
from bass_core.drafters import Drafter
from bass_core.generation import Generation, generate
from bass_core.loading.measured_costs import costs_like
from bass_core.loading.model_pair import ModelPair
from bass_core.prompts import check_context, token_ids
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.kept_session import KeptSession
from bass_lab.measure import records, timed_runs
from bass_lab.measure.clocks import LATENCIES, Clock, passes_marked
from bass_lab.measure.ratios import Ratio, counted_repeats
from bass_lab.measure.timed_runs import Method
from bass_lab.pairs import in_dtype
from bass_lab.provenance import describe_environment

METHODS = ("transformers", "assisted", "regular", "single", "batched")
OTHER = "other_draft"
DRAFTING = ("single", "batched", OTHER)  # those with a draft length
BASELINES = ("regular", "transformers")  # those that draft nothing
COSTS = ("device", "commit", "samples", "spread")  # of what was measured of the costs that the default policy goes by
COUNTS = ("alpha", "acceptance_rate", "tokens_per_step")


@dataclass(frozen=True)
class Comparison:
    """runs: one line per (repeat, method): repeat, method, k, seconds, tokens, tokens_per_second, first_ms, last_ms,
    mean_ms (latency per token), alpha, acceptance_rate, tokens_per_step (NaN where nothing was drafted), disturbed
    (whether something was recorded in this repeat, by any method)."""

    runs: pd.DataFrame

    def ratio(self, method: str = "batched", to: str = "regular") -> Ratio:
        """Speed of one method over another."""
        seconds = self.runs.pivot(index="repeat", columns="method", values="seconds")
        return Ratio.of(seconds[method], seconds[to])

    def lines(self) -> list[dict]:
        """For each method what `records` has of it: medians of tokens/s, latencies and counts, the speed over regular
        decoding, and the seconds of all repeats."""
        found = []
        for method, runs in self.runs.groupby("method", sort=False):
            medians = runs[["tokens_per_second", *LATENCIES, *COUNTS]].median()
            line = {"method": method, "k": None if pd.isna(runs.k.iloc[0]) else int(runs.k.iloc[0])}
            line |= {"seconds": runs.seconds.tolist(), "over_regular": self.ratio(method)._asdict()}
            if runs.disturbed.any():
                line["disturbed"] = int(runs.disturbed.sum())
            found.append(line | {name: None if np.isnan(value) else float(value) for name, value in medians.items()})
        return found

    def summary(self) -> pd.DataFrame:
        """The same as a table, without the seconds; over_regular with the columns low and high."""
        numbers = dict.fromkeys((*LATENCIES, *COUNTS), float)
        return records.frame(self.lines()).drop(columns="seconds").astype(numbers)


def compare(
    pair: ModelPair,
    prompts: Sequence[str],
    *,
    methods: Sequence[str] = ("transformers", "regular", "batched"),
    repeats: int = 7,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    draft_length: int | None = 5,
    other_lengths: Sequence[int | None] = (),
    other_drafts: Mapping[str, PreTrainedModel | Drafter] | None = None,
    batch: int | None = None,
    take_turns: bool = False,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> Comparison:
    """Time the methods on the same prompts, EOS switched off so that all emit the same number of tokens.

    batch: None decodes all prompts in every repeat; a number that many, each repeat the next ones (and from the first
    again), for comparisons that a few texts could decide.
    repeats: interleaved, after one that warms up and is not counted. Where steps are recorded (on a GPU), sessions keep
    what they have recorded, all of them open at once; another repeat takes the place of one in which something is
    recorded, up to two times `repeats` in all (those after that are `disturbed`). draft_length: of `single` and
    `batched`; None is the default policy. other_lengths: `batched` again, with these, as methods "batched k=2" and so
    on; None is "batched default". other_drafts: by name, each with all of these lengths, as methods "other_draft
    suffix" and "other_draft suffix k=2". take_turns: the methods of a repeat decode side by side, and the next step is
    always taken by the one that has emitted the fewest tokens; each is timed in its own steps. progress: told what is
    done now and which share of the work, 0 to 1, is done.

    Raises ValueError for an unknown method, for `assisted` without a draft model and for methods of transformers' that
    are to take turns.
    """
    repeats = checks.integer("repeats", repeats, least=1)
    pool, lines = token_ids(pair, prompts), []
    rows = len(pool) if batch is None else batch
    options = {"temperature": temperature, "draft_length": draft_length}
    options |= {"other_lengths": other_lengths, "other_drafts": other_drafts}
    called = _methods(pair, rows, methods, **options)
    timed = timed_runs.in_turns if take_turns else timed_runs.one_by_one
    with ExitStack() as stack:
        decodes = {name: stack.enter_context(method.open()) for name, method in called.items()}

        def once(repeat: int) -> list[dict]:
            done = len(lines) // len(called)
            doing = f"repeat {done + 1} of {repeats}" if repeat else "warming up"
            progress(doing, (done + bool(repeat)) / (repeats + 1))
            ids, found = [pool[(repeat * rows + row) % len(pool)] for row in range(rows)], []
            how = {"seed": repeat, "max_new_tokens": max_new_tokens}
            for name, seconds, clock, trace in timed(decodes, ids, pair.device, **how):
                line = {"repeat": repeat, "method": name, "k": called[name].k, "seconds": seconds}
                line["tokens"] = rows * max_new_tokens
                summary = {} if trace is None else trace.summary()
                counts = {count: summary.get(count, float("nan")) for count in COUNTS}
                found.append(line | clock.latencies(max_new_tokens) | counts)
            return found

        def recordings() -> int:
            return sum(decode.recordings for decode in decodes.values() if isinstance(decode, KeptSession))

        once(0)
        for found, disturbed in counted_repeats(once, repeats, recordings, first=1):
            lines += [line | {"disturbed": disturbed} for line in found]
    runs = pd.DataFrame(lines)
    return Comparison(runs.assign(tokens_per_second=runs.tokens / runs.seconds))


def _methods(
    pair: ModelPair,
    rows: int,
    methods: Sequence[str],
    *,
    temperature: float,
    draft_length: int | None,
    other_lengths: Sequence[int | None],
    other_drafts: Mapping[str, PreTrainedModel | Drafter] | None,
) -> dict[str, Method]:
    """Return the methods that `compare` times, by name. The arguments are those of `compare`, and it raises as that."""
    for method in methods:
        checks.one_of("methods", method, METHODS)
    if "assisted" in methods and not isinstance(pair.draft, PreTrainedModel):
        raise ValueError("the method 'assisted' needs a draft model; leave it out of `methods`")

    def ours(k: int | None, pair: ModelPair = pair, rows: int = rows, **named: str) -> Method:
        options = {"temperature": temperature, "draft_length": k, "eos_token_id": ()}
        return Method(k, partial(KeptSession, pair, rows, **options), **named)

    def theirs(decode: Callable[..., list[Tensor]]) -> Method:
        return Method(None, partial(nullcontext, partial(decode, pair, temperature=temperature)))

    known = {
        "transformers": theirs(timed_runs.transformers_generate),
        "assisted": theirs(timed_runs.assisted),
        "regular": replace(ours(0), k=None),
        "single": ours(draft_length, rows=1),
        "batched": ours(draft_length),
    }
    found = {method: known[method] for method in methods}
    found |= {_with_length("batched", k): ours(k) for k in other_lengths}
    for name, draft in (other_drafts or {}).items():
        drafted, method = partial(ours, pair=replace(pair, draft=draft), drafter=name), f"{OTHER} {name}"
        found[method] = drafted(draft_length)
        found |= {_with_length(method, k): drafted(k) for k in other_lengths}
    return found


def _with_length(method: str, k: int | None) -> str:
    return f"{method} default" if k is None else f"{method} k={k}"


def bench(
    pair: ModelPair,
    sets: dict[str, Sequence[str]],
    *,
    models: str,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    methods: Sequence[str],
    repeats: int = 7,
    vary_prompts: bool = False,
    take_turns: bool = False,
    progress: Callable[[str, float], None] = lambda doing, share: None,
    **options,
) -> Iterator[list[dict]]:
    """Compare the methods on prompt sets at several batch sizes: for each, the lines that `records` describes.

    sets: prompts by name, at least as many as the largest batch. vary_prompts: every repeat takes the next ones of a
    set rather than its first. models: what to call the pair. options: max_new_tokens (128), temperature (0.2),
    draft_length (5), other_lengths and other_drafts; these and take_turns as in `compare`. One row has no `single`
    beside `batched`. exactness: of each method's greedy rows in float32, copies of the models if they are not.

    Raises ValueError as `compare` does, and without the method `regular`.
    """
    if "regular" not in methods:
        raise ValueError(f"methods must include 'regular', which the others are compared with; got {list(methods)}")
    options = {"max_new_tokens": 128, "temperature": 0.2, "draft_length": 5, "other_lengths": ()} | options
    new, others = options["max_new_tokens"], options.setdefault("other_drafts", {})
    exact = in_dtype(pair, torch.float32)
    common = {"schema": "speed", "models": models, "dtype": str(pair.target.dtype).removeprefix("torch.")}
    common |= {"repeats": repeats, "seed": 0, "max_new_tokens": new, "temperature": options["temperature"]}
    common |= {"vary_prompts": vary_prompts, "take_turns": take_turns, "synthetic": pair.synthetic}
    common |= describe_environment(pair.device)
    in_float32 = {name: in_dtype(replace(pair, draft=draft), torch.float32).draft for name, draft in others.items()}
    at_zero = options | {"temperature": 0.0, "other_drafts": in_float32}
    del at_zero["max_new_tokens"]
    cost = costs_like(pair)
    costs = None if cost is None else {name: cost.measured.get(name) for name in COSTS}
    how = {"repeats": repeats, "take_turns": take_turns, **options}
    spent = {"regular": 0, "batched": options["draft_length"]}  # by draft length, time outside of passes
    done, all_rows = 0, len(sets) * sum(batches)
    for name, prompts in sets.items():
        alone = greedy_alone(exact, prompts[: max(batches)], max_new_tokens=new)
        for batch in batches:

            def tell(_: str, share: float, name: str = name, rows: int = batch, before: int = done) -> None:
                progress(f"{name}, batch {rows}", (before + share * rows) / all_rows)

            taken, first = [method for method in methods if batch > 1 or method != "single"], prompts[:batch]
            compared = compare(
                pair, prompts if vary_prompts else first, batch=batch, methods=taken, **how, progress=tell
            )
            found, done = compared.lines(), done + batch
            greedy = _methods(exact, batch, taken, **at_zero)
            for line in found:
                method, called = line["method"], greedy[line["method"]]
                with called.open() as decode:
                    texts = timed_runs.texts(decode, token_ids(exact, first), Clock(), max_new_tokens=new, seed=0)
                line["exactness"] = {"dtype": "float32", "rows": batch, "identical": _identical(texts, alone[:batch])}
                if method in spent and new > 1:  # a single token comes of the prefill
                    decoding = {"max_new_tokens": new, "temperature": options["temperature"]}
                    overhead = step_overhead(pair, first, draft_length=spent[method], **decoding)
                    line |= {} if overhead is None else {"step_overhead": overhead}
                if method.split()[0] in DRAFTING and line["k"] is None:
                    line["costs"] = costs
                line |= common | {"method": method.split()[0], "prompt_set": name, "batch": batch}
                if called.drafter is not None:
                    line["drafter"] = called.drafter
            yield found


def over_baseline(lines: Sequence[dict]) -> tuple[str, list[Ratio]]:
    """The faster of regular decoding and `transformers`, where both were timed, and each line's speed over it.

    lines: records of one prompt set and batch.
    """
    known = [line for line in lines if line["method"] in BASELINES]
    fastest = max(known, key=lambda line: line["tokens_per_second"])
    return fastest["method"], [Ratio.of(line["seconds"], fastest["seconds"]) for line in lines]


def table(lines: Sequence[dict]) -> tuple[str, list[dict[str, str]], str]:
    """The records of one prompt set and batch for people: what was timed, the lines of a table, and what its columns
    mean."""
    first = lines[0]
    heading = (
        f"{first['prompt_set']} prompts, batch {first['batch']}, temperature {first['temperature']}, "
        f"{first['dtype']}, {first['repeats']} repeats"
    )
    notes = f"exact rows: greedy in {first['exactness']['dtype']}, equal to transformers' text of the row alone"
    outside = {line["method"]: line["step_overhead"] for line in lines if "step_overhead" in line}
    if outside:
        shares = ", ".join(f"{method} {share:.1%}" for method, share in outside.items())
        notes += f"; time outside of the models' passes: {shares}"
    if disturbed := max(line.get("disturbed", 0) for line in lines):
        notes += f"; in {disturbed} of the repeats something was recorded, so they took longer"
    baseline, ratios = over_baseline(lines)
    if baseline != "regular":
        notes += f"; over faster: over {baseline}, which is faster than regular here"
    rows = [
        {
            "method": line.get("drafter", line["method"]) + ("" if line["k"] is None else f" k={line['k']}"),
            "tokens/s": f"{line['tokens_per_second']:.0f}",
            "over regular": str(Ratio(**line["over_regular"])),
            **({} if baseline == "regular" else {"over faster": str(ratio)}),
            "ms/token: first, mean, last": ", ".join(
                f"{line[name]:.3g}" for name in ("first_ms", "mean_ms", "last_ms") if line[name] is not None
            ),
            "α": records.text(line["alpha"], ".2f"),
            "tokens per step": records.text(line["tokens_per_step"], ".2f"),
            "exact rows": "{identical}/{rows}".format(**line["exactness"]),
        }
        for line, ratio in zip(lines, ratios, strict=True)
    ]
    return heading, rows, notes


def methods_of(pair: ModelPair) -> list[str]:
    """The methods that this pair can be timed with: all, or without a draft model all but `assisted`."""
    return [method for method in METHODS if method != "assisted" or isinstance(pair.draft, PreTrainedModel)]


def greedy_alone(pair: ModelPair, prompts: Sequence[str | Tensor], *, max_new_tokens: int = 96) -> list[Tensor]:
    """What `transformers.generate` writes greedily after each prompt alone: the reference of exactness."""
    ids = token_ids(pair, prompts)
    check_context(pair, max(map(len, ids)), max_new_tokens)
    return [plain_decoding.greedy(pair.target, row, max_new_tokens)[0] for row in ids]


def identical_rows(
    pair: ModelPair,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 96,
    draft_length: int | None = 5,
    alone: Sequence[Tensor] | None = None,
) -> int:
    """Rows of a greedy speculative batch whose every token equals `transformers.generate`'s for the row alone.

    alone: those texts if they are known already (`greedy_alone`).
    """
    ids = token_ids(pair, prompts)
    alone = greedy_alone(pair, prompts, max_new_tokens=max_new_tokens) if alone is None else alone
    return _identical(
        generate(pair, ids, max_new_tokens=max_new_tokens, draft_length=draft_length, eos_token_id=()), alone
    )


def _identical(found: Generation | list[Tensor], alone: Sequence[Tensor]) -> int:
    """Rows whose every token is that of the row alone."""
    found = found.sequences if isinstance(found, Generation) else found
    return sum(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def step_overhead(pair: ModelPair, prompts: Sequence[str], *, max_new_tokens: int = 96, **options) -> float | None:
    """Share of the decode steps' time that is spent outside the two models' forward passes (on a CPU: wall time); None
    where steps are recorded, which call no model.

    options: as in `generate`. Prefill is left out of both.
    """
    outside, whole = 0.0, 0.0
    options = {"max_batch_size": len(prompts), "eos_token_id": ()} | options
    with passes_marked(pair) as watch, Session(pair, **options) as session, session.prepared():
        if session.device_step.records:
            return None
        for prompt in prompts:
            session.submit(prompt, max_new_tokens=max_new_tokens)
        session.step()  # prefill
        while not session.idle:
            watch.start()
            session.step()
            watch.mark()
            parts = watch.intervals()  # outside, a pass, outside, a pass, …, outside
            outside, whole = outside + sum(parts[::2]), whole + sum(parts)
    return outside / whole
