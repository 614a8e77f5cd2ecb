"""Input that cannot be honoured gets a typed error before any forward pass, with the value and what to do instead."""

import copy
import weakref
from contextlib import contextmanager

import pytest
import torch
from tiny import (
    CONTEXT,
    VOCABULARY,
    byte_tokenizer,
    forward_passes,
    greedy_alone,
    ragged_prompts,
    tiny_model,
)
from transformers import AutoModel, AutoModelForSeq2SeqLM, BertConfig, BertForMaskedLM, BertLMHeadModel, T5Config

import bass_core as bass
from bass_core import kernel_ops, probe

TARGET = tiny_model(dtype="float64")
DRAFT = tiny_model(dtype="float64", noise=0.02)
PAIR = bass.ModelPair(TARGET, DRAFT)
PROMPTS = ragged_prompts(5, 9, 13)


@pytest.fixture(scope="module", autouse=True)
def probed():
    """Which attention path a model takes is found out by forward passes, once per model: not what is counted here."""
    for model in (TARGET, DRAFT):
        probe.resolve(model)


def generate(prompts, pair=PAIR, **options) -> bass.Generation:
    return bass.generate(pair, prompts, **({"max_new_tokens": 8} | options))


@contextmanager
def refused(kind, *words, pair=PAIR):
    """The block raises `kind` with all these words in its message, and no model has run."""
    models = [model for model in (pair.target, pair.draft) if isinstance(model, torch.nn.Module)]
    with forward_passes(*models) as passes, pytest.raises(kind) as caught:
        yield
    assert passes == []
    for word in map(str, words):
        assert word in str(caught.value)


# --- prompts --------------------------------------------------------------------------------------


def test_empty_list_of_prompts_is_refused():
    with refused(ValueError, "prompts is empty", "at least one"):
        generate([])


@pytest.mark.parametrize("empty", [torch.zeros(0, dtype=torch.int64), torch.zeros(0), [], ""], ids=repr)
def test_empty_prompt_is_refused(empty):
    pair = bass.ModelPair(TARGET, DRAFT, byte_tokenizer())
    with refused(ValueError, "empty", "at least one token"):
        generate([PROMPTS[0], empty], pair)


@pytest.mark.parametrize("prompts", [None, 7, {"ids": PROMPTS}, torch.ones(2, 3, dtype=torch.int64)], ids=repr)
def test_prompts_of_another_type_or_a_batch_without_its_mask_are_refused(prompts):
    with refused(TypeError, "prompts must be"):
        generate(prompts)


@pytest.mark.parametrize("prompt", [torch.ones(2, 3, dtype=torch.int64), [[1, 2], [3, 4]], torch.tensor(5)], ids=repr)
def test_prompt_that_is_not_one_dimensional_is_refused(prompt):
    with refused(ValueError, "1-D", tuple(torch.as_tensor(prompt).shape)):
        generate([prompt])


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [True, False], [1j], torch.tensor([5.5]), None, ...], ids=repr)
def test_prompt_whose_ids_are_no_integers_is_refused(prompt):
    with refused(TypeError, "token ids"):
        generate([prompt])


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**40])
def test_token_id_outside_the_vocabulary_is_refused(wrong):
    with refused(ValueError, wrong, "outside the target's vocabulary", f"0 … {VOCABULARY - 1}"):
        generate([PROMPTS[0], torch.tensor([5, wrong, 6])])


def test_vocabulary_ends_at_its_last_id():
    out = generate([torch.tensor([VOCABULARY - 1, 0])], max_new_tokens=1, eos_token_id=())
    assert len(out.sequences[0]) == 1


def test_text_prompt_without_a_tokenizer_is_refused():
    with refused(ValueError, "tokenizer=", "token ids"):
        generate("hello")


def test_text_whose_ids_the_target_lacks_is_refused():
    tokenizer = byte_tokenizer()
    assert max(tokenizer("é")["input_ids"]) >= VOCABULARY
    with refused(ValueError, "outside the target's vocabulary"):
        generate("é", bass.ModelPair(TARGET, DRAFT, tokenizer))


def test_bad_prompt_is_refused_before_unknown_models_are_probed(monkeypatch):
    monkeypatch.setattr(probe, "_probed", weakref.WeakKeyDictionary())
    with refused(ValueError, "outside the target's vocabulary"):
        generate([torch.tensor([VOCABULARY])])


