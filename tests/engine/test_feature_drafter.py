"""A feature head's drafts are what it says of all that the target knew, whatever became of earlier drafts."""

import pytest
import torch
from recording import use_on_cpu
from tiny import feature_head, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.cache import TokenStates
from bass_core.drafters import FeatureHead
from bass_core.eager_step import EagerStep
from bass_core.step_ahead import StepAhead

TEMPERATURE = 2.0  # random models: where p and q overlap enough for drafts to be accepted, and not always
EXACT = 1e-6  # transformers' own code for the path "eager" rounds its softmax to float32


def pair_of(architecture="llama", layers=1) -> bass.ModelPair:
    target = tiny_model(architecture, dtype="float64")
    return bass.ModelPair(target, bass.FeatureDrafter(feature_head(target, layers=layers)))


@torch.no_grad()
def recomputed(pair: bass.ModelPair, text: list[int], drafted: list[int]) -> torch.Tensor:
    """What each of the drafted tokens is drawn from [K, V], without a cache: the head over the target's hidden states
    before all tokens of the text, and its own before drafted ones."""
    head: FeatureHead = pair.drafter.head.attached(pair.target)
    hidden = pair.target.get_decoder()(torch.tensor([text]))[0]  # [1, S, H]
    features, laws = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1), []
    for slot in range(len(drafted)):
        ids = torch.tensor([text + drafted[:slot]])
        logits = head(ids, features).logits[0, -1]
        features = torch.cat([features, head.predicted[:, -1:]], 1)
        laws.append((logits / TEMPERATURE).softmax(-1))
    return torch.stack(laws)


class Drafts(list):
    """Of each step and row: the text before it, what was drafted, and from what."""

    def note(self, context, draft) -> None:
        for row, drafted in enumerate(draft.lengths_host.tolist()):
            text = context.tokens[row, : context.lengths_host[row]].tolist()
            probs = torch.zeros(0) if draft.probs is None else draft.probs[row, :drafted].clone()
            self.append((text, draft.tokens[row, :drafted].tolist(), probs))


@pytest.fixture
def drafts(monkeypatch) -> Drafts:
    noted = Drafts()
    for kind in (EagerStep, StepAhead):
        original = kind.draft

        def draft(self, context, *arguments, original=original):
            made = original(self, context, *arguments)
            noted.note(context, made)
            return made

        monkeypatch.setattr(kind, "draft", draft)
    return noted


class Varying(bass.DraftLengthPolicy):
    """3, 1, 0, 0, 5, 2, …: rows that rested have to catch up."""

    def __init__(self):
        self.at = 0

    def plan(self, rows):
        self.at += 1
        return (3, 1, 0, 0, 5, 2)[self.at % 6]


class PerRow(Varying):
    def plan(self, rows):
        self.at += 1
        return torch.as_tensor((rows.ids + self.at) % 4)


POLICIES = {"fixed": lambda: 3, "varying": Varying, "per row": PerRow}


def decode(pair, policy="fixed", prompts=None, **options) -> bass.Generation:
    options = {"max_new_tokens": 18, "temperature": TEMPERATURE, "eos_token_id": (), "seed": 1} | options
    return bass.generate(pair, prompts or ragged_prompts(5, 11, 1, 8), draft_length=POLICIES[policy](), **options)


def worst(pair, drafts: Drafts) -> float:
    """The largest difference of a draft's law to what recomputing gives."""
    found = [difference(pair, *each) for each in drafts if each[1]]
    assert len(found) >= 15
    return max(found)


def difference(pair, text: list[int], drafted: list[int], q: torch.Tensor) -> float:
    return (recomputed(pair, text, drafted) - q).abs().max().item()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_drafts_are_drawn_from_what_recomputing_gives(policy, compile, drafts, monkeypatch):
    use_on_cpu(monkeypatch)
    pair = pair_of()
    out = decode(pair, policy, compile=compile)
    steps = out.trace.steps
    assert 0 < steps.accepted.sum() < steps.drafted.sum()
    assert (steps.accepted == steps.drafted)[steps.drafted > 0].any()  # the last draft was read by nobody yet
    assert worst(pair, drafts) < EXACT


@pytest.mark.parametrize("attention", ["pad", "split", "eager"])
@pytest.mark.parametrize("layers", [1, 2])
def test_on_every_path_and_with_more_layers(attention, layers, drafts):
    pair = pair_of(layers=layers)
    decode(pair, attention=attention)
    assert worst(pair, drafts) < EXACT


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2", "opt", "phi3"])
def test_for_targets_of_every_make(architecture, drafts):
    pair = pair_of(architecture)
    decode(pair)
    assert worst(pair, drafts) < EXACT


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_rows_that_wait_move_and_share_a_prompt(compile, drafts, monkeypatch):
    use_on_cpu(monkeypatch)
    pair = pair_of()
    decode(pair, num_return_sequences=3, max_batch_size=2, prompts=ragged_prompts(6, 2), compile=compile)
    with bass.Session(pair, max_batch_size=3, temperature=TEMPERATURE, draft_length=3, eos_token_id=()) as session:
        rows = [session.submit(prompt, max_new_tokens=9) for prompt in ragged_prompts(4, 7, 5, 9, 3)]
        session.step()
        session.step()
        session.cancel(rows[0])
        while not session.idle:
            session.step()
    assert worst(pair, drafts) < EXACT


