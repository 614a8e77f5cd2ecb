import copy

import numpy as np
import pytest
import tokenizers
import torch
from recording import texts
from tiny import BYTES, byte_tokenizer, forward_passes, tiny_model

import bass_core as bass
from bass_core.prompts import prompt_ids, prompt_list

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}{% if not loop.last or add_generation_prompt %}|{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "2 + 2?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is"}]
TEXTS = ["a", "a longer one", "b c"]


def tokenizer_with(**changes):
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.padding_side = "left"
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


TOKENIZER = tokenizer_with(chat_template=CHAT)
PAIR = bass.ModelPair(tiny_model(vocab_size=BYTES), tiny_model(vocab_size=BYTES, noise=0.1), TOKENIZER)


def read(prompts, tokenizer=TOKENIZER):
    return [prompt_ids(each, tokenizer, BYTES).tolist() for each in prompt_list(prompts)]


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_decodes_as_its_rows_alone(side):
    padded = tokenizer_with(padding_side=side)(TEXTS, return_tensors="pt", padding=True)
    assert padded["attention_mask"].min() == 0
    together = bass.generate(PAIR, padded, max_new_tokens=6, eos_token_id=())
    assert [s.tolist() for s in together.sequences] == [
        bass.generate(PAIR, text, max_new_tokens=6, eos_token_id=()).sequences[0].tolist() for text in TEXTS
    ]


def test_all_forms_of_texts_are_equal():
    for prompts in (
        TEXTS,
        tuple(TEXTS),
        TOKENIZER(TEXTS),
        TOKENIZER(TEXTS, return_tensors="pt", padding=True),
        dict(TOKENIZER(TEXTS, return_tensors="pt", padding=True)),
        TOKENIZER(TEXTS, return_tensors="np", padding=True),
        {"input_ids": TOKENIZER(TEXTS)["input_ids"]},
        [TOKENIZER(text) for text in TEXTS],
        [TOKENIZER(text, return_tensors="pt") for text in TEXTS],
        [TOKENIZER(text, return_tensors="pt")["input_ids"] for text in TEXTS],
        [TOKENIZER(text)["input_ids"] for text in TEXTS],
    ):
        assert read(prompts) == [ids_of(text) for text in TEXTS], prompts
    equal = TOKENIZER(["abc", "xyz"], return_tensors="np")  # an array could also be one long prompt
    assert read(equal) == [ids_of("abc"), ids_of("xyz")]
    ids, one = ids_of("a text"), [TOKENIZER("a text", return_tensors=kind) for kind in (None, "pt", "np")]
    for prompt in (*one, ids, np.array(ids), torch.tensor([ids])):
        assert read(prompt) == [ids], prompt


def test_conversation_is_written_by_the_chat_template():
    expected = ids_of("<user>2 + 2?|<assistant>")
    assert read(ASKED) == [expected] and expected[:2] != [1, 1]
    assert read([ASKED, "a text", ASKED]) == [expected, ids_of("a text"), expected]
    assert read(BEGUN) == [ids_of("<user>2 + 2?|<assistant>It is")]


def test_text_with_a_bos_gets_no_second_bos():
    text = TOKENIZER.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<s>") and ids_of(text)[:2] == [1, 1]
    assert read(text) == read(ASKED)
    assert read("<s><s>a", byte_tokenizer())[0][:2] == [1, 1]  # both come from the caller


def test_session_takes_the_same_prompts():
    with bass.Session(PAIR, eos_token_id=()) as session:
        forms = (ASKED, TOKENIZER("a"), "a", np.array([ids_of("a")]))
        rows = [session.submit(prompt, max_new_tokens=4) for prompt in forms]
        chat, first, second, third = texts(session, rows)
    assert first == second == third
    assert chat == bass.generate(PAIR, ASKED, max_new_tokens=4, eos_token_id=()).sequences[0].tolist()