def test_bad_option_is_refused_before_unknown_models_are_probed(monkeypatch):
    monkeypatch.setattr(probe, "_probed", weakref.WeakKeyDictionary())
    for options in ({"eos_token_id": VOCABULARY}, {"stop": "x"}, {"max_batch_size": 0}, {"trace": "everything"}):
        with refused(ValueError, *options):
            generate(PROMPTS, **options)


# --- context --------------------------------------------------------------------------------------


def pair_with_contexts(architecture: str, target: int, draft: int) -> bass.ModelPair:
    size = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    return bass.ModelPair(
        tiny_model(architecture, dtype="float64", **{size: target}),
        tiny_model(architecture, seed=1, dtype="float64", **{size: draft}),
    )


@pytest.mark.parametrize(("role", "target", "draft"), [("target", 24, CONTEXT), ("draft", CONTEXT, 24)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_row_fits_exactly_into_the_shorter_context_and_not_one_token_more(architecture, role, target, draft):
    pair = pair_with_contexts(architecture, target, draft)
    (prompt,) = ragged_prompts(14)
    out = generate([prompt, prompt[:6]], pair, max_new_tokens=10, draft_length=7, eos_token_id=())
    assert torch.equal(out.sequences[0], greedy_alone(pair.target, prompt, 10))
    with refused(ValueError, "14", "11", f"{role} model's context of 24", "at most 10", pair=pair):
        generate([prompt[:6], prompt], pair, max_new_tokens=11)


def test_prompt_longer_than_the_context_is_refused_even_if_it_is_not_to_be_continued():
    pair = pair_with_contexts("llama", 24, 24)
    with refused(ValueError, "25", "context of 24", "shorten the prompt", pair=pair):
        generate(ragged_prompts(25), pair, max_new_tokens=0)


def test_ngram_drafting_has_no_context_of_its_own():
    (prompt,) = ragged_prompts(CONTEXT - 4)
    out = generate([prompt], bass.ModelPair(TARGET), max_new_tokens=4, eos_token_id=())
    assert torch.equal(out.sequences[0], greedy_alone(TARGET, prompt, 4))


# --- numbers and names ----------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", -1),
        ("num_return_sequences", 0),
        ("num_return_sequences", -2),
        ("max_batch_size", 0),
        ("temperature", -0.5),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", NAN),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", NAN),
        ("draft_length", -1),
        ("time_budget", -1),
        ("time_budget", NAN),
        ("eos_token_id", -1),
        ("eos_token_id", VOCABULARY),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
    ],
)
def test_number_outside_its_range_is_refused(option, value):
    with refused(ValueError, option, value):
        generate(PROMPTS, **{option: value})


@pytest.mark.parametrize("option", ["max_new_tokens", "num_return_sequences", "max_batch_size", "seed", "draft_length"])
@pytest.mark.parametrize("value", [True, 2.5, "3", [1]], ids=repr)
def test_what_is_no_integer_is_refused(option, value):
    with refused(TypeError, option, repr(value)):
        generate(PROMPTS, **{option: value})


@pytest.mark.parametrize("value", [True, 2.5, "3"], ids=repr)
def test_top_k_that_is_no_integer_is_refused(value):
    with refused((TypeError, ValueError), "top_k", repr(value)):
        generate(PROMPTS, top_k=value)


@pytest.mark.parametrize("option", ["temperature", "top_p", "min_p", "repetition_penalty", "time_budget"])
def test_text_in_place_of_a_number_is_refused(option):
    with refused((TypeError, ValueError), option, "'0.7'"):
        generate(PROMPTS, **{option: "0.7"})


@pytest.mark.parametrize("value", [True, 2.5, "2", [2, "3"]], ids=repr)
def test_eos_that_is_no_integer_is_refused(value):
    with refused(TypeError, "eos_token_id"):
        generate(PROMPTS, eos_token_id=value)


@pytest.mark.parametrize("eos", [[2, VOCABULARY], torch.tensor([2, VOCABULARY])], ids=repr)
def test_any_eos_outside_the_vocabulary_is_refused(eos):
    with refused(ValueError, "eos_token_id", VOCABULARY):
        generate(PROMPTS, eos_token_id=eos)


