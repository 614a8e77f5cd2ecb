"""Encoder-decoder targets: what is written of sources of different lengths in one batch is what is written of each."""

import math
from dataclasses import replace

import pytest
import torch
from readers import HEARS, OPTIONS, START, alone, given, sources, tabular_reader, tiny_reader
from transformers import GenerationMixin
from trial_policies import PerRow

import bass_core as bass
import bass_lab as lab
from bass_core import attention
from bass_core.runner import Runner
from bass_core.sources import Encoded, Source, Sources
from bass_lab.checks import plain_decoding
from bass_lab.checks.enumeration import EXACT
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import total_variation

NEW = 16
LENGTHS = (9, 4, 12, 1, 5, 9, 3, 20)
FEW = ("t5", "pegasus", "whisper")
KINDS = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIONS]
DRAFTS = {
    "model": lambda kind, dtype: tiny_reader(kind, dtype, noise=0.05),
    "first layer": lambda kind, dtype: bass.LayerSkipDrafter(1),
    "suffix": lambda kind, dtype: bass.SuffixDrafter(),
}


def pair_of(kind: str, dtype: str = "float32", draft: str = "model") -> bass.ModelPair:
    return bass.ModelPair(tiny_reader(kind, dtype), DRAFTS[draft](kind, dtype))


def assert_identical(kind: str, dtype: str = "float32", draft: str = "model", **options) -> bass.Generation:
    pair, read = pair_of(kind, dtype, draft), sources(kind, *LENGTHS)
    out = bass.generate(pair, read, max_new_tokens=NEW, **({"draft_length": 4, "max_batch_size": 5} | options))
    assert [sequence.tolist() for sequence in out.sequences] == [alone(pair.target, each, NEW) for each in read]
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_the_source_alone(kind, dtype):
    """Eight sources in five places: rows wait, and move into places of rows with other sources."""
    drafted = assert_identical(kind, dtype)
    assert 0.05 < drafted.trace.summary()["alpha"] < 1  # drafts were both accepted and rejected
    for length in (0, PerRow(3)):
        assert_identical(kind, dtype, draft_length=length)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_matters(kind):
    model, read = tiny_reader(kind), sources(kind, *LENGTHS)
    assert len({tuple(alone(model, each, NEW)) for each in read}) > len(read) / 2


