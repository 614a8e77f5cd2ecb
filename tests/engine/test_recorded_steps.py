"""Steps of fixed shapes, recorded and replayed, give what steps launched one operator at a time give."""

import pytest
import torch
from recording import PROMPTS, Recorder, assert_same, pair, use_fixed_steps, use_on_cpu
from tiny import CONTEXT, feature_head, greedy_alone, ragged_prompts, tiny_model
from trial_policies import CHEAP, Alternating, PerRow, StopWhenUnsure, TakingTurns, library_policies

import bass_core as bass
from bass_core import recorded_step
from bass_core.drafters.draft_model import _passes
from bass_core.graphs import Graphs, NotRecordable
from bass_lab.checks.enumeration import EXACT, exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    use_on_cpu(monkeypatch)


SAMPLING = {
    "greedy": {},
    "token": {"temperature": 0.9},
    "block": {"temperature": 0.9, "verification": "block"},
    "coupled": {"temperature": 0.9, "verification": "coupled"},
    "processed": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    "greedy with a penalty": {"repetition_penalty": 1.3},
}


def with_feature_head() -> bass.ModelPair:
    target = tiny_model(dtype="float64")
    return bass.ModelPair(target, bass.FeatureDrafter(feature_head(target)))


def test_fixed_passes_stay_within_the_context_where_the_cache_does_not():
    """A caller may make room past the last position, for which MPT has no bias."""
    models, prompts = pair("mpt"), ragged_prompts(8, 60)

    def decoded() -> list[list[int]]:
        session = bass.Session(models, max_batch_size=2, draft_length=3, eos_token_id=(), compile="graphs")
        handles = [session.submit(prompts[0], max_new_tokens=44)]
        session.step()
        session.reserve(2 * CONTEXT)
        handles.append(session.submit(prompts[1], max_new_tokens=36))
        while not session.idle:
            session.step()
        assert session.rows.capacity > CONTEXT
        return [session.result(handle).sequence.tolist() for handle in handles]

    expected = [greedy_alone(models.target, *row).tolist() for row in zip(prompts, (44, 36), strict=True)]
    assert decoded() == expected


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("k", [0, 3])
def test_every_way_to_choose_tokens(sampling, k):
    assert_same(pair(), draft_length=k, **SAMPLING[sampling])


POLICIES = {
    "per row": lambda: PerRow(most=3),
    "alternating": lambda: Alternating(k=3, zeros=3),
    "seldom": lambda: Alternating(k=3, zeros=9),
    "taking turns": lambda: TakingTurns(k=3),
    "stop when unsure": lambda: StopWhenUnsure(most=4, at_least=0.3),
    **library_policies(limit=4),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("models", [pair, with_feature_head], ids=["model", "features"])
def test_every_policy(policy, models):
    assert_same(models(), draft_length=POLICIES[policy], temperature=0.7)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "opt", "codegen"])
def test_every_kind_of_attention(architecture):
    assert_same(pair(architecture), draft_length=2)


@pytest.mark.parametrize(
    "models",
    [
        lambda: bass.ModelPair(tiny_model(dtype="float64")),
        lambda: bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64")),
        lambda: bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", seed=1, vocab_size=60)),
        lambda: bass.ModelPair(tiny_model(dtype="float64", vocab_size=60), tiny_model(dtype="float64", seed=1)),
        lambda: bass.ModelPair(tiny_model(dtype="float64"), bass.SuffixDrafter()),
        lambda: bass.ModelPair(tiny_model(dtype="float64"), bass.LayerSkipDrafter(1)),
        with_feature_head,
    ],
    ids=["n-gram", "one model is both", "smaller vocabulary", "larger vocabulary", "suffix", "layers", "features"],
)
def test_every_kind_of_draft(models):
    prompts = [prompt % 60 for prompt in PROMPTS]
    assert_same(models(), prompts, draft_length=3, temperature=0.8)


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "codegen"])
def test_rows_that_rest_do_not_run_beyond_the_context(architecture):
    """Learned positions end with the context: a row at its end beside one that drafts on, and an empty place that a
    row left there."""
    changes = {"n_positions": 48} if architecture != "opt" else {"max_position_embeddings": 48}
    models = bass.ModelPair(*(tiny_model(architecture, dtype="float64", noise=n, **changes) for n in (0.0, 0.1)))
    prompts = ragged_prompts(38, 20, 12, 30)
    found = {}
    for way in ("off", "graphs"):
        with bass.Session(models, compile=way, draft_length=8, eos_token_id=(), temperature=0.8) as running:
            found[way] = texts(running, [running.submit(p, max_new_tokens=48 - len(p)) for p in prompts])
    assert found["graphs"] == found["off"]


