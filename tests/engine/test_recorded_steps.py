"""Captured steps of fixed shapes give the text, log-probabilities and trace of eager steps."""

import pytest
import torch
from recording import PROMPTS, Recorder, assert_same, count_ahead, pair, session, submitted, texts, use_on_cpu
from tiny import CONTEXT, feature_head, greedy_alone, ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow, StopWhenUnsure, TakingTurns

import bass_core as bass
from bass_core.execution import execution
from bass_core.gpu.graphs import Graphs, NotRecordable


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    use_on_cpu(monkeypatch)


def target(**changes):
    return tiny_model(dtype="float64", **changes)


def with_feature_head() -> bass.ModelPair:
    return bass.ModelPair(target(), bass.FeatureDrafter(feature_head(target())))


PROCESSED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        (0, {}),
        (3, {"repetition_penalty": 1.3}),
        (3, {"temperature": 0.9, "verification": "block"}),
        (3, {"temperature": 0.9, "verification": "coupled"}),
        (3, PROCESSED),
    ],
    ids=str,
)
def test_every_sampling_option(k, sampling):
    assert_same(pair(), draft_length=k, **sampling)


POLICIES = {
    "per row": (with_feature_head, lambda: PerRow(most=3)),
    "alternating": (with_feature_head, lambda: Alternating(k=3, zeros=3)),
    "seldom": (pair, lambda: Alternating(k=3, zeros=9)),
    "taking turns": (pair, lambda: TakingTurns(k=3)),
    "stop when unsure": (pair, lambda: StopWhenUnsure(most=4, at_least=0.3)),
}


@pytest.mark.parametrize("case", POLICIES)
def test_every_kind_of_policy(case):
    models, policy = POLICIES[case]
    assert_same(models(), draft_length=policy, temperature=0.7)


@pytest.mark.parametrize(
    "models",
    [
        lambda: pair("gemma2"),
        lambda: bass.ModelPair(target()),
        lambda: bass.ModelPair(target(), target()),
        lambda: bass.ModelPair(target(), target(seed=1, vocab_size=60)),
        lambda: bass.ModelPair(target(vocab_size=60), target(seed=1)),
    ],
    ids=["sliding window", "n-gram", "one model is both", "smaller vocabulary", "larger vocabulary"],
)
def test_every_kind_of_model_and_draft(models):
    options = {"draft_length": 3, "temperature": 0.8, "max_batch_size": 3, "num_return_sequences": 2, "new": 10}
    assert_same(models(), [prompt % 60 for prompt in PROMPTS[:3]], **options)


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_idle_rows_stay_within_the_context(architecture):
    """Learned positions end with the context. One row reaches its end while another row drafts."""
    changes = {"n_positions": 48} if architecture != "opt" else {"max_position_embeddings": 48}
    models = bass.ModelPair(*(tiny_model(architecture, dtype="float64", noise=n, **changes) for n in (0.0, 0.1)))
    found = {}
    for compile in ("off", "graphs"):
        with session(compile, models, draft_length=8, temperature=0.8) as running:
            prompts = ragged_prompts(38, 20, 12, 30)
            found[compile] = texts(running, [running.submit(p, max_new_tokens=48 - len(p)) for p in prompts])
    assert found["graphs"] == found["off"]


def test_reserve_beyond_the_context():
    models, prompts = pair("mpt"), ragged_prompts(8, 60)
    with session(models=models, max_batch_size=2) as running:
        handles = submitted(running, prompts[:1], 44)
        running.step()
        running.reserve(2 * CONTEXT)
        found = texts(running, handles + submitted(running, prompts[1:], 36))
        assert running.rows.capacity > CONTEXT
    assert found == [greedy_alone(models.target, *row).tolist() for row in zip(prompts, (44, 36), strict=True)]


def test_surplus_draft_tokens_are_cut():
    class Wide(bass.Drafter):
        def draft(self, context, lengths, policy):
            return bass.Draft.of(context.last_tokens().expand(-1, 16), lengths)

    assert_same(bass.ModelPair(target(), Wide()), PROMPTS[:2], draft_length=5)


def test_overridden_draft_method_is_called():
    class Certain(bass.ModelDrafter):
        def draft(self, context, lengths, policy):
            draft = super().draft(context, lengths, policy)
            calls.append(draft.lengths_host.tolist())
            return draft

    calls = []
    assert_same(bass.ModelPair(target(), Certain(target(seed=1))), PROMPTS[:2], draft_length=3, temperature=0.8)
    eager = len(calls) // 2
    assert eager > 5 and calls[:eager] == calls[eager:]


def test_deterministic_mode_records_anew():
    with session() as running:
        submitted(running, PROMPTS[:2])
        for _ in range(6):
            running.step()
        made = running.device_step.recordings
        running.step()
        assert running.device_step.recordings == made
        try:
            torch.use_deterministic_algorithms(True)
            running.step()  # launched ahead
            running.step()
            assert running.device_step.recordings == made + 2  # a draft phase and a verification
        finally:
            torch.use_deterministic_algorithms(False)


def test_draft_buffers_grow_within_the_limits_of_rows():
    with session(draft_length=32) as running:
        texts(running, submitted(running, PROMPTS[:1], 6))
        assert running.device_step.step.drafts.tokens.shape[1] == 8
    growing = lambda: bass.BassHeuristic(initial=6, increment=5)  # noqa: E731
    recorded, _ = assert_same(bass.ModelPair(target(), target()), draft_length=growing, temperature=0.8, new=40)
    assert recorded.trace.steps.k.max() > 8


