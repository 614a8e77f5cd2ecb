"""Interrupts at the worst moments of a session: after a commit, while rows move, while a commit is written."""

import pytest
import torch
from recording import use_fixed_steps
from tiny import forward_passes, ragged_prompts, tiny_model
from trial_policies import StopWhenUnsure

import bass_core as bass
from bass_core.batch import Batch
from bass_core.rows import Rows

PROMPTS = ragged_prompts(5, 11, 3, 17)
NEW = (3, 14, 9, 12)


def pair():
    return bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.1))


def run(session):
    """Submit the rows, step to the end; interrupted steps are simply repeated."""
    handles = [session.submit(prompt, max_new_tokens=new) for prompt, new in zip(PROMPTS, NEW, strict=True)]
    interrupts = 0
    while not session.idle:
        try:
            session.step()
        except KeyboardInterrupt:
            interrupts += 1
    return [session.result(handle).sequence.tolist() for handle in handles], interrupts


@pytest.fixture(scope="module")
def undisturbed():
    with bass.Session(pair(), draft_length=3, eos_token_id=()) as session:
        return run(session)[0]


def interrupt_every_other_call(monkeypatch, owner, name):
    """Each odd call of owner.name does its work and is interrupted after it."""
    original, calls = getattr(owner, name), [0]

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] % 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(bass.FixedLength, "update"), (bass.ModelDrafter, "committed"), (Batch, "_move"), (Rows, "_move")],
)
def test_a_step_interrupted_after_its_commit_can_be_followed_by_others(monkeypatch, undisturbed, owner, name):
    interrupt_every_other_call(monkeypatch, owner, name)
    with bass.Session(pair(), draft_length=3, eos_token_id=()) as session:
        found, interrupts = run(session)
    assert interrupts > 0
    assert found == undisturbed


def test_a_commit_cut_in_half_is_not_built_upon(monkeypatch):
    with bass.Session(pair(), draft_length=3, eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=20)
        session.step()
        interrupt_every_other_call(monkeypatch, Rows, "_ends")
        with pytest.raises(KeyboardInterrupt):
            session.step()
        with pytest.raises(RuntimeError, match="make a new session"):
            session.step()


@pytest.mark.parametrize("first_bad_pass", [1, 2])
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed shapes"])
def test_nan_of_the_draft_is_no_doubt(monkeypatch, fixed, first_bad_pass):
    """A policy that stops on low confidence must not take NaN for it."""
    if fixed:
        use_fixed_steps(monkeypatch)
    target, draft = tiny_model(dtype="float64"), tiny_model.__wrapped__("llama", dtype="float64", noise=0.1)
    policy = StopWhenUnsure(most=3, at_least=0.0)
    with bass.Session(bass.ModelPair(target, draft), draft_length=policy, eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=20)
        session.step()
        with forward_passes(draft) as passes:
            draft.lm_head.register_forward_hook(
                lambda module, args, output: output * torch.nan if len(passes) >= first_bad_pass else output
            )
            with pytest.raises(FloatingPointError, match="draft model"):
                session.step()


def test_a_cache_that_could_not_grow_with_the_other_grows_later(monkeypatch):
    with bass.Session(pair(), draft_length=3, eos_token_id=(), max_batch_size=3) as session:
        first = session.submit(PROMPTS[0], max_new_tokens=20)
        session.step()
        too_long = session.submit(PROMPTS[1], max_new_tokens=80)
        original = bass.ModelDrafter.grow

        def fail(self, capacity):
            raise MemoryError("no room for the draft")

        monkeypatch.setattr(bass.ModelDrafter, "grow", fail)
        with pytest.raises(MemoryError):
            session.step()
        monkeypatch.setattr(bass.ModelDrafter, "grow", original)
        session.cancel(too_long)
        second = session.submit(PROMPTS[3], max_new_tokens=30)
        while not session.idle:
            session.step()
        alone = bass.generate(pair(), [PROMPTS[0], PROMPTS[3]], max_new_tokens=30, draft_length=3, eos_token_id=())
        assert session.result(first).sequence.tolist() == alone.sequences[0][:20].tolist()
        assert session.result(second).sequence.tolist() == alone.sequences[1].tolist()
