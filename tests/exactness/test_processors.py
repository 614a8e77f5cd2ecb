"""Processors: the distribution by enumeration, built-in processors against plain formulas, grammars, and refusals."""

import itertools
import json
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass

import llguidance
import llguidance.hf
import numpy as np
import pytest
import torch
from recording import use_on_cpu
from sessions import run_to_the_end
from tiny import byte_tokenizer, feature_head, tiny_model
from transformers import LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

import bass_core as bass
import bass_lab as lab
from bass_core.exactness.processors import Processing, Row, Text
from bass_lab.checks.enumeration import EXACT, PROMPT, exact_law, law_of_engine
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import tabular, total_variation

V = 31


class ByPrefix(LogitsProcessor):
    """Moves all logits by the whole text, and forbids an id if another id is possible."""

    def __call__(self, input_ids, scores):
        code = sum((token + 1) * 7**place for place, token in enumerate(input_ids[0].tolist()))
        moved = scores + torch.tensor([[(code * step) % 5 / 3 for step in range(1, scores.shape[1] + 1)]])
        fewer = moved.index_fill(-1, torch.tensor(code % 3), -torch.inf)
        return fewer if fewer.isfinite().any() else moved


@pytest.mark.parametrize(("rule", "k"), [("token", 2), ("block", 3)])
def test_distribution_with_a_processor_of_the_prefix(rule, k):
    target, draft, processors = tabular(3, seed=1), tabular(3, seed=2), [ByPrefix()]
    found = law_of_engine(target, draft, 4, lambda: k, verification=rule, processors=processors)
    assert total_variation(found, exact_law(target, 4, processors=processors)) < EXACT


def test_joint_distribution_with_a_processor_of_one_row():
    """A row with a processor and a waiting row without share steps; the first row's slot is used again."""
    target, draft, ways = tabular(3, seed=1), tabular(3, seed=2), ({"processors": [ByPrefix()]}, {})
    options = {"eos_token_id": (), "trace": "off", "attention": "pad", "draft_length": 2, "temperature": 1.0}

    def run():
        with bass.Session(bass.ModelPair(target, draft), **options) as session:
            rows = [session.submit(torch.tensor(PROMPT), max_new_tokens=2, **way) for way in ways]
            run_to_the_end(session)
            return tuple(tuple(session.result(row).sequence.tolist()) for row in rows)

    laws = [exact_law(target, 2, **way) for way in ways]
    expected = {(*a, *b): p * q for a, p in laws[0].items() for b, q in laws[1].items()}
    assert total_variation(Oracle().laws(run), expected) < EXACT


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_target_and_draft_are_processed_alike(monkeypatch, compile):
    """All drafts of the target itself are accepted."""
    use_on_cpu(monkeypatch)
    pair, processors = bass.ModelPair(TARGET, TARGET, TOKENIZER), [bass.Penalties(1.6, 0.9, 0.7), bass.Bias({9: 2.0})]
    options = {"temperature": 0.9, "draft_length": 4, "compile": compile, "max_new_tokens": 24, "eos_token_id": ()}
    steps = bass.generate(pair, PROMPTS, processors=processors, **options).trace.steps
    assert (steps.accepted == steps.drafted).all() and steps.drafted.max() == 4


def texts_of(generator, rows=5, longest=9, drafted=3) -> tuple[Text, list[list[int]], list[int]]:
    """Return random texts, the same as lists with the draft tokens, and the lengths of the prompts."""
    lengths = torch.randint(3, longest + 1, (rows,), generator=generator)
    tokens, drafts = (torch.randint(V, (rows, size), generator=generator) for size in (longest + 2, drafted))
    prompts = torch.ones_like(lengths) + torch.randint(2, (rows,), generator=generator)
    whole = [row[:size].tolist() + own.tolist() for row, size, own in zip(tokens, lengths, drafts, strict=True)]
    return Text(tokens, lengths, prompts, drafts), whole, prompts.tolist()


