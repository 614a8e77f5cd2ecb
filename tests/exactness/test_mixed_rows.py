import pytest
import torch
from recording import texts, use_fixed_steps, use_on_cpu
from sessions import PAIR, TARGET, alone, run_to_the_end, session_over
from tiny import ragged_prompts
from transformers import NoRepeatNGramLogitsProcessor
from trial_policies import StopWhenUnsure

import bass_core as bass
from bass_lab.checks.enumeration import EXACT, exact_law
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import tabular, total_variation

WAYS = [
    {},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "seed": 9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 1e-8},
    {"temperature": 1.5, "top_p": 0.7},
    {"processors": [bass.Penalties(1.3, 0.5, 0.2)], "temperature": 0.8},
    {"processors": [bass.Bias({3: 2.0, 9: -torch.inf}), NoRepeatNGramLogitsProcessor(1), bass.MinTokens(4)]},
    {"draft_length": 0, "temperature": 0.7},
    {"draft_length": bass.BassHeuristic(initial=1, limit=4), "repetition_penalty": 1.4},
]
UNDRAFTED = [way for way in WAYS if not way.get("draft_length")]
PROMPTS = ragged_prompts(5, 9, 13, 7, 3, 8, 4, 6, 11, 9)
NEW = 10


def mixed(ways=WAYS, **options) -> list[bass.Result]:
    """Decode a row per prompt with its own options. Most rows join after two steps."""
    session = session_over(max_batch_size=4, **options)
    handles = []
    for prompt, way in zip(PROMPTS, ways, strict=False):
        handles.append(session.submit(prompt, max_new_tokens=NEW, **way))
        if len(handles) == 3:
            session.step()
            session.step()
    run_to_the_end(session)
    return [session.result(handle) for handle in handles]


def assert_rows_are_as_alone(ways=WAYS, **options) -> None:
    for row, (found, way) in enumerate(zip(mixed(ways, **options), ways, strict=True)):
        expected = alone(row, PROMPTS[row], NEW, **options | way)  # as options of the session
        assert found.sequence.tolist() == expected.sequence.tolist(), (row, way)
        assert torch.allclose(found.logprobs, expected.logprobs)


DRAFTS = {"model": PAIR, "n-gram": bass.ModelPair(TARGET)}


@pytest.mark.parametrize(
    ("draft", "rule", "options"),
    [
        ("model", "token", {"trace": "tokens"}),
        ("model", "block", {"draft_length": StopWhenUnsure()}),
        ("n-gram", "block", {}),
        ("model", "coupled", {}),
    ],
)
def test_rows_are_as_alone(draft, rule, options):
    assert_rows_are_as_alone(pair=DRAFTS[draft], verification=rule, **options)


def test_rows_of_a_session_without_drafts_are_as_alone():
    assert_rows_are_as_alone(UNDRAFTED, pair=DRAFTS["n-gram"], draft_length=0)
    with pytest.raises(ValueError, match="draft_length=2 needs a drafter, but this session has draft_length=0"):
        session_over(draft_length=0).submit(PROMPTS[0], max_new_tokens=NEW, draft_length=2)


def test_a_sampling_session_takes_greedy_rows():
    ways = [{"temperature": 0.0, **way} for way in WAYS]
    assert_rows_are_as_alone(ways, temperature=0.9, top_k=5)


@pytest.mark.parametrize(
    ("draft", "rule", "k"), [("model", "token", 3), ("n-gram", "coupled", 3), ("model", "coupled", 0)]
)
def test_recorded_steps_give_the_same_texts(monkeypatch, draft, rule, k):
    use_on_cpu(monkeypatch)
    eager, recorded = (
        mixed(WAYS if k else UNDRAFTED, pair=DRAFTS[draft], verification=rule, draft_length=k, compile=compile)
        for compile in ("off", "graphs")
    )
    assert [row.sequence.tolist() for row in recorded] == [row.sequence.tolist() for row in eager]


def test_recorded_steps_before_and_after_a_row_with_own_options(monkeypatch):
    use_on_cpu(monkeypatch)
    session = session_over(max_batch_size=2, draft_length=2, compile="graphs")
    first = session.submit(PROMPTS[0], max_new_tokens=30)
    for _ in range(4):
        session.step()
    second = session.submit(PROMPTS[1], max_new_tokens=6, repetition_penalty=1.4)
    run_to_the_end(session)
    for row, handle, new, way in ((0, first, 30, {}), (1, second, 6, WAYS[1])):
        assert session.result(handle).sequence.tolist() == alone(row, PROMPTS[row], new, **way).sequence.tolist()


SEEDED = [way | {"seed": 5 + index % 2, "sample": index // 2} for index, way in enumerate(WAYS)]


@pytest.mark.parametrize(
    ("rule", "compile"),
    [("token", "graphs"), ("block", "off"), pytest.param("coupled", "graphs", marks=pytest.mark.ci)],
)
def test_seeded_samples_equal_a_separate_session(monkeypatch, rule, compile):
    use_on_cpu(monkeypatch)
    found = mixed(SEEDED, verification=rule, compile=compile, temperature=0.6, seed=1)
    for prompt, way, row in zip(PROMPTS, SEEDED, found, strict=True):
        session = session_over(max_batch_size=1, verification=rule, temperature=0.6)
        handle = session.submit(prompt, max_new_tokens=NEW, row=99, **way)  # another row number
        assert [row.sequence.tolist()] == texts(session, [handle]), way


def test_seed_and_sample_name_the_text():
    session = session_over(max_batch_size=6, temperature=0.9, seed=4)
    own = [{"row": 6}, {"sample": 6}, *({"seed": seed, "sample": n} for seed, n in ((7, 0), (7, 0), (7, 1), (8, 0)))]
    rows = [session.submit(PROMPTS[0], max_new_tokens=NEW, **each) for each in own]
    found = texts(session, rows)
    assert found[0] == found[1] == alone(6, PROMPTS[0], NEW, temperature=0.9, seed=4).sequence.tolist()
    assert found[2] == found[3] and len(set(map(tuple, found))) == 4


LAWS = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1.3, "repetition_penalty": 1.5}]


@pytest.mark.parametrize(("fixed", "rule", "first"), [(False, "block", 0), (True, "token", 1)])
def test_joint_distribution_is_the_product_of_the_rows_own(monkeypatch, fixed, rule, first):
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


def test_trace_names_the_rule_once_a_row_is_sampled():
    session = session_over()
    assert session.trace.meta["verification"] == "greedy"
    session.submit(PROMPTS[0], max_new_tokens=NEW, temperature=0.8)
    assert session.trace.meta["verification"] == "token"
