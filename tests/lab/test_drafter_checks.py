from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import feature_head, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_lab.checks import drafter_checks, plain_decoding
from bass_lab.drafters import LayerSkipDrafter

ONE = {"dtype": "float64", "num_hidden_layers": 1}
TARGET = tiny_model(**ONE)
FEW = tiny_model(**ONE, vocab_size=3, hidden_size=16, pad_token_id=None)
LAWS = ["law, token verification", "law, block verification"]
NAMES = [*LAWS, "greedy identity", "coupled identity", "sessions apart"]


class Guesses(bass.Drafter):
    """Draft from the last token with a random table of logits."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def begin(self, setting: bass.Setting) -> "Guesses":
        mine = super().begin(setting)
        size = (setting.vocabulary, setting.vocabulary)
        mine.table = torch.randn(size, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return mine

    def draft(self, context, lengths, policy):
        token, tokens, laws = context.last_tokens()[:, 0], [], []
        for slot in range(int(lengths.max())):
            q = self.law(context, token)
            token = self.draw(context, q, slot)
            context = context.after(token)
            tokens.append(token)
            laws.append(self.claimed(q))
        return bass.Draft.of(torch.stack(tokens, 1), lengths, torch.stack(laws, 1))

    def law(self, context, token):
        return context.law(self.table[token])

    def draw(self, context, q, slot):
        return context.draw(q, slot)

    def claimed(self, q):
        return q


class HasDiceOfItsOwn(Guesses):
    def draw(self, context, q, slot):
        return torch.multinomial(q, 1)[:, 0]


class FlattersAfterMoves(Guesses):
    moved = False

    def move_row(self, source, places):
        self.moved = True

    def claimed(self, q):
        return (q + q.mean(-1, keepdim=True)) / 2 if self.moved else q


class ClaimsTheFirstRowsLaw(Guesses):
    def draft(self, context, lengths, policy):
        draft = super().draft(context, lengths, policy)
        return draft._replace(probs=draft.probs[:1].expand_as(draft.probs))


class DrawsAllAlike(Guesses):
    def draw(self, context, q, slot):
        return context.draw(q, 0)


class SharesItsState(Guesses):
    calls = np.zeros(1)  # of all sessions

    def law(self, context, token):
        self.calls += 1
        return context.law(self.table[token].roll(int(self.calls[0]), -1))


def broken(drafter: bass.Drafter, **options) -> list[str]:
    report = lab.check_drafter(drafter, TARGET, **options)
    assert [check.name for check in report.checks] == NAMES
    return [check.name for check in report.checks if not check.passed]


@pytest.fixture
def one_way(monkeypatch):
    for name, value in (("WAYS", drafter_checks.WAYS[2:]), ("_small_target", lambda: FEW), ("NEW", 8), ("ROWS", 4)):
        monkeypatch.setattr(drafter_checks, name, value)


def test_correct_drafter_passes(one_way):
    assert broken(Guesses()) == []


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(Guesses(), marks=pytest.mark.ci),
        pytest.param(LayerSkipDrafter(1), marks=pytest.mark.slow),
        pytest.param(bass.ModelDrafter(tiny_model(dtype="float64", noise=0.1)), marks=pytest.mark.slow),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_correct_drafters_pass_all_sampling_methods(drafter):
    report = lab.check_drafter(drafter, tiny_model(dtype="float64"))
    assert report.passed, report.table().to_string()


@pytest.mark.slow
def test_half_precision_target_is_checked_in_float32(monkeypatch):
    seen, greedy = [], plain_decoding.greedy
    monkeypatch.setattr(
        plain_decoding, "greedy", lambda target, *given: (seen.append(target.dtype), greedy(target, *given))[1]
    )
    assert lab.check_drafter(bass.SuffixDrafter(), tiny_model(dtype="bfloat16")).passed
    assert set(seen) == {torch.float32}


@pytest.mark.slow
def test_feature_head_is_enumerated_on_its_own_target():
    drafter = bass.FeatureDrafter(feature_head(TARGET))
    small = bass.ModelPair(FEW, bass.FeatureDrafter(feature_head(FEW)))
    report = lab.check_drafter(drafter, TARGET, small=small)
    assert report.passed
    laws = [check.details for check in report.checks if check.name in LAWS]
    assert all(0 < law["accepted"] < law["drafted"] for law in laws)
    assert set(broken(drafter)) == set(LAWS)  # the common small target does not fit


@pytest.mark.parametrize(
    "drafter",
    [
        DrawsAllAlike,
        pytest.param(FlattersAfterMoves, marks=pytest.mark.slow),
        pytest.param(ClaimsTheFirstRowsLaw, marks=pytest.mark.slow),
    ],
)
def test_wrong_claims_are_caught(drafter, one_way):
    assert broken(drafter())[:2] == LAWS


@pytest.mark.parametrize("drafter", [HasDiceOfItsOwn, pytest.param(SharesItsState, marks=pytest.mark.ci)])
def test_private_dice_and_shared_state_are_caught(drafter, one_way):
    assert "sessions apart" in broken(drafter())


def test_models_on_a_gpu_are_copied_to_the_cpu():
    class Model:
        device = torch.device("cuda")

        def cpu(self):
            self.device = torch.device("cpu")

    drafter = SimpleNamespace(models=[Model()])
    copied = drafter_checks._on_cpu(drafter)
    assert copied.models[0].device.type == "cpu" and drafter.models[0].device.type == "cuda"
    on_cpu = SimpleNamespace(models=copied.models)
    assert drafter_checks._on_cpu(on_cpu) is on_cpu


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="must be a Drafter"):
        lab.check_drafter("ngram")