@pytest.mark.parametrize("positions", [1, 4])
def test_penalties_and_biases_follow_their_formulas(positions):
    generator = torch.Generator().manual_seed(3)
    text, whole, prompts = texts_of(generator)
    logits = torch.randn(5, positions, V, generator=generator)
    processors = bass.Penalties(1.7, 0.4, 0.3), bass.Bias({4: 2.5, 9: -np.inf}), bass.Bias({7: -np.inf}, until=6)
    found, possible = Processing([processors] * 5, np.zeros(5, int), V, torch.device("cpu"))(logits, text)
    assert possible.all()
    for row, (ids, prompt) in enumerate(zip(whole, prompts, strict=True)):
        for position in range(positions):
            before = ids[: len(ids) + 1 - positions + position]
            counts = Counter(before[prompt:])
            for each in range(V):
                value = logits[row, position, each].item()
                if each in before:
                    value = value * 1.7 if value < 0 else value / 1.7
                value -= 0.3 * counts[each] + 0.4 * (each in counts)
                value += {4: 2.5, 9: -np.inf}.get(each, 0)
                if each == 7 and len(before) - prompt < 6:
                    value = -np.inf
                assert found[row, position, each].item() == pytest.approx(value, abs=1e-5), (row, position, each)


def test_equal_processors_of_rows_are_called_once_and_expire():
    shapes = []

    class Noting(bass.Processor):
        def __call__(self, logits, text):
            shapes.append(tuple(logits.shape))
            return logits

    shared, late = Noting(), Noting()
    late.until = 2
    own = [(shared,), (bass.Bias({1: 1.0}), late), (shared,), (late,)]
    processing = Processing(own, np.array([0, 1, 2, 3]), V, torch.device("cpu"))
    processing(torch.zeros(4, 2, V), texts_of(torch.Generator().manual_seed(0), rows=4, drafted=1)[0])
    assert shapes == [(2, 2, V), (1, 2, V)]


# --- grammars -------------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()
MODEL = {"vocab_size": len(TOKENIZER), "dtype": "float64"}
TARGET, DRAFT = tiny_model(**MODEL), tiny_model(**MODEL, noise=0.02)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
DRAFTERS = {
    "model": DRAFT,
    "n-gram": bass.NgramDrafter(),
    "suffix": bass.SuffixDrafter(),
    "features": bass.FeatureDrafter(feature_head(TARGET)),
}
END = {"eos_token_id": TOKENIZER.eos_token_id}


def reference(prompt: list[int], source: str, new: int) -> list[int]:
    """Decode greedily with the model's plain forward pass and a new matcher for every position."""
    tokenizer = llguidance.hf.from_tokenizer(TOKENIZER, n_vocab=len(TOKENIZER))
    ids: list[int] = []
    while len(ids) < new and TOKENIZER.eos_token_id not in ids:
        matcher = llguidance.LLMatcher(tokenizer, source)
        assert matcher.consume_tokens(ids)
        allowed = torch.tensor(list(matcher.compute_bitmask()), dtype=torch.uint8)[:, None] >> torch.arange(8)
        with torch.inference_mode():
            logits = TARGET(input_ids=torch.tensor([prompt + ids])).logits[0, -1]
        ids.append(int(logits.masked_fill((allowed & 1).flatten()[: len(logits)] == 0, -torch.inf).argmax()))
    return ids