UNPROBED = bass.ModelPair(*copy.deepcopy(PAIR.models), TOKENIZER)  # refusals come before the probe
ONES = torch.ones(2, 3, dtype=torch.int64)
OUTSIDE = rf"is outside the target's vocabulary.*0 … {BYTES - 1}"


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        ([], ValueError, "prompts is empty.*at least one"),
        (None, TypeError, "prompts must be"),
        (["a", []], ValueError, "prompt 1: a prompt is empty.*at least one token"),
        (["a", torch.zeros(0)], ValueError, "prompt 1: a prompt is empty"),
        (["a", "b", [1, 2, 900]], ValueError, f"prompt 2: token id 900 {OUTSIDE}"),
        ([[5], torch.tensor([5, -1])], ValueError, f"prompt 1: token id -1 {OUTSIDE}"),
        ([torch.tensor([5, BYTES])], ValueError, f"token id {BYTES} {OUTSIDE}"),
        ([[5], [1.5]], TypeError, "prompt 1: token ids must be integers"),
        ([[True, False]], TypeError, "token ids"),
        ([torch.tensor([5.5])], TypeError, "token ids"),
        ([None], TypeError, "token ids"),
        ([ONES], ValueError, r"1-D.*\(2, 3\)"),
        ([[[1, 2], [3, 4]]], ValueError, r"1-D.*\(2, 2\)"),
        (ONES, TypeError, "prompts must be .*attention_mask"),
        ({"input_ids": ONES}, ValueError, "several rows of token ids need an attention_mask"),
        ({"input_ids": ONES, "attention_mask": ONES[:1]}, ValueError, "the same shape"),
        ({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 0, 1]]}, ValueError, "0 over the padding before or after"),
        ({"input_ids": [[3, 4]], "attention_mask": [[0, 0]]}, ValueError, "prompt 0: a prompt is empty"),
        ({"attention_mask": [[1]]}, TypeError, "input_ids"),
        ({"input_ids": ONES[None], "attention_mask": ONES[None]}, ValueError, r"rows of shape \(2, 3"),
        ([TOKENIZER(["a", "b"])], ValueError, "prompt 0: a prompt must be one row of token ids, got 2 rows"),
        ([[{"role": "tool", "content": "4"}]], ValueError, "prompt 0: .*chat template refuses .*no tools"),
        (
            [{"rol": "user", "content": "x"}],
            TypeError,
            r'conversations \(\[{"role": "user", .* got a mapping with rol, content',
        ),
        ({"role": "user", "content": "x"}, TypeError, "conversations .* got a mapping with role, content"),
        ({"prompt": "x"}, TypeError, "prompts must be texts, .* got a mapping with prompt"),
        ([{"role": "user"}], ValueError, 'has a "role" and a "content"; got'),
        ([[5], [3] * 96], ValueError, r"prompt 1: prompt \(96 tokens\) \+ max_new_tokens"),
        ([[3] * 97], ValueError, "shorten the prompt$"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:30],
)
def test_bad_prompts_are_refused_by_number(prompts, kind, message):
    with forward_passes(*UNPROBED.models) as passes, pytest.raises(kind, match=message):
        bass.generate(UNPROBED, prompts, max_new_tokens=2)
    assert passes == []


def test_texts_with_no_ids_or_unknown_ids_are_refused():
    pair = bass.ModelPair(tiny_model(), tokenizer=byte_tokenizer())
    for text, message in (("", "a prompt is empty"), ("é", "outside the target's vocabulary")):
        with pytest.raises(ValueError, match=message):
            bass.generate(pair, text)


def test_conversation_needs_a_chat_template():
    pair = bass.ModelPair(PAIR.target, tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        bass.generate(pair, ASKED)


@pytest.mark.parametrize("call", [lambda model: bass.generate(model, [[3, 4]]), bass.Session])
def test_first_argument_must_be_a_pair(call):
    with pytest.raises(TypeError, match=r"pair must be a ModelPair, got LlamaForCausalLM; .*ModelPair\(model, small"):
        call(PAIR.target)
    with pytest.raises(TypeError, match=r"got str; load_pair\(\) loads the embedded pair"):
        call("Qwen/Qwen2.5-0.5B")
    with pytest.raises(TypeError, match=r"got list; load_pair.*prompts come after the pair"):
        bass.generate(["x"], PAIR)
