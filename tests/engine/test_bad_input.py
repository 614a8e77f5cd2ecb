"""Bad input raises a typed error before any forward pass. The message has the value and a remedy."""

import copy
from contextlib import contextmanager

import pytest
import torch
from tiny import (
    CONTEXT,
    VOCABULARY,
    assert_greedy,
    byte_tokenizer,
    forward_passes,
    greedy_alone,
    ragged_prompts,
    tiny_model,
)
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertLMHeadModel

import bass_core as bass
from bass_core.model import kernel_ops

TARGET = tiny_model(dtype="float64")
DRAFT = tiny_model(dtype="float64", noise=0.02)
PROMPTS = ragged_prompts(5, 9, 13)
NAN, INFINITY = float("nan"), float("inf")
TOKENIZER = byte_tokenizer()
NAMES = {
    "attention": ["auto", "ragged", "pad", "split", "eager"],
    "verification": ["token", "block", "coupled"],
    "trace": ["off", "steps", "tokens"],
    "on_row_error": ["raise", "finish"],
}


UNKNOWN = {
    "do_sample": (bass.generate, r"set temperature=… \(0 is greedy\)"),
    "n": (bass.generate, "set num_return_sequences=…"),
    "max_tokens": (bass.Session.submit, "set max_new_tokens=…"),
    "max_length": (bass.stream, r"set max_new_tokens=… \(without the prompt\)"),
    "num_beams": (bass.generate, "beam search is not supported"),
    "stop_strings": (bass.Session, "set stop=…"),
    "stop_token_ids": (bass.Session, r"set eos_token_id=\[…\]"),
    "eos_token_ids": (bass.astream, r"did you mean eos_token_id\?"),
    "logit_bias": (bass.generate, r"set processors=\[bass\.Bias\({id: value}\)\]"),
    "frequency_penalty": (bass.generate, r"set processors=\[bass\.Penalties\(…\)\]"),
    "min_tokens": (bass.generate, r"set processors=\[bass\.MinTokens\(n\)\]"),
    "num_speculative_tokens": (bass.generate, "set draft_length=…"),
    "batch_size": (bass.astream, "set max_batch_size=…"),
    "torch_dtype": (bass.load_pair, "set dtype=…"),
    "device_map": (bass.generate, r"pass device=… to load_pair\(\)"),
    "draft_model": (bass.load_pair, "set draft=…"),
    "tokenizer": (bass.load_pair, r"use ModelPair\(target, draft, tokenizer=…\)"),
    "streamer": (bass.generate, r"use bass\.stream\(pair, prompts\)"),
    "verification": (bass.Session.submit, r"pass verification=… to Session\(\)"),
    "on_step": (bass.stream, r"pass on_step=… to generate\(\)"),
    "temprature": (bass.generate, r"did you mean temperature\?"),
    "xyz": (bass.load_pair, r"did you mean one of device, draft, .*\?"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_argument_names_another(name):
    function, instead = UNKNOWN[name]
    said = rf"{function.__qualname__}\(\) has no argument '{name}'; {instead}\Z"
    with pytest.raises(TypeError, match=said):
        function(**{name: 1})


@pytest.fixture(scope="module")
def unprobed() -> bass.ModelPair:
    return bass.ModelPair(*(copy.deepcopy(model) for model in (TARGET, DRAFT)), TOKENIZER)


def generate(prompts, pair, **options) -> bass.Generation:
    return bass.generate(pair, prompts, **({"max_new_tokens": 8} | options))


@contextmanager
def refused(kind, *words, pair: bass.ModelPair):
    """Expect an error of type `kind` with all words, before any model runs."""
    models = [model for model in (pair.target, pair.draft) if isinstance(model, torch.nn.Module)]
    with forward_passes(*models) as passes, pytest.raises(kind) as caught:
        yield
    assert passes == []
    for word in map(str, words):
        assert word in str(caught.value)


def test_text_without_a_tokenizer_is_refused(unprobed):
    pair = bass.ModelPair(*unprobed.models)
    with refused(ValueError, "tokenizer=", "token ids", pair=pair):
        generate("hello", pair)
    with refused(ValueError, "stop", "tokenizer=", pair=pair):
        generate(PROMPTS, pair, stop=["end"])


@pytest.mark.parametrize(
    ("architecture", "size", "role"),
    [
        ("llama", "max_position_embeddings", "draft"),
        ("gpt2", "n_positions", "target"),
        ("opt", "max_position_embeddings", "draft"),
    ],
)
def test_row_fits_into_the_shorter_context_and_not_one_token_more(architecture, size, role):
    sizes = {"target": CONTEXT, "draft": CONTEXT} | {role: 24}
    models = [
        tiny_model(architecture, seed=seed, dtype="float64", **{size: sizes[which]})
        for seed, which in enumerate(("target", "draft"))
    ]
    pair = bass.ModelPair(*models)
    (prompt,) = ragged_prompts(14)
    out = generate([prompt, prompt[:6]], pair, max_new_tokens=10, draft_length=7, eos_token_id=())
    assert torch.equal(out.sequences[0], greedy_alone(pair.target, prompt, 10))
    with refused(ValueError, "14", "11", f"{role} model's context of 24", "at most 10", pair=pair):
        generate([prompt[:6], prompt], pair, max_new_tokens=11)
    with refused(ValueError, "25", "context of 24", "shorten the prompt", pair=pair):
        generate(ragged_prompts(25), pair, max_new_tokens=0)


@pytest.mark.parametrize(
    ("option", "kind", "values"),
    [
        ("max_new_tokens", ValueError, [-1]),
        ("num_return_sequences", ValueError, [0, -2]),
        ("max_batch_size", ValueError, [0]),
        ("temperature", ValueError, [-0.5, NAN, INFINITY]),
        ("top_k", ValueError, [-1]),
        ("top_p", ValueError, [0, -0.1, 1.5, NAN]),
        ("min_p", ValueError, [-0.1, 1.5, NAN]),
        ("repetition_penalty", ValueError, [0, -1.0, NAN]),
        ("draft_length", ValueError, [-1]),
        ("time_budget", ValueError, [-1, NAN]),
        ("eos_token_id", ValueError, [-1, VOCABULARY, [2, VOCABULARY], torch.tensor([2, VOCABULARY])]),
        ("seed", ValueError, [2**63, -(2**63) - 1]),
        *((name, TypeError, [True, 2.5, "3"]) for name in ("max_new_tokens", "num_return_sequences", "max_batch_size")),
        *((name, TypeError, [True, 2.5, [1]]) for name in ("seed", "draft_length")),
        ("top_k", (TypeError, ValueError), [True, 2.5, "3"]),
        *((name, (TypeError, ValueError), ["0.7"]) for name in ("temperature", "top_p", "min_p", "time_budget")),
        ("repetition_penalty", (TypeError, ValueError), ["0.7"]),
        ("eos_token_id", TypeError, [True, 2.5, "2", [2, "3"]]),
        ("stop", TypeError, [None, 3, b"end", ["end", 3]]),
        ("stop", ValueError, ["", ["end", ""]]),
        *((name, ValueError, ["flash", "", None, True]) for name in NAMES),
    ],
    ids=str,
)
def test_bad_values_are_refused(unprobed, option, kind, values):
    for value in values:
        words = [] if option in ("eos_token_id", "stop") else [repr(value), *NAMES.get(option, [])]
        with refused(kind, option, *words, pair=unprobed):
            generate(PROMPTS, unprobed, **{option: value})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"deadline": -1}, ValueError, "deadline must be >= 0 seconds, got -1"),
        ({"deadline": NAN}, ValueError, "deadline must be >= 0 seconds, got nan"),
        ({"seed": 2**63}, ValueError, "seed must fit into 64 bits"),
        ({"seed": "x"}, TypeError, "seed must"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must"),
        ({"sample": -1}, ValueError, "sample must"),
        ({"sample": 1.5}, TypeError, "sample must"),
        ({"sample": 2**64}, ValueError, "sample must"),
        ({"temperature": -1}, ValueError, "temperature must be a finite number >= 0"),
        ({"temperature": "hot"}, (TypeError, ValueError), "temperature must be a finite number"),
        ({"top_p": 0}, ValueError, "top_p must be in"),
        ({"top_k": 2.5}, (TypeError, ValueError), "top_k must be an integer"),
        ({"stop": [""]}, ValueError, "stop"),
        ({"stop": 5}, TypeError, "stop"),
        ({"stop": [5]}, TypeError, "stop"),
        ({"stop": "a</s>"}, ValueError, "'a</s>' contains the special token '</s>', which does not appear"),
    ],
    ids=str,
)
def test_bad_option_of_a_row_is_refused_and_takes_no_number(options, kind, words):
    pair = bass.ModelPair(TARGET, None, TOKENIZER)
    session = bass.Session(pair)
    with refused(kind, words, pair=pair):
        session.submit(PROMPTS[0], **{"max_new_tokens": 8} | options)
    assert session.idle and session.submit(PROMPTS[0], max_new_tokens=8, stop=()).row == 0


