"""Faults that gave wrong text without a word: options of the model's own, extremes of dtype and temperature, stops."""

import copy

import pytest
import tokenizers
import torch
from tiny import byte_tokenizer, greedy_alone, ragged_prompts, tiny_model
from transformers import GenerationConfig, PreTrainedTokenizerFast

import bass_core as bass
from bass_core import probe, sampling
from bass_core.rows import StopStrings
from bass_core.sampling import SamplingParams

PROMPTS = ragged_prompts(5, 9, 13)


def own_pair(**generation) -> bass.ModelPair:
    """A pair whose target asks for these options wherever it is decoded."""
    target = copy.deepcopy(tiny_model(dtype="float64"))
    target.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **generation)
    return bass.ModelPair(target, tiny_model(dtype="float64", noise=0.02))


# --- what the model asks for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5, 6]]},
        {"forced_eos_token_id": 2}, {"forced_bos_token_id": 1}, {"min_length": 9}, {"min_new_tokens": 3},
        {"num_beams": 2}, {"guidance_scale": 1.5}, {"sequence_bias": [[[5], 1.0]]},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_option_of_the_models_own_that_changes_its_text_is_refused_by_name_unless_overridden(asked):
    pair, name = own_pair(**asked), next(iter(asked))
    with pytest.raises(ValueError, match=f"asks for {name}=.*cannot be honoured"):
        bass.generate(pair, PROMPTS, max_new_tokens=4)
    out = bass.generate(pair, PROMPTS, max_new_tokens=4, generation_config=GenerationConfig())
    assert [len(row) for row in out.sequences] == [4, 4, 4]


def test_what_the_refusal_advises_keeps_the_ends_of_rows():
    pair = own_pair(no_repeat_ngram_size=2)
    pair.target.generation_config.eos_token_id = [7, 8]
    with pytest.raises(ValueError, match=r"generation_config=transformers\.GenerationConfig\(eos_token_id=\[7, 8\]\)"):
        bass.generate(pair, PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "num_return_sequences", "max_time"])
def test_a_generation_config_that_says_how_long_or_how_many_is_not_passed_over(name):
    with pytest.raises(ValueError, match=f"generation_config says {name}=3, .*say so in the call"):
        bass.generate(own_pair(), PROMPTS, generation_config=GenerationConfig(do_sample=True, **{name: 3}))
    own = own_pair(do_sample=True, **{name: 3})  # what a checkpoint brings is for `generate`
    assert len(bass.generate(own, PROMPTS, max_new_tokens=7)) == len(PROMPTS)


@pytest.mark.parametrize("option", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids"])
def test_ids_that_the_models_own_options_suppress_are_never_chosen(option):
    prompt, new = PROMPTS[1], 12
    common = greedy_alone(tiny_model(dtype="float64"), prompt, new).tolist()
    pair = own_pair(**{option: [[each] for each in common[:3]] if option == "bad_words_ids" else common[:3]})
    alone = pair.target.generate(prompt[None], max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
    assert alone[0] not in common[:3]
    for k in (0, 3):
        assert bass.generate(pair, [prompt], max_new_tokens=new, draft_length=k).sequences[0].tolist() == alone
    drawn = bass.generate(pair, [prompt], num_return_sequences=40, temperature=3.0, max_new_tokens=new)
    looked_at = 1 if option == "begin_suppress_tokens" else new
    assert not {token for row in drawn.sequences for token in row[:looked_at].tolist()} & set(common[:3])
    overridden = bass.generate(pair, [prompt], max_new_tokens=new, generation_config=GenerationConfig())
    assert overridden.sequences[0].tolist() == common


def test_repetition_penalty_of_the_models_own_is_honoured_by_both_ways_and_overridden():
    pair = own_pair(repetition_penalty=1.7)
    prompt = PROMPTS[1]
    alone = pair.target.generate(prompt[None], max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    plain = greedy_alone(pair.target, prompt, 16)
    assert alone.tolist() != plain.tolist()
    ours = bass.generate(pair, [prompt], max_new_tokens=16).sequences[0]
    by_hf = pair.target.generate(
        prompt[None], max_new_tokens=16, custom_generate=bass.bass_generate, draft_model=pair.draft
    )[0, len(prompt) :]
    assert ours.tolist() == by_hf.tolist() == alone.tolist()
    for options in ({"repetition_penalty": 1.0}, {"generation_config": GenerationConfig()}):
        assert bass.generate(pair, [prompt], max_new_tokens=16, **options).sequences[0].tolist() == plain.tolist()


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-46, 5e-324])
def test_any_temperature_above_zero_gives_a_law(temperature, dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, -1e30, 1e30, 2.0]], dtype=dtype)
    found = sampling.probabilities(logits, SamplingParams(temperature=temperature))
    assert found.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0]] and found.dtype == dtype