def test_rows_come_and_go():
    """Fewer places than rows: admissions, moves, batch sizes that shrink."""
    assert_same(pair(), draft_length=3, temperature=0.8, max_batch_size=3, num_return_sequences=2)


def test_rows_end_on_eos():
    recorded, _ = assert_same(pair(), draft_length=4, temperature=1.5, new=60, eos_token_id=range(3, 12))
    assert "eos" in recorded.finish_reasons


def session(models=None, **options):
    return bass.Session(models or pair(), compile="graphs", eos_token_id=(), **({"draft_length": 3} | options))


def texts(session, handles):
    while not session.idle:
        session.step()
    return [session.result(handle).sequence.tolist() for handle in handles]


def test_memory_that_moves_is_recorded_anew():
    """A longer row makes all buffers grow while others are under way."""
    found = {}
    for way in ("off", "graphs"):
        with bass.Session(pair(), compile=way, eos_token_id=(), draft_length=3, temperature=0.8) as running:
            handles = [running.submit(PROMPTS[0], max_new_tokens=20)]
            for _ in range(3):
                running.step()
            handles.append(running.submit(PROMPTS[3], max_new_tokens=70))
            found[way] = texts(running, handles)
    assert found["graphs"] == found["off"]


def test_padding_that_nobody_asked_for_is_cut():
    """There is room for eight drafts where five were asked for."""

    class Wide(bass.Drafter):
        def draft(self, context, lengths, policy):
            return bass.Draft.of(context.last_tokens().expand(-1, 16), lengths)

    pair = bass.ModelPair(tiny_model(dtype="float64"), Wide())
    options = {"max_new_tokens": 30, "draft_length": 5, "eos_token_id": ()}
    found = [bass.generate(pair, PROMPTS[:2], compile=way, **options).sequences for way in ("off", "graphs")]
    assert all(map(torch.equal, *found))


def test_whoever_drafts_nothing_has_no_keys():
    """Their places would be read in every pass of a draft phase."""
    tokens, committed = torch.zeros(3, 20, dtype=torch.int64), torch.tensor([9, 12, 1])
    _, starts, counts, ends = _passes(tokens, committed, torch.tensor([4, 0, -1]), 4, 2)
    assert ends.tolist() == [12, 10, -1] and (ends <= starts[0]).tolist() == [False, True, True]
    assert counts[:, 1:].sum() == 0


def test_a_drafter_with_a_draft_of_its_own_is_asked(monkeypatch):
    """What is recorded is the draft of the class that it comes from."""

    class Certain(bass.LayerSkipDrafter):
        def draft(self, context, lengths, policy):
            draft = super().draft(context, lengths, policy)
            asked.append(draft.lengths_host.tolist())
            return draft

    asked, target = [], tiny_model(dtype="float64")
    found = {}
    for way in ("off", "graphs"):
        pair = bass.ModelPair(target, Certain(1))
        options = {"max_new_tokens": 30, "draft_length": 3, "eos_token_id": (), "temperature": 0.8}
        found[way] = bass.generate(pair, PROMPTS[:2], compile=way, **options).sequences
        assert len(asked) > 5
        asked.clear()
    assert all(map(torch.equal, found["off"], found["graphs"]))


def test_what_must_be_deterministic_from_now_on_is_recorded_anew():
    with session() as running:
        for prompt in PROMPTS[:2]:
            running.submit(prompt, max_new_tokens=60)
        for _ in range(6):
            running.step()
        made = running.device_step.recordings
        running.step()
        assert running.device_step.recordings == made
        try:
            torch.use_deterministic_algorithms(True)
            running.step()  # is under way
            running.step()
            assert running.device_step.recordings == made + 2  # a draft phase and a verification
        finally:
            torch.use_deterministic_algorithms(False)


def test_longer_drafts_find_room():
    def growing():
        return bass.BassHeuristic(initial=6, increment=5)

    same = tiny_model(dtype="float64")
    recorded, _ = assert_same(bass.ModelPair(same, same), draft_length=growing, temperature=0.8, new=60)
    assert recorded.trace.steps.k.max() > 8


def test_few_recordings_serve_many_steps():
    with session() as running:
        texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS])
        decoded = running.trace.steps.query("kind == 'decode'")
        shapes = decoded.groupby("step").agg(rows=("row", "size"), k=("drafted", "max"))
        assert len(decoded.step.unique()) > 30
        places = shapes.rows.map(lambda rows: min(1 << (int(rows) - 1).bit_length(), 8))
        assert len(running.device_step.graphs) <= 2 * len(set(zip(places, shapes.k, strict=True)))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "verification": "coupled"}])
