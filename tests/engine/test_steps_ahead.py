"""A step is launched before the one before it is read, and nothing else of a session is another."""

from __future__ import annotations

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from recording import PROMPTS, assert_same, count_ahead, pair, use_fixed_steps, use_on_cpu
from tiny import tiny_model
from trial_policies import DEAR, Fickle, library_policies

import bass_core as bass
from bass_core import probe, step_ahead
from bass_core.batch import Batch
from bass_core.rows import Fetched
from bass_lab.checks.enumeration import EXACT, exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation


@pytest.fixture
def ahead(monkeypatch):
    use_on_cpu(monkeypatch)
    return count_ahead(monkeypatch)


def session(way="graphs", **options):
    return bass.Session(pair(), compile=way, eos_token_id=(), **({"draft_length": 3, "temperature": 0.8} | options))


def to_the_end(running):
    while not running.idle:
        running.step()


def texts(running, handles):
    to_the_end(running)
    found = [running.result(handle) for handle in handles]
    return [(each.sequence.tolist(), each.finish_reason) for each in found]


@pytest.mark.parametrize("k", [0, 3])
def test_the_next_step_is_under_way_when_a_step_is_read(ahead, monkeypatch, k):
    under_way, on_host = [], step_ahead.Decided.on_host
    with session(draft_length=k) as running:
        monkeypatch.setattr(
            step_ahead.Decided,
            "on_host",
            lambda self: (under_way.append(running.device_step.is_ahead), on_host(self))[1],
        )
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:2]]
        found = texts(running, handles)
        steps = running.trace.steps.query("kind == 'decode'").step.nunique()
    assert sum(under_way) == ahead["launched"] > steps / 2
    assert ahead["taken back"] == 0
    with session("off", draft_length=k) as running:
        assert texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:2]]) == found


def test_rows_that_end_meanwhile_keep_nobody_waiting(ahead):
    """They end on EOS, which nobody foresees; the others move up, and the step under way counts for them."""
    recorded, _ = assert_same(pair(), draft_length=4, temperature=1.5, new=70, eos_token_id=range(3, 7))
    assert set(recorded.finish_reasons) == {"eos", "length"} or recorded.finish_reasons.count("eos") > 2
    assert ahead["launched"] > 5 and ahead["taken back"] <= 1  # under way when the last row ended


def test_a_policy_that_changes_its_mind_has_its_way(ahead):
    assert_same(pair(), draft_length=lambda: Fickle(k=3, zeros=4), temperature=0.8, new=60)
    assert 0 < ahead["taken back"] < ahead["launched"]


def test_a_policy_that_drafts_nothing_for_long_foretells_it(ahead):
    useless = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", seed=1))
    assert_same(useless, draft_length=lambda: bass.Goodput(DEAR), temperature=0.8, new=60)
    assert ahead["launched"] > 50 and ahead["taken back"] == 0


def test_drafters_are_told_of_their_own_step(ahead, monkeypatch):
    """The step under way has written over what was drafted."""
    told, original = [], bass.ModelDrafter.committed

    def committed(self, before, drafted, accepted):
        told.append((before.tolist(), drafted.tolist(), accepted.tolist()))
        original(self, before, drafted, accepted)

    monkeypatch.setattr(bass.ModelDrafter, "committed", committed)
    with session() as running:
        texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]])
        steps = running.trace.steps.query("kind == 'decode'").groupby("step")
        assert told == [
            tuple(step[name].tolist() for name in ("kv_length", "drafted", "accepted")) for _, step in steps
        ]
    assert ahead["launched"] > 5


def test_a_model_that_cannot_be_recorded_is_never_ahead(ahead):
    """Launching its step takes until the step is done."""
    mixtral = bass.ModelPair(tiny_model("mixtral"), tiny_model("mixtral", seed=1))
    with bass.Session(mixtral, compile="auto", draft_length=3, eos_token_id=()) as running:
        texts(running, [running.submit(prompt, max_new_tokens=40) for prompt in PROMPTS[:2]])
        assert running.trace.meta["compile"] == "off"
    assert ahead["launched"] == 0


