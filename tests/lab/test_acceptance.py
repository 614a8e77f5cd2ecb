import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import invoke
from tiny import ragged_prompts, tiny_model
from trial_policies import PerRow, StopWhenUnsure

import bass_core as bass
from bass_lab.checks.goodness_of_fit import g_test
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import next_token_law, tabular, total_variation
from bass_lab.study import recorded_acceptance, recording
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, _runs, decode
from bass_lab.texts.prompt_sets import prompt_set

PROMPT = [0, 1]
NEW = 4


@pytest.fixture(scope="module")
def sampled(tiny_pair):
    return recording.record(
        tiny_pair, ragged_prompts(4, 9, 6), samples=2, max_new_tokens=16, temperature=0.8, seed=3, rollout=5
    )


def engines_law(pair, policy):
    """Return {(text, (drafted, accepted) per step): probability} of the engine, with all decisions enumerated."""

    def run():
        options = {"max_new_tokens": NEW, "temperature": 1.0, "eos_token_id": (), "attention": "pad"}
        out = bass.generate(pair, [torch.tensor(PROMPT)], draft_length=policy(), **options)
        decode_steps = out.trace.steps.query("kind == 'decode'")
        return tuple(out.sequences[0].tolist()), tuple(zip(decode_steps.drafted, decode_steps.accepted, strict=True))

    return Oracle().laws(run)


def simulated_law(pair, policy, texts):
    """Return the same from the target's text probabilities, the recorded probabilities, and all patterns of coin
    flips."""
    law = {}
    for text in texts:
        trace = recording.teacher_forced(pair, [torch.tensor(PROMPT)], [torch.tensor(text)], temperature=1.0, rollout=1)
        prefixes = [PROMPT + list(text[:t]) for t in range(NEW)]
        of_text = np.prod(
            [next_token_law(pair.target, prefix)[token] for prefix, token in zip(prefixes, text, strict=True)]
        )
        for coins in np.ndindex(*(2,) * NEW):
            heads = np.array(coins, dtype=bool)
            chance = np.where(heads, trace.accept[0], 1 - trace.accept[0]).prod()
            steps = decode(replay_of(trace, heads[None]), policy())
            key = text, tuple((int(step.drafted[0]), int(step.accepted[0])) for step in steps)
            law[key] = law.get(key, 0.0) + of_text * chance
    return law


def replay_of(trace, fates):
    return Replay(trace, np.arange(len(fates)), trace.lengths, trace.p.shape[1], _runs(fates))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(lambda: bass.BassHeuristic(initial=2), marks=pytest.mark.ci),
        pytest.param(PerRow, marks=pytest.mark.ci),
        # With two ids, the rejected token and the draft's next signals are known.
        lambda: StopWhenUnsure(most=2, at_least=0.7),
    ],
    ids=["algorithm 1", "per row", "stop when unsure"],
)
def test_text_and_steps_have_the_engines_joint_distribution(policy):
    pair = bass.ModelPair(tabular(2, seed=5), tabular(2, seed=6))
    wanted = engines_law(pair, policy)
    found = simulated_law(pair, policy, {text for text, _ in wanted})
    assert len({steps for _, steps in wanted}) >= 2
    assert total_variation(found, wanted) < 1e-6  # probabilities are stored in float32


def test_recorded_p_and_q_are_the_engines(tiny_pair):
    options = {"max_new_tokens": 16, "temperature": 0.8, "draft_length": 3, "eos_token_id": (), "trace": "tokens"}
    out = bass.generate(tiny_pair, ragged_prompts(4, 9), **options)
    trace = recording.teacher_forced(tiny_pair, ragged_prompts(4, 9), out.sequences, temperature=0.8)
    tokens = out.trace.tokens.query("kind in ('accepted', 'recovered')")  # positions with a draft
    at = tokens.row, tokens.position - trace.prompt_lengths[tokens.row]
    np.testing.assert_allclose(trace.p[at], tokens.p, atol=1e-5)
    np.testing.assert_allclose(trace.q[at], tokens.q, atol=1e-5)
    np.testing.assert_allclose(trace.accept[at], np.minimum(1, tokens.q / tokens.p), atol=1e-3)
    assert 0.1 < trace.accept[at].mean() < 0.95


