"""Synthetic acceptance: drafts are accepted at the requested rate in each row, and results are labelled."""

import numpy as np
import pytest
import torch
from recording import use_on_cpu
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.study.recorded_acceptance import SHIPPED, AcceptanceTrace
from bass_lab.synthetic_acceptance import SyntheticAcceptance

PROMPTS = ragged_prompts(5, 11, 3, 8)


def decode(acceptance, prompts=PROMPTS, new=300, k=4, **options):
    pair = bass.ModelPair(*(tiny_model(max_position_embeddings=512, num_hidden_layers=1, seed=seed) for seed in (0, 1)))
    if isinstance(acceptance, str):
        acceptance = SyntheticAcceptance.named(acceptance)
    options = {"draft_length": k, "acceptance": acceptance, "eos_token_id": ()} | options
    return bass.generate(pair, prompts, max_new_tokens=new, **options)


def decode_steps(out):
    return out.trace.steps.query("kind == 'decode'")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "verification": "coupled"}], ids=str)
def test_each_draft_is_accepted_with_the_requested_probability(options):
    out = decode("synthetic:0.8", num_return_sequences=2, new=150, **options)
    found, decisions = out.trace.summary(), 8 * 150 * 0.8  # about as many as tokens, without each step's last token
    assert found["alpha"] == pytest.approx(0.8, abs=4 * np.sqrt(0.8 * 0.2 / decisions))
    assert found["tokens_per_step"] == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.08)
    # A common count would keep the batch from growing ragged.
    counts = decode_steps(out).pivot(index="step", columns="row", values="accepted").dropna().to_numpy()
    assert abs(np.corrcoef(counts, rowvar=False)[~np.eye(8, dtype=bool)]).max() < 4 / np.sqrt(len(counts))


def test_row_draws_the_same_alone_in_a_batch_and_in_recorded_steps(monkeypatch):
    use_on_cpu(monkeypatch)
    columns = ["step", "row", "drafted", "accepted", "emitted", "kv_length"]
    eager, recorded, alone = (
        decode("synthetic:0.7", prompts, new=40, temperature=0.5, compile=compile).trace.steps[columns]
        for prompts, compile in ((PROMPTS, "off"), (PROMPTS, "graphs"), (PROMPTS[:1], "off"))
    )
    assert recorded.equals(eager)
    assert alone.accepted.tolist() == eager.query("row == 0").accepted.tolist()


def saved_trace(path, chances, **changes) -> str:
    made = AcceptanceTrace.synthetic(alpha=0.5, length=31, sequences=1)
    chances = chances.astype(np.float32)[None]
    AcceptanceTrace(**vars(made) | {"p": np.ones_like(chances), "q": chances} | changes).save(path)
    return f"synthetic:{path}"


def test_recording_is_followed_position_by_position(tmp_path):
    name = saved_trace(tmp_path / "thirds.npz", np.arange(31) % 3 != 0)
    steps = decode_steps(decode(name, PROMPTS[:1], new=120))
    positions = (steps.kv_length.to_numpy()[:, None] + np.arange(4)) % 30 + 1  # the prefill produces the first token
    kept = (positions % 3 != 0) & (np.arange(4) < steps.drafted.to_numpy()[:, None])
    assert steps.accepted.tolist() == kept.cumprod(1).sum(1).tolist()


def test_padding_behind_the_end_of_a_recorded_text_is_not_followed(tmp_path):
    """Drafts are certain in the ten positions of the text, and impossible after its end."""
    name = saved_trace(tmp_path / "short.npz", np.arange(31) < 11, lengths=np.array([11]))
    assert decode(name, PROMPTS[:1], k=3, new=100).trace.summary()["acceptance_rate"] == 1


def test_shipped_recording_has_its_own_alpha():
    found = decode("synthetic:trace", k=3, num_return_sequences=8, new=50).trace.summary()
    assert found["alpha"] == pytest.approx(AcceptanceTrace.load(SHIPPED / "library.npz").alpha, abs=0.1)


def test_synthetic_results_are_labelled(tmp_path):
    out = decode("synthetic:0.8", new=10)
    assert out.synthetic and out.trace.summary()["synthetic"] is True
    assert out.trace.summary()["acceptance"] == "synthetic:0.8"
    assert all(torch.isnan(logprobs[1:]).all() for logprobs in out.logprobs)
    out.trace.save(tmp_path / "trace.json")
    assert bass.Trace.load(tmp_path / "trace.json").meta["synthetic"] is True
    earned = decode(None, new=10)
    assert not earned.synthetic and earned.trace.summary()["acceptance"] == "earned"


def test_unknown_names_are_refused():
    wrong = ("0.8", "synthetic", "synthetic:", "synthetic:1.2", "synthetic:-0.1", "synthetic:nan", 0.8)
    for name in (*wrong, "synthetic:x.npz"):
        with pytest.raises(ValueError, match="acceptance"):
            SyntheticAcceptance.named(name)