@pytest.mark.parametrize("draft", ["first layer", "suffix"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_without_a_second_model(kind, draft):
    assert_identical(kind, draft=draft)


@pytest.mark.parametrize("path", ["pad", "split", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attention_path(kind, path):
    assert assert_identical(kind, attention=path).trace.meta["attention"] == path


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_rows_end_where_generate_ends_them(kind):
    pair, read = pair_of(kind), sources(kind, *LENGTHS)
    eos = alone(pair.target, read[0], NEW)[NEW // 2]
    out = bass.generate(pair, read, max_new_tokens=NEW, eos_token_id=eos, max_batch_size=3)
    expected = [alone(pair.target, each, NEW, eos_token_id=eos) for each in read]
    assert [sequence.tolist() for sequence in out.sequences] == expected
    assert "eos" in out.finish_reasons


def test_a_repetition_penalty_counts_what_was_written_and_not_what_was_read():
    pair, read = pair_of("t5"), sources("t5", *LENGTHS)
    out = bass.generate(pair, read, max_new_tokens=NEW, repetition_penalty=1.7)
    expected = [alone(pair.target, each, NEW, repetition_penalty=1.7) for each in read]
    assert [sequence.tolist() for sequence in out.sequences] == expected


def test_samples_of_one_source_share_its_reading():
    pair, read = pair_of("bart"), sources("bart", 7, 5)
    out = bass.generate(pair, read, num_return_sequences=3, max_new_tokens=NEW, max_batch_size=2)
    expected = [alone(pair.target, each, NEW) for each in read for _ in range(3)]
    assert [sequence.tolist() for sequence in out.sequences] == expected


def test_a_session_in_which_rows_come_and_go():
    pair, read = pair_of("marian"), sources("marian", *LENGTHS)
    with bass.Session(pair, max_batch_size=3, draft_length=3, prefill_chunk=1) as session:
        handles = [session.submit(each, max_new_tokens=NEW) for each in read[:4]]
        for _ in range(3):
            session.step()
        session.cancel(handles[1])
        handles += [session.submit(each, max_new_tokens=NEW) for each in read[4:]]
        while not session.idle:
            session.step()
        found = [session.result(handle).sequence.tolist() for handle in handles]
    expected = [alone(pair.target, each, NEW) for each in read]
    assert found[1] == expected[1][: len(found[1])]
    assert found[:1] + found[2:] == expected[:1] + expected[2:]


def test_coupled_text_is_the_same_whatever_drafts_and_how_far():
    pair, read = pair_of("t5"), sources("t5", *LENGTHS)
    options = {"max_new_tokens": NEW, "temperature": 0.9, "verification": "coupled", "seed": 3}
    regular = bass.generate(pair, read, draft_length=0, **options).sequences
    for draft, length, places in (("model", 4, 8), ("model", 2, 3), ("first layer", 3, 1)):
        other = bass.generate(pair_of("t5", draft=draft), read, draft_length=length, max_batch_size=places, **options)
        assert all(map(torch.equal, regular, other.sequences))


# --- what a generation config asks for ------------------------------------------------------------------


def asked(monkeypatch, kind: str, **options) -> bass.ModelPair:
    pair = pair_of(kind)
    for name, value in options.items():
        monkeypatch.setattr(pair.target.generation_config, name, value)
    return pair


def test_a_forced_first_token_begins_the_text(monkeypatch):
    pair, read = asked(monkeypatch, "mbart", forced_bos_token_id=7), sources("mbart", *LENGTHS)
    out = bass.generate(pair, read, max_new_tokens=NEW - 1)
    assert [[7, *sequence.tolist()] for sequence in out.sequences] == [alone(pair.target, each, NEW) for each in read]


@pytest.mark.parametrize(
    ("kind", "option"), [("marian", "bad_words_ids"), ("whisper", "suppress_tokens"), ("t5", "begin_suppress_tokens")]
)
def test_suppressed_ids_never_occur(monkeypatch, kind, option):
    model, read = tiny_reader(kind), sources(kind, *LENGTHS)
    common = [alone(model, each, NEW)[0] for each in read]
    ids = [[each] for each in common] if option == "bad_words_ids" else common
    pair = asked(monkeypatch, kind, **{option: ids})
    out = bass.generate(pair, read, max_new_tokens=NEW, draft_length=3)
    expected = [alone(pair.target, each, NEW) for each in read]
    assert [sequence.tolist() for sequence in out.sequences] == expected
    assert expected[0][0] != common[0]


def test_a_text_may_begin_as_the_caller_says():
    pair, read = pair_of("bart"), sources("bart", 6, 9)
    begun = [torch.tensor([START, 5, 9]), torch.tensor([START, 8])]
    mappings = [{"input_ids": a, "decoder_input_ids": b} for a, b in zip(read, begun, strict=True)]
    out = bass.generate(pair, mappings, max_new_tokens=NEW)
    for sequence, each, begin in zip(out.sequences, read, begun, strict=True):
        expected = alone(pair.target, each, NEW, decoder_input_ids=begin[None])
        assert sequence.tolist() == expected[len(begin) - 1 :]


def test_beams_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="num_beams=4"):
        bass.generate(asked(monkeypatch, "bart", num_beams=4), sources("bart", 4))


# --- custom_generate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_custom_generate_is_generate(monkeypatch, kind):
    pair, read = asked(monkeypatch, kind, forced_eos_token_id=2, forced_bos_token_id=5), sources(kind, *LENGTHS)
    batch = {"input_features": torch.stack(read).float()} if kind in HEARS else padded(read)
    options = batch | {"max_new_tokens": NEW, "do_sample": False}
    expected = GenerationMixin.generate(pair.target, **options)
    ours = {"custom_generate": bass.bass_generate, "draft_model": pair.draft, "draft_length": 3}
    assert torch.equal(GenerationMixin.generate(pair.target, **options, **ours), expected)
    sampled = options | ours | {"do_sample": True, "num_return_sequences": 2, "forced_bos_token_id": None}
    assert GenerationMixin.generate(pair.target, **sampled).shape == (2 * len(read), NEW + 1)


class Heard(list):
    """A streamer that keeps what it is given."""

    def put(self, value):
        self += value.flatten().tolist()

    def end(self):
        self.append("end")


@pytest.mark.parametrize(
    ("kind", "forced"),
    [
        ("bart", {"forced_bos_token_id": 9, "forced_eos_token_id": 4}),
        ("t5", {"forced_eos_token_id": [11, 4]}),  # the lower one wins
        ("t5", {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "eos_token_id": 9}),  # ends before it begins
        ("mbart", {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "max_new_tokens": 1}),
        ("mbart", {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "max_new_tokens": 2}),
    ],
)
def test_a_streamer_hears_what_is_returned_forced_tokens_too(kind, forced):
    pair, (read,) = pair_of(kind), sources(kind, 9)
    options = given(pair.target, read) | {"max_new_tokens": NEW, "do_sample": False} | forced
    expected, heard = pair.target.generate(**options)[0].tolist(), Heard()
    ours = {"custom_generate": bass.bass_generate, "draft_model": pair.draft, "draft_length": 3, "streamer": heard}
    assert pair.target.generate(**options, **ours)[0].tolist() == expected
    assert heard == [*expected, "end"]


@pytest.mark.parametrize("hidden", [[3], [0], [0, 1, 2]], ids=["a hole", "first", "on the left"])
def test_masks_of_sources_hide_padding_on_the_right_alone(hidden):
    pair, (read,) = pair_of("bart"), sources("bart", 7)
    mask = torch.ones_like(read).index_fill(0, torch.tensor(hidden), 0)
    options = {"input_ids": read[None], "attention_mask": mask[None], "max_new_tokens": NEW}
    with pytest.raises(ValueError, match="zeros on the right of each row only"):
        pair.target.generate(**options, custom_generate=bass.bass_generate, draft_model=pair.draft)


def test_whispers_own_generate_is_told_what_to_call_instead():
    pair, (read,) = pair_of("whisper", "float32"), sources("whisper", 1)
    options = {"input_features": read[None].float(), "max_new_tokens": 8, "draft_model": "ngram"}
    with pytest.raises(ValueError, match=r"prompt_condition_type.*call bass_core\.generate\(pair, features\)"):
        pair.target.generate(**options, custom_generate=bass.bass_generate)


def padded(read):
    ids = torch.nn.utils.rnn.pad_sequence(read, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


# --- the law -------------------------------------------------------------------------------------------


READ = torch.tensor([1, 0]), torch.tensor([0, 1, 1])


def expected_law(target, new):
    """The joint law of both rows, by the model's plain forward passes."""
    laws = [plain_decoding.exact_law(target, each, bass.SamplingParams(1.0), new) for each in READ]
    return {(a, b): p * q for a, p in laws[0].items() for b, q in laws[1].items()}


def found_law(target, draft, new, k, rule):
    pair = bass.ModelPair(target, draft)
    options = {"temperature": 1.0, "eos_token_id": (), "trace": "off", "attention": "pad", "verification": rule}

    def run():
        out = bass.generate(pair, list(READ), max_new_tokens=new, draft_length=k, **options)
        return tuple(tuple(sequence.tolist()) for sequence in out.sequences)

    return Oracle().laws(run)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_joint_law_of_two_sources_is_the_targets(rule, k):
    target, draft = tabular_reader(2, seed=1), tabular_reader(2, seed=2)
    assert total_variation(found_law(target, draft, 3, k, rule), expected_law(target, 3)) < EXACT


def test_the_two_sources_have_different_laws():
    one, other = (
        plain_decoding.exact_law(tabular_reader(2, seed=1), each, bass.SamplingParams(1.0), 3) for each in READ
    )
    assert total_variation(one, other) > 0.05


# --- faults that are to be found --------------------------------------------------------------------------


def test_what_lies_beyond_a_text_or_a_source_changes_nothing():
    """All slots that no row may see hold 1e4 before every step."""
    pair, read = pair_of("t5"), sources("t5", *LENGTHS)
    with bass.Session(pair, max_batch_size=3, draft_length=3) as session:
        handles = [session.submit(each, max_new_tokens=NEW) for each in read]
        while not session.idle:
            session.step()
            poison(session.target, session.rows)
            poison(session.drafter.runner, session.rows)
        found = [session.result(handle).sequence.tolist() for handle in handles]
    assert found == [alone(pair.target, each, NEW) for each in read]


@torch.inference_mode()
def poison(runner: Runner, rows) -> None:
    cache, live = runner.cache, len(rows.live)
    for place in range(cache.max_rows):
        kept = int(rows.lengths_host[place]) - 1 if place < live else 0
        for buffer in cache.buffers():
            buffer[place, :, kept:] = 1e4
        for buffer in cache.sources.buffers():
            buffer[place, :, cache.sources.lengths[place] if place < live else 0 :] = 1e4


def no_mask(sources, current, dtype):
    return None


def another_rows(handed_out):
    return lambda self, buffer: handed_out(self, buffer).flip(0)


def by_slots_of_the_batch(module):
    compute = module.compute_bias

    def counted(*args, **kwargs):
        current = attention._thread.current
        if current is None:
            return compute(*args, **kwargs)
        one = replace(current, positions=current.positions[:1].expand_as(current.positions))
        attention._thread.current = one
        try:
            return right(*args, **kwargs)
        finally:
            attention._thread.current = current

    right = attention_bias(module)
    return counted


attention_bias = attention._bias_by_row
MUTATIONS = {
    "no mask behind a source's end": (Sources, "bias", no_mask),
    "another row's source": (Sources, "handed_out", another_rows(Sources.handed_out)),
    "a source stays where its row was": (Sources, "move_row", lambda self, source, places: None),
    "a bias that goes by the first row's positions": (attention, "_bias_by_row", by_slots_of_the_batch),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_planted_fault_changes_texts(monkeypatch, mutation):
    pair, read = pair_of("t5", "float64"), sources("t5", *LENGTHS)
    expected = [alone(pair.target, each, NEW) for each in read]
    bass.generate(pair, read, max_new_tokens=2)  # the probe has taken the model before the fault
    monkeypatch.setattr(*MUTATIONS[mutation])
    with bass.Session(pair, max_batch_size=3, draft_length=3) as session:
        handles = [session.submit(each, max_new_tokens=NEW - index) for index, each in enumerate(read)]
        while not session.idle:
            session.step()
        found = [session.result(handle).sequence.tolist() for handle in handles]
    assert found != [text[: len(mine)] for text, mine in zip(expected, found, strict=True)]


@pytest.mark.parametrize("mutation", ["no mask behind a source's end", "another row's source"])
def test_the_probe_refuses_a_planted_fault(monkeypatch, mutation):
    monkeypatch.setattr(*MUTATIONS[mutation])
    tiny_reader.cache_clear()
    with pytest.raises(ValueError, match="cannot be decoded"):
        bass.generate(pair_of("pegasus"), sources("pegasus", 5), max_new_tokens=2, attention="pad")
    tiny_reader.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_verify_passes_what_is_right_and_finds_another_rows_source(monkeypatch, kind):
    pair, options = pair_of(kind), {"max_new_tokens": 12, "samples": 1000}
    report = lab.verify(pair, **options)
    assert report.passed
    assert ("sounds" if kind in HEARS else "prompts of") in report.checks[0].tested
    monkeypatch.setattr(*MUTATIONS["another row's source"])
    assert not lab.verify(pair, sources(kind, 9, 4, 5, 7), **options).passed


# --- what cannot be read -----------------------------------------------------------------------------------


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
def test_a_source_that_cannot_be_read_is_refused_before_any_pass(kind, prompt, words):
    with pytest.raises((ValueError, TypeError), match=words):
        bass.generate(pair_of(kind), [prompt] if isinstance(prompt, list) else prompt)


def test_a_draft_of_another_kind_is_refused():
    from tiny import tiny_model

    for target, draft in ((tiny_reader("t5"), tiny_model()), (tiny_model(), tiny_reader("t5"))):
        with pytest.raises(ValueError, match="take a draft of the target's kind"):
            bass.ModelPair(target, draft)
    with pytest.raises(ValueError, match="take a draft of the target's kind"):
        bass.ModelPair(tiny_reader("whisper"), tiny_reader("bart"))


def test_what_goes_over_texts_alone_refuses_a_target_that_reads():
    pair, read = pair_of("t5"), sources("t5", 3)
    for call in (
        lambda: lab.record(pair, read, max_new_tokens=4, temperature=1.0),
        lambda: lab.distance(pair, pair.quantized("int8"), read),
    ):
        with pytest.raises(ValueError, match="reads sources"):
            call()


def test_encoder_outputs_of_the_callers_are_refused():
    pair, (read,) = pair_of("bart"), sources("bart", 5)
    with torch.no_grad():
        encoded = pair.target.get_encoder()(read[None])
    for source in ({}, {"input_ids": read[None]}):  # with its source, it may be another encoder's
        with pytest.raises(ValueError, match="cannot honour encoder_outputs"):
            pair.target.generate(
                **source,
                encoder_outputs=encoded,
                max_new_tokens=4,
                custom_generate=bass.bass_generate,
                draft_model=pair.draft,
            )


def test_compiled_layers_are_refused_by_name():
    with pytest.raises(ValueError, match="lengths of its sources"):
        bass.generate(pair_of("t5"), sources("t5", 3), compile="compiled")


def test_a_model_that_does_not_say_how_texts_begin_is_refused(monkeypatch):
    pair = pair_of("t5")
    monkeypatch.setattr(pair.target, "generation_config", type(pair.target.generation_config)())
    monkeypatch.setattr(pair.target.config, "decoder_start_token_id", None)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        bass.generate(pair, sources("t5", 3))


@pytest.mark.parametrize("kind", ["t5", "pegasus"])
def test_integer_weights(kind):
    pair = pair_of(kind).quantized("int8")
    read = sources(kind, *LENGTHS)
    out = bass.generate(pair, read, max_new_tokens=NEW, draft_length=3)
    assert [sequence.tolist() for sequence in out.sequences] == [alone(pair.target, each, NEW) for each in read]


def test_int4_of_layers_that_go_by_their_weights_dtype_is_refused():
    with pytest.raises(ValueError, match="quantize to int8"):
        pair_of("t5").quantized("int4")


def test_encoded_sources_can_be_handed_on():
    """What the target's encoder made of sources serves a second runner of the same model."""
    model, read = tiny_reader("t5", "float64"), sources("t5", 5, 3)
    with Runner(model, "pad", 2, 8) as one, Runner(model, "pad", 2, 8) as other, torch.inference_mode():
        encoded = one.read([Source(each) for each in read], range(2))
        assert isinstance(encoded, Encoded) and encoded.lengths == [5, 3]
        other.read(encoded, range(2))
        ids = torch.tensor([[START], [START]])
        first, second = (runner.feed_last(ids, [1, 1], 1) for runner in (one, other))
        expected = torch.cat([model(**given(model, each), decoder_input_ids=ids[:1]).logits[:, 0] for each in read])
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, rtol=1e-12, atol=1e-12) and math.isfinite(float(first.sum()))
