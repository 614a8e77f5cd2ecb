"""`check_drafter`: drafters that keep their word pass, and each broken demand is named."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import feature_head, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_lab.checks import drafter_checks

TARGET = tiny_model(dtype="float64")
LAWS = ["law, token verification", "law, block verification"]
NAMES = [*LAWS, "greedy identity", "coupled identity", "sessions apart"]


class Guesses(bass.Drafter):
    """Guesses by the last token alone: a table of logits that its seed decides."""

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


class Flatters(Guesses):
    def claimed(self, q):
        return (q + q.mean(-1, keepdim=True)) / 2


class HasDiceOfItsOwn(Guesses):
    def draw(self, context, q, slot):
        return torch.multinomial(q, 1)[:, 0]


class PicksTheMostLikely(Guesses):
    def draw(self, context, q, slot):
        return q.argmax(-1)


class FlattersAfterMoves(Guesses):
    moved = False

    def move_row(self, source, places):
        self.moved = True

    def claimed(self, q):
        return (q + q.mean(-1, keepdim=True)) / 2 if self.moved else q


class ClaimsTheFirstLaw(Guesses):
    """Of a dimension, for all along it: 0 is the rows', 1 the drafts'."""

    def __init__(self, dimension: int):
        super().__init__()
        self.dimension = dimension

    def draft(self, context, lengths, policy):
        draft = super().draft(context, lengths, policy)
        return draft._replace(probs=draft.probs.narrow(self.dimension, 0, 1).expand_as(draft.probs))


class DrawsAllAlike(Guesses):
    """Every draft of a step with one random number."""

    def draw(self, context, q, slot):
        return context.draw(q, 0)


class ForgetsWhatWasSaid(Guesses):
    def law(self, context, token):
        return self.table[token].softmax(-1)  # neither the temperature nor what rows have had


class SharesItsState(Guesses):
    """What it counts belongs to no session."""

    calls = np.zeros(1)

    def law(self, context, token):
        self.calls += 1
        return context.law(self.table[token].roll(int(self.calls[0]), -1))


def broken(drafter: bass.Drafter) -> list[str]:
    report = lab.check_drafter(drafter, TARGET)
    assert [check.name for check in report.checks] == NAMES
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize(
    "drafter",
    [
        Guesses(),
        pytest.param(ForgetsWhatWasSaid(), marks=pytest.mark.slow),  # a worse draft, and an honest one
        pytest.param(bass.NgramDrafter(), marks=pytest.mark.slow),
        bass.SuffixDrafter(),
        bass.LayerSkipDrafter(1),
        bass.ModelDrafter(tiny_model(dtype="float64", noise=0.1)),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_drafters_that_keep_their_word_pass(drafter):
    assert broken(drafter) == []


def test_a_target_in_half_precision_is_asked_in_full(monkeypatch):
    """Rounding decides between close tokens, whatever drafts."""
    seen = []
    monkeypatch.setattr(drafter_checks, "_greedy", lambda pair, prompts: (seen.append(pair.target.dtype), True, {})[1:])
    assert lab.check_drafter(bass.NgramDrafter(), tiny_model(dtype="bfloat16")).checks
    assert seen == [torch.float32]


def test_a_feature_head_is_enumerated_on_a_target_of_its_own():
    drafter = bass.FeatureDrafter(feature_head(TARGET))
    few = tiny_model(dtype="float64", vocab_size=3, hidden_size=16, num_hidden_layers=1, pad_token_id=None)
    small = bass.ModelPair(few, bass.FeatureDrafter(feature_head(few)))
    report = lab.check_drafter(drafter, TARGET, small=small)
    assert report.passed
    laws = [check.details for check in report.checks if check.name in LAWS]
    assert all(0 < law["accepted"] < law["drafted"] for law in laws)
    assert set(broken(drafter)) == set(LAWS)  # on the target that every drafter gets it cannot draft


@pytest.mark.parametrize(
    "drafter",
    [
        Flatters(),
        PicksTheMostLikely(),
        FlattersAfterMoves(),
        ClaimsTheFirstLaw(0),
        ClaimsTheFirstLaw(1),
        DrawsAllAlike(),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_a_law_that_is_not_the_drafts_is_caught(drafter):
    assert broken(drafter)[:2] == LAWS


def test_dice_of_its_own_are_caught():
    assert set(broken(HasDiceOfItsOwn())) >= {"sessions apart"}


def test_state_that_sessions_share_is_caught():
    assert "sessions apart" in broken(SharesItsState())


def test_models_on_a_gpu_are_copied_to_where_the_random_numbers_are():
    class Model:
        device = torch.device("cuda")

        def cpu(self):
            self.device = torch.device("cpu")

    drafter = SimpleNamespace(models=[Model()])
    copied = drafter_checks._on_cpu(drafter)
    assert copied.models[0].device.type == "cpu" and drafter.models[0].device.type == "cuda"
    on_cpu = SimpleNamespace(models=copied.models)
    assert drafter_checks._on_cpu(on_cpu) is on_cpu


def test_what_is_no_drafter_is_refused():
    with pytest.raises(TypeError, match="must be a Drafter"):
        lab.check_drafter("ngram")
