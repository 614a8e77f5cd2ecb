import functools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_core.loop.phases import Stopwatch
from bass_core.loop.trace import Trace

PROMPTS = ragged_prompts(5, 11, 3)


@functools.cache
def run(trace="tokens", temperature=0.8):
    pair = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.1))
    options = {"max_new_tokens": 20, "eos_token_id": (), "draft_length": 3}
    return bass.generate(pair, PROMPTS, trace=trace, temperature=temperature, **options)


def test_steps_add_up_to_the_text():
    began = time.perf_counter()
    out = run.__wrapped__()
    elapsed = (time.perf_counter() - began) * 1e3
    steps = out.trace.steps
    assert list(steps.columns) == [
        "step", "row", "kind", "k", "drafted", "accepted", "emitted", "kv_length", "draft_ms", "verify_ms", "other_ms",
    ]  # fmt: skip
    for row, sequence in enumerate(out.sequences):
        mine = steps[steps.row == row]
        assert mine.emitted.sum() == len(sequence) == 20
        assert mine.kind.tolist() == ["prefill"] + ["decode"] * (len(mine) - 1)
        assert mine.kv_length.tolist() == (len(PROMPTS[row]) + mine.emitted.cumsum() - mine.emitted).tolist()
    assert (steps.accepted <= steps.drafted).all() and (steps.drafted <= steps.k).all()
    times = steps[["draft_ms", "verify_ms", "other_ms"]]
    assert (times >= 0).all().all() and 0 < times[steps.row == 0].to_numpy().sum() <= elapsed


def test_tokens_are_the_text_with_their_origin():
    out = run()
    tokens = out.trace.tokens
    for row, (prompt, sequence) in enumerate(zip(PROMPTS, out.sequences, strict=True)):
        mine = tokens[(tokens.row == row) & (tokens.kind != "rejected")]
        assert mine.token.tolist() == sequence.tolist()
        assert mine.position.tolist() == list(range(len(prompt), len(prompt) + len(sequence)))
        assert mine.kind.iloc[0] == "regular"
    steps = out.trace.steps
    counts = tokens.kind.value_counts()
    assert counts["accepted"] == steps.accepted.sum()
    assert counts["rejected"] == (steps.drafted - steps.accepted).sum()
    assert counts["recovered"] == (steps.accepted < steps.drafted).sum()
    assert counts["accepted"] > 0 and counts["rejected"] > 0 and counts["bonus"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_p_and_q_are_the_models_probabilities(temperature):
    out = run(temperature=temperature)
    tokens = out.trace.tokens
    target = tiny_model(dtype="float64")
    for row, (prompt, sequence) in enumerate(zip(PROMPTS, out.sequences, strict=True)):
        logits = target(torch.cat([prompt, sequence])[None]).logits[0] / (temperature or 1)
        mine = tokens[(tokens.row == row) & (tokens.kind != "rejected")]
        expected = logits[len(prompt) - 1 : -1].softmax(-1).gather(-1, sequence[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(mine.p.to_numpy()), expected)
    drafted = tokens[tokens.kind.isin(["accepted", "rejected"])]
    assert drafted.q.between(0, 1, inclusive="right").all()
    assert tokens[tokens.kind.isin(["regular", "bonus"])].q.isna().all()


def test_tokens_per_step_count_the_text():
    trace = Trace()
    times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 0.0}
    counts = {"accepted": np.array([5, 2]), "emitted": np.array([3, 3])}  # row 0: the third draft is EOS
    trace.record_step(step=1, row=np.array([0, 1]), kind="decode", k=5, drafted=5, kv_length=9, **counts, **times)
    assert trace.summary()["tokens_per_step"] == 3


def test_summary_is_defined_by_the_steps():
    out = run()
    decode = out.trace.steps.query("kind == 'decode'")
    summary = out.trace.summary()
    assert summary["tokens_per_step"] == pytest.approx(decode.emitted.mean())
    assert summary["acceptance_rate"] == pytest.approx(decode.accepted.sum() / decode.drafted.sum())
    rejections = (decode.accepted < decode.drafted).sum()
    assert summary["alpha"] == pytest.approx(decode.accepted.sum() / (decode.accepted.sum() + rejections))
    assert summary["tokens"] == 60 and summary["rows"] == 3 and summary["k"] == 3
    assert summary["attention"] == "pad" and summary["verification"] == "token"


@pytest.mark.parametrize(("level", "name"), [("steps", "trace.json"), ("tokens", "trace.json.gz")])
def test_saved_trace_loads_unchanged(tmp_path, level, name):
    trace = run(level).trace
    trace.save(tmp_path / name)
    loaded = bass.Trace.load(tmp_path / name)
    assert loaded.steps.equals(trace.steps) and loaded.summary() == trace.summary()
    assert level == "steps" or loaded.tokens.equals(trace.tokens)


def test_levels_record_less_and_change_no_text():
    assert len(run("off").trace.steps) == 0
    with pytest.raises(ValueError, match="trace='tokens'"):
        _ = run("steps").trace.tokens
    for temperature in (0.0, 0.8):
        expected, *others = (run(level, temperature).sequences for level in ("tokens", "off", "steps"))
        for other in others:
            assert all(map(torch.equal, other, expected))


def test_stopwatch_reuses_its_events_and_stays_on_its_stream(monkeypatch):
    """The clock of this GPU advances by 1.5 ms per event. stream: the caller's stream."""
    gpu = SimpleNamespace(made=0, now=0.0, recorded=set(), stream="a")

    class Event:
        def __init__(self, enable_timing):
            gpu.made += 1

        def record(self, stream):
            gpu.now += 1.5
            gpu.recorded.add(stream)
            self.at = gpu.now

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream)
    watch = Stopwatch(torch.device("cuda:1"))
    watch.mark()  # not started yet
    watch.start()
    watch.mark()
    gpu.stream = "b"
    watch.start()  # the step was interrupted
    watch.mark()
    watch.mark()
    assert watch.intervals() == [1.5, 1.5]
    watch.start()
    watch.mark()
    assert watch.intervals() == [1.5]
    assert gpu.made == 3 and gpu.recorded == {"a"}
