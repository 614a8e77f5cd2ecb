"""Encoder-decoder targets: a batch of sources of different lengths gives the text of each single source."""

from types import SimpleNamespace

import pytest
import torch
from readers import HEARS, OPTIONS, START, alone, given, sources, tiny_reader
from sessions import run_to_the_end
from stale import texts_over_poison
from tiny import tiny_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin
from trial_policies import PerRow

import bass_core as bass
import bass_lab as lab
from bass_lab.checks import plain_decoding
from bass_lab.checks.enumeration import EXACT
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import total_variation
from bass_lab.drafters import LayerSkipDrafter

NEW = 8
LENGTHS = (9, 4, 1, 5, 20)
DRAFTS = {
    "model": lambda kind, dtype: tiny_reader(kind, dtype, noise=0.05),
    "first layer": lambda kind, dtype: LayerSkipDrafter(1),
    "suffix": lambda kind, dtype: bass.SuffixDrafter(),
}


def pair_of(kind: str, dtype: str = "float32", draft: str = "model") -> bass.ModelPair:
    return bass.ModelPair(tiny_reader(kind, dtype), DRAFTS[draft](kind, dtype))


def assert_identical(pair: bass.ModelPair, kind: str, lengths=LENGTHS, samples=1, **options) -> bass.Generation:
    """Decode sources, and compare with transformers' text of each single source."""
    read = sources(kind, *lengths)
    out = bass.generate(pair, read, max_new_tokens=NEW, num_return_sequences=samples, **options)
    changes = {name: value for name, value in options.items() if name == "repetition_penalty"}
    expected = [alone(pair.target, each, NEW, **changes) for each in read for _ in range(samples)]
    assert [sequence.tolist() for sequence in out.sequences] == expected
    return out


FEW = [  # a bias by distance, a table of positions, audio
    ("t5", "float64", "model", 4, "pad"),
    ("t5", "float32", "first layer", PerRow(3), "split"),
    ("pegasus", "float64", "suffix", 4, "eager"),
    ("whisper", "float32", "model", 4, "eager"),
    ("whisper", "float32", "suffix", 0, "pad"),
]
OTHERS = [pytest.param(kind, "float32", "model", 4, "pad", marks=pytest.mark.slow) for kind in OPTIONS]


@pytest.mark.parametrize(("kind", "dtype", "draft", "length", "path"), FEW + OTHERS)
def test_greedy_text_equals_the_single_source(kind, dtype, draft, length, path):
    options = {"draft_length": length, "max_batch_size": 3, "attention": path}
    out = assert_identical(pair_of(kind, dtype, draft), kind, **options)
    assert len({tuple(sequence.tolist()) for sequence in out.sequences}) > 2  # the text depends on the source
    assert out.trace.meta["attention"] == path
    if draft == "model":
        assert 0.05 < out.trace.summary()["alpha"] < 1  # drafts were both accepted and rejected


def test_repetition_penalty_counts_the_text_and_not_the_source():
    assert_identical(pair_of("t5"), "t5", repetition_penalty=1.7)


def test_samples_of_one_source_share_its_encoding():
    assert_identical(pair_of("bart"), "bart", (7, 5), samples=3, max_batch_size=2)


def test_integer_weights():
    assert_identical(pair_of("t5").quantized("int8"), "t5", draft_length=3)


def test_rows_join_and_leave_a_session():
    pair, read = pair_of("marian"), sources("marian", *LENGTHS)
    with bass.Session(pair, max_batch_size=3, draft_length=3, prefill_chunk=1) as session:
        handles = [session.submit(each, max_new_tokens=NEW) for each in read[:3]]
        for _ in range(3):
            session.step()
        session.cancel(handles[1])
        handles += [session.submit(each, max_new_tokens=NEW) for each in read[3:]]
        run_to_the_end(session)
        found = [session.result(handle).sequence.tolist() for handle in handles]
    expected = [alone(pair.target, each, NEW) for each in read]
    assert found[1] == expected[1][: len(found[1])]
    assert found[:1] + found[2:] == expected[:1] + expected[2:]


