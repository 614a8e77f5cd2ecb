"""The gate must close on bugs: each test injects one and asserts that it is caught."""

import pytest
import torch
import torch.nn.functional as F
from test_invariance import alpha_when_draft_is_target

from bass_core import attention, engine, randomness, sampling, verification
from bass_core.drafters import ModelDrafter
from bass_core.randomness import Key, Purpose
from bass_core.verification import Outcome
from bass_lab.checks.enumeration import PROMPT, exact_law, law_of_engine
from bass_lab.checks.oracle import RepeatedKey
from bass_lab.checks.tabular import tabular, total_variation

CAUGHT = 1e-3


def distance(rule="token", new=4, k=3, prompts=(PROMPT,), **options):
    """Total variation between the engine's law (with whatever bug is injected) and the target's."""
    target, draft = tabular(2, seed=1), tabular(2, seed=2)
    found = law_of_engine(target, draft, new, lambda: k, prompts, verification=rule, **options)
    return total_variation(found, exact_law(target, new, prompts, temperature=options.get("temperature", 1.0)))


def mutate_rule(monkeypatch, change):
    """Replace token verification by `change(original outcome, its arguments)`."""
    monkeypatch.setitem(verification.RULES, "token", lambda *args: change(verification.token(*args), *args))


def test_without_a_bug_nothing_is_caught():
    assert distance() < 1e-12
    assert distance(temperature=0.6) < 1e-12


def test_dropped_token_is_caught(monkeypatch):
    mutate_rule(monkeypatch, lambda outcome, *_: Outcome((outcome.accepted - 1).clamp(min=0), outcome.next_token))
    assert distance() > CAUGHT


def test_raw_q_is_caught(monkeypatch):
    original = ModelDrafter._next_token

    def raw(self, logits, *args):
        token, _, peak = original(self, logits, *args)
        return token, logits.softmax(-1), peak  # what it was drawn from was the processed one

    monkeypatch.setattr(ModelDrafter, "_next_token", raw)
    assert distance(temperature=0.6) > CAUGHT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_peeking_budget_is_caught(monkeypatch, rule):
    original = ModelDrafter.draft

    def peek(self, context, lengths, policy):
        draft = original(self, context, lengths, policy)
        if draft.probs is None:
            return draft
        likely = draft.probs.gather(-1, draft.tokens[..., None])[..., 0] > 0.5
        kept = likely.long().cumprod(1).sum(1).minimum(draft.lengths)  # drops x_j because q(x_j) is low
        return draft._replace(lengths=kept, lengths_host=kept.numpy())

    monkeypatch.setattr(ModelDrafter, "draft", peek)
    assert distance(rule) > CAUGHT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_unnormalised_residual_is_caught(monkeypatch, rule):
    original = randomness.draw

    def lossy(probs, key):
        if key.purpose == Purpose.TARGET:  # u against 1 instead of the sum: the missing mass goes to the last id
            missing = F.one_hot(torch.tensor(probs.shape[-1] - 1), probs.shape[-1]) * (1 - probs.sum(-1, keepdim=True))
            probs = probs + missing.clamp(min=0)
        return randomness_draw(probs, key)

    def with_lossy_draw(*args):
        nonlocal randomness_draw
        randomness_draw = randomness.draw  # the oracle's
        randomness.draw = lossy
        try:
            return getattr(verification, rule)(*args)
        finally:
            randomness.draw = randomness_draw

    randomness_draw = original
    monkeypatch.setitem(verification.RULES, rule, with_lossy_draw)
    target, draft = tabular(3, seed=1), tabular(3, seed=2)
    found = law_of_engine(target, draft, 3, lambda: 2, verification=rule)
    assert total_variation(found, exact_law(target, 3)) > CAUGHT


def test_bonus_drawn_from_q_is_caught(monkeypatch):
    def from_q(outcome, drafted, lengths, q, p, keys):
        k = drafted.shape[1]
        if k == 0:
            return outcome
        full = outcome.accepted == lengths
        p = torch.where(full[:, None, None], torch.cat([p[:, :k], q[:, -1:]], 1), p)
        accepted, bonus = outcome
        return Outcome(accepted, torch.where(full, p[:, k].argmax(-1), bonus))

    mutate_rule(monkeypatch, from_q)
    assert distance() > CAUGHT


