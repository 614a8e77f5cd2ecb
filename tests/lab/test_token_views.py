import html
import re

import pytest

import bass_core as bass
from bass_lab.show import token_views
from bass_lab.texts.prompt_sets import prompt_set

RULES = ("token", "block", "coupled")


@pytest.fixture(scope="module")
def pair():
    return bass.load_pair(dtype="float32")


@pytest.fixture(scope="module")
def traces(pair):
    options = {"max_new_tokens": 24, "draft_length": 4, "trace": "tokens"}
    texts = prompt_set("library", 3)
    sampled = {rule: bass.generate(pair, texts, verification=rule, temperature=0.8, **options) for rule in RULES}
    return {name: out.trace for name, out in sampled.items()} | {"greedy": bass.generate(pair, texts, **options).trace}


@pytest.mark.parametrize("rule", [*RULES, "greedy"])
def test_outcomes_are_the_steps_of_the_trace(traces, rule):
    trace = traces[rule]
    tokens = token_views.outcomes(trace)
    assert len(tokens) == len(trace.tokens)
    steps = trace.steps.query("kind == 'decode'").copy()
    steps["nth"] = steps.groupby("row").cumcount() + 1
    for step in steps.itertuples():
        found = token_views.step_tokens(trace, step.row, step.nth)
        refused = ["rejected"] * (step.drafted - step.accepted)
        if rule != "block":
            refused = (refused[:1] + ["not reached"] * len(refused))[: len(refused)]
        own = "regular" if not step.drafted else "recovered" if step.accepted < step.drafted else "bonus"
        if step.emitted > step.accepted:  # the row did not end inside the draft
            assert found.outcome.tolist() == ["accepted"] * step.accepted + refused + [own]
        kept = min(step.accepted, step.emitted)
        assert found.position.tolist()[:kept] == list(range(step.kv_length, step.kv_length + kept))
    assert (tokens.nth == 0).sum() == 3  # the prefill's tokens


def test_rejected_tokens_have_larger_q_and_recovered_ones_larger_p(traces):
    tokens = token_views.outcomes(traces["token"])
    rejected, recovered = (tokens[tokens.outcome == outcome] for outcome in ("rejected", "recovered"))
    assert len(rejected) > 5 and (rejected.p < rejected.q).all() and (recovered.p > recovered.q).all()
    row, nth = token_views.surest_rejection(traces["token"])
    refused = token_views.step_tokens(traces["token"], row, nth).query("outcome == 'rejected'")
    assert (refused.q - refused.p).item() == (rejected.q - rejected.p).max()


REASONS = {
    "token": "accepted with probability p/q",
    "block": "judges the draft tokens together",
    "coupled": "choose with the same noise",
    "greedy": "At temperature 0 only the target",
}


def test_rejection_has_the_reason_of_its_rule(pair, traces):
    for rule, words in REASONS.items():
        row, nth = token_views.surest_rejection(traces[rule])
        assert words in token_views.why(traces[rule], row, nth, pair.tokenizer)


def test_step_without_a_rejection_has_its_reason(pair):
    both = bass.ModelPair(pair.target, pair.target, pair.tokenizer)
    full = bass.generate(both, "def f(x):\n", draft_length=3, max_new_tokens=9, trace="tokens").trace
    assert "All 3 draft tokens were accepted" in token_views.why(full, 0, 1, pair.tokenizer)
    assert token_views.surest_rejection(full) == (0, 1)
    regular = bass.generate(pair, "def f(x):\n", draft_length=0, max_new_tokens=3, trace="tokens").trace
    assert "Nothing was drafted" in token_views.why(regular, 0, 1, pair.tokenizer)
    eos = full.tokens.query("kind == 'accepted'").token.iloc[0]
    ended = bass.generate(both, "def f(x):\n", draft_length=3, eos_token_id=int(eos), trace="tokens").trace
    assert "The row ended with an accepted token" in token_views.why(ended, 0, 1, pair.tokenizer)


def test_row_shows_its_text_and_numbers(pair, traces):
    trace = traces["token"]
    mine = token_views.outcomes(trace).query("row == 1 and kind != 'rejected'")
    text = pair.tokenizer.decode(mine.token.tolist(), skip_special_tokens=True)
    shown = token_views.row_html(trace, 1, pair.tokenizer, prompt="# <prompt>\n", nth=2)
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == "# <prompt>\n" + text
    titles = re.findall('title="([^"]*)"', shown)
    assert len(titles) == len(mine)
    for title, line in zip(titles, mine.itertuples(), strict=True):
        assert title.startswith(line.outcome) and f"p = {line.p:.3f}" in title
        assert title.endswith(f"step {line.nth}" if line.nth else "prefill")
    assert shown.count("background:") == (mine.nth == 2).sum() > 0


def test_step_shows_the_text_before_and_every_token(pair, traces):
    trace = traces["token"]
    part = token_views.step_tokens(trace, 0, 2)
    shown = token_views.step_html(trace, 0, 2, pair.tokenizer, prompt="def f(x):\n")
    before = token_views.outcomes(trace).query("row == 0 and nth < 2 and kind != 'rejected'").token.tolist()
    plain = html.unescape(re.sub("<[^>]*>", "", shown))
    assert plain.startswith("def f(x):\n" + pair.tokenizer.decode(before))
    for line in part.itertuples():
        assert f"{token_views.SYMBOLS[line.outcome]} {token_views.label(line.token, pair.tokenizer)}" in plain


def test_headline_is_the_summary(traces):
    summary, words = traces["token"].summary(), token_views.headline(traces["token"])
    assert f"{summary['tokens_per_step']:.2f} tokens per step" in words
    assert f"acceptance rate <b>{summary['acceptance_rate']:.0%} at k = 4" in words
    assert f"α = {summary['alpha']:.2f}" in words
