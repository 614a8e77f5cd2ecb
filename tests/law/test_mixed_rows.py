"""Rows of one session that are sampled in different ways: each has the law, and the very text, that it has alone."""

import pytest
import torch
from recording import use_fixed_steps, use_on_cpu
from sessions import PAIR, TARGET, alone, run_to_the_end, session_over
from tiny import ragged_prompts
from trial_policies import StopWhenUnsure

import bass_core as bass
from bass_lab.checks.enumeration import EXACT, exact_law
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import tabular, total_variation

WAYS = [
    {},
    {"temperature": 0.8},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "seed": 9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 1e-8},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 0.8},
]
PROMPTS = ragged_prompts(5, 9, 13, 7, 3, 8, 4, 11)
NEW = 16


def mixed(ways=WAYS, **options) -> list[bass.Result]:
    """Every prompt's row, sampled in its own way, half of them joining later."""
    session = session_over(max_batch_size=6, **options)
    handles = []
    for prompt, way in zip(PROMPTS, ways, strict=True):
        handles.append(session.submit(prompt, max_new_tokens=NEW, **way))
        if len(handles) == 3:
            session.step()
            session.step()
    run_to_the_end(session)
    return [session.result(handle) for handle in handles]


def assert_rows_are_as_alone(ways=WAYS, **options) -> None:
    for row, (found, way) in enumerate(zip(mixed(ways, **options), ways, strict=True)):
        expected = alone(row, PROMPTS[row], NEW, **options | way)
        assert found.sequence.tolist() == expected.sequence.tolist(), (row, way)
        assert torch.allclose(found.logprobs, expected.logprobs)


DRAFTS = {"model": PAIR, "n-gram": bass.ModelPair(TARGET)}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_rows_are_what_they_are_alone(draft, rule):
    assert_rows_are_as_alone(pair=DRAFTS[draft], verification=rule)


def test_a_session_that_samples_takes_greedy_rows():
    ways = [{"temperature": 0.0, **way} for way in WAYS]
    assert_rows_are_as_alone(ways, temperature=0.9, top_k=5)


@pytest.mark.parametrize("options", [{"trace": "tokens"}, {"draft_length": 0}, {"draft_length": StopWhenUnsure()}])
def test_rows_are_what_they_are_alone_however_steps_go(options):
    assert_rows_are_as_alone(**options)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("k", [0, 3])
def test_recorded_steps_take_them_too(monkeypatch, draft, rule, k):
    use_on_cpu(monkeypatch)
    eager, recorded = (
        mixed(pair=DRAFTS[draft], verification=rule, draft_length=k, compile=compile) for compile in ("off", "graphs")
    )
    assert [row.sequence.tolist() for row in recorded] == [row.sequence.tolist() for row in eager]


def test_rows_as_the_session_says_are_recorded_whole_before_and_after_others(monkeypatch):
    use_on_cpu(monkeypatch)
    session = session_over(max_batch_size=2, draft_length=2, compile="graphs")
    first = session.submit(PROMPTS[0], max_new_tokens=40)
    for _ in range(4):
        session.step()
    second = session.submit(PROMPTS[1], max_new_tokens=6, repetition_penalty=1.4)
    run_to_the_end(session)
    for row, handle, new, way in ((0, first, 40, {}), (1, second, 6, WAYS[2])):
        assert session.result(handle).sequence.tolist() == alone(row, PROMPTS[row], new, **way).sequence.tolist()


# --- samples --------------------------------------------------------------------------------------

