"""Time decoding methods on the same prompts: interleaved repeats, paired ratios and their intervals.

Every repeat runs all methods one after the other, with the same prompts and limits. A slow moment of the machine
therefore slows all methods, and a speed-up is the ratio within a repeat. With `take_turns`, the methods of a repeat
alternate step by step. This resolves differences of a few percent on a noisy machine. The baseline `regular` is this
engine with draft length 0: the same cache and loop without speculative work. `transformers` is a second baseline.
`bass_lab/assets/records.schema.json` describes each method.
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
from bass_lab.provenance import describe_run

METHODS = ("transformers", "assisted", "regular", "single", "batched")
OTHER = "other_draft"
DRAFTING = ("single", "batched", OTHER)  # methods with a draft length
BASELINES = ("regular", "transformers")
COSTS = ("device", "commit", "samples", "spread")  # fields of `CostModel.measured` that a record keeps
COUNTS = ("alpha", "acceptance_rate", "tokens_per_step")


@dataclass(frozen=True)
class Comparison:
    """Timed repeats. `runs` has a line per (repeat, method) with the columns repeat, method, k, seconds, tokens,
    tokens_per_second, first_ms, last_ms, mean_ms (latencies per token), alpha, acceptance_rate, tokens_per_step (NaN
    where unknown), disturbed (True if any method captured CUDA graphs in this repeat)."""

    runs: pd.DataFrame

    def ratio(self, method: str = "batched", to: str = "regular") -> Ratio:
        """Return the speed of one method relative to another."""
        seconds = self.runs.pivot(index="repeat", columns="method", values="seconds")
        return Ratio.of(seconds[method], seconds[to])

    def lines(self) -> list[dict]:
        """Return a line per method for `records`: medians of tokens/s, latencies and counts, the speed relative to
        regular decoding, and the seconds of all repeats."""
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
        """Return `lines` as a table without seconds. The columns low and high hold the interval of over_regular."""
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
    """Time the methods on the same prompts. EOS is switched off, so all methods emit the same number of tokens.

    batch: prompts per repeat. Each repeat takes the next prompts and starts again after the last. None: all prompts in
    every repeat. repeats: interleaved repeats, after an uncounted warm-up. On a GPU, all sessions stay open and keep
    their captured CUDA graphs. A repeat that captures another graph is replaced, up to 2 · `repeats` times; later
    repeats with a capture are marked `disturbed`. draft_length: of `single` and `batched`. None: the default policy.
    other_lengths: further draft lengths of `batched`, as methods "batched k=2" and "batched default" (None).
    other_drafts: draft models or drafters by name, timed with all of these lengths as methods "other_draft suffix" and
    "other_draft suffix k=2". take_turns: interleave the methods of a repeat step by step. The method with the fewest
    emitted tokens takes the next step, and each method is timed in its own steps. progress: receives a description of
    the current work and the share done, 0 to 1.

    Raises ValueError for an unknown method, for `assisted` without a draft model, and for take_turns with methods of
    transformers.
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
    """Return the methods to time, by name. Arguments and errors are those of `compare`."""
    for method in methods:
        checks.one_of("methods", method, METHODS)
    if "assisted" in methods and not isinstance(pair.draft, PreTrainedModel):
        raise ValueError("the method 'assisted' needs a draft model; remove 'assisted' from `methods`")

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
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    methods: Sequence[str],
    repeats: int = 7,
    vary_prompts: bool = False,
    take_turns: bool = False,
    progress: Callable[[str, float], None] = lambda doing, share: None,
    **options,
) -> Iterator[list[dict]]:
    """Compare the methods on prompt sets at several batch sizes. Yield the records of each set and batch size.

    sets: prompts by name, at least as many as the largest batch. vary_prompts: every repeat takes the next prompts of
    the set instead of the first. options: max_new_tokens (128), temperature (0.2), draft_length (5), other_lengths,
    other_drafts and take_turns as in `compare`. At batch 1, `single` is left out: `batched` is the same. The field
    exactness counts each method's exact rows in a greedy float32 run.

    Raises ValueError as `compare` does, and without the method `regular`.
    """
    if "regular" not in methods:
        raise ValueError(f"methods must include the baseline 'regular'; got {list(methods)}")
    options = {"max_new_tokens": 128, "temperature": 0.2, "draft_length": 5, "other_lengths": ()} | options
    new, others = options["max_new_tokens"], options.setdefault("other_drafts", {})
    exact = in_dtype(pair, torch.float32)
    common = {"schema": "speed", **describe_run(pair), "repeats": repeats, "seed": 0, "max_new_tokens": new}
    common |= {"temperature": options["temperature"], "vary_prompts": vary_prompts, "take_turns": take_turns}
    in_float32 = {name: in_dtype(replace(pair, draft=draft), torch.float32).draft for name, draft in others.items()}
    at_zero = options | {"temperature": 0.0, "other_drafts": in_float32}
    del at_zero["max_new_tokens"]
    cost = costs_like(pair)
    costs = None if cost is None else {name: cost.measured.get(name) for name in COSTS}
    how = {"repeats": repeats, "take_turns": take_turns, **options}
    spent = {"regular": 0, "batched": options["draft_length"]}  # methods whose step overhead is measured: draft length
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
                if method in spent and new > 1:  # the prefill emits the first token
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
    """Return the name of the faster baseline and the speed of each line relative to this baseline.

    The baselines are `regular` and, if timed, `transformers`. lines: records of one prompt set and batch.
    """
    known = [line for line in lines if line["method"] in BASELINES]
    fastest = max(known, key=lambda line: line["tokens_per_second"])
    return fastest["method"], [Ratio.of(line["seconds"], fastest["seconds"]) for line in lines]