@pytest.mark.parametrize(
    ("option", "accepted"),
    [
        ("attention", ["auto", "ragged", "pad", "split", "eager"]),
        ("verification", ["token", "block", "coupled"]),
        ("trace", ["off", "steps", "tokens"]),
        ("on_row_error", ["raise", "finish"]),
    ],
)
@pytest.mark.parametrize("value", ["flash", "", None, 3, True], ids=repr)
def test_unknown_name_is_refused_and_the_known_ones_are_listed(option, accepted, value):
    with refused(ValueError, option, repr(value), *accepted):
        generate(PROMPTS, **{option: value})


@pytest.mark.parametrize(("option", "value"), [("deadline", -1), ("deadline", NAN), ("seed", 2**63)])
def test_bad_number_of_a_single_row_is_refused_at_submission(option, value):
    session = bass.Session(PAIR)
    with refused(ValueError, option, value):
        session.submit(PROMPTS[0], max_new_tokens=8, **{option: value})
    assert session.idle


def test_no_new_tokens_are_an_empty_result():
    with forward_passes(TARGET, DRAFT) as passes:
        out = generate(PROMPTS, max_new_tokens=0)
    assert [len(sequence) for sequence in out.sequences] == [0, 0, 0]
    assert [len(logprobs) for logprobs in out.logprobs] == [0, 0, 0]
    assert out.finish_reasons == ["length"] * 3
    assert passes == []


def test_stop_strings_without_a_tokenizer_are_refused():
    with refused(ValueError, "stop", "tokenizer="):
        generate(PROMPTS, stop=["end"])


@pytest.mark.parametrize("stop", ["", ["end", ""]], ids=repr)
def test_empty_stop_string_is_refused(stop):
    with refused(ValueError, "stop", "empty string"):
        generate(PROMPTS, bass.ModelPair(TARGET, DRAFT, byte_tokenizer()), stop=stop)


@pytest.mark.parametrize("stop", [None, 3, b"end", ["end", 3]], ids=repr)
def test_stop_that_is_no_text_is_refused(stop):
    with refused(TypeError, "stop must be", repr(stop)):
        generate(PROMPTS, bass.ModelPair(TARGET, DRAFT, byte_tokenizer()), stop=stop)


def test_ragged_attention_without_its_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(kernel_ops, "obstacle", lambda device: "the package bass_kernels is not installed")
    with refused(ValueError, "attention='ragged'", "bass_kernels", "auto"):
        generate(PROMPTS, attention="ragged")


def test_named_attention_path_never_falls_back():
    codegen = bass.ModelPair(tiny_model("codegen", dtype="float64"))
    with pytest.raises(ValueError, match=r"CodeGen.*pad.*attention='auto'"):
        generate(PROMPTS, codegen, attention="pad")


# --- models ---------------------------------------------------------------------------------------

T5 = AutoModelForSeq2SeqLM.from_config(
    T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
)
BERT_CONFIG = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    initializer_range=0.3,  # a smaller scale would hide that it looks ahead
)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (T5, ["T5ForConditionalGeneration", "encoder-decoder"]),
        (BertForMaskedLM(BERT_CONFIG), ["BertForMaskedLM", "AutoModelForCausalLM"]),
        (AutoModel.from_config(TARGET.config), ["LlamaModel", "AutoModelForCausalLM"]),
        (copy.deepcopy(TARGET).to("meta"), ["meta device", "load its weights"]),
    ],
    ids=["encoder-decoder", "encoder", "no head", "meta tensors"],
)
def test_model_that_cannot_continue_text_is_refused_as_target_and_as_draft(model, words):
    with pytest.raises(ValueError) as as_target:
        bass.ModelPair(model, DRAFT)
    with pytest.raises(ValueError) as as_draft:
        bass.ModelPair(TARGET, model)
    for role, caught in (("target", as_target), ("draft", as_draft)):
        assert all(word in str(caught.value) for word in [role, *words])


@pytest.mark.parametrize("thing", ["Qwen/Qwen2.5-0.5B", torch.nn.Linear(2, 2), 3], ids=["name", "module", "int"])
def test_what_is_no_transformers_model_is_refused(thing):
    with pytest.raises(TypeError, match="target must be a transformers model"):
        bass.ModelPair(thing)
    with pytest.raises(TypeError, match="draft must be a transformers model, a Drafter or None"):
        bass.ModelPair(TARGET, thing)