def test_what_a_row_drafts_is_nobody_elses_business():
    pair = pair_of()
    prompts = ragged_prompts(5, 11, 4)
    together = decode(pair, prompts=prompts, max_batch_size=2)
    with bass.Session(pair, temperature=TEMPERATURE, draft_length=3, eos_token_id=(), seed=1) as session:
        for number, prompt in enumerate(prompts):
            row = session.submit(prompt, max_new_tokens=18, row=number)
            while not session.idle:
                session.step()
            assert session.result(row).sequence.tolist() == together[number].sequence.tolist()


@pytest.mark.parametrize("outer", ["head", "model"])
def test_sessions_inside_each_other_keep_their_own(outer, drafts):
    """A target that one session holds switched is another's in between, and keeps hidden states for one of them."""
    with_head = pair_of()
    with_model = bass.ModelPair(with_head.target, tiny_model(dtype="float64", noise=0.1))
    options = {"temperature": TEMPERATURE, "draft_length": 3, "eos_token_id": (), "max_batch_size": 4}
    with bass.Session(with_head, **options) as mine, bass.Session(with_model, **options) as other:
        for session in (mine, other):
            for prompt in ragged_prompts(5, 11, 1, 8):
                session.submit(prompt, max_new_tokens=18)
        heads = []
        with (mine if outer == "head" else other).prepared():
            while not (mine.idle and other.idle):
                other.step()
                drafts.clear()
                mine.step()
                heads += drafts
    assert worst(with_head, heads) < EXACT
    assert "forward" not in vars(with_head.target.get_decoder())


def test_nothing_is_kept_for_drafters_that_do_not_ask():
    target = tiny_model(dtype="float64")
    for draft in (target, bass.NgramDrafter(), bass.LayerSkipDrafter(1)):
        with bass.Session(bass.ModelPair(target, draft), eos_token_id=()) as session:
            session.submit(ragged_prompts(5)[0], max_new_tokens=3)
            session.step()
            assert session.target.cache.hidden is None and session.target.hidden(range(1)) is None


def test_a_head_for_another_width_is_refused():
    head = feature_head(tiny_model(dtype="float64"))
    wider = tiny_model(hidden_size=64)
    with pytest.raises(ValueError, match="a feature head for hidden states of 32 cannot draft for LlamaForCausalLM"):
        bass.Session(bass.ModelPair(wider, bass.FeatureDrafter(head)))


def test_a_head_is_no_draft_model_and_a_folder_no_head():
    target = tiny_model(dtype="float64")
    with pytest.raises(ValueError, match=r"draft is a feature head, .*: FeatureDrafter\(head\)"):
        bass.ModelPair(target, feature_head(target))
    with pytest.raises(TypeError, match="head must be a FeatureHead, got str; load_pair"):
        bass.FeatureDrafter("folder")


def test_the_head_goes_where_the_target_is_and_stays_what_it_was():
    head, target = feature_head(tiny_model(dtype="float64")), tiny_model(dtype="float32")
    out = decode(bass.ModelPair(target, bass.FeatureDrafter(head)))
    assert out.trace.steps.accepted.sum() > 0
    assert head.dtype == torch.float64 and not head.borrowed and head.predicted is None


# --- bugs, each of which the comparison above has to see ---


def test_features_of_rejected_tokens_are_caught(drafts, monkeypatch):
    """A head that takes what it predicted for drafted tokens to be what the target said of them."""

    def committed(self, before, drafted, accepted):
        self.cached[: len(before)] += accepted

    monkeypatch.setattr(bass.FeatureDrafter, "committed", committed)
    pair = pair_of()
    decode(pair)
    assert worst(pair, drafts) > 1e-3


def test_features_one_behind_are_caught(drafts, monkeypatch):
    original = bass.FeatureDrafter._features
    monkeypatch.setattr(
        bass.FeatureDrafter, "_features", lambda self, hidden, starts, n: original(self, hidden, starts - 1, n)
    )
    pair = pair_of()
    decode(pair)
    assert worst(pair, drafts) > 1e-3


def test_hidden_states_of_another_row_are_caught(drafts, monkeypatch):
    original = TokenStates.of
    monkeypatch.setattr(TokenStates, "of", lambda self, places: original(self, places).roll(1, 0))
    pair = pair_of()
    decode(pair)
    assert worst(pair, drafts) > 1e-3


def test_a_cache_that_stays_behind_its_row_is_caught(drafts, monkeypatch):
    monkeypatch.setattr(bass.FeatureDrafter, "move_row", lambda self, source, places: None)
    pair = pair_of()
    decode(pair, num_return_sequences=3, max_batch_size=3)
    assert worst(pair, drafts) > 1e-3


def test_a_cache_one_behind_is_caught(drafts, monkeypatch):
    """The oldest of the tokens that a step has committed is not read again."""
    original = bass.FeatureDrafter._missed
    monkeypatch.setattr(bass.FeatureDrafter, "_missed", lambda self, *arguments: original(self, *arguments) - 1)
    pair = pair_of()
    decode(pair)
    assert worst(pair, drafts) > 1e-3


def test_a_law_that_is_not_what_was_drawn_from_is_caught(drafts, monkeypatch):
    monkeypatch.setattr(bass.FeatureDrafter, "_q", lambda self, context, logits: logits.softmax(-1))
    pair = pair_of()
    decode(pair)
    assert worst(pair, drafts) > 1e-3
