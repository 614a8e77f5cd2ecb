"""Exercise of lesson 05: a drafter of ten lines, tested by `check_drafter`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from bass_core.drafters import Drafter
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.loop.trace import Trace
from bass_lab.checks.drafter_checks import check_drafter
from bass_lab.checks.exactness import Report
from bass_lab.lessons.checking import Case, check
from bass_lab.lessons.l05_demonstrations import bigram_logits
from bass_lab.show.token_views import outcomes
from bass_lab.texts.prompt_sets import prompt_set

K, NEW, TEMPERATURE = 3, 12, 0.8


def check_bigram(kind: Callable[[Tensor], Drafter]) -> bool:
    """Check a drafter kind(logits), a `l05_demonstrations.BigramTable` with a method `draft`.

    The drafter returns the requested number of tokens. Each token is drawn from the logits of its predecessor; at
    temperature 0 it is the likeliest token. The last case is `check_drafter`.
    """
    return check(lambda ask: ask(kind(_logits())), _cases())


@functools.cache
def _pair() -> ModelPair:
    return load_pair(dtype="float32")


@functools.cache
def _logits() -> Tensor:
    return bigram_logits(_pair().tokenizer, 50)


def _cases() -> Iterator[Case]:
    for temperature in (0.0, TEMPERATURE):
        yield f"draft tokens at temperature {temperature}", (_decoded(temperature),), partial(_judge, temperature)
    yield "check_drafter", (check_drafter,), _broken


def _decoded(temperature: float) -> Callable[[Drafter], Trace]:
    options = {"max_new_tokens": NEW, "draft_length": K, "temperature": temperature, "trace": "tokens"}

    def decoded(drafter: Drafter) -> Trace:
        pair = ModelPair(_pair().target, drafter, _pair().tokenizer)
        return generate(pair, prompt_set("mini", 2), eos_token_id=(), **options).trace

    return decoded


def _judge(temperature: float, trace: Trace) -> str:
    steps = trace.steps.query("kind == 'decode'")
    written = 1 + steps.kv_length - steps.groupby("row").kv_length.transform("first")
    asked = (NEW - 1 - written).clip(upper=K)  # the target adds one token
    short = steps[steps.drafted < asked]
    if len(short):
        return f"{asked[short.index[0]]} tokens were requested, but {short.drafted.iloc[0]} drafted"
    faults = (_fault_of(line, temperature) for line in _drafted(trace).itertuples())
    return next(filter(None, faults), "")


def _drafted(trace: Trace) -> pd.DataFrame:
    """Return the draft tokens, each with its predecessor (before)."""
    tokens = outcomes(trace)
    known = tokens.assign(draft=tokens.kind.isin(["accepted", "rejected"]))
    first = known.groupby(["row", "nth"]).cumcount() == 0
    text = known[known.kind != "rejected"]
    ends = text.groupby(["row", "nth"]).token.last().groupby("row").shift()  # the text's last token before a step
    started = ends.reindex(pd.MultiIndex.from_frame(known[["row", "nth"]])).to_numpy()
    before = known.token.shift().where(~first, started)
    return known.assign(before=before)[known.draft & before.notna()]


def _fault_of(line, temperature: float) -> str:
    logits, decode = _logits()[int(line.before)], _pair().tokenizer.decode
    after = f"after {decode([int(line.before)])!r}"
    if temperature == 0:
        likeliest = int(logits.argmax())
        told = f"{after} the drafter drafts {decode([line.token])!r}, but the likeliest is {decode([likeliest])!r}"
        return "" if line.token == likeliest else told
    wanted = float(torch.softmax(logits / temperature, -1)[line.token])
    told = f"{after} the drafter reports probability {line.q:.4f} for {decode([line.token])!r}; by `logits`, at that "
    return "" if abs(line.q - wanted) < 1e-5 else told + f"temperature, it is {wanted:.4f}"


def _broken(report: Report) -> str:
    return next((f"{each.name}: {each.tested}" for each in report.checks if not each.passed), "")
