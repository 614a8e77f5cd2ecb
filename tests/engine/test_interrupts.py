"""Ctrl-C at every line of the engine: no row is lost, no model is changed, and the texts stay the same."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from readers import tiny_reader
from recording import count_ahead, use_fixed_steps
from sessions import run_to_the_end
from tiny import feature_head, ragged_prompts, tiny_model
from trial_policies import Fickle

import bass_core as bass
from bass_core import attention
from bass_core.probe import resolve

CORE = str(Path(bass.__file__).parent)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
SHARED, OTHER = ragged_prompts(5, 9)
Line = tuple[str, int]


DRAFTS = {
    "model": lambda target: copy.deepcopy(tiny_model(dtype="float64", noise=0.02, **SMALL)),
    "layers": lambda target: bass.LayerSkipDrafter(1),
    "features": lambda target: bass.FeatureDrafter(feature_head(target)),
}


def small_pair(draft: str) -> bass.ModelPair:
    if draft == "reader":
        pair = bass.ModelPair(*(copy.deepcopy(tiny_reader("t5", "float64", noise)) for noise in (0.0, 0.02)))
    else:
        layers = {"num_hidden_layers": 2} if draft == "layers" else {}
        target = copy.deepcopy(tiny_model(dtype="float64", **SMALL | layers))
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
    """A session whose rows wait, share a prompt, finish, move or are cancelled."""

    ROWS = ((SHARED, 3), (OTHER, 6), (SHARED, 4), (OTHER, 5))
    TEMPERATURE = 0.8

    def __init__(self, pair: bass.ModelPair):
        options = {"temperature": self.TEMPERATURE, "draft_length": self.policy(), "eos_token_id": ()}
        self.session = bass.Session(pair, max_batch_size=2, **options)
        self.handles = [self.session.submit(prompt, max_new_tokens=new) for prompt, new in self.ROWS]

    def policy(self) -> bass.DraftLengthPolicy:
        return bass.FixedLength(2)

    def to_the_end(self) -> None:
        self.session.step()
        self.session.step()
        self.session.cancel(self.handles[3])
        run_to_the_end(self.session)

    def results(self) -> list:
        found = [self.session.result(handle) for handle in self.handles]
        return [(each.sequence.tolist(), each.finish_reason) for each in found]


class RunAhead(Run):
    """Steps are launched before the results of earlier ones are read, and some are taken back."""

    ROWS = ((SHARED, 14), (OTHER, 18), (SHARED, 12), (OTHER, 5))
    TEMPERATURE = 0.0  # an interrupt changes plans; greedy texts stay

    def policy(self) -> bass.DraftLengthPolicy:
        return Fickle(k=2, zeros=3)


def traced(function: Callable[[], None], met: Callable[[Line], None]) -> None:
    """Call `met` before each line of the engine that the function runs."""

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


def lines_of_a_run(pair: bass.ModelPair, run: type = Run) -> Counter[Line]:
    count: Counter[Line] = Counter()
    traced(run(pair).to_the_end, lambda line: count.update([line]))
    return count


def interrupted(run: Run, line: Line, occurrence: int) -> bool:
    """Interrupt a run at one occurrence of a line. Return True if the run met it."""
    count = 0

    def met(each: Line) -> None:
        nonlocal count
        count += each == line
        if each == line and count == occurrence:
            raise KeyboardInterrupt

    try:
        traced(run.to_the_end, met)
    except KeyboardInterrupt:
        return True
    return False


SLOW = [("last", "model"), ("last", "layers"), ("first", "features"), ("last", "features"), ("last", "reader")]
SLOW += [("first", "model, launched ahead"), ("last", "model, launched ahead")]


@pytest.mark.parametrize(
    ("which", "draft"), [("first", "model"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_session_interrupted_at_any_line_goes_on_or_refuses(monkeypatch, which, draft):
    draft, _, ahead = draft.partition(", ")
    make = RunAhead if ahead else Run
    if ahead:
        use_fixed_steps(monkeypatch)
        seen = count_ahead(monkeypatch)
    pair = small_pair(draft)
    training = [module.training for module in pair.target.modules()]
    undisturbed = make(pair)
    undisturbed.to_the_end()
    expected, lines = undisturbed.results(), lines_of_a_run(pair, make)
    assert len(lines) > 200
    assert not ahead or seen["launched"] > seen["taken back"] > 0
    logits = [logits_of(model) for model in pair.models]
    gave_up = set()
    for line, count in lines.items():
        run = make(pair)
        assert interrupted(run, line, 1 if which == "first" else count), line
        assert all(attention.path_of(model) is None for model in pair.models), line
        assert [module.training for module in pair.target.modules()] == training, line
        for model, expected_logits in zip(pair.models, logits, strict=True):
            assert torch.equal(logits_of(model), expected_logits), line
        try:
            run_to_the_end(run.session)
        except RuntimeError as error:
            assert "make a new session" in str(error), line
            gave_up.add(line)
        else:
            reached_cancel = run.handles[3].finish_reason == "cancelled"
            for row, (found, wanted) in enumerate(zip(run.results(), expected, strict=True)):
                if row < 3 or reached_cancel:
                    assert found == wanted, (line, row)
        run.session.close()
    # Only lines of the commit itself may end a session.
    assert {Path(file).name for file, _ in gave_up} <= {"rows.py", "engine.py"}
    assert len(gave_up) < 40
