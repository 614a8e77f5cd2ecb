"""Overlapped steps are launched before the previous step is read, with the texts, traces and errors of eager steps."""

import itertools
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from recording import PROMPTS, assert_same, count_ahead, pair, submitted, texts, use_fixed_steps, use_on_cpu
from recording import session as greedy_session
from tiny import tiny_model
from trial_policies import DEAR, Fickle, PerRow, StopWhenUnsure, library_policies

import bass_core as bass
from bass_core.gpu import overlap
from bass_core.loop.rows import Fetched
from bass_lab.checks.enumeration import EXACT, exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation


@pytest.fixture
def ahead(monkeypatch):
    use_on_cpu(monkeypatch)
    return count_ahead(monkeypatch)


def session(compile="graphs", **options):
    return greedy_session(compile, **({"temperature": 0.8} | options))


def decode_steps(running) -> int:
    return running.trace.steps.query("kind == 'decode'").step.nunique()


@pytest.mark.parametrize("k", [0, 3])
def test_next_step_is_launched_before_a_step_is_read(ahead, monkeypatch, k):
    under_way, on_host = [], overlap.StepReport.on_host
    with session(draft_length=k) as running:
        monkeypatch.setattr(
            overlap.StepReport,
            "on_host",
            lambda self: (under_way.append(running.device_step.is_ahead), on_host(self))[1],
        )
        found = texts(running, submitted(running, PROMPTS[:2]))
        assert sum(under_way) == ahead["launched"] > decode_steps(running) / 2 and ahead["taken back"] == 0
        times = running.trace.steps[["draft_ms", "verify_ms", "other_ms"]]
        assert (times >= 0).all().all() and (times.sum(axis=1) > 0).all()
    with session("off", draft_length=k) as running:
        assert texts(running, submitted(running, PROMPTS[:2])) == found


def test_rows_ending_on_eos_delay_no_other_row(ahead):
    recorded, _ = assert_same(pair(), PROMPTS, draft_length=2, temperature=1.5, new=50, eos_token_id=range(3, 7))
    assert recorded.finish_reasons.count("eos") > 2
    assert ahead["launched"] > 5 and ahead["taken back"] <= 1  # one step in flight when the last row ended


def test_rows_ending_one_by_one_keep_overlapped_steps(ahead):
    found = {}
    for compile in ("off", "graphs"):
        with session(compile, max_batch_size=4, draft_length=2) as running:
            for _ in range(3):  # the third time, all graphs are captured
                handles = [running.submit(prompt, max_new_tokens=12 + 6 * at) for at, prompt in enumerate(PROMPTS[:4])]
                ahead.clear()
                found[compile] = texts(running, handles)
            steps = decode_steps(running) / 3
    assert ahead["taken back"] == 0 and ahead["launched"] >= steps - 4  # except after smaller batches
    assert found["graphs"] == found["off"]


def test_policy_may_change_its_prediction(ahead):
    assert_same(pair(), draft_length=lambda: Fickle(k=3, zeros=4), temperature=0.8, new=36)
    assert 0 < ahead["taken back"] < ahead["launched"]


def test_policy_without_drafts_predicts_zero(ahead):
    useless = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", seed=1))
    assert_same(useless, draft_length=lambda: bass.Goodput(DEAR), temperature=0.8, new=60)
    assert ahead["launched"] > 50 and ahead["taken back"] == 0


@pytest.mark.parametrize("policy", ["fixed", *library_policies(limit=4)])
def test_predicted_length_is_planned_while_no_row_ends(monkeypatch, policy):
    made = bass.FixedLength(3) if policy == "fixed" else library_policies(limit=4)[policy]()
    original, before, kept = type(made).plan, None, []

    def plan(self, rows):
        nonlocal before
        ids, found = rows.ids.tolist(), original(self, rows)
        if before is not None and before[0] == ids and before[1] is not None:
            assert before[1] == found
            kept.append(found)
        before = ids, self.predict_next()
        return found

    monkeypatch.setattr(type(made), "plan", plan)
    out = bass.generate(pair(), PROMPTS, max_new_tokens=24, draft_length=made, temperature=0.8, eos_token_id=())
    steps = out.trace.steps.query("kind == 'decode'").step.nunique()
    assert steps > 6 and (len(kept) >= steps - len(PROMPTS) or policy != "fixed")


def test_drafters_are_notified_of_their_own_step(ahead, monkeypatch):
    notified, original = [], bass.ModelDrafter.committed

    def committed(self, *given):
        notified.append([each.tolist() for each in given])
        original(self, *given)

    monkeypatch.setattr(bass.ModelDrafter, "committed", committed)
    with session() as running:
        texts(running, submitted(running, PROMPTS[:3]))
        steps = running.trace.steps.query("kind == 'decode'").groupby("step")
    assert notified == [[step[name].tolist() for name in ("kv_length", "drafted", "accepted")] for _, step in steps]
    assert ahead["launched"] > 5


def cancel(running, handles):
    for handle in handles:
        running.cancel(handle)


def replace_all(running, handles):
    cancel(running, handles)
    assert running.idle and running.step().rows == []
    return submitted(running, PROMPTS, 20)


ACTS = {
    "a longer row is submitted": lambda running, handles: submitted(running, PROMPTS[3:4], 60),
    "all rows are cancelled, others come": replace_all,
    "capacity grows": lambda running, handles: running.reserve(300) or [],
    "a row with other sampling comes": lambda running, handles: [
        running.submit(PROMPTS[3], max_new_tokens=20, temperature=0.3, repetition_penalty=1.2)
    ],
}