def test_stop_string_of_a_row_needs_a_tokenizer():
    with bass.Session(bass.ModelPair(TARGET)) as session, pytest.raises(ValueError, match="need a tokenizer"):
        session.submit(PROMPTS[0], max_new_tokens=8, stop="x")


def test_no_new_tokens_are_an_empty_result():
    generate(PROMPTS, bass.ModelPair(TARGET, DRAFT))  # probes the models
    with forward_passes(TARGET, DRAFT) as passes:
        out = generate(PROMPTS, bass.ModelPair(TARGET, DRAFT), max_new_tokens=0)
    assert [len(sequence) for sequence in out.sequences] == [0, 0, 0]
    assert [len(logprobs) for logprobs in out.logprobs] == [0, 0, 0]
    assert out.finish_reasons == ["length"] * 3
    assert passes == []


def test_named_attention_path_never_falls_back(monkeypatch):
    with pytest.raises(ValueError, match=r"Falcon.*pad.*attention='auto'"):
        generate(PROMPTS, bass.ModelPair(tiny_model("falcon", dtype="float64")), attention="pad")
    monkeypatch.setattr(kernel_ops, "obstacle", lambda device: "the package bass_kernels is not installed")
    with pytest.raises(ValueError, match=r"attention='ragged'.*bass_kernels.*auto"):
        generate(PROMPTS, bass.ModelPair(TARGET), attention="ragged")


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT_CONFIG = BertConfig(vocab_size=VOCABULARY, initializer_range=0.3, **SIZES)  # 0.02 hides the look-ahead


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (BertForMaskedLM(BERT_CONFIG), ValueError, "{role} BertForMaskedLM .*AutoModelForCausalLM"),
        (AutoModel.from_config(TARGET.config), ValueError, "{role} LlamaModel .*AutoModelForCausalLM"),
        (copy.deepcopy(TARGET).to("meta"), ValueError, "{role} .*meta device; load its weights"),
        ("Qwen/Qwen2.5-0.5B", TypeError, "{role} must be a transformers model"),
        (torch.nn.Linear(2, 2), TypeError, "{role} must be a transformers model"),
        (tiny_model("bloom"), ValueError, "BloomForCausalLM.*ALiBi"),
        (tiny_model("rwkv"), ValueError, "RwkvForCausalLM keeps other state"),
        (BertLMHeadModel(BERT_CONFIG).eval(), ValueError, "BertLMHeadModel"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_unfit_model_is_refused_as_target_and_as_draft(model, kind, words):
    for role, models in (("target", (model, DRAFT)), ("draft", (TARGET, model))):
        with pytest.raises(kind, match=words.format(role=role)):
            generate(PROMPTS, bass.ModelPair(*models))


def test_models_on_two_devices_are_refused(monkeypatch):
    draft = tiny_model("gpt2")
    monkeypatch.setattr(type(draft), "device", torch.device("cuda", 1), raising=False)
    with pytest.raises(ValueError, match="target is on cpu and draft on cuda:1; move both"):
        bass.ModelPair(TARGET, draft)


def test_tokenizers_agree_except_for_more_tokens_at_the_end():
    words = "id 100 is .* for the target and .* for the draft.*(same family|draft=None)"
    with pytest.raises(ValueError, match=words):
        bass.ModelPair(TARGET, DRAFT, TOKENIZER, byte_tokenizer(swap=(100, 200)))
    longer = byte_tokenizer()
    longer.add_tokens(["<tail>"])
    for tokenizers in ((TOKENIZER, longer), (longer, TOKENIZER)):
        bass.ModelPair(TARGET, DRAFT, *tokenizers)


@pytest.fixture(scope="module")
def padded_pairs():
    """Return a target and a draft that agree; one of them has 40 more ids: {"target": …, "draft": …}."""
    large = tiny_model(dtype="float64", vocab_size=VOCABULARY + 40)
    small = copy.deepcopy(large)
    small.resize_token_embeddings(VOCABULARY)
    return {"target": bass.ModelPair(large, small), "draft": bass.ModelPair(small, large)}


@pytest.mark.parametrize("larger", ["target", "draft"])
def test_padded_vocabulary_keeps_greedy_and_coupled_text(padded_pairs, larger):
    pair = padded_pairs[larger]
    options = {"max_new_tokens": 20, "eos_token_id": ()}
    out = generate(PROMPTS, pair, **options)
    assert_greedy(out, pair.target, PROMPTS, 20)
    assert out.trace.summary()["acceptance_rate"] > (0 if larger == "target" else 0.5)
    options |= {"temperature": 1.0, "verification": "coupled"}
    drafted, regular = (generate(PROMPTS, pair, draft_length=k, **options) for k in (5, 0))
    assert all(torch.equal(a, b) for a, b in zip(drafted.sequences, regular.sequences, strict=True))
    assert drafted.trace.summary()["acceptance_rate"] > 0


@pytest.mark.parametrize(("larger", "verification"), [("target", "token"), ("target", "coupled"), ("draft", "block")])
def test_padded_vocabulary_keeps_drafts_within_the_smaller_one(padded_pairs, larger, verification):
    options = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": (), "verification": verification}
    out = generate(PROMPTS, padded_pairs[larger], trace="tokens", repetition_penalty=1.1, **options)
    tokens = out.trace.tokens
    drafted = tokens.token[tokens.kind.isin(["accepted", "rejected"])]
    assert drafted.max() < VOCABULARY
    emitted = torch.cat(out.sequences)
    assert bool((emitted >= VOCABULARY).any()) == (larger == "target")  # only the target uses its tail
    assert all(logprobs.isfinite().all() for logprobs in out.logprobs)