@pytest.fixture(scope="module")
def shown(tiny_pair):
    """Decode greedily: only one rollout is possible. Return the trace, the accepted lengths by position, and by
    position and slot entropy and maximum before a draft."""
    prompt, signalled = ragged_prompts(5), {}

    class Listener(bass.DraftLengthPolicy):
        def plan(self, rows):
            self.at = int(rows.generated[0])
            return 4

        def keep_drafting(self, signals):
            signalled[self.at, signals.slot] = float(signals.entropy[0]), float(signals.maximum[0])
            return torch.ones_like(signals.drafting)

    out = bass.generate(tiny_pair, prompt, max_new_tokens=24, draft_length=Listener(), eos_token_id=())
    trace = recording.record(tiny_pair, prompt, max_new_tokens=24, temperature=0.0, rollout=4)
    accepted = dict(zip(out.trace.steps.kv_length - 5, out.trace.steps.accepted, strict=True))
    return trace, accepted, signalled


def test_recorded_signals_are_the_engines(shown):
    trace, accepted, signalled = shown
    off_text = 0
    for (at, slot), (entropy, maximum) in signalled.items():
        past = slot - accepted[at] - 1
        off_text += past >= 0
        if past < 0:
            assert trace.entropy[0, at + slot] == pytest.approx(entropy, abs=1e-4)
            assert trace.maximum[0, at + slot] == pytest.approx(maximum, abs=1e-5)
        else:
            assert trace.rollout_entropy[0, at + accepted[at], past] == pytest.approx(entropy, abs=3e-3)  # float16
            assert trace.rollout_maximum[0, at + accepted[at], past] == pytest.approx(maximum, abs=1e-3)
    assert 10 < off_text < len(signalled) - 10


def test_rollouts_exist_at_possible_rejections(sampled):
    t = sampled.p.shape[1]
    places = np.arange(t)
    can = (sampled.accept < 1) & (places >= 1)
    follows = np.minimum(t - 2 - places, sampled.rollout_entropy.shape[-1]).clip(min=0)  # possible further drafts
    recorded = np.isfinite(sampled.rollout_entropy)
    assert (recorded.sum(-1) == np.where(can, follows, 0)).all()
    assert (recorded == np.isfinite(sampled.rollout_maximum)).all()
    assert recorded.any() and not recorded.all()


def test_rejected_token_has_the_residual_distribution():
    """The draft's maximum after the rejected token identifies the token."""
    pair = bass.ModelPair(tabular(4, seed=3), tabular(4, seed=4))
    text = torch.tensor([1, 2, 0, 1])
    p, q = (next_token_law(model, [*PROMPT, 1]) for model in (pair.target, pair.draft))
    assert q[2] < p[2]  # the second token may replace a rejected draft
    residual = np.maximum(q - p, 0) / np.maximum(q - p, 0).sum()
    maxima = {token: next_token_law(pair.draft, [*PROMPT, 1, token]).max() for token in np.flatnonzero(residual)}
    copies = 200
    trace = recording.teacher_forced(pair, [torch.tensor(PROMPT)] * copies, [text] * copies, temperature=1.0)
    found = [min(maxima, key=lambda token: abs(maxima[token] - seen)) for seen in trace.rollout_maximum[:, 1, 0]]
    assert len(maxima) > 1
    law = {(int(token),): residual[token] for token in maxima}
    assert g_test([(int(token),) for token in found], law)["p_value"] > 1e-4


def test_recording_continues_after_eos():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    prompts = ragged_prompts(4, 9, 6, 5)
    options = {"max_new_tokens": 24, "temperature": 1.5, "seed": 1}
    ended = bass.generate(pair, prompts, num_return_sequences=4, draft_length=0, **options)
    trace = recording.record(pair, prompts, samples=4, **options)
    assert trace.lengths.tolist() == [len(sequence) for sequence in ended.sequences]
    assert trace.lengths.min() < 24 and np.isfinite(trace.p).all()


def test_draft_with_fewer_ids_has_zero_chance_for_the_others():
    pair = bass.ModelPair(tiny_model(), tiny_model(vocab_size=50))
    trace = recording.record(pair, ragged_prompts(4, 7), max_new_tokens=12, temperature=1.0)
    options = {"max_new_tokens": 12, "temperature": 1.0, "draft_length": 0, "eos_token_id": ()}
    texts = bass.generate(pair, ragged_prompts(4, 7), **options).sequences
    unknown = torch.stack(texts).numpy() >= 50
    assert unknown.any()
    assert (trace.q[unknown] == 0).all() and (trace.q[~unknown] > 0).all()


