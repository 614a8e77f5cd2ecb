"""Ctrl-C at every line of the engine loses no row, changes no model, and keeps the texts."""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from readers import tiny_reader
from recording import count_ahead, use_fixed_steps
from sessions import run_to_the_end
from tiny import feature_head, ragged_prompts, tiny_model
from trial_policies import Fickle

import bass_core as bass
from bass_core.model.patching import path_of
from bass_core.model.probe import resolve

CORE = str(Path(bass.__file__).parent)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
SHARED, OTHER = ragged_prompts(5, 9)
Line = tuple[str, int]


DRAFTS = {
    "model": lambda target: copy.deepcopy(tiny_model(dtype="float64", noise=0.02, **SMALL)),
    "features": lambda target: bass.FeatureDrafter(feature_head(target)),
}


def small_pair(draft: str) -> bass.ModelPair:
    if draft == "reader":
        pair = bass.ModelPair(*(copy.deepcopy(tiny_reader("t5", "float64", noise)) for noise in (0.0, 0.02)))
    else:
        target = copy.deepcopy(tiny_model(dtype="float64", **SMALL))
        pair = bass.ModelPair(target, DRAFTS[draft](target))
    for model in pair.models:
        resolve(model)
    pair.target.train(draft != "reader")
    return pair


def logits_of(model) -> torch.Tensor:
    read = {"decoder_input_ids": OTHER[None]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(SHARED[None], **read).logits


class Run:
    """Rows that wait, share a prompt, finish, move and are cancelled, with growing caches and chunked prefill."""

    ROWS = ((SHARED, 3), (OTHER, 6), (SHARED, 12), (OTHER, 5))
    TEMPERATURE = 0.8
    CHUNK = 6

    def __init__(self, pair: bass.ModelPair):
        options = {"temperature": self.TEMPERATURE, "draft_length": self.policy(), "eos_token_id": ()}
        self.session = bass.Session(pair, max_batch_size=2, prefill_chunk=self.CHUNK, **options)
        self.handles = [self.session.submit(prompt, max_new_tokens=new) for prompt, new in self.ROWS]
        self.steps = 0

    def policy(self) -> bass.DraftLengthPolicy:
        return bass.FixedLength(2)

    def to_the_end(self) -> None:
        while not self.session.idle:
            if self.steps == 2:
                self.session.cancel(self.handles[3])
            self.session.step()
            self.steps += 1

    def results(self) -> list:
        found = [self.session.result(handle) for handle in self.handles]
        return [(each.sequence.tolist(), each.finish_reason) for each in found]


class RunAhead(Run):
    """A run with overlapped steps. Some steps are discarded."""

    ROWS = ((SHARED, 14), (OTHER, 18), (SHARED, 12), (OTHER, 5))
    TEMPERATURE = 0.0  # an interrupt changes plans, but no greedy text

    def policy(self) -> bass.DraftLengthPolicy:
        return Fickle(k=2, zeros=3)


def traced(function: Callable[[], None], met: Callable[[Line], None]) -> None:

    def on_line(frame, event, argument):
        if event == "line":
            met((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame, event, argument):
        return on_line if frame.f_code.co_filename.startswith(CORE) else None

    sys.settrace(on_call)
    try:
        function()
    finally:
        sys.settrace(None)


def interrupted(run: Run, pending: set[Line]) -> Line | None:
    """Interrupt the run at the first pending line. Return the line, or None at the end of the run."""
    found = None

    def met(line: Line) -> None:
        nonlocal found
        if line in pending:
            pending.remove(line)
            found = line
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        traced(run.to_the_end, met)
    return found


SLOW = ["model", "model, launched ahead", "features", "reader"]


@pytest.mark.parametrize(
    ("draft", "chains"), [("model", 1), *(pytest.param(d, 16, marks=pytest.mark.slow) for d in SLOW)]
)
def test_session_interrupted_at_any_line_continues_or_refuses(monkeypatch, draft, chains):
    draft, _, ahead = draft.partition(", ")
    make = RunAhead if ahead else Run
    if ahead:
        use_fixed_steps(monkeypatch)
        seen = count_ahead(monkeypatch)
    pair = small_pair(draft)
    training = [module.training for module in pair.target.modules()]
    undisturbed = make(pair)
    run_to_the_end(undisturbed.session)
    expected, met = undisturbed.results(), {}
    traced(make(pair).to_the_end, met.setdefault)
    lines: list[Line] = list(met)
    assert len(lines) > 200 and sum(file.endswith("batch.py") for file, _ in lines) > 60
    assert not ahead or seen["launched"] > seen["taken back"] > 0
    logits = [logits_of(model) for model in pair.models]
    gave_up = set()
    for chain in range(chains):
        pending = set(lines[chain::chains])
        while pending:
            run, line = make(pair), None
            try:
                while line := interrupted(run, pending):
                    assert all(path_of(model) is None for model in pair.models), line
                    assert [module.training for module in pair.target.modules()] == training, line
                    for model, expected_logits in zip(pair.models, logits, strict=True):
                        assert torch.equal(logits_of(model), expected_logits), line
                    last = line
            except RuntimeError as error:
                assert "make a new session" in str(error), last
                gave_up.add(last)
            else:
                *rows, (text, reason) = run.results()
                assert rows == expected[:3]
                assert text == expected[3][0][: len(text)] and (reason == "cancelled" or text == expected[3][0])
            run.session.close()
    # Only lines of the commit and of its error handling may end a session.
    assert {Path(file).name for file, _ in gave_up} <= {"rows.py", "session.py", "environment.py", "interrupts.py"}
    assert len(gave_up) < 40