def test_sampled_text_has_the_targets_distribution():
    """Every random decision of a row is enumerated, next to a row with another source."""
    pair, read = pair_of("t5", "float64"), sources("t5", 4, 9)
    options = {"draft_length": 1, "verification": "block", "trace": "off", "attention": "pad"}

    def run():
        with bass.Session(pair, **options) as session:
            sampled = session.submit(read[0], max_new_tokens=3, temperature=2.0, top_k=2)
            session.submit(read[1], max_new_tokens=3)
            run_to_the_end(session)
            return tuple(session.result(sampled).sequence.tolist())

    expected = plain_decoding.exact_law(pair.target, read[0], bass.SamplingParams(2.0, top_k=2), 3)
    assert total_variation(Oracle().laws(run), expected) < EXACT


def asked(monkeypatch, kind: str, **options) -> bass.ModelPair:
    pair = pair_of(kind)
    for name, value in options.items():
        monkeypatch.setattr(pair.target.generation_config, name, value)
    return pair


def test_forced_first_token(monkeypatch):
    pair, read = asked(monkeypatch, "mbart", forced_bos_token_id=7), sources("mbart", *LENGTHS)
    out = bass.generate(pair, read, max_new_tokens=NEW)
    assert [sequence.tolist() for sequence in out.sequences] == [alone(pair.target, each, NEW) for each in read]


@pytest.mark.parametrize(
    ("kind", "option"), [("marian", "bad_words_ids"), ("whisper", "suppress_tokens"), ("t5", "begin_suppress_tokens")]
)
def test_suppressed_ids_never_occur(monkeypatch, kind, option):
    model = tiny_reader(kind)
    common = [alone(model, each, NEW)[0] for each in sources(kind, *LENGTHS)]
    ids = [[each] for each in common] if option == "bad_words_ids" else common
    out = assert_identical(asked(monkeypatch, kind, **{option: ids}), kind, draft_length=3)
    assert out.sequences[0][0] != common[0]


def test_caller_gives_the_first_tokens_of_a_text(monkeypatch):
    pair, read = asked(monkeypatch, "bart", forced_bos_token_id=7), sources("bart", 6, 9)
    begun = [torch.tensor([START, 5, 9]), torch.tensor([START, 8])]
    mappings = [{"input_ids": a, "decoder_input_ids": b} for a, b in zip(read, begun, strict=True)]
    out = bass.generate(pair, mappings, max_new_tokens=NEW)
    for sequence, each, begin in zip(out.sequences, read, begun, strict=True):
        expected = alone(pair.target, each, NEW, decoder_input_ids=begin[None])
        assert sequence.tolist() == expected[len(begin) - 1 :]


OURS = {"custom_generate": bass.bass_generate, "draft_length": 3}


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_custom_generate_is_generate(monkeypatch, kind):
    pair, read = asked(monkeypatch, kind, forced_eos_token_id=2, forced_bos_token_id=5), sources(kind, *LENGTHS)
    batch = torch.stack(read).float() if kind in HEARS else pad_sequence(read, batch_first=True)
    options = {pair.target.main_input_name: batch, "max_new_tokens": NEW, "do_sample": False}
    if kind not in HEARS:
        options["attention_mask"] = (batch != 0).long()
    expected, ours = GenerationMixin.generate(pair.target, **options), OURS | {"draft_model": pair.draft}
    assert torch.equal(GenerationMixin.generate(pair.target, **options, **ours), expected)
    sampled = options | ours | {"do_sample": True, "num_return_sequences": 2, "forced_bos_token_id": None}
    assert GenerationMixin.generate(pair.target, **sampled).shape == (2 * len(read), NEW + 1)


def test_forced_eos_replaces_an_eos_at_the_last_position():
    pair, (read,) = pair_of("t5"), sources("t5", 9)
    options = given(pair.target, read) | {"max_new_tokens": NEW, "do_sample": False}
    text = pair.target.generate(**options)[0, 1:].tolist()
    last = max(index for index, token in enumerate(text) if token not in text[:index])
    options |= {"max_new_tokens": last + 1, "eos_token_id": [text[last], 3], "forced_eos_token_id": [3]}
    expected, options["draft_model"] = pair.target.generate(**options), pair.draft
    assert expected[0, -1] == 3 and torch.equal(pair.target.generate(**options, **OURS), expected)
    drawn = pair.target.generate(**options | {"do_sample": True, "forced_eos_token_id": [3, 4]}, **OURS)
    assert drawn[0, -1] in (3, 4)