def test_saved_trace_is_loaded(sampled, tmp_path):
    path = tmp_path / "eight rows.npz"
    sampled.save(path)
    loaded = AcceptanceTrace.load(path)
    for name in vars(sampled).keys() - {"meta"}:
        before, after = getattr(sampled, name), getattr(loaded, name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
    assert loaded.meta == sampled.meta


def test_synthetic_chances_have_mean_alpha_and_spells_their_duration():
    flat = AcceptanceTrace.synthetic(alpha=0.8, length=64, sequences=4)
    assert flat.accept == pytest.approx(np.full((4, 64), 0.8))
    assert flat.alpha == pytest.approx(0.8)
    switching = AcceptanceTrace.synthetic(alpha=0.8, length=1000, sequences=100, regimes=(0.15, 20))
    assert np.unique(switching.accept.round(4)).tolist() == [0.65, 0.95]
    # 100,000 tokens in spells of 20 on average: about 2,500 independent pairs of spells; five standard errors
    assert switching.alpha == pytest.approx(0.8, abs=5 * 0.15 / np.sqrt(2500))
    spells = 1 + (np.diff(switching.accept, axis=1) != 0).sum(1)
    assert 1000 / spells.mean() == pytest.approx(20, rel=0.1)


def test_impossible_recordings_are_refused(tiny_pair, sampled, tmp_path):
    made, two = {"alpha": 0.8, "length": 8, "sequences": 2}, [torch.tensor([3, 4]), torch.tensor([3])]
    how = {"max_new_tokens": 4, "temperature": 0.0}
    refused = {
        "alpha=1.2": lambda: AcceptanceTrace.synthetic(**made | {"alpha": 1.2}),
        r"regimes=\(0.3, 5": lambda: AcceptanceTrace.synthetic(**made, regimes=(0.3, 5)),
        r"regimes=\(0.1, 0.5": lambda: AcceptanceTrace.synthetic(**made, regimes=(0.1, 0.5)),
        "needs a draft model": lambda: recording.record(bass.ModelPair(tiny_model()), ragged_prompts(4), **how),
        "equal lengths": lambda: recording.teacher_forced(tiny_pair, ragged_prompts(4, 5), two, temperature=0.0),
        "rollout": lambda: recording.record(tiny_pair, ragged_prompts(4), rollout=0, **how),
        "one of mini, library; got 'other'": lambda: recorded_acceptance.shipped("other"),
        "holds no trace: it lacks entropy, maximum, rollout_entropy": lambda: AcceptanceTrace.load(
            tmp_path / "old.npz"
        ),
        "lengths": lambda: replace(sampled, lengths=sampled.lengths + 100),
    }
    for name in ("entropy", "rollout_maximum"):
        cut = {name: getattr(sampled, name)[:, 1:]}
        refused[f"^{name} must have the shape"] = lambda cut=cut: replace(sampled, **cut)
    np.savez(tmp_path / "old.npz", p=sampled.p, q=sampled.q, meta=np.array("{}"))
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["mini", "library"])
def test_recorded_traces_of_the_embedded_pair_ship(name):
    trace = recorded_acceptance.shipped(name)
    assert trace.p.shape == (96, 128) and trace.meta["prompt_set"] == name
    assert {"mini": 0.85, "library": 0.6}[name] < trace.alpha < {"mini": 0.95, "library": 0.7}[name]
    assert (recorded_acceptance.SHIPPED / f"{name}.npz").stat().st_size < 1_000_000
    whole = trace.past_eos()
    assert (trace.lengths < 128).any() and (whole.lengths == 128).all() and whole.p is trace.p


def test_command_records_like_the_function(tmp_path):
    path = tmp_path / "a folder to make" / "trace.npz"
    options = ["--count", "2", "--max-new-tokens", "4", "--seed", "3", "--json"]
    result = invoke("record", "--output", str(path), *options)
    assert result.exit_code == 0, result.output
    found, pair = AcceptanceTrace.load(path), bass.load_pair()
    texts = prompt_set("mini", 2)
    expected = recording.record(pair, texts, max_new_tokens=4, temperature=0.2, seed=3, rollout=12)
    assert np.array_equal(found.p, expected.p) and np.array_equal(found.q, expected.q)
    assert json.loads(result.stdout) == {"saved": str(path), "texts": 2, "alpha": found.alpha}