def test_last_steps_of_a_row_need_no_captures():
    with session(draft_length=5, temperature=0.8) as running:
        texts(running, submitted(running, PROMPTS[:1]))
        decoded = running.trace.steps.query("kind == 'decode'")
        assert decoded.drafted.iloc[-1] < 5 and running.device_step.graphs.made == 4  # both phases, met and captured


def test_catching_up_of_the_draft_model_is_recorded(monkeypatch):
    with session(draft_length=Alternating(k=3, zeros=9)) as running:
        texts(running, submitted(running))
        handles = submitted(running)
        running.step()
        monkeypatch.setattr(running.drafter.runner, "feed", pytest.fail)  # an eager pass
        assert all(len(text) == 40 for text in texts(running, handles))


def test_least_recently_used_recording_makes_room():
    graphs = Graphs(lambda function: function, most=2)
    for key in "ab":
        graphs.record(key, lambda: None)
    graphs.run("a", pytest.fail)
    graphs.record("c", lambda: None)
    assert [key in graphs for key in "abc"] == [True, False, True]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("phase", ["record", "commit"])
def test_interrupted_step_is_repeated(monkeypatch, phase):
    options = {"temperature": 0.8, "repetition_penalty": 1.3}
    with session(**options) as running:
        undisturbed = texts(running, submitted(running, new=20))
    with session(**options) as running:
        handles, graphs = submitted(running, new=20), running.device_step.graphs
        running.step()
        running.step()  # the first step with drafts; the next step is captured
        for _ in range(3 if phase == "commit" else 1):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                if phase == "record":
                    patch.setattr(graphs, "record", lambda *given, record=graphs.record: interrupt(record(*given)))
                else:
                    patch.setattr(running, "_commit", interrupt)
                running.step()
            running.step()
        assert texts(running, handles) == undisturbed


def own_pair() -> bass.ModelPair:
    return bass.ModelPair(tiny_model.__wrapped__(dtype="float64"), tiny_model.__wrapped__(dtype="float64", noise=0.1))


def spoil(model, row):
    def write_nan(module, args, output):
        output.logits[row].fill_(torch.nan)

    model.register_forward_hook(write_nan)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("on_row_error", ["raise", "finish"])
def test_row_with_nan_logits_leaves_the_others_alone(role, on_row_error):
    models = own_pair()
    with session(models=models, on_row_error=on_row_error) as running:
        handles = submitted(running, PROMPTS[:3], 20)
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
            assert [len(running.result(handle).sequence) > 1 for handle in handles[:2]] == [True, False]


def test_batch_slot_of_a_failed_draft_is_sound_again():
    models = own_pair()
    with session(
        models=models, on_row_error="finish", draft_length=Alternating(k=3, zeros=3), max_batch_size=1
    ) as running:
        spoil(models.draft, 0)
        handles = [running.submit(PROMPTS[0], max_new_tokens=20), running.submit(PROMPTS[1], max_new_tokens=3)]
        found = texts(running, handles)
        assert [handle.finish_reason for handle in handles] == ["error", "length"]
        assert found[1] == greedy_alone(models.target, PROMPTS[1], 3).tolist()


@pytest.mark.parametrize("inference", [False, True])
def test_host_reads_cannot_be_recorded(inference):
    for read in (
        lambda x: float(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.to("meta").cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0]) + x,
    ):
        with torch.inference_mode(inference), pytest.raises(NotRecordable, match="compile='off'"), Recorder():
            read(torch.ones(3))


def test_model_that_reads_on_the_host_falls_back_to_launches(monkeypatch, caplog):
    models, ahead = pair("mixtral"), count_ahead(monkeypatch)
    options = {"max_new_tokens": 30, "eos_token_id": (), "draft_length": 2}
    expected = bass.generate(models, PROMPTS[:2], compile="off", **options)
    found = bass.generate(models, PROMPTS[:2], compile="auto", **options)
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    assert found.trace.meta["compile"] == "off" and ahead["launched"] == 0
    assert "run without CUDA graphs" in caplog.text
    with pytest.raises(NotRecordable, match="compile='off'"):
        bass.generate(models, PROMPTS, compile="graphs", **options)


def test_unavailable_compile_option_is_refused(monkeypatch):
    monkeypatch.undo()
    for options, message in (
        ({"compile": "graphs"}, "need a CUDA GPU.*compile='off'"),
        ({"compile": "compiled+graphs"}, "need a CUDA GPU"),
        ({"compile": "compiled", "trace": "tokens"}, "trace='steps'"),
        ({"compile": "compiled", "attention": "split"}, "another path"),
        ({"compile": "fast"}, "compile must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bass.generate(pair(), PROMPTS[:1], max_new_tokens=4, **options)


def test_auto_captures_graphs_on_a_supported_gpu(monkeypatch):
    monkeypatch.undo()
    for device, paths, trace, expected in (
        ("cpu", ["pad", "pad"], "steps", "off"),
        ("cuda", ["ragged", "ragged"], "steps", "graphs"),
        ("cuda", ["eager", None], "off", "graphs"),
        ("cuda", ["split", "split"], "steps", "off"),
        ("cuda", ["ragged", "ragged"], "tokens", "off"),
    ):
        assert execution("auto", torch.device(device), paths, trace).name == expected