@pytest.mark.parametrize(
    ("kind", "forced"),
    [
        ("t5", {"forced_eos_token_id": [11, 4]}),  # the lower id wins
        ("t5", {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "eos_token_id": 9}),  # ends before it begins
        ("mbart", {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "max_new_tokens": 2}),
    ],
)
def test_streamer_receives_forced_tokens(kind, forced):
    heard = []
    streamer = SimpleNamespace(put=lambda value: heard.extend(value.flatten().tolist()), end=lambda: heard.append(-1))
    pair, (read,) = pair_of(kind), sources(kind, 9)
    options = given(pair.target, read) | {"max_new_tokens": NEW, "do_sample": False} | forced
    expected = pair.target.generate(**options)[0].tolist()
    options |= {"draft_model": pair.draft, "streamer": streamer}
    assert pair.target.generate(**options, **OURS)[0].tolist() == expected
    assert heard == [*expected, -1]


def test_stale_slots_never_matter():
    pair, read = pair_of("t5"), sources("t5", *LENGTHS)
    assert texts_over_poison(pair, read, NEW) == [alone(pair.target, each, NEW) for each in read]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_verify_passes(kind):
    report = lab.verify(pair_of(kind), max_new_tokens=12, samples=1000)
    assert report.passed
    assert ("audio inputs" if kind in HEARS else "prompts of") in report.checks[0].tested


@pytest.mark.parametrize(
    ("kind", "prompt", "words"),
    [
        ("t5", torch.tensor([], dtype=torch.int64), "empty"),
        ("bart", torch.ones(200, dtype=torch.int64), "96 positions"),
        ("bart", torch.tensor([3, 500]), "outside the target's vocabulary"),
        ("t5", [{"role": "user", "content": "hello"}], "conversation"),
        ("t5", torch.randn(6, 24), "1-D tensor"),
        ("whisper", torch.randn(6, 20), r"features \[6, 24\]"),
        ("whisper", torch.tensor([3, 4]), r"features \[6, 24\]"),
        ("whisper", "a text", r"features \[6, 24\].*got str"),
        ("whisper", [{"input_ids": [1, 2]}], r"features \[6, 24\]"),
    ],
)
def test_unreadable_source_is_refused(kind, prompt, words):
    with pytest.raises((ValueError, TypeError), match=words):
        bass.generate(pair_of(kind), [prompt] if isinstance(prompt, list) else prompt)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("bart", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "zeros only on the right of each row"),
        ("bart", {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "zeros only on the right of each row"),
        ("bart", {"encoder_outputs": ()}, "does not support encoder_outputs"),
        ("whisper", {}, r"prompt_condition_type.*call bass_core\.generate\(pair, features\)"),
    ],
    ids=["padding on the left", "a hole", "encoder outputs", "Whisper's own generate"],
)
def test_custom_generate_refuses(kind, options, words):
    pair, (source,) = pair_of(kind), sources(kind, 5)
    if "encoder_outputs" in options:
        options = {"encoder_outputs": pair.target.get_encoder()(source[None])}
    options = given(pair.target, source) | options | {"max_new_tokens": 4, "custom_generate": bass.bass_generate}
    with pytest.raises(ValueError, match=words):
        pair.target.generate(**options, draft_model="ngram" if kind in HEARS else pair.draft)


BEAMS = GenerationConfig(num_beams=4)
T5, READ = pair_of("t5"), sources("t5", 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bass.generate(T5, READ, generation_config=BEAMS), "num_beams=4"),
        (lambda: bass.ModelPair(tiny_reader("t5"), tiny_model()), "use a draft of the target's kind"),
        (lambda: bass.ModelPair(tiny_model(), tiny_reader("t5")), "use a draft of the target's kind"),
        (lambda: bass.ModelPair(tiny_reader("whisper"), tiny_reader("bart")), "use a draft of the target's kind"),
        (lambda: lab.record(T5, READ, max_new_tokens=4, temperature=1.0), "is an encoder-decoder"),
        (lambda: lab.distance(T5, T5.quantized("int8"), READ), "is an encoder-decoder"),
        (lambda: bass.generate(T5, READ, compile="compiled"), "depend on source lengths"),
        (lambda: T5.quantized("int4"), "do not support int4; use int8"),  # INT4 layers need their weights' dtype
    ],
)
def test_refused_uses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_model_without_a_start_token_is_refused(monkeypatch):
    pair = pair_of("t5")
    monkeypatch.setattr(pair.target, "generation_config", GenerationConfig())
    monkeypatch.setattr(pair.target.config, "decoder_start_token_id", None)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        bass.generate(pair, sources("t5", 3))