def test_reused_key_is_caught(monkeypatch):
    def again(outcome, drafted, lengths, q, p, keys):
        randomness.draw(p[:, 0], keys.target())
        return outcome

    mutate_rule(monkeypatch, again)
    with pytest.raises(RepeatedKey):
        distance()


def test_draft_drawn_with_the_targets_key_is_caught(monkeypatch):
    monkeypatch.setattr(
        randomness.StepKeys, "draft", lambda self, slot: Key(self.stream, self.counter, Purpose.TARGET, slot)
    )
    with pytest.raises(RepeatedKey):
        distance()


def test_step_counter_that_stands_still_is_caught(monkeypatch):
    monkeypatch.setattr(engine.Rows, "context", _without_counting(engine.Rows.context))
    with pytest.raises(RepeatedKey):
        distance(k=1)


def _without_counting(original):
    def context(self, places, most):
        context = original(self, places, most)
        return context._replace(keys=randomness.StepKeys(context.keys.stream, context.keys.counter * 0, max(most, 1)))

    return context


def test_draft_one_token_behind_is_caught(monkeypatch):
    assert alpha_when_draft_is_target(draft_length=3) == 1
    monkeypatch.setattr(ModelDrafter, "_catch_up", lambda self, context, rows: self._comparable(
        self.runner.feed_last(context.tokens, context.lengths_host, 1)))  # fmt: skip
    assert alpha_when_draft_is_target(draft_length=3) < 0.99


def test_stale_draft_cache_after_regular_steps_is_caught(monkeypatch):
    from trial_policies import Alternating

    assert alpha_when_draft_is_target(draft_length=Alternating(k=3, zeros=4)) == 1
    monkeypatch.setattr(ModelDrafter, "_catch_up", lambda self, context, rows: self._comparable(
        self.runner.feed_last(context.tokens, context.lengths_host, 2)))  # fmt: skip
    assert alpha_when_draft_is_target(draft_length=Alternating(k=3, zeros=4)) < 0.99


def test_rows_that_rested_taken_for_fed_are_caught(monkeypatch):
    from trial_policies import TakingTurns

    original = ModelDrafter._catch_up

    def all_fed(self, context, rows):
        logits = original(self, context, rows)
        self.cached[: len(context.lengths_host)] = context.lengths_host
        return logits

    monkeypatch.setattr(ModelDrafter, "_catch_up", all_fed)
    assert alpha_when_draft_is_target(draft_length=TakingTurns(k=3)) < 0.99


def test_zeroed_instead_of_masked_key_is_caught(monkeypatch):
    def zeroed(module, query, key, value, attention_mask=None, **kwargs):
        visible = attention._thread.current.visible()[:, None]  # [B, 1, Q, S]
        scores = query @ key.transpose(-1, -2) * kwargs["scaling"] * visible  # a zero logit still adds e^0
        return (scores.softmax(-1) @ (value * visible[:, :, -1, :, None])).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, "bass_pad", zeroed)
    assert distance(prompts=([0, 1], [1, 0, 0, 1]), new=2, k=1) > CAUGHT


def test_target_that_sees_rejected_tokens_is_caught(monkeypatch):
    original = attention.Pass.visible
    monkeypatch.setattr(
        attention.Pass, "visible", lambda self, *args: original(self, *args).any(1, keepdim=True).expand(
            -1, self.positions.shape[1], -1)
    )  # fmt: skip
    assert distance() > CAUGHT


def test_penalty_over_the_wrong_history_is_caught(monkeypatch):
    from test_sampling import first_difference_from_transformers

    assert first_difference_from_transformers(repetition_penalty=1.3) is None
    monkeypatch.setattr(
        sampling, "seen_after", lambda seen, tokens: seen[:, None].expand(-1, tokens.shape[1] + 1, -1)
    )  # forgets x_<j
    assert first_difference_from_transformers(repetition_penalty=1.3) is not None