def test_models_on_different_devices_are_refused(monkeypatch):
    draft = tiny_model("gpt2")
    monkeypatch.setattr(type(draft), "device", torch.device("cuda", 1), raising=False)
    with pytest.raises(ValueError, match="target is on cpu and draft on cuda:1; move both"):
        bass.ModelPair(TARGET, draft)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (tiny_model("bloom"), ["BloomForCausalLM", "ALiBi"]),
        (tiny_model("bamba"), ["BambaForCausalLM", "recurrent state"]),
        (BertLMHeadModel(BERT_CONFIG).eval(), ["BertLMHeadModel"]),
    ],
    ids=["bloom", "bamba", "bidirectional"],
)
def test_architecture_without_a_right_path_is_refused_as_target_and_as_draft(model, words):
    for pair in (bass.ModelPair(model, DRAFT), bass.ModelPair(TARGET, model)):
        with pytest.raises(ValueError) as caught:
            generate(PROMPTS, pair)
        assert all(word in str(caught.value) for word in words)


# --- tokenizers and vocabularies ------------------------------------------------------------------


def test_tokenizers_of_one_size_that_differ_in_one_token_are_refused():
    tokenizer, swapped = byte_tokenizer(), byte_tokenizer(swap=(100, 200))
    assert len(tokenizer) == len(swapped)
    words = "id 100 is .* for the target and .* for the draft.*(same family|draft=None)"
    with pytest.raises(ValueError, match=words):
        bass.ModelPair(TARGET, DRAFT, tokenizer, swapped)


def test_tokenizers_with_the_same_tokens_fit():
    bass.ModelPair(TARGET, DRAFT, byte_tokenizer(), byte_tokenizer())


def test_tokenizer_with_more_tokens_at_its_end_fits():
    longer = byte_tokenizer()
    longer.add_tokens(["<tail>"])
    bass.ModelPair(TARGET, DRAFT, byte_tokenizer(), longer)
    bass.ModelPair(TARGET, DRAFT, longer, byte_tokenizer())


@pytest.fixture(scope="module")
def padded_pairs():
    """Target and draft that agree but for 40 ids that only one of them has: {"target": ..., "draft": ...}."""
    large = tiny_model(dtype="float64", vocab_size=VOCABULARY + 40)
    small = copy.deepcopy(large)
    small.resize_token_embeddings(VOCABULARY)
    return {"target": bass.ModelPair(large, small), "draft": bass.ModelPair(small, large)}


@pytest.mark.parametrize("larger", ["target", "draft"])
def test_padded_vocabulary_leaves_greedy_text_exact(padded_pairs, larger):
    pair = padded_pairs[larger]
    out = generate(PROMPTS, pair, max_new_tokens=20, eos_token_id=(), trace="tokens")
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
        assert torch.equal(sequence, greedy_alone(pair.target, prompt, 20))
    assert out.trace.summary()["acceptance_rate"] > (0 if larger == "target" else 0.5)


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("larger", ["target", "draft"])
def test_padded_vocabulary_leaves_sampled_text_and_drafts_within_what_the_models_know(
    padded_pairs, larger, verification
):
    pair = padded_pairs[larger]
    options = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": (), "verification": verification}
    out = generate(PROMPTS, pair, trace="tokens", repetition_penalty=1.1, **options)
    tokens = out.trace.tokens
    drafted = tokens.token[tokens.kind.isin(["accepted", "rejected"])]
    assert drafted.max() < VOCABULARY
    emitted = torch.cat(out.sequences)
    assert bool((emitted >= VOCABULARY).any()) == (larger == "target")  # the tail is the target's own to use
    assert all(logprobs.isfinite().all() for logprobs in out.logprobs)


@pytest.mark.parametrize("larger", ["target", "draft"])
def test_padded_vocabulary_leaves_coupled_text_that_of_regular_decoding(padded_pairs, larger):
    options = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": (), "verification": "coupled"}
    drafted = generate(PROMPTS, padded_pairs[larger], draft_length=5, **options)
    regular = generate(PROMPTS, padded_pairs[larger], draft_length=0, **options)
    assert all(torch.equal(a, b) for a, b in zip(drafted.sequences, regular.sequences, strict=True))
    assert drafted.trace.summary()["acceptance_rate"] > 0
