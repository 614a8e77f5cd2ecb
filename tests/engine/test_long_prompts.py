"""Chunked prefill keeps the texts, runs at most one chunk between two decode steps, and starves no prompt."""

import copy

import pytest
import torch
from recording import use_on_cpu
from sessions import DRAFT, PAIR, TARGET, alone, assert_same_result, run_to_the_end, session_over
from tiny import feature_head, forward_passes, ragged_prompts, tiny_model

import bass_core as bass

CHUNK, NEW = 8, 7
SHORT, LONG, OTHER_LONG = ragged_prompts(5, 45, 30)
PROMPTS = ragged_prompts(6, 41, 8, 60, 3, 16)
DRAFTS = {
    "model": PAIR,
    "n-gram": bass.ModelPair(TARGET),
    "suffix": bass.ModelPair(TARGET, bass.SuffixDrafter()),
    "features": bass.ModelPair(TARGET, bass.FeatureDrafter(feature_head(TARGET))),
}

COUPLED, TOKEN, BLOCK = ({"temperature": 0.8, "verification": rule} for rule in ("coupled", "token", "block"))


def texts(**options) -> list[list[int]]:
    session = session_over(max_batch_size=3, **options)
    handles = []
    for prompt in PROMPTS:
        handles.append(session.submit(prompt, max_new_tokens=NEW))
        if len(handles) == 3:
            for _ in range(5):
                session.step()
    run_to_the_end(session)
    return [session.result(handle).sequence.tolist() for handle in handles]


@pytest.mark.parametrize(
    ("draft", "options", "compile"),
    [
        ("model", BLOCK, "graphs"),
        ("n-gram", COUPLED, "off"),
        ("suffix", {}, "off"),  # sampled text depends on other rows, except with coupled verification
        ("features", TOKEN, "graphs"),
    ],
)
def test_chunks_change_no_text(monkeypatch, draft, options, compile):
    use_on_cpu(monkeypatch)
    options = options | {"pair": DRAFTS[draft], "compile": compile}
    assert texts(prefill_chunk=CHUNK, **options) == texts(**options)


@pytest.mark.parametrize(
    ("path", "chunks"), [("pad", (1, 40)), ("eager", (8,)), pytest.param("split", (7, 59), marks=pytest.mark.ci)]
)
def test_chunks_of_any_size_change_no_text(path, chunks):
    options = {"temperature": 0.8, "attention": path}
    expected = texts(**options)
    for chunk in chunks:
        assert texts(prefill_chunk=chunk, **options) == expected


def test_chunks_around_a_window_change_no_text():
    pair = bass.ModelPair(*(tiny_model("mistral", dtype="float64", noise=noise) for noise in (0, 0.02)))
    assert texts(pair=pair, prefill_chunk=5) == texts(pair=pair, prefill_chunk=30) == texts(pair=pair)


class Whole(bass.Drafter):
    def __init__(self):
        self.prompts = []

    def prefill(self, tokens, lengths, places, hidden=None):
        self.prompts += [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]

    def draft(self, context, lengths, policy):
        return bass.Draft.of(context.last_tokens().expand(-1, lengths.max()), lengths)


def test_drafter_without_chunks_receives_whole_prompts():
    drafter = Whole()
    pair = bass.ModelPair(TARGET, drafter)
    assert texts(pair=pair, prefill_chunk=CHUNK) == texts(pair=pair)
    assert sorted(drafter.prompts) == sorted(2 * [prompt.tolist() for prompt in PROMPTS])


def kinds(session) -> str:
    """Return the session's steps: c for a chunk, p for a prefill, d for a decode step."""
    steps = session.trace.steps.groupby("step").agg(kind=("kind", "first"), emitted=("emitted", "sum"))
    return "".join("c" if kind == "prefill" and not n else kind[0] for kind, n in steps.itertuples(index=False))


@pytest.mark.parametrize("draft", ["model", pytest.param("features", marks=pytest.mark.ci)])
def test_one_chunk_at_most_between_two_decode_steps(draft):
    pair = DRAFTS[draft]
    session = session_over(pair, max_batch_size=3, prefill_chunk=CHUNK)
    session.submit(SHORT, max_new_tokens=80)
    for _ in range(2):
        session.step()
    session.submit(LONG, max_new_tokens=NEW)
    session.submit(OTHER_LONG, max_new_tokens=NEW)
    fed_between, fed = [], 0
    while not session.idle:
        with forward_passes(*pair.models) as passes:
            event = session.step()
        assert max(queries for _, queries in passes or [(0, 0)]) <= CHUNK
        if event.drafted and any(event.drafted):
            fed_between.append(fed)
            fed = 0
        else:
            fed += max((queries for rows, queries in passes if rows == 1), default=0)
    assert max(fed_between) == CHUNK
    assert fed_between.count(CHUNK) == 45 // CHUNK + 30 // CHUNK
    assert "cc" not in kinds(session) and "cpc" not in kinds(session)