def test_text_at_a_vanishing_temperature_is_the_greedy_one():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.02))
    cold, greedy = (bass.generate(pair, PROMPTS, temperature=t, eos_token_id=(), max_new_tokens=12) for t in (1e-46, 0))
    assert [row.tolist() for row in cold.sequences] == [row.tolist() for row in greedy.sequences]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_torchs_default_dtype_changes_nothing(default, verification):
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.02))
    options = {"temperature": 0.8, "verification": verification, "eos_token_id": (), "max_new_tokens": 12}
    expected = bass.generate(pair, PROMPTS, **options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = bass.generate(pair, PROMPTS, **options)
    finally:
        torch.set_default_dtype(before)
    assert [row.tolist() for row in found.sequences] == [row.tolist() for row in expected.sequences]
    assert all(torch.equal(a, b) for a, b in zip(found.logprobs, expected.logprobs, strict=True))


# --- what half precision hides --------------------------------------------------------------------


def louder_in_batches(module, args, kwargs, output):
    """A fault by which a row of several is off by less than bfloat16 rounds in a deep model."""
    if kwargs["input_ids"].shape[0] > 1:
        output.logits = output.logits * 1.01
    return output


def test_small_model_of_half_precision_is_probed_in_float32():
    model = copy.deepcopy(tiny_model(dtype="bfloat16"))
    model.register_forward_hook(louder_in_batches, with_kwargs=True)
    with pytest.raises(ValueError, match=r"pad: its logits are off by 1\.0e-02 \(allowed 1e-03\)"):
        probe.resolve(model, "pad")
    assert model.dtype == torch.bfloat16


def test_mask_of_doges_own_that_a_path_loses_is_found_in_half_precision_too():
    with pytest.raises(ValueError, match="pad: its logits are off"):
        probe.resolve(tiny_model("doge", dtype="bfloat16"), "pad")


# --- stop strings ---------------------------------------------------------------------------------


def grouped(stop: StopStrings, tokens: list[int], sizes: list[int]) -> int | None:
    """How many tokens a row has when it stops, if steps bring so many at a time."""
    at = 0
    for size in sizes:
        found = stop.completed_at(torch.tensor(tokens[: at + size]).numpy(), len(tokens[: at + size]) - at)
        if found is not None:
            return at + found
        at += size
    return None


def word_pieces() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "a", "##b", ".", "c", "'", "s", "[X]"]
    model = tokenizers.models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["[X]"], unk_token="[UNK]")


@pytest.mark.parametrize("seed", range(40))
def test_where_a_row_stops_is_a_function_of_its_tokens_alone(seed):
    """Also for matches that the next token takes back: half of a character, a space before a full stop."""
    generator = torch.Generator().manual_seed(seed)
    for tokenizer, stops in ((byte_tokenizer(), ("\ufffd", "é", "a")), (word_pieces(), ("a ", "ab .", "c '", " "))):
        size = len(tokenizer)
        for stop in stops:
            finder = StopStrings((stop,), lambda ids, by=tokenizer: by.decode(ids, skip_special_tokens=True))
            tokens = torch.randint(0, size, (24,), generator=generator).tolist()
            if size > 100:
                tokens = [*tokenizer("aé bé")["input_ids"], *tokens[:8], *tokenizer("x é")["input_ids"]]
            text = [tokenizer.decode(tokens[: n + 1], skip_special_tokens=True) for n in range(len(tokens))]
            expected = next((n + 1 for n, each in enumerate(text) if stop in each), None)
            for sizes in ([1] * len(tokens), [len(tokens)], [3] * 12, [5, 1, 7, 2, 9, 4, 8]):
                assert grouped(finder, tokens, sizes) == expected, (stop, tokens, sizes)


def test_stop_string_across_many_special_tokens_is_found():
    tokenizer = byte_tokenizer()
    finder = StopStrings(("ab",), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    a, b = tokenizer("a")["input_ids"][-1], tokenizer("b")["input_ids"][-1]
    tokens = [a, *[1] * 200, b]
    assert grouped(finder, tokens, [1] * len(tokens)) == grouped(finder, tokens, [len(tokens)]) == len(tokens)