SEEDED = [way | {"seed": 5 + index % 2, "sample": index // 2} for index, way in enumerate(WAYS)]


def seeded_alone(index: int, **options) -> list[int]:
    """The text of a seeded row in a session of its own, in which it has another number."""
    session = session_over(max_batch_size=1, **options)
    session.submit(PROMPTS[index], max_new_tokens=0)
    handle = session.submit(PROMPTS[index], max_new_tokens=NEW, row=99, **SEEDED[index])
    run_to_the_end(session)
    return session.result(handle).sequence.tolist()


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_seeded_samples_are_what_they_are_in_a_session_of_their_own(monkeypatch, rule, compile):
    use_on_cpu(monkeypatch)
    found = mixed(SEEDED, verification=rule, compile=compile, temperature=0.6, seed=1)
    for index, row in enumerate(found):
        assert row.sequence.tolist() == seeded_alone(index, verification=rule, temperature=0.6), SEEDED[index]


def test_rows_of_one_seed_and_sample_are_one_text_and_of_others_another():
    session = session_over(max_batch_size=6, temperature=0.9)
    named = [(7, 0), (7, 0), (7, 1), (8, 0)]
    rows = [session.submit(PROMPTS[0], max_new_tokens=NEW, seed=seed, sample=sample) for seed, sample in named]
    assert [row.row for row in rows] == [0, 1, 2, 3]
    run_to_the_end(session)
    texts = [tuple(session.result(row).sequence.tolist()) for row in rows]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_the_sample_of_a_row_is_its_number_unless_it_has_its_own():
    session = session_over(temperature=0.9, seed=4)
    rows = [session.submit(PROMPTS[0], max_new_tokens=NEW, **own) for own in ({"row": 6}, {"sample": 6})]
    run_to_the_end(session)
    first, second = (session.result(row).sequence.tolist() for row in rows)
    assert first == second == alone(6, PROMPTS[0], NEW, temperature=0.9, seed=4).sequence.tolist()


@pytest.mark.parametrize(
    ("sample", "error"), [(-1, ValueError), (1.5, TypeError), ("a", TypeError), (2**64, ValueError)]
)
def test_what_is_no_sample_is_refused_and_takes_no_number(sample, error):
    session = session_over()
    with pytest.raises(error, match="sample must"):
        session.submit(PROMPTS[0], max_new_tokens=NEW, sample=sample)
    assert session.submit(PROMPTS[0], max_new_tokens=NEW).row == 0


LAWS = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1.3, "repetition_penalty": 1.5}]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_joint_law_is_the_product_of_the_rows_own(monkeypatch, fixed, rule, first):
    if fixed:
        use_fixed_steps(monkeypatch)
    target, draft, prompts = tabular(3, seed=5), tabular(3, seed=6), ([0, 1], [1, 0, 0])
    ways = LAWS[first : first + 2]

    def run() -> tuple[tuple[int, ...], ...]:
        options = {"eos_token_id": (), "trace": "off", "attention": "pad", "draft_length": 2, "verification": rule}
        with bass.Session(bass.ModelPair(target, draft), **options) as session:
            rows = [
                session.submit(torch.tensor(prompt), max_new_tokens=2, **way)
                for prompt, way in zip(prompts, ways, strict=True)
            ]
            run_to_the_end(session)
            return tuple(tuple(session.result(row).sequence.tolist()) for row in rows)

    laws = [exact_law(target, 2, [prompt], **way) for prompt, way in zip(prompts, ways, strict=True)]
    joint = {(*a, *b): p * q for a, p in laws[0].items() for b, q in laws[1].items()}
    assert total_variation(Oracle().laws(run), joint) < EXACT


def test_the_trace_names_the_rule_once_a_row_is_sampled():
    session = session_over()
    assert session.trace.meta["verification"] == "greedy"
    session.submit(PROMPTS[0], max_new_tokens=NEW, temperature=0.8)
    assert session.trace.meta["verification"] == "token"


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ({"temperature": -1}, "temperature must be a finite number >= 0"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
    ],
)
def test_what_no_row_can_be_sampled_with_is_refused_and_takes_no_number(way, error):
    session = session_over()
    with pytest.raises((ValueError, TypeError), match=error):
        session.submit(PROMPTS[0], max_new_tokens=NEW, **way)
    assert session.submit(PROMPTS[0], max_new_tokens=NEW).row == 0