PROMPTS = [torch.tensor(TOKENIZER(text)["input_ids"]) for text in ("json:", "a", 'name "', "12 34 12 34 1")]


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_grammar_is_constrained_regular_decoding(name):
    grammar = lab.Grammar.json(SCHEMA)
    expected = [reference(prompt.tolist(), grammar.source, 40) for prompt in PROMPTS]
    pair = bass.ModelPair(TARGET, DRAFTERS[name], TOKENIZER)
    for k in (0, 4):
        options = {"max_new_tokens": 40, "draft_length": k, "processors": [grammar], "max_batch_size": 3}
        out = bass.generate(pair, PROMPTS, **options, **END)
        assert [row.tolist() for row in out.sequences] == expected
        assert all(set(json.loads(text)) == {"name", "n"} for text in out.texts)


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_rows_with_grammars_share_steps_with_other_rows(monkeypatch, compile):
    """Sampled rows equal the same request alone, for one draft length per row, and coupled rows for every length."""
    use_on_cpu(monkeypatch)
    pair, rng = bass.ModelPair(TARGET, DRAFT, TOKENIZER), random.Random(5)
    kinds = [[lab.Grammar.json(SCHEMA)], [lab.Grammar.regex("[ab]{3,9}c")], [bass.Penalties(1.2, 0.3)], []]
    asked = [
        {
            "prompt": rng.choice(PROMPTS), "processors": rng.choice(kinds), "draft_length": rng.choice([None, 0, 2, 5]),
            "temperature": rng.choice([0.0, 0.8, 1.2]), "seed": number, "sample": 0, "max_new_tokens": 24,
        }
        for number in range(12)
    ]  # fmt: skip
    for rule, own in (("block", {}), ("coupled", {"draft_length": 3})):
        options = {"verification": rule, "draft_length": 3, "compile": compile, **END}
        with bass.Session(pair, max_batch_size=4, **options) as session:
            together = [session.submit(**each) for each in asked]
            run_to_the_end(session)
            texts = [session.result(handle).sequence.tolist() for handle in together]
        for each, text in zip(asked, texts, strict=True):
            with bass.Session(pair, max_batch_size=1, **options) as session:
                handle = session.submit(**each | own)
                run_to_the_end(session)
                assert session.result(handle).sequence.tolist() == text


class Always(bass.Drafter):
    """Drafts the same ids in every step."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def draft(self, context, lengths, policy):
        counts = np.minimum(lengths, len(self.ids))
        return bass.Draft.of(self.ids[: counts.max()].expand(len(lengths), -1), counts)


# After x, the grammar is beyond the library's limits.
LIMITED = lab.Grammar.lark('start: /[a-z]/ ("y" /[a-z]{9}/ | "x" /(ab){500000}/)')
Y, X, A = (TOKENIZER(each)["input_ids"][0] for each in "yxa")


def test_limits_of_a_grammar_end_only_the_row_that_reaches_them():
    """Neither a draft that is rejected nor another row with the same grammar ends a row."""
    for drafts, k in (([X], 0), ([X, A], 1), ([X, A], 2), ([Y, X, A, A], 4)):
        pair = bass.ModelPair(TARGET, Always(drafts), TOKENIZER)
        with bass.Session(pair, draft_length=k, on_row_error="finish", max_batch_size=3, **END) as session:
            options = {"max_new_tokens": 14, "temperature": 1.0, "seed": 1, "sample": 0}
            rows = [
                session.submit(PROMPTS[1], processors=[bass.Bias({each: 500.0}), LIMITED], **options)
                for each in (Y, X, Y)
            ]
            run_to_the_end(session)
            found = [(row.finish_reason, session.result(row).text) for row in rows]
        assert found[0] == found[2] == ("eos", "y" * 11)
        assert found[1][0] in ("error", "length") and re.fullmatch("xx(ab)*a?", found[1][1])


@pytest.mark.parametrize("draft", [TARGET, Always(TOKENIZER("ab zz")["input_ids"])])
def test_text_ends_at_a_position_without_a_possible_token(draft):
    """The grammar allows only the end after `ab`, which is forbidden there."""
    pair = bass.ModelPair(TARGET, draft, TOKENIZER)
    for k, rule in itertools.product((0, 1, 2, 5), ("token", "block", "coupled")):
        processors = [lab.Grammar.regex("ab"), bass.MinTokens(8)]
        options = {"verification": rule, "draft_length": k, "on_row_error": "finish", "temperature": 0.7, **END}
        out = bass.generate(pair, PROMPTS[:2], max_new_tokens=12, processors=processors, **options)
        assert out.finish_reasons == ["error", "error"] and all("ab".startswith(text) for text in out.texts)


def test_interrupted_grammar_keeps_its_text():
    """An interrupt comes after any line that moves a grammar's state. The repeated step gives the same text."""
    pair = bass.ModelPair(TARGET, Always(TOKENIZER("1+(1+(1")["input_ids"]), TOKENIZER)
    grammar = lab.Grammar.lark('start: "(" sum ")" \n sum: part ("+" part)* \n part: /[0-9]/ | "(" sum ")"')
    options = {"max_new_tokens": 24, "processors": [grammar], "seed": 3, "sample": 0, "temperature": 2.0}
    code = type(grammar.begin(Row(1, {2: "eos"}, len(TOKENIZER), TOKENIZER)))._go_to.__code__
    texts, raised = set(), []
    for at in (None, *range(60, 460, 5)):
        lines = itertools.count()

        def trace(frame, event, argument, at=at, lines=lines):
            if frame.f_code is code and event in ("line", "return") and next(lines) == at:
                raised.append(frame.f_lineno)
                raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        with bass.Session(pair, draft_length=4, verification="coupled", **END) as session:
            row = session.submit(PROMPTS[0], **options)
            while not session.idle:
                sys.settrace(trace)
                try:
                    session.step()
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(None)
            texts.add(session.result(row).text)
    assert len(texts) == 1 and len(set(raised)) > 5