@pytest.mark.parametrize("policy", ["fixed", *library_policies(limit=4)])
def test_what_is_foretold_comes_true_while_no_row_ends(policy):
    made = bass.FixedLength(3) if policy == "fixed" else library_policies(limit=4)[policy]()
    foretold, said = None, []

    class Watched(bass.DraftLengthPolicy):
        keep_drafting, choose = made.keep_drafting, made.choose

        def start(self, rows):
            made.start(rows)

        def plan(self, rows):
            nonlocal foretold
            found = made.plan(rows)
            if foretold is not None and said and said[-1][0] == rows.ids.tolist():
                assert foretold == found
            said.append((rows.ids.tolist(), foretold))
            foretold = made.foretell()
            return found

        def update(self, drafted, accepted):
            made.update(drafted, accepted)

    bass.generate(pair(), PROMPTS, max_new_tokens=70, draft_length=Watched(), temperature=0.8, eos_token_id=())
    assert all(told == 3 for _, told in said[1:]) if policy == "fixed" else len(said) > 10


def between_steps(way, act):
    """Texts of rows, between whose steps something is done; steps are launched ahead by then."""
    with session(way, max_batch_size=4) as running:
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
        for _ in range(6):
            running.step()
        assert running.device_step.is_ahead == (way == "graphs")
        handles += act(running, handles) or []
        return texts(running, handles)


ACTS = {
    "a row is submitted": lambda running, handles: [running.submit(PROMPTS[3], max_new_tokens=20)],
    "a longer row is submitted": lambda running, handles: [running.submit(PROMPTS[3], max_new_tokens=78)],
    "a row is cancelled": lambda running, handles: running.cancel(handles[0]),
    "all rows are cancelled": lambda running, handles: [running.cancel(handle) for handle in handles] and None,
    "all rows are cancelled, and others come": lambda running, handles: (
        [running.cancel(handle) for handle in handles]
        and [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
    ),
    "room is made": lambda running, handles: running.reserve(300),
    "a row of other sampling comes": lambda running, handles: [
        running.submit(PROMPTS[3], max_new_tokens=20, temperature=0.3, repetition_penalty=1.2)
    ],
}


@pytest.mark.parametrize("what", ACTS)
def test_what_is_done_between_two_steps_is_done_to_the_rows_that_were_read(ahead, what):
    assert between_steps("graphs", ACTS[what]) == between_steps("off", ACTS[what])


def after_an_error(way, raising, k):
    """Texts of rows between whose steps something was raised once."""
    with session(way, draft_length=raising(k)) as running:
        handles, errors = [running.submit(prompt, max_new_tokens=40) for prompt in PROMPTS[:3]], 0
        while not running.idle:
            try:
                running.step()
            except ValueError:
                errors += 1
        return texts(running, handles), [(each.drafted, each.accepted) for each in handles], errors


def raising(method):
    """A fixed length, one of whose methods raises at its seventh call."""

    def once(self, *given):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 7:
            raise ValueError(method)
        return getattr(bass.FixedLength, method)(self, *given)

    return type("Raising", (bass.FixedLength,), {method: once})


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("method", ["foretell", "plan"])
def test_an_error_on_the_way_to_a_step_loses_nothing(ahead, method, k):
    found, counted, errors = after_an_error("graphs", raising(method), k)
    assert errors == 1 and ahead["taken back"] == 1
    assert (found, counted) == after_an_error("off", bass.FixedLength, k)[:2]


@pytest.mark.parametrize("on_row_error", ["raise", "finish"])
def test_what_becomes_of_a_row_behind_its_end_is_nobodys_matter(ahead, on_row_error):
    """It goes on in the step under way, where its logits are not numbers; the others do not stay where they are."""
    ends, found = torch.arange(3, 9), {}
    prompts = [torch.where(torch.isin(prompt, ends), 50, prompt) for prompt in PROMPTS]
    for way in ("off", "graphs"):
        target = tiny_model.__wrapped__(dtype="float64")
        probe.resolve(target)
        target.register_forward_hook(lambda *given: spoilt_behind(ends, *given), with_kwargs=True)
        options = {"draft_length": 0, "eos_token_id": ends.tolist(), "temperature": 0.8, "on_row_error": on_row_error}
        with bass.Session(bass.ModelPair(target), compile=way, **options) as running:
            found[way] = texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in prompts])
    assert found["graphs"] == found["off"] and "eos" in {reason for _, reason in found["off"]}
    assert ahead["launched"] > 5


