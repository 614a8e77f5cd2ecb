"""Accepted counts that are drawn: as often as asked for, each row for itself, and always labelled."""

import numpy as np
import pytest
import torch
from recording import use_on_cpu
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.study.recorded_acceptance import SHIPPED, AcceptanceTrace

PROMPTS = ragged_prompts(5, 11, 3, 8)


def pair():
    return bass.ModelPair(tiny_model(max_position_embeddings=512), tiny_model(max_position_embeddings=512, seed=1))


def decode(acceptance, prompts=PROMPTS, new=400, k=4, **options):
    return bass.generate(
        pair(), prompts, max_new_tokens=new, draft_length=k, acceptance=acceptance, eos_token_id=(), **options
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "verification": "coupled"}])
def test_each_draft_is_accepted_with_the_chance_asked_for(options):
    found = decode("synthetic:0.8", **options).trace.summary()
    decisions = 4 * 400 * 0.8  # about as many as tokens, less the last ones of steps
    assert found["alpha"] == pytest.approx(0.8, abs=4 * np.sqrt(0.8 * 0.2 / decisions))
    assert found["tokens_per_step"] == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.08)


@pytest.mark.parametrize(("chance", "tokens_per_step"), [(0, 1), (1, 5)])
def test_certain_chances(chance, tokens_per_step):
    steps = decode(f"synthetic:{chance}", new=41).trace.steps.query("kind == 'decode'")
    assert (steps.accepted == chance * steps.drafted).all()
    assert set(steps.emitted) == {tokens_per_step}


def test_rows_draw_for_themselves():
    """One count for the whole batch would keep it from growing ragged."""
    counts = (
        decode("synthetic:0.6")
        .trace.steps.query("kind == 'decode'")
        .pivot(index="step", columns="row", values="accepted")
    )
    full = counts.dropna().to_numpy()
    assert abs(np.corrcoef(full, rowvar=False)[~np.eye(4, dtype=bool)]).max() < 4 / np.sqrt(len(full))


def test_a_row_draws_the_same_alone_and_in_a_batch():
    def accepted(out):
        return out.trace.steps.query("row == 0").accepted.tolist()

    assert accepted(decode("synthetic:0.7", PROMPTS[:1], new=60)) == accepted(decode("synthetic:0.7", new=60))


def test_a_recording_is_followed_place_by_place(tmp_path):
    """Texts in which every third draft is certain to fail: nothing is drawn, and everything depends on the place."""
    made = AcceptanceTrace.synthetic(alpha=0.5, length=31, sequences=1)
    chances = np.where(np.arange(31) % 3 == 0, 0.0, 1.0).astype(np.float32)[None]
    forced = AcceptanceTrace(**(vars(made) | {"p": np.ones_like(chances), "q": chances}))
    forced.save(tmp_path / "thirds.npz")
    steps = decode(f"synthetic:{tmp_path / 'thirds.npz'}", PROMPTS[:1], new=120).trace.steps
    steps = steps.query("kind == 'decode'")
    places = (steps.kv_length.to_numpy()[:, None] + np.arange(4)) % 30 + 1  # the first token is the prefill's
    kept = (places % 3 != 0) & (np.arange(4) < steps.drafted.to_numpy()[:, None])
    assert steps.accepted.tolist() == kept.cumprod(1).sum(1).tolist()


def test_what_stands_behind_the_end_of_a_text_is_not_followed(tmp_path):
    """Drafts are certain within the text, ten places long, and impossible behind it."""
    made = AcceptanceTrace.synthetic(alpha=0.5, length=31, sequences=1)
    chances = np.where(np.arange(31) < 11, 1.0, 0.0).astype(np.float32)[None]
    parts = vars(made) | {"p": np.ones_like(chances), "q": chances, "lengths": np.array([11])}
    AcceptanceTrace(**parts).save(tmp_path / "short.npz")
    found = decode(f"synthetic:{tmp_path / 'short.npz'}", PROMPTS[:1], k=3, new=100).trace.summary()
    assert found["acceptance_rate"] == 1


def test_the_shipped_recording_has_its_own_alpha():
    shipped = AcceptanceTrace.load(SHIPPED / "library.npz")
    found = decode("synthetic:trace", k=3, num_return_sequences=8, new=100).trace.summary()
    assert found["alpha"] == pytest.approx(shipped.alpha, abs=0.1)


def test_recorded_steps_draw_the_same(monkeypatch):
    use_on_cpu(monkeypatch)
    eager, recorded = (decode("synthetic:0.8", new=40, temperature=0.5, compile=way) for way in ("off", "graphs"))
    columns = ["step", "row", "drafted", "accepted", "emitted", "kv_length"]
    assert recorded.trace.steps[columns].equals(eager.trace.steps[columns])


def test_whatever_is_made_so_says_so(tmp_path):
    out = decode("synthetic:0.8", new=10)
    assert out.synthetic and out.trace.summary()["synthetic"] is True
    assert out.trace.summary()["acceptance"] == "synthetic:0.8"
    assert all(torch.isnan(logprobs[1:]).all() for logprobs in out.logprobs)
    out.trace.save(tmp_path / "trace.json")
    assert bass.Trace.load(tmp_path / "trace.json").meta["synthetic"] is True
    earned = decode(None, new=10)
    assert not earned.synthetic and earned.trace.summary()["acceptance"] == "earned"


@pytest.mark.parametrize(
    "name",
    ["0.8", "synthetic", "synthetic:", "synthetic:1.2", "synthetic:-0.1", "synthetic:nan", 0.8, "synthetic:x.npz"],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="acceptance"):
        decode(name)
