"""`model.generate(custom_generate=bass_generate)` returns the result of `generate`, or refuses options by name."""

import functools
import itertools

import pytest
import torch
from tiny import VOCABULARY, byte_tokenizer, forward_passes, ragged_prompts, tiny_model
from transformers import (
    DynamicCache,
    EncoderNoRepeatNGramLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, LogitsProcessor

import bass_core as bass
from bass_core import bass_generate
from bass_core.model.transformers_internals import CACHE

PROMPTS = ragged_prompts(5, 11, 3, 17, 1)
NEW = 10
small = functools.partial(tiny_model, num_hidden_layers=1)
PAD = 0
WIDTH = max(map(len, PROMPTS))
BATCH = {
    "input_ids": torch.stack([torch.nn.functional.pad(prompt, (WIDTH - len(prompt), 0)) for prompt in PROMPTS]),
    "attention_mask": torch.stack([(torch.arange(WIDTH) >= WIDTH - len(prompt)).long() for prompt in PROMPTS]),
}
EOS = list(range(10, 60))
ONE = {"input_ids": PROMPTS[1][None], "attention_mask": None}


def by_bass(model=None, **options):
    options = {"max_new_tokens": NEW, "draft_model": small(noise=0.1), **BATCH} | options
    return (model or small()).generate(custom_generate=bass_generate, **options)


def frequent_ids(sequences: torch.Tensor, count: int) -> list[int]:
    return sequences[:, WIDTH:].flatten().bincount(minlength=VOCABULARY).argsort(descending=True)[:count].tolist()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_greedy_rows_with_left_padding_equal_generate(architecture):
    model, draft = tiny_model(architecture), tiny_model(architecture, noise=0.1)
    plain = {**BATCH, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}
    expected = model.generate(**plain)
    for eos in (None, frequent_ids(expected, 4)):
        options = plain | {"eos_token_id": eos}
        found = by_bass(model, draft_model=draft, **options)
        assert torch.equal(found, model.generate(**options))
        assert found.dtype == torch.int64 and not found.is_inference()


def test_ngram_drafts_and_short_integers_equal_generate():
    ids = PROMPTS[3][None]
    for draft in ("ngram", bass.NgramDrafter(longest=2)):
        found = by_bass(inputs=ids.int(), input_ids=None, attention_mask=None, draft_model=draft)
        assert torch.equal(found, small().generate(ids, max_new_tokens=NEW))


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": None, "max_length": WIDTH + 7},
        {"max_new_tokens": None},  # generate's default: 20
        {"attention_mask": None, "pad_token_id": PAD},  # the mask is inferred
        {"min_length": WIDTH},
        {"min_new_tokens": 5, "eos_token_id": None},  # nothing to suppress
        {"pad_token_id": 5, "eos_token_id": list(range(10, 30))},
        {"suppress_tokens": list(range(10, 60))},
        {"begin_suppress_tokens": list(range(10, 60))},
        {"bad_words_ids": [[each] for each in range(10, 60)]},
        {"pad_token_id": None, "eos_token_id": list(range(10, 30))},  # generate pads with the first id
        {"temperature": 0.5, "top_p": 0.5, "do_sample": False},  # unused without sampling
        {"generation_config": GenerationConfig(max_length=WIDTH + 3, pad_token_id=7)},
        {"min_new_tokens": 8, "eos_token_id": EOS, "pad_token_id": PAD},
        {"min_length": WIDTH + 6, "eos_token_id": EOS, "pad_token_id": PAD},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[each, other] for each in range(10, 60) for other in range(10, 60, 3)]},
        {"sequence_bias": {(each,): 2.0 for each in range(20)} | {(12, 13): -3.0}},
        {"forced_eos_token_id": [3, 4]},
        {"forced_bos_token_id": 3, "input_ids": PROMPTS[4][None], "attention_mask": None},
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": EOS, "pad_token_id": PAD},
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5), NoRepeatNGramLogitsProcessor(2)])},
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.4, 3)]},
        {"logits_processor": [SuppressTokensAtBeginLogitsProcessor(list(range(40)), WIDTH + 3)]},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e6)])},  # time counts from the collection of tests
    ],
    ids=lambda options: ",".join(options),
)
def test_greedy_with_option_is_generate(options):
    options = BATCH | {"max_new_tokens": NEW} | options
    if "generation_config" in options:
        del options["max_new_tokens"]
    expected = small().generate(**options)
    found = small().generate(custom_generate=bass_generate, draft_model=small(noise=0.1), **options)
    assert torch.equal(found, expected)