def spoilt_behind(ends, model, args, given, output):
    """NaN wherever one of these ids is fed."""
    fed = torch.isin(given["input_ids"], ends)[:, -output.logits.shape[1] :]
    output.logits = output.logits.masked_fill(fed[..., None], torch.nan)
    return output


def test_phases_are_watched_from_any_step_on(ahead, monkeypatch):
    """Also from one that is under way, and is not wanted."""
    with session() as running:
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
        while not running.device_step.is_ahead:
            running.step()
        for handle in handles:
            running.cancel(handle)
        handles.append(running.submit(PROMPTS[3], max_new_tokens=20))
        monkeypatch.setattr(bass.Session, "on_phase", lambda *_: None)
        found = texts(running, handles)
        assert running.trace.steps.query("row == 3 and kind == 'prefill'").draft_ms.item() == 0
    monkeypatch.setattr(bass.Session, "on_phase", None)
    with session("off") as running:
        for prompt in PROMPTS[:3]:
            running.cancel(running.submit(prompt, max_new_tokens=60))
        assert texts(running, [running.submit(PROMPTS[3], max_new_tokens=20)]) == found[3:]


def test_cancelled_rows_leave_a_session_idle(ahead):
    with session() as running:
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
        for _ in range(6):
            running.step()
        for handle in handles:
            running.cancel(handle)
        assert running.idle
        assert running.step().rows == []


def test_a_row_that_waits_comes_in_as_soon_as_one_ends_at_its_limit(ahead):
    """The step under way would keep it waiting."""
    recorded, eager = assert_same(pair(), draft_length=0, max_batch_size=2, new=30)
    assert ahead["launched"] > 20
    assert recorded.trace.steps.step.tolist() == eager.trace.steps.step.tolist()


def test_rows_that_end_one_by_one_leave_steps_under_way(ahead):
    """Others have moved into their places, and what these submit has moved along."""
    with session(max_batch_size=4, draft_length=2) as running:
        for _ in range(3):  # what is met for the third time is recorded
            handles = [running.submit(prompt, max_new_tokens=20 + 9 * at) for at, prompt in enumerate(PROMPTS[:4])]
            ahead.clear()
            found = texts(running, handles)
        steps = running.trace.steps.query("kind == 'decode'").step.nunique() / 3
    assert ahead["taken back"] == 0 and ahead["launched"] >= steps - 4  # the first, and those of fewer places
    with session("off", max_batch_size=4, draft_length=2) as running:
        for _ in range(3):
            handles = [running.submit(prompt, max_new_tokens=20 + 9 * at) for at, prompt in enumerate(PROMPTS[:4])]
            expected = texts(running, handles)
    assert found == expected


class Stream:
    """Of a GPU that there is none of: `told` is what streams were told, in order."""

    current: Stream
    told: ClassVar[list[tuple]] = []
    device = torch.device("cuda:1")

    def __init__(self, name: str):
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.told.append((self.name, "waits for", other.name))

    @contextmanager
    def inside(self):
        before, Stream.current = Stream.current, self
        try:
            yield
        finally:
            Stream.current = before