@pytest.mark.parametrize(("places", "new"), [(1, 6), (2, 1)])
def test_short_rows_never_starve_a_long_prompt(places, new):
    session = session_over(max_batch_size=places, prefill_chunk=CHUNK)
    session.submit(SHORT, max_new_tokens=5)
    long = [session.submit(prompt, max_new_tokens=NEW) for prompt in (LONG, OTHER_LONG)]
    for _ in range(100):
        session.submit(SHORT, max_new_tokens=new)
        session.step()
    assert [handle.finish_reason for handle in long] == ["length", "length"]


def test_long_prompt_alone_is_read_without_waiting():
    for chunk, expected in ((CHUNK, "ccccccpd"), (len(LONG), "pd")):
        session = session_over(max_batch_size=1, prefill_chunk=chunk)
        session.submit(LONG, max_new_tokens=NEW)
        run_to_the_end(session)
        assert kinds(session).startswith(expected)
        assert session.trace.summary()["rows"] == 1 and session.trace.summary()["tokens"] == NEW


def test_samples_of_a_long_prompt_share_its_chunks():
    session = session_over(max_batch_size=3, prefill_chunk=CHUNK, temperature=0.8)
    handles = [session.submit(LONG, max_new_tokens=NEW) for _ in range(5)]
    run_to_the_end(session)
    assert kinds(session).count("c") == 6
    for row, handle in enumerate(handles):
        assert_same_result(session.result(handle), alone(row, LONG, NEW, temperature=0.8))


def half_read(**options):
    """Return a session with a running short row and a long prompt of two rows, after two chunks of the prompt."""
    session = session_over(max_batch_size=3, prefill_chunk=CHUNK, **options)
    handles = [session.submit(SHORT, max_new_tokens=30)]
    session.step()
    handles += [session.submit(LONG, max_new_tokens=NEW, deadline=deadline) for deadline in (None, 100)]
    for _ in range(4):
        session.step()
    assert kinds(session) == "pcdcd"
    return session, handles


def test_cancelled_row_leaves_its_prefill_to_the_next():
    session, (short, first, second) = half_read()
    session.cancel(first)
    session.step()
    assert kinds(session) == "pcdcdc"
    session.cancel(second)
    session.step()
    assert kinds(session) == "pcdcdcd"
    again = [session.submit(prompt, max_new_tokens=NEW) for prompt in (OTHER_LONG, LONG)]
    run_to_the_end(session)
    assert [session.result(row).finish_reason for row in (first, second)] == ["cancelled"] * 2
    assert_same_result(session.result(short), alone(0, SHORT, 30))
    for row, (handle, prompt) in enumerate(zip(again, (OTHER_LONG, LONG), strict=True), 3):
        assert_same_result(session.result(handle), alone(row, prompt, NEW))


def test_deadline_passes_during_a_prefill(clock):
    session, (short, first, second) = half_read()
    session.cancel(first)
    clock.now += 100
    run_to_the_end(session)
    assert (session.result(second).finish_reason, len(session.result(second).sequence)) == ("budget", 0)
    assert_same_result(session.result(short), alone(0, SHORT, 30))


def test_session_is_closed_during_a_prefill():
    session, (_, first, _) = half_read()
    session.close()
    assert not session.target.cache.buffers() and not session.drafter.runner.cache.buffers()
    assert session.result(first).finish_reason is None
    with pytest.raises(RuntimeError, match="closed"):
        session.step()


def test_nan_of_a_long_prompt_ends_its_rows_alone():
    model = copy.deepcopy(TARGET)
    nan = model.get_input_embeddings().weight.new_full((1,), torch.nan)

    def spoil(module, args, output):
        return torch.where((args[0] == int(LONG[20]))[..., None], nan, output)

    session = session_over(bass.ModelPair(model, DRAFT), max_batch_size=3, prefill_chunk=CHUNK, on_row_error="finish")
    hook = model.get_input_embeddings().register_forward_hook(spoil)
    short, long = (session.submit(prompt, max_new_tokens=NEW) for prompt in (SHORT, LONG))
    run_to_the_end(session)
    hook.remove()
    later = session.submit(OTHER_LONG, max_new_tokens=NEW)
    run_to_the_end(session)
    assert [session.result(row).finish_reason for row in (short, long, later)] == ["length", "error", "length"]
    assert_same_result(session.result(later), alone(2, OTHER_LONG, NEW))


def test_bad_chunk_is_refused():
    for chunk, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="prefill_chunk must be"):
            session_over(prefill_chunk=chunk)
