"""Faults that changed text without an error: generation configs, extreme dtypes, stop strings."""

import copy

import pytest
import torch
from tiny import greedy_alone, ragged_prompts, tiny_model
from transformers import GenerationConfig

import bass_core as bass
from bass_core.model import probe

PROMPTS = ragged_prompts(5, 9, 13)


def own_pair(**generation) -> bass.ModelPair:
    target = copy.deepcopy(tiny_model(dtype="float64"))
    target.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **generation)
    return bass.ModelPair(target, tiny_model(dtype="float64", noise=0.02))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forced_eos_token_id", 2), ("num_beams", 2), ("guidance_scale", 1.5), ("typical_p", 0.5),
    ],
)  # fmt: skip
def test_unsupported_option_is_refused_unless_overridden(name, value):
    pair = own_pair(**{name: value})
    pair.target.generation_config.eos_token_id = [7, 8]
    advice = r"generation_config=transformers\.GenerationConfig\(eos_token_id=\[7, 8\]\)"
    with pytest.raises(ValueError, match=f" has {name}=.*is not supported.*{advice}"):
        bass.generate(pair, PROMPTS, max_new_tokens=4)
    out = bass.generate(pair, PROMPTS, max_new_tokens=4, generation_config=GenerationConfig())
    assert [len(row) for row in out.sequences] == [4, 4, 4]


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "num_return_sequences", "max_time"])
def test_limits_in_a_generation_config_are_refused(name):
    with pytest.raises(ValueError, match=f"generation_config has {name}=3, .*to the call"):
        bass.generate(own_pair(), PROMPTS, generation_config=GenerationConfig(do_sample=True, **{name: 3}))
    own = own_pair(do_sample=True, **{name: 3})  # the checkpoint's own limits are ignored
    assert len(bass.generate(own, PROMPTS, max_new_tokens=7)) == len(PROMPTS)


def test_generation_config_sampling_is_refused_unless_repeated():
    asked = GenerationConfig(do_sample=True, temperature=1.5)
    with pytest.raises(ValueError, match=r"has temperature=1.5 with do_sample=True, but the call has temperature=0.0"):
        bass.generate(own_pair(), PROMPTS, generation_config=asked, max_new_tokens=3)
    out = bass.generate(own_pair(), PROMPTS, generation_config=asked, temperature=1.5, max_new_tokens=3)
    assert len(out) == len(PROMPTS)


@pytest.mark.parametrize("option", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids"])
def test_suppressed_ids_are_never_chosen(option):
    prompt, new = PROMPTS[1], 12
    common = greedy_alone(tiny_model(dtype="float64"), prompt, new).tolist()
    pair = own_pair(**{option: [[each] for each in common[:3]] if option == "bad_words_ids" else common[:3]})
    alone = pair.target.generate(prompt[None], max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
    assert alone[0] not in common[:3]
    for k in (0, 3):
        assert bass.generate(pair, [prompt], max_new_tokens=new, draft_length=k).sequences[0].tolist() == alone
    drawn = bass.generate(pair, [prompt], num_return_sequences=40, temperature=3.0, max_new_tokens=new)
    suppressed = 1 if option == "begin_suppress_tokens" else new
    assert not {token for row in drawn.sequences for token in row[:suppressed].tolist()} & set(common[:3])
    overridden = bass.generate(pair, [prompt], max_new_tokens=new, generation_config=GenerationConfig())
    assert overridden.sequences[0].tolist() == common


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_ids": [[29, 80], [3, 4, 5], [7]]},
        {"sequence_bias": [[[each], 4.0] for each in range(9)] + [[[3, 4], -2.0]], "repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 1, "suppress_tokens": list(range(20))},
        {"min_length": 20, "eos_token_id": list(range(30))},
        {"min_new_tokens": 5, "min_length": 30, "eos_token_id": list(range(30))},
    ],
    ids=",".join,
)
def test_options_of_the_model_are_those_of_transformers(options):
    pair = own_pair()
    pair.target.generation_config.update(**options)
    common = greedy_alone(tiny_model(dtype="float64"), PROMPTS[0], 12).tolist()
    if "bad_words_ids" in options:
        pair.target.generation_config.bad_words_ids += [common[2:4], common[5:8]]
    for prompt in PROMPTS:
        expected = pair.target.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for k in (0, 3):
            assert bass.generate(pair, prompt, max_new_tokens=12, draft_length=k).sequences[0].tolist() == expected


def test_repetition_penalty_of_the_model_is_honoured_and_overridden():
    pair, prompt = own_pair(repetition_penalty=1.7), PROMPTS[1]
    alone = pair.target.generate(prompt[None], max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    plain = greedy_alone(pair.target, prompt, 16)
    assert alone.tolist() != plain.tolist()
    ours = bass.generate(pair, [prompt], max_new_tokens=16).sequences[0]
    options = {"custom_generate": bass.bass_generate, "draft_model": pair.draft}
    by_hf = pair.target.generate(prompt[None], max_new_tokens=16, **options)[0, len(prompt) :]
    assert ours.tolist() == by_hf.tolist() == alone.tolist()
    for options in ({"repetition_penalty": 1.0}, {"generation_config": GenerationConfig()}):
        assert bass.generate(pair, [prompt], max_new_tokens=16, **options).sequences[0].tolist() == plain.tolist()


def test_text_at_a_vanishing_temperature_is_greedy():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.02))
    cold, greedy = (bass.generate(pair, PROMPTS, temperature=t, eos_token_id=(), max_new_tokens=12) for t in (1e-46, 0))
    assert [row.tolist() for row in cold.sequences] == [row.tolist() for row in greedy.sequences]


@pytest.mark.parametrize(
    ("default", "verification"), [(torch.bfloat16, "token"), (torch.float64, "block"), (torch.bfloat16, "coupled")]
)
def test_torchs_default_dtype_changes_nothing(default, verification):
    pair, found, before = bass.ModelPair(tiny_model(), tiny_model(noise=0.02)), [], torch.get_default_dtype()
    options = {"temperature": 0.8, "verification": verification, "eos_token_id": (), "max_new_tokens": 12}
    for dtype in (before, default):
        torch.set_default_dtype(dtype)
        try:
            found.append(bass.generate(pair, PROMPTS, **options))
        finally:
            torch.set_default_dtype(before)
    for name in ("sequences", "logprobs"):
        assert all(map(torch.equal, *(getattr(each, name) for each in found)))


def test_half_precision_models_are_probed_in_float32():
    def louder_in_batches(module, args, kwargs, output):
        output.logits *= 1.01 if len(kwargs["input_ids"]) > 1 else 1

    model = copy.deepcopy(tiny_model(dtype="bfloat16"))
    model.register_forward_hook(louder_in_batches, with_kwargs=True)
    with pytest.raises(ValueError, match=r"pad: its logits are off by 1\.0e-02 \(allowed 1e-03\)"):
        probe.resolve(model, "pad")
    assert model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="pad: its logits are off"):  # the path loses Doge's own mask
        probe.resolve(tiny_model("doge", dtype="bfloat16"), "pad")