def test_eos_is_never_a_bad_word():
    """`generate` ignores bad words among the EOS ids of the call, but not of the model."""
    model, ends = small(), frequent_ids(small().generate(**BATCH, max_new_tokens=NEW), 4)
    options = {**BATCH, "max_new_tokens": NEW, "eos_token_id": ends, "bad_words_ids": [[each] for each in (*ends, 11)]}
    expected = model.generate(**options)
    assert (expected == ends[0]).any()
    assert torch.equal(by_bass(**options), expected)
    config = GenerationConfig(bad_words_ids=options["bad_words_ids"], eos_token_id=3)
    pair = bass.ModelPair(model, small(noise=0.1))
    out = bass.generate(pair, PROMPTS, max_new_tokens=NEW, eos_token_id=ends, generation_config=config)
    for sequence, row in zip(out.sequences, expected[:, WIDTH:], strict=True):
        assert sequence.tolist() == row[: len(sequence)].tolist()
    assert "eos" in out.finish_reasons


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_repetition_penalty_ignores_padding(penalty):
    options = {"max_new_tokens": 24, "repetition_penalty": penalty, "eos_token_id": None, "pad_token_id": PAD}
    for prompt, row in zip(PROMPTS, by_bass(**options), strict=True):
        assert torch.equal(row[WIDTH - len(prompt) :], small().generate(prompt[None], **options)[0])


def test_samples_equal_generate_and_share_prefills():
    pair, options = bass.ModelPair(small(), small(noise=0.1)), {"num_return_sequences": 4, "seed": 5}
    with forward_passes(small()) as passes:
        found = by_bass(do_sample=True, temperature=0.6, eos_token_id=None, **options)
    options |= {"max_new_tokens": NEW, "temperature": 0.6, "top_k": 50, "eos_token_id": ()}  # as in generate
    assert torch.equal(found[:, :WIDTH], BATCH["input_ids"].repeat_interleave(4, dim=0))
    assert torch.equal(found[:, WIDTH:], torch.stack(bass.generate(pair, PROMPTS, **options).sequences))
    assert len(found[:4].unique(dim=0)) > 1
    assert (len(PROMPTS), WIDTH) in passes
    assert all(queries < WIDTH for rows, queries in passes if rows > len(PROMPTS))


def test_sampling_options_with_one_choice_give_greedy_text():
    greedy = by_bass()
    assert not torch.equal(by_bass(do_sample=True), greedy)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert torch.equal(by_bass(do_sample=True, **options), greedy), options


def test_manual_seed_governs_sampling_alone():
    def sample():
        torch.manual_seed(11)
        return by_bass(do_sample=True), by_bass(do_sample=True)

    first, second = sample()
    assert torch.equal(first, sample()[0]) and torch.equal(second, sample()[1])
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    by_bass()
    by_bass(do_sample=True, seed=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_dictionary_holds_sequences_and_the_generation():
    out = by_bass(return_dict_in_generate=True, trace="tokens")
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, by_bass()) and torch.equal(out["sequences"], out[0])
    assert out.scores is None and getattr(out, CACHE) is None
    assert len(out.generation.logprobs) == len(PROMPTS)
    assert len(out.generation.trace.tokens) > 0


def test_events_hold_the_tokens_of_the_result():
    streamed = [[] for _ in PROMPTS]

    def on_step(event):
        for row, tokens in zip(event.rows, event.new_tokens, strict=True):
            streamed[row] += tokens

    eos = frequent_ids(by_bass(eos_token_id=None), 3)
    found = by_bass(on_step=on_step, max_batch_size=2, eos_token_id=eos, pad_token_id=PAD)
    for row, tokens in zip(found[:, WIDTH:].tolist(), streamed, strict=True):
        assert row[: len(tokens)] == tokens and set(row[len(tokens) :]) <= {PAD}


def test_max_time_ends_rows_and_pads_them():
    found = by_bass(max_time=1e-6, max_new_tokens=70)
    assert torch.equal(found, BATCH["input_ids"])
    stale = StoppingCriteriaList([MaxTimeCriteria(600.0, initial_timestamp=0.0)])
    assert torch.equal(by_bass(stopping_criteria=stale), found)
    assert torch.equal(by_bass(max_time=600.0), by_bass())


class Any(LogitsProcessor, StoppingCriteria):
    def __call__(self, *args, **kwargs):
        raise AssertionError("never called")


def of_new_tokens_alone(penalty):
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    processor.prompt_ignore_length = torch.full((5,), WIDTH)
    return processor


