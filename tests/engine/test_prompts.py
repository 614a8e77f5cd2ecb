"""What prompts may be: texts, conversations, token ids, and what tokenizers return, padding and all."""

import numpy as np
import pytest
import tokenizers
import torch
from tiny import BYTES, byte_tokenizer, ragged_prompts, tiny_model

import bass_core as bass
from bass_core import inputs

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}{% if not loop.last or add_generation_prompt %}|{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "2 + 2?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is"}]
TEXTS = ["a", "a longer one", "b c"]


def tokenizer_with(**changes):
    """A tokenizer that writes <s> before each text and pads on the left."""
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
    """The token ids that a call would decode from."""
    return [inputs.prompt_ids(each, tokenizer, BYTES).tolist() for each in inputs.prompt_list(prompts)]


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_decodes_as_its_rows_alone(side):
    padded = tokenizer_with(padding_side=side)(TEXTS, return_tensors="pt", padding=True)
    assert padded["attention_mask"].min() == 0
    together = bass.generate(PAIR, padded, max_new_tokens=6, eos_token_id=())
    assert [s.tolist() for s in together.sequences] == [
        bass.generate(PAIR, text, max_new_tokens=6, eos_token_id=()).sequences[0].tolist() for text in TEXTS
    ]


@pytest.mark.parametrize(
    "prompts",
    [
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
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_all_ways_to_give_texts_are_one(prompts):
    assert read(prompts) == [ids_of(text) for text in TEXTS]


@pytest.mark.parametrize(
    "of",
    [
        TOKENIZER,
        lambda text: TOKENIZER(text, return_tensors="pt"),
        lambda text: TOKENIZER(text, return_tensors="np"),
        ids_of,
        lambda text: np.array(ids_of(text)),
        lambda text: torch.tensor([ids_of(text)]),
    ],
)
def test_one_text_needs_no_list_around_what_the_tokenizer_made_of_it(of):
    assert read(of("a text")) == [ids_of("a text")]


def test_arrays_of_equal_lengths_are_as_many_prompts():
    """They would also make one long one."""
    assert read(TOKENIZER(["abc", "xyz"], return_tensors="np")) == [ids_of("abc"), ids_of("xyz")]


def test_a_conversation_is_written_out_by_the_chat_template_with_the_assistants_turn_next():
    assert read(ASKED) == [ids_of("<user>2 + 2?|<assistant>")]
    assert read([ASKED, "a text", ASKED]) == [read(ASKED)[0], ids_of("a text"), read(ASKED)[0]]


def test_an_answer_that_was_begun_goes_on():
    assert read(BEGUN) == [ids_of("<user>2 + 2?|<assistant>It is")]


def test_a_text_that_brings_its_bos_gets_no_second_one():
    text = TOKENIZER.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<s>") and ids_of(text)[:2] == [1, 1]
    assert read(text) == read(ASKED)
    assert read(ASKED)[0][:2] != [1, 1]


def test_a_second_bos_that_the_caller_wrote_stays():
    assert read("<s><s>a", byte_tokenizer())[0][:2] == [1, 1]


def test_a_session_takes_the_same_prompts():
    with bass.Session(PAIR, eos_token_id=()) as session:
        ways = (ASKED, TOKENIZER("a"), "a", np.array([ids_of("a")]))
        rows = [session.submit(prompt, max_new_tokens=4) for prompt in ways]
        while not session.idle:
            session.step()
        chat, first, second, third = (session.result(row).sequence.tolist() for row in rows)
    assert first == second == third
    assert chat == bass.generate(PAIR, ASKED, max_new_tokens=4, eos_token_id=()).sequences[0].tolist()


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        (["a", []], ValueError, "prompt 1: a prompt is empty"),
        (["a", "b", [1, 2, 900]], ValueError, "prompt 2: token id 900 is outside"),
        ([[5], [1.5]], TypeError, "prompt 1: token ids must be integers"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, ValueError, "come with their attention_mask"),
        ({"input_ids": torch.ones(1, 4), "attention_mask": torch.ones(1, 3)}, ValueError, "the same shape"),
        ({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 0, 1]]}, ValueError, "0 over the padding before or behind"),
        ({"input_ids": [[3, 4]], "attention_mask": [[0, 0]]}, ValueError, "prompt 0: a prompt is empty"),
        ({"attention_mask": [[1]]}, TypeError, "input_ids"),
        (
            {"input_ids": torch.ones(1, 2, 3), "attention_mask": torch.ones(1, 2, 3)},
            ValueError,
            r"rows of shape \(2, 3",
        ),
        ([TOKENIZER(["a", "b"])], ValueError, "prompt 0: a prompt must be one row of token ids, got 2 rows"),
        (
            [[{"role": "tool", "content": "4"}]],
            ValueError,
            "prompt 0: .*chat template refuses .*no tools",
        ),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:30],
)
def test_prompts_at_fault_are_refused_by_their_number(prompts, kind, message):
    with pytest.raises(kind, match=message):
        bass.generate(PAIR, prompts, max_new_tokens=2)


def test_a_prompt_beyond_the_context_is_named_by_its_number():
    with pytest.raises(ValueError, match=r"prompt 1: prompt \(3 tokens\) \+ max_new_tokens"):
        bass.generate(PAIR, [[5], [5, 6, 7]], max_new_tokens=min(PAIR.contexts.values()) - 1)


def test_a_conversation_needs_a_chat_template():
    pair = bass.ModelPair(PAIR.target, tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        bass.generate(pair, ASKED)


@pytest.mark.parametrize("call", [lambda model: bass.generate(model, ragged_prompts(3)), bass.Session])
def test_a_model_where_a_pair_belongs_is_told_how_to_be_one(call):
    with pytest.raises(TypeError, match=r"pair must be a ModelPair, got LlamaForCausalLM; .*ModelPair\(model, small"):
        call(PAIR.target)
    with pytest.raises(TypeError, match=r"got str; load_pair\(\) loads the embedded one"):
        call("Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([{"rol": "user", "content": "x"}], r'conversations \(\[{"role": "user", .* got a mapping with rol, content'),
        ({"role": "user", "content": "x"}, "conversations .* got a mapping with role, content"),
        ({"prompt": "x"}, "prompts must be texts, .* got a mapping with prompt"),
        ([{"role": "user"}], 'has a "role" and a "content"; got'),
    ],
)
def test_what_is_nearly_a_conversation_is_told_what_one_is(prompt, says):
    with pytest.raises((TypeError, ValueError), match=says):
        bass.generate(PAIR, prompt, max_new_tokens=2)


def test_arguments_in_the_wrong_order_are_told_the_right_one():
    with pytest.raises(TypeError, match=r"got list; load_pair.*prompts come after it"):
        bass.generate(["x"], PAIR)


def test_a_prompt_beyond_the_context_is_not_told_to_want_fewer_new_tokens():
    with pytest.raises(ValueError, match=r"shorten the prompt$"):
        bass.generate(bass.ModelPair(tiny_model()), torch.zeros(97, dtype=torch.int64) + 3)