@pytest.fixture
def streams(monkeypatch):
    """A session's own, and a caller's other one."""
    monkeypatch.setattr(Stream, "told", [])
    monkeypatch.setattr(Stream, "current", Stream("own"), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", Stream.inside)
    return Stream.current, Stream("other")


def test_a_session_stays_on_the_stream_that_it_was_made_on(streams, monkeypatch):
    """What it frees goes back to that one's memory. Callers' streams wait, and are waited for."""
    own, other = streams
    ends = Batch.end
    monkeypatch.setattr(Batch, "end", lambda *args: [Stream.told.append(Stream.current.name), ends(*args)])
    with session("off") as running:
        handles = [running.submit(prompt, max_new_tokens=9) for prompt in PROMPTS[:2]]
        running._stream = own
        running.step()
        assert Stream.told == []
        with other.inside():
            running.step()
            running.result(handles[0])
            there_and_back = [("own", "waits for", "other"), ("other", "waits for", "own")]
            assert Stream.told == 2 * there_and_back and Stream.current is other
            Stream.told.clear()
            running.cancel(handles[0])
            assert Stream.told == [there_and_back[0], "own", there_and_back[1]]


def test_a_step_that_fails_has_its_caller_wait_all_the_same(streams, monkeypatch):
    own, other = streams
    with session("off") as running:
        running._stream = own
        monkeypatch.setattr(running, "_next_step", lambda: 1 / 0)
        with other.inside(), pytest.raises(ZeroDivisionError):
            running.step()
        assert Stream.told == [("own", "waits for", "other"), ("other", "waits for", "own")]


def test_a_gpu_that_is_lost_is_told_by_what_lost_it(streams, monkeypatch):
    """Nothing can be waited for any more, and a session that is closed says no more of it."""
    own, other = streams

    def lost(*_):
        monkeypatch.setattr(Stream, "wait_stream", lost)
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    running = session("off")
    running._stream = own
    monkeypatch.setattr(running, "_next_step", lost)
    with other.inside():
        with pytest.raises(torch.AcceleratorError) as caught:
            running.step()
        assert caught.value.__context__ is None
        running.close()
        with pytest.raises(RuntimeError, match="closed"):
            running.step()


def test_nothing_is_launched_ahead_of_somebody_who_watches_phases(ahead, monkeypatch):
    monkeypatch.setattr(bass.Session, "on_phase", lambda *_: None)
    with session() as running:
        texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS])
    assert ahead["launched"] == 0


@pytest.mark.parametrize("way", ["off", "graphs"])
def test_what_a_row_leaves_is_on_the_host_a_step_later(ahead, monkeypatch, way):
    """Not at once: that would wait for the step under way. Not when somebody asks: a GPU may have failed by then."""
    asked = []
    monkeypatch.setattr(Fetched, "__call__", lambda self: [asked.append(self), self._copied.numpy()][1])
    with session(way, draft_length=2) as running:
        short, _ = (running.submit(prompt, max_new_tokens=new) for prompt, new in zip(PROMPTS, (6, 40), strict=False))
        while short.finish_reason is None:
            running.step()
        assert short.fetched not in asked
        running.step()
        assert short.fetched in asked


def test_times_of_steps_add_up(ahead):
    """The end of a step is the beginning of the one that was launched ahead."""
    with session() as running:
        texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS])
        times = running.trace.steps[["draft_ms", "verify_ms", "other_ms"]]
    assert ahead["launched"] > 5 and (times >= 0).all().all() and (times.sum(axis=1) > 0).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets(monkeypatch, rule):
    """Every random decision, of steps that are taken back, too."""
    use_fixed_steps(monkeypatch)
    ahead, target, draft = count_ahead(monkeypatch), tabular(2, seed=1), tabular(2, seed=2)
    for policy in (lambda: 1, lambda: Fickle(k=1, zeros=1)):
        found = law_of_engine(target, draft, 5, policy, verification=rule)
        assert total_variation(found, exact_law(target, 5)) < EXACT
    assert ahead["launched"] > ahead["taken back"] > 0


def test_rows_set_back_are_those_that_were_read(ahead):
    with session() as running:
        for prompt in PROMPTS[:3]:
            running.submit(prompt, max_new_tokens=60)
        for _ in range(6):
            running.step()
        lengths = torch.from_numpy(running.rows.lengths_host)
        assert running.device_step.is_ahead and not torch.equal(running.rows.lengths[:3], lengths[:3])
        running.device_step.take_back()
        assert torch.equal(running.rows.lengths[:3], lengths[:3])
