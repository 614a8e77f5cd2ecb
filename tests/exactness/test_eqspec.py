"""One test for each bug of naive batch implementations ("Batch Speculative Decoding Done Right", arXiv 2510.22876)."""

import pytest
import torch
from tiny import ragged_prompts, tiny_model
from transformers import DynamicCache
from trial_policies import Alternating

import bass_core as bass
from bass_core.model.runner import Runner
from bass_core.model.transformers_internals import CACHE

PROMPTS = ragged_prompts(5, 11, 3, 17)
PAIR = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.1))


@pytest.fixture
def session():
    with bass.Session(PAIR, max_batch_size=4, draft_length=3, eos_token_id=()) as session:
        for prompt in PROMPTS:
            session.submit(prompt, max_new_tokens=30)
        session.step()
        yield session


@pytest.fixture
def passes(monkeypatch):
    """Record every forward pass as (model, ids, pass)."""
    seen, original = [], Runner.run_model

    def recording(runner, ids, current):
        seen.append((runner.model, ids.clone(), current))
        return original(runner, ids, current)

    monkeypatch.setattr(Runner, "run_model", recording)
    return seen


def committed(session, place):
    return session.rows.tokens[place, : session.rows.lengths[place]]


def test_position_ids_do_not_drift(session, passes):
    while not session.idle:
        before = [committed(session, place).tolist() for place in range(len(session.rows.live))]
        passes.clear()
        session.step()
        for model, ids, current in passes:
            if model is not session.pair.target:
                continue
            for row, positions, slots in zip(
                before, current.positions.tolist(), current.kv_slots.tolist(), strict=True
            ):
                assert positions[0] == len(row) - 1
                for offset, (position, slot) in enumerate(zip(positions, slots, strict=True)):
                    if slot != session.target.cache.scratch_kv_slot:
                        assert position == slot == len(row) - 1 + offset
            assert ids[:, 0].tolist() == [row[-1] for row in before]


def test_masks_hide_all_keys_beyond_a_query(session, passes):
    session.step()
    assert passes
    for _, _, current in passes:
        visible = current.visible()
        for query, seen in zip(current.positions.flatten().tolist(), visible.flatten(0, 1), strict=True):
            assert seen.nonzero().flatten().tolist() == list(range(query + 1))


@torch.inference_mode()
def assert_keys_are_those_of_a_prefill(runner, place, ids):
    cache = DynamicCache(config=runner.model.config)
    runner.model(input_ids=ids[None], use_cache=True, **{CACHE: cache})
    for ours, theirs in zip(runner.cache.layers, cache.layers, strict=True):
        torch.testing.assert_close(ours.keys[place, :, : len(ids)], theirs.keys[0])


def test_caches_are_not_cut_to_the_shortest_row(session):
    for _ in range(4):
        session.step()
        accepted = session.trace.steps.query("step == step.max()").accepted
        for place in range(4):
            assert_keys_are_those_of_a_prefill(session.target, place, committed(session, place)[:-1])
    assert accepted.nunique() > 1  # the batch was ragged


def test_padding_does_not_accumulate(session, passes):
    for _ in range(5):
        longest = int(session.rows.lengths.max())
        passes.clear()
        session.step()
        assert all(current.max_kv_length <= longest + 3 and ids.shape[1] <= 4 for _, ids, current in passes)


def test_bonus_token_enters_both_caches():
    target = tiny_model(dtype="float64")
    with bass.Session(bass.ModelPair(target, target), draft_length=3, eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=30)
        for _ in range(4):
            session.step()
            ids = committed(session, 0)
            assert_keys_are_those_of_a_prefill(session.target, 0, ids[:-1])
            assert_keys_are_those_of_a_prefill(session.drafter.runner, 0, ids[: session.drafter.cached[0]])


@pytest.mark.parametrize("policy", [3, Alternating(k=3, zeros=5)], ids=["always", "after regular steps"])
def test_draft_has_read_the_whole_row(policy):
    options = {"draft_length": policy, "max_new_tokens": 40, "temperature": 0.8, "eos_token_id": (), "trace": "tokens"}
    out = bass.generate(PAIR, PROMPTS, **options)
    checked = 0
    for row, (prompt, sequence) in enumerate(zip(PROMPTS, out.sequences, strict=True)):
        logits = PAIR.draft(torch.cat([prompt, sequence])[None]).logits[0]
        accepted = out.trace.tokens[(out.trace.tokens.row == row) & (out.trace.tokens.kind == "accepted")]
        for position, token, q in zip(accepted.position, accepted.token, accepted.q, strict=True):
            assert q == pytest.approx((logits[position - 1] / 0.8).softmax(-1)[token].item(), rel=1e-6)
            checked += 1
    assert checked > 20