REFUSED = (
    "num_beams=3", "typical_p=0.5", "top_h=0.5", "epsilon_cutoff=0.1", "eta_cutoff=0.1",
    "renormalize_logits=True", "remove_invalid_values=True", "guidance_scale=1.5", "encoder_repetition_penalty=1.5",
    "output_scores=True", "output_logits=True", "output_attentions=True", "output_hidden_states=True",
    "prompt_lookup_num_tokens=3", "penalty_alpha=0.6", "dola_layers='high'",
)  # fmt: skip
NEUTRAL = {
    "use_cache": False, "cache_implementation": "dynamic", "num_assistant_tokens": 7, "prefill_chunk_size": 4,
    "assistant_confidence_threshold": 0.1, "disable_compile": True, "trust_remote_code": True, "length_penalty": 2.0,
    "early_stopping": True, "unheard_of": 1,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_generation_options_are_refused_by_name():
    for option in REFUSED:
        key, value = option.split("=", 1)
        with pytest.raises(ValueError, match=f"bass_generate does not support the generation option {key}=.*: "):
            by_bass(do_sample=key != "penalty_alpha", **{key: eval(value)})


def test_options_of_the_models_configuration_are_refused(monkeypatch):
    def by_bass_with(**options):
        monkeypatch.setattr(small(), "generation_config", GenerationConfig(**options))
        return by_bass()

    with pytest.raises(ValueError, match="typical_p"):
        by_bass_with(typical_p=0.5, pad_token_id=PAD)
    # hub models set these options; generate drops the cache
    assert by_bass_with(cache_implementation="hybrid", temperature=0.6, top_k=20).shape == (5, WIDTH + NEW)
    assert torch.equal(by_bass_with(pad_token_id=PAD, **NEUTRAL), by_bass_with(pad_token_id=PAD))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logits_processor": [EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS[1])]}, "EncoderNoRepeatNGram.* batch"),
        ({"logits_processor": [of_new_tokens_alone(1.4)]}, "a repetition penalty with prompt_ignore_length"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [4]}, "PrefixConstrained.* depends on the batch"),
        ({"stopping_criteria": StoppingCriteriaList([Any()])}, "the stopping criterion Any"),
        ({CACHE: DynamicCache()}, CACHE),
        ({"inputs_embeds": torch.randn(5, WIDTH, 32)}, "inputs_embeds"),
        ({"input_ids": None, "attention_mask": None, "inputs_embeds": torch.randn(2, 4, 32)}, "inputs_embeds"),
        ({"labels": BATCH["input_ids"]}, "the model input labels"),
        ({"position_ids": torch.arange(WIDTH)[None].expand(5, -1)}, "position_ids"),
        ({"attention_mask": BATCH["attention_mask"].flip(1)}, "attention_mask"),
        ({"attention_mask": torch.ones(5, WIDTH + 1)}, "attention_mask"),
        ({"attention_mask": 0 * BATCH["attention_mask"]}, "a prompt is empty"),
        ({"trace": "steps"}, "return_dict_in_generate"),
        ({"verification": "blok"}, "verification"),
        ({"attention": "flash"}, "attention"),
        ({"compile": "fast"}, "compile"),
        ({"draft_length": -1}, "draft_length|draft length"),
        ({"max_new_tokens": 90}, "context of 96"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"draft_lenght": 4}, "draft_lenght"),
        ({"draft_model": None}, r'pass draft_model=small, .* or draft_model="ngram"'),
        ({**ONE, "assistant_model": small(noise=0.1)}, "draft_model or assistant_model"),
        (
            {"do_sample": True, "num_return_sequences": 2, "assistant_model": small()},
            "num_return_sequences has to be 1",
        ),
        ({"stop_strings": ["x"], "tokenizer": byte_tokenizer()}, "stop strings"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_input_is_refused_by_name(options, name):
    with pytest.raises(ValueError, match=name):
        by_bass(**options)


def test_rows_that_may_end_early_need_a_pad_token(monkeypatch):
    monkeypatch.setattr(small(), "generation_config", GenerationConfig())
    for options in ({}, {"max_time": 600.0, "pad_token_id": 3}):
        assert by_bass(**options).shape == (5, WIDTH + NEW)
    with pytest.raises(ValueError, match="pad_token_id"):
        by_bass(max_time=600.0)


def test_assistant_model_drafts():
    draft = small(noise=0.1)
    for method in (bass_generate, functools.partial(bass_generate, draft_length=2)):
        with forward_passes(draft) as passes:
            ids, options = ONE["input_ids"], {"custom_generate": method, "assistant_model": draft}
            found = small().generate(ids, max_new_tokens=NEW, **options)
        assert passes and torch.equal(found, by_bass(**ONE))


class Heard(BaseStreamer):
    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.flatten().tolist())

    def end(self):
        self.given.append("end")


def test_streamer_receives_prompt_tokens_and_end():
    heard = Heard()
    found = by_bass(**ONE, streamer=heard, on_step=lambda event: heard.given.append(event.step))
    tokens = [each for each in heard.given if isinstance(each, list)]
    steps = [each for each in heard.given if isinstance(each, int)]
    assert heard.given[-1] == "end" and heard.given.count("end") == 1
    assert list(itertools.chain(*tokens)) == found[0].tolist() and len(tokens) == len(steps) + 1 < NEW


def test_streamer_ends_after_an_error():
    for options, kind, error in (
        ({"max_new_tokens": 1000}, ValueError, "beyond the target model's context"),
        ({"typical_p": 0.5}, ValueError, "typical_p"),
        ({"draft_model": "a name"}, TypeError, "draft_model must be .*got 'a name'"),
    ):
        heard = Heard()
        with pytest.raises(kind, match=error):
            by_bass(**ONE, streamer=heard, **options)
        assert heard.given[-1] == "end"
    with pytest.raises(ValueError, match=r"does not support streamer=Heard: .*on_step"):
        by_bass(streamer=Heard())  # several rows


def test_nested_call_sees_its_own_arguments():
    def on_step(event):
        with pytest.raises(ValueError, match="where drafts come from"):
            tiny_model("gpt2").generate(**ONE, max_new_tokens=2, custom_generate=bass_generate)

    heard = Heard()
    by_bass(**ONE, streamer=heard, on_step=on_step, max_new_tokens=2)
    assert heard.given[-1] == "end"