@pytest.mark.parametrize("act", ACTS)
def test_changes_between_steps_apply_to_the_read_rows(ahead, act):
    found = {}
    for compile in ("off", "graphs"):
        with session(compile, max_batch_size=4) as running:
            handles = submitted(running, PROMPTS[:2], 24)
            for _ in range(6):
                running.step()
            assert running.device_step.is_ahead == (compile == "graphs")
            handles += ACTS[act](running, handles)
            found[compile] = texts(running, handles), [handle.finish_reason for handle in handles]
    assert found["graphs"] == found["off"]


@pytest.mark.parametrize(("method", "k"), [("predict_next", 3), ("plan", 0)])
def test_error_of_a_policy_loses_nothing(ahead, method, k):
    calls, found, errors = itertools.count(1), {}, 0

    def raising(self, *given):
        if next(calls) == 7:
            raise ValueError(method)
        return getattr(bass.FixedLength, method)(self, *given)

    policy = type("Raising", (bass.FixedLength,), {method: raising})(k)
    for compile, length in (("off", k), ("graphs", policy)):
        with session(compile, draft_length=length) as running:
            handles = submitted(running, PROMPTS[:2], 40)
            while not running.idle:
                try:
                    running.step()
                except ValueError:
                    errors += 1
            found[compile] = texts(running, handles), [(each.drafted, each.accepted) for each in handles]
    assert errors == 1 and ahead["taken back"] == 1 and found["graphs"] == found["off"]


@pytest.mark.parametrize("on_row_error", [pytest.param("raise", marks=pytest.mark.ci), "finish"])
def test_bad_logits_after_a_rows_end_do_not_matter(ahead, on_row_error):
    """The row continues in the launched step with NaN logits."""
    ends, found = torch.arange(3, 9), {}
    prompts = [torch.where(torch.isin(prompt, ends), 50, prompt) for prompt in PROMPTS]

    def spoil(model, args, given, output):
        fed = torch.isin(given["input_ids"], ends)[:, -output.logits.shape[1] :]
        output.logits = output.logits.masked_fill(fed[..., None], torch.nan)
        return output

    for compile in ("off", "graphs"):
        target = tiny_model.__wrapped__(dtype="float64")
        options = {"draft_length": 0, "eos_token_id": ends.tolist(), "temperature": 0.8, "on_row_error": on_row_error}
        with bass.Session(bass.ModelPair(target), compile=compile, **options) as running:
            target.register_forward_hook(spoil, with_kwargs=True)  # the probe is over
            handles = submitted(running, prompts)
            found[compile] = texts(running, handles), [handle.finish_reason for handle in handles]
    assert found["graphs"] == found["off"] and "eos" in found["off"][1]
    assert ahead["launched"] > 5


class Stream:
    """A fake CUDA stream. `log` records all waits in order."""

    current: "Stream"
    log: ClassVar[list[tuple]] = []
    device = torch.device("cuda:1")

    def __init__(self, name: str):
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        self.log.append((self.name, "waits for", other.name))

    @contextmanager
    def inside(self):
        before, Stream.current = Stream.current, self
        try:
            yield
        finally:
            Stream.current = before


THERE_AND_BACK = [("own", "waits for", "other"), ("other", "waits for", "own")]


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(Stream, "log", [])
    monkeypatch.setattr(Stream, "current", Stream("own"), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", Stream.inside)
    return Stream.current, Stream("other")


def test_session_stays_on_its_stream(streams, monkeypatch):
    own, other = streams
    with session("off") as running:
        handles = submitted(running, PROMPTS[:2], 9)
        running._stream = own
        running.step()
        assert Stream.log == []
        with other.inside():
            running.step()
            running.result(handles[0])
            assert Stream.log == 2 * THERE_AND_BACK and Stream.current is other
            Stream.log.clear()
            running.cancel(handles[0])
            assert Stream.log == THERE_AND_BACK
            Stream.log.clear()
            monkeypatch.setattr(bass.FixedLength, "plan", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                running.step()
            assert Stream.log == THERE_AND_BACK


def test_lost_gpu_reports_the_original_error(streams, monkeypatch):
    own, other = streams

    def lost(*_):
        monkeypatch.setattr(Stream, "wait_stream", lost)
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    running = session("off")
    submitted(running, PROMPTS[:1], 9)
    running.step()
    running._stream = own
    monkeypatch.setattr(bass.FixedLength, "plan", lost)
    with other.inside():
        with pytest.raises(RuntimeError, match=r"restart the process.*device-side assert") as caught:
            running.step()
        assert caught.value.__cause__.__context__ is None
        running.close()
        with pytest.raises(RuntimeError, match="closed"):
            running.step()


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_log_probabilities_of_an_ended_row_are_fetched_a_step_later(ahead, monkeypatch, compile):
    """Fetching at once would wait for the launched step. Later the GPU may have failed."""
    fetched = []
    monkeypatch.setattr(Fetched, "__call__", lambda self: [fetched.append(self), self._copied.numpy()][1])
    with session(compile, draft_length=2) as running:
        short, _ = submitted(running, PROMPTS[:1], 6) + submitted(running, PROMPTS[1:2], 40)
        while short.finish_reason is None:
            running.step()
        assert short.fetched not in fetched
        running.step()
        assert short.fetched in fetched


def test_distribution_is_the_targets(monkeypatch):
    """All random decisions are enumerated, also in discarded steps."""
    use_fixed_steps(monkeypatch)
    ahead, models = count_ahead(monkeypatch), (tabular(2, seed=1), tabular(2, seed=2))
    fickle = lambda: Fickle(k=1, zeros=1)  # noqa: E731
    for rule, policy in (("token", lambda: 1), ("block", fickle), ("token", StopWhenUnsure), ("block", PerRow)):
        found = law_of_engine(*models, 4, policy, verification=rule)
        assert total_variation(found, exact_law(models[0], 4)) < EXACT
    assert ahead["launched"] > ahead["taken back"] > 0