def test_rows_near_their_end_need_no_recordings_of_their_own(options):
    with session(draft_length=5, **options) as running:
        running.submit(PROMPTS[0], max_new_tokens=40)
        for _ in range(3):
            running.step()
        while not running.idle:
            running.step()
        decoded = running.trace.steps.query("kind == 'decode'")
        assert decoded.drafted.iloc[-1] < 5 and running.device_step.graphs.made == 4  # each phase: met, and recorded


def test_what_a_draft_model_has_missed_for_long_is_fed_by_recorded_passes(monkeypatch):
    with session(draft_length=Alternating(k=3, zeros=9)) as running:
        texts(running, [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS])
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS]
        running.step()
        monkeypatch.setattr(running.drafter.runner, "feed", pytest.fail)  # a pass that is launched
        assert all(len(text) >= 60 for text in texts(running, handles))


def test_a_step_interrupted_after_a_recording_is_told_its_drafts_again(monkeypatch):
    with session(temperature=0.8) as running:
        undisturbed = texts(running, [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS])
    with session(temperature=0.8) as running:
        handles = [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
        running.step()
        running.step()  # the first with drafts: the next is recorded
        record = running.device_step.graphs.record
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(running.device_step.graphs, "record", lambda *given: interrupt(record(*given)))
            running.step()
        assert texts(running, handles) == undisturbed


def test_a_place_is_sound_again_for_a_row_without_drafts():
    """The row before there ended because its draft was not numbers."""
    models = bass.ModelPair(tiny_model.__wrapped__(dtype="float64"), tiny_model.__wrapped__(dtype="float64", noise=0.1))
    with session(models, on_row_error="finish", draft_length=Alternating(k=3, zeros=3), max_batch_size=1) as running:
        spoil(models.draft, 0)
        handles = [
            running.submit(prompt, max_new_tokens=3 + 17 * first)
            for first, prompt in ((1, PROMPTS[0]), (0, PROMPTS[1]))
        ]
        found = texts(running, handles)
        assert [handle.finish_reason for handle in handles] == ["error", "length"]
        assert found[1] == greedy_alone(models.target, PROMPTS[1], 3).tolist()


def test_drafts_that_were_never_this_long_are_not_made_so():
    """A length beyond all that rows may emit."""
    with session(draft_length=32) as running:
        running.submit(PROMPTS[0], max_new_tokens=6)
        running.step()
        running.step()
        assert running.device_step._drafted.shape[1] == 8


def test_recordings_that_make_room_are_made_again():
    with session(draft_length=PerRow(most=3)) as running:
        running.device_step.graphs._most = 2
        found = texts(running, [running.submit(prompt, max_new_tokens=30) for prompt in PROMPTS])
        assert len(running.device_step.graphs) == 2
    with session(draft_length=PerRow(most=3)) as running:
        assert found == texts(running, [running.submit(prompt, max_new_tokens=30) for prompt in PROMPTS])


def spoil(model, row):
    """From now on this row's logits are NaN."""

    def write_nan(module, args, output):
        output.logits[row].fill_(torch.nan)

    model.register_forward_hook(write_nan)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("on_row_error", ["raise", "finish"])
def test_a_row_that_is_not_numbers_moves_nobody_else(role, on_row_error):
    models = bass.ModelPair(tiny_model.__wrapped__(dtype="float64"), tiny_model.__wrapped__(dtype="float64", noise=0.1))
    with session(models, on_row_error=on_row_error) as running:
        handles = [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS[:3]]
        running.step()
        before = running.rows.lengths.clone()
        spoil(getattr(models, role), 1)
        if on_row_error == "raise":
            with pytest.raises(FloatingPointError, match=f"{role} model .* row 1"):
                running.step()
            assert torch.equal(running.rows.lengths, before)
        else:
            running.step()
            assert running.result(handles[1]).finish_reason == "error"
            assert len(running.result(handles[1]).sequence) == 1
            assert len(running.result(handles[0]).sequence) > 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("way", ["off", "graphs"])
def test_a_step_interrupted_while_the_device_was_ahead_is_taken_back(monkeypatch, way, options):
    with bass.Session(pair(), compile=way, draft_length=3, eos_token_id=(), **options) as running:
        undisturbed = texts(running, [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS])
    with bass.Session(pair(), compile=way, draft_length=3, eos_token_id=(), **options) as running:
        handles = [running.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
        running.step()
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(running, "_commit", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    running.step()
            running.step()
        assert texts(running, handles) == undisturbed


def interrupt(*_):
    raise KeyboardInterrupt


HOST = {
    "a number": lambda x: float(x.sum()),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "a copy": lambda x: x.to("meta").cpu(),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "different ones": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a comparison": lambda x: torch.equal(x, x),
    "numbers of its own": lambda x: torch.tensor([1.0]) + x,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("read", HOST)
def test_what_the_host_reads_or_makes_cannot_be_recorded(read, inference):
    with torch.inference_mode(inference), pytest.raises(NotRecordable, match="compile='off'"), Recorder():
        HOST[read](torch.ones(3))


def test_what_stays_on_the_device_can_be_recorded():
    x, mask = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool)
    with torch.inference_mode():
        with Recorder() as recorder:
            y = torch.where(mask, x, 0).matmul(x)[torch.arange(2)].masked_fill(mask[:2], 1.0)
        y.zero_()
        recorder.replay()
    assert (y == 1).all()


def test_a_model_that_reads_on_the_host_is_launched_each_time_where_that_was_left_open():
    """Mixtral's plain loop over experts asks which of them have tokens."""
    models = pair("mixtral")
    expected = bass.generate(models, PROMPTS, max_new_tokens=12, eos_token_id=(), draft_length=2, compile="off")
    found = bass.generate(models, PROMPTS, max_new_tokens=12, eos_token_id=(), draft_length=2, compile="auto")
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    assert found.trace.meta["compile"] == "off"
    with pytest.raises(NotRecordable, match="compile='off'"):
        bass.generate(models, PROMPTS, max_new_tokens=12, draft_length=2, compile="graphs")


def test_a_recording_is_replayed_with_the_values_of_now():
    """The recorder of these tests does freeze what Python knew."""
    from recording import recorded

    source, total, factor = torch.ones(3), torch.zeros(()), 2.0
    graphs = Graphs(recorded(torch.device("cpu")))

    def add_up():
        return total.copy_(factor * source.sum())

    graphs.record("sum", add_up)
    source.fill_(5.0)
    factor = 7.0
    assert graphs.run("sum", add_up) == 30.0


# --- exactness of steps of fixed shapes, by enumeration ----------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "policy",
    [
        lambda: 2,
        lambda: PerRow(),
        lambda: Alternating(k=2),
        lambda: StopWhenUnsure(),
        lambda: bass.Goodput(CHEAP, limit=3),
        lambda: bass.BassHeuristic(initial=2),
        lambda: bass.RaggedBudget(CHEAP, limit=3),
    ],
    ids=["k=2", "per row", "alternating", "stop when unsure", "goodput", "algorithm 1", "ragged budget"],
)
def test_the_law_of_a_row_is_the_targets(monkeypatch, policy, rule):
    use_fixed_steps(monkeypatch)
    target, draft = tabular(2, seed=1), tabular(2, seed=2)
    assert total_variation(law_of_engine(target, draft, 4, policy, verification=rule), exact_law(target, 4)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_joint_law_of_two_rows_is_the_targets(monkeypatch, rule):
    use_fixed_steps(monkeypatch)
    target, draft, prompts = tabular(2, seed=5), tabular(2, seed=6), ([0, 1], [1, 0, 0])
    found = law_of_engine(target, draft, 3, lambda: 2, prompts, verification=rule)
    assert total_variation(found, exact_law(target, 3, prompts)) < EXACT


# --- what cannot be honoured ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compile": "graphs"}, "need a CUDA GPU.*compile='off'"),
        ({"compile": "compiled+graphs"}, "need a CUDA GPU"),
        ({"compile": "compiled", "trace": "tokens"}, "trace='steps'"),
        ({"compile": "compiled", "attention": "split"}, "another path"),
        ({"compile": "fast"}, "compile must be one of"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, options, says):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=says):
        bass.generate(pair(), PROMPTS[:1], max_new_tokens=4, **options)


@pytest.mark.parametrize(
    ("device", "paths", "trace", "expected"),
    [
        ("cpu", ["pad", "pad"], "steps", "off"),
        ("cuda", ["ragged", "ragged"], "steps", "graphs"),
        ("cuda", ["ragged", None], "off", "graphs"),
        ("cuda", ["eager", "ragged"], "steps", "graphs"),
        ("cuda", ["split", "split"], "steps", "off"),
        ("cuda", ["ragged", "ragged"], "tokens", "off"),
    ],
)
def test_what_auto_means(monkeypatch, device, paths, trace, expected):
    monkeypatch.undo()
    assert recorded_step.resolve("auto", torch.device(device), paths, trace).name == expected