def test_grammars_that_do_not_fit_are_refused():
    pair, one = bass.ModelPair(TARGET, DRAFT, TOKENIZER), {"max_new_tokens": 4}
    for processor, error in (
        (lab.Grammar.json({"type": "nothing"}), "the grammar is not valid, .*nothing"),
        (lab.Grammar.lark("begin: /a/"), "the grammar is not valid, .*start"),
        (lab.Grammar.json({"$ref": "#"}), "or has no texts"),
        (lab.Grammar.regex(r"a+[^\s\S]"), "or has no texts"),
    ):
        with pytest.raises(ValueError, match=error):
            bass.generate(pair, "a", processors=[processor], **one, **END)
    fits = lab.Grammar.regex("a+")
    with pytest.raises(ValueError, match="needs an EOS id, but the row has none or ignores it"):
        bass.generate(pair, "a", processors=[fits], eos_token_id=(), **one)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        bass.generate(bass.ModelPair(TARGET, DRAFT), PROMPTS, processors=[fits], **one, **END)


# --- requests -------------------------------------------------------------------------------------


@dataclass
class Unhashable(bass.Processor):
    value: int = 1


def test_wrong_processors_are_refused():
    pair = bass.ModelPair(TARGET, DRAFT)
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, TARGET)
    for processors, kind, error in (
        (bass.Bias({1: 2.0}), TypeError, r"write processors=\[…\]"),
        ([lambda ids, scores: scores], TypeError, "processors must be a list of bass.Processor or transformers"),
        ([guidance], ValueError, "UnbatchedClassifierFreeGuidance.* depends on the batch or keeps state"),
        ([bass.Bias({10**6: 1.0})], ValueError, "token id 1000000, outside the target's vocabulary"),
        ([Unhashable()], TypeError, "must be hashable, got .*frozen=True"),
    ):
        with pytest.raises(kind, match=error):
            bass.generate(pair, PROMPTS, max_new_tokens=4, processors=processors)
    for make, error in (
        *(
            (lambda value=value: bass.Bias({1: value}), "the bias of id 1 must be")
            for value in (np.inf, 1e31, 10**40, "2")
        ),
        (lambda: bass.Bias({-1: 1.0}), "a token id of a bias must be >= 0"),
        (lambda: bass.Penalties(repetition=0.0), "repetition_penalty must be > 0"),
        *((lambda value=value: bass.Penalties(presence=value), "presence_penalty must be") for value in (np.nan, 1e39)),
        (lambda: bass.MinTokens(-1), "MinTokens must be >= 0"),
        (lambda: bass.FixedLength(10**30), "draft_length must be an integer"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            make()


def test_largest_bias_chooses_its_id():
    out = bass.generate(bass.ModelPair(TARGET, DRAFT), PROMPTS, max_new_tokens=5, processors=[bass.Bias({9: 10**30})])
    assert all(row.tolist() == [9] * 5 for row in out.sequences)


def test_row_without_a_possible_token_fails_alone():
    nothing = bass.Bias(dict.fromkeys(range(len(TOKENIZER)), -np.inf))
    pair, options = bass.ModelPair(TARGET, DRAFT), {"draft_length": 3, "eos_token_id": ()}
    with bass.Session(pair, on_row_error="finish", **options) as session:
        rows = [session.submit(PROMPTS[1], max_new_tokens=6, processors=own) for own in ([], [nothing])]
        run_to_the_end(session)
        assert [session.result(row).finish_reason for row in rows] == ["length", "error"]
    with pytest.raises(FloatingPointError, match="no token is possible after the row's processors, or target model"):
        bass.generate(pair, PROMPTS, max_new_tokens=6, processors=[nothing], **options)


def test_stop_token_ids_and_minimum_length():
    pair = bass.ModelPair(TARGET, DRAFT)
    plain = bass.generate(pair, PROMPTS[:1], max_new_tokens=20, eos_token_id=()).sequences[0].tolist()
    with bass.Session(pair, draft_length=4, eos_token_id=plain[9]) as session:
        rows = [
            session.submit(PROMPTS[0], max_new_tokens=20, stop_token_ids=ids, ignore_eos=ignored)
            for ids, ignored in (((), False), ([plain[5]], False), ([plain[5]], True), ((), True))
        ]
        later = session.submit(PROMPTS[0], max_new_tokens=20, processors=[bass.MinTokens(15)])
        run_to_the_end(session)
        found = [(session.result(row).sequence.tolist(), session.result(row).finish_reason) for row in rows]
        first = plain.index(plain[9])
        at = plain.index(plain[5])
        stopped = (plain[: at + 1], "stop") if at < first else (plain[: first + 1], "eos")
        assert found == [(plain[: first + 1], "eos"), stopped, (plain[: at + 1], "stop"), (plain, "length")]
        assert plain[9] not in session.result(later).sequence[:15].tolist()
    with pytest.raises(ValueError, match="stop_token_ids 99999 is outside"):
        bass.Session(pair).submit(PROMPTS[0], max_new_tokens=2, stop_token_ids=[99999])


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_alternatives_are_the_likeliest_ids(monkeypatch, compile):
    use_on_cpu(monkeypatch)
    pair = bass.ModelPair(TARGET, DRAFT)
    with bass.Session(pair, draft_length=3, compile=compile, eos_token_id=()) as session:
        asked = [
            (each, n, session.submit(each, max_new_tokens=12, top_logprobs=n))
            for each, n in zip(PROMPTS, (2, 0, 5, 1), strict=True)
        ]
        run_to_the_end(session)
        for prompt, n, handle in asked:
            result = session.result(handle)
            with torch.inference_mode():
                logits = TARGET(input_ids=torch.cat([prompt, result.sequence])[None]).logits[0, len(prompt) - 1 : -1]
            values, ids = logits.float().log_softmax(-1).topk(n)
            assert len(handle.alternatives) == (12 if n else 0)
            for position, found in enumerate(handle.alternatives):
                assert list(found) == ids[position].tolist()
                assert list(found.values()) == pytest.approx(values[position].tolist(), abs=1e-4)