def table(lines: Sequence[dict]) -> tuple[str, list[dict[str, str]], str]:
    """Return a heading, table rows and notes about the columns, for the records of one prompt set and batch."""
    first = lines[0]
    heading = (
        f"{first['prompt_set']} prompts, batch {first['batch']}, temperature {first['temperature']}, "
        f"{first['dtype']}, {first['repeats']} repeats"
    )
    notes = f"exact rows: greedy {first['exactness']['dtype']} rows equal to transformers' text of the row alone"
    outside = {line["method"]: line["step_overhead"] for line in lines if "step_overhead" in line}
    if outside:
        shares = ", ".join(f"{method} {share:.1%}" for method, share in outside.items())
        notes += f"; time outside the models' forward passes: {shares}"
    if disturbed := max(line.get("disturbed", 0) for line in lines):
        notes += f"; {disturbed} of the repeats captured CUDA graphs and therefore took longer"
    baseline, ratios = over_baseline(lines)
    if baseline != "regular":
        notes += f"; over faster: speed relative to {baseline}, the faster baseline here"
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
    """Return the methods that this pair supports: all, or without a draft model all except `assisted`."""
    return [method for method in METHODS if method != "assisted" or isinstance(pair.draft, PreTrainedModel)]


def greedy_alone(pair: ModelPair, prompts: Sequence[str | Tensor], *, max_new_tokens: int = 96) -> list[Tensor]:
    """Return the greedy `transformers.generate` tokens of each prompt alone: the reference for exactness."""
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
    """Count the rows of a greedy speculative batch that equal `transformers.generate` of the row alone in every token.

    alone: the reference rows, if the caller already has them (`greedy_alone`).
    """
    ids = token_ids(pair, prompts)
    alone = greedy_alone(pair, prompts, max_new_tokens=max_new_tokens) if alone is None else alone
    return _identical(
        generate(pair, ids, max_new_tokens=max_new_tokens, draft_length=draft_length, eos_token_id=()), alone
    )


def _identical(found: Generation | list[Tensor], alone: Sequence[Tensor]) -> int:
    found = found.sequences if isinstance(found, Generation) else found
    return sum(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def step_overhead(pair: ModelPair, prompts: Sequence[str], *, max_new_tokens: int = 96, **options) -> float | None:
    """Return the share of decode time outside the two models' forward passes. On a CPU this is wall time.

    Prefill is excluded. None if steps replay CUDA graphs: replays call no model. options: as in `Session`.
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
            parts = watch.intervals()  # alternating: outside, pass, outside, …, outside
            outside, whole = outside + sum(parts[::2]), whole + sum(parts)
    return outside / whole
