"""Drafts of a feature head with a cache equal drafts without a cache."""

import pytest
import torch
from recording import use_on_cpu
from sessions import run_to_the_end
from tiny import feature_head, ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow

import bass_core as bass
from bass_core.drafters import FeatureHead
from bass_core.gpu.overlap import Overlap
from bass_core.loop.step import EagerStep

TEMPERATURE = 2.0  # p and q of random models overlap: some drafts are accepted, some rejected
EXACT = 1e-6  # transformers' code for the path "eager" rounds its softmax to float32


def pair_of(architecture="llama", layers=1) -> bass.ModelPair:
    target = tiny_model(architecture, dtype="float64")
    return bass.ModelPair(target, bass.FeatureDrafter(feature_head(target, layers=layers)))


@torch.no_grad()
def recomputed(pair: bass.ModelPair, text: list[int], drafted: list[int]) -> torch.Tensor:
    """Return the distributions [K, V] of the draft tokens without a cache. Before text tokens the head reads the
    target's hidden states, before draft tokens its own hidden states."""
    head: FeatureHead = pair.drafter.head.attached(pair.target)
    hidden = pair.target.get_decoder()(torch.tensor([text]))[0]  # [1, S, H]
    features, laws = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1), []
    for slot in range(len(drafted)):
        ids = torch.tensor([text + drafted[:slot]])
        logits = head(ids, features).logits[0, -1]
        features = torch.cat([features, head.predicted[:, -1:]], 1)
        laws.append((logits / TEMPERATURE).softmax(-1))
    return torch.stack(laws)


@pytest.fixture
def drafts(monkeypatch) -> list:
    noted = []

    def note(context, draft) -> None:
        for row, drafted in enumerate(draft.lengths_host.tolist()):
            text = context.tokens[row, : context.lengths_host[row]].tolist()
            probs = torch.zeros(0) if draft.probs is None else draft.probs[row, :drafted].clone()
            noted.append((text, draft.tokens[row, :drafted].tolist(), probs))

    for kind in (EagerStep, Overlap):

        def draft(self, context, *arguments, original=kind.draft):
            made = original(self, context, *arguments)
            note(context, made)
            return made

        monkeypatch.setattr(kind, "draft", draft)
    return noted


POLICIES = {"fixed": lambda: 3, "seldom": lambda: Alternating(k=4, zeros=1), "per row": lambda: PerRow(most=5)}


def decode(pair, policy="fixed", prompts=None, **options) -> bass.Generation:
    options = {"max_new_tokens": 18, "temperature": TEMPERATURE, "eos_token_id": (), "seed": 1} | options
    return bass.generate(pair, prompts or ragged_prompts(5, 11, 1, 8), draft_length=POLICIES[policy](), **options)


def worst(pair, drafts: list) -> float:
    found = [(recomputed(pair, text, drafted) - q).abs().max().item() for text, drafted, q in drafts if drafted]
    assert len(found) >= 15
    return max(found)


@pytest.mark.parametrize(("policy", "compile"), [("fixed", "graphs"), ("seldom", "off"), ("per row", "graphs")])
def test_drafts_equal_recomputation(policy, compile, drafts, monkeypatch):
    use_on_cpu(monkeypatch)
    pair = pair_of()
    steps = decode(pair, policy, compile=compile).trace.steps
    assert 0 < steps.accepted.sum() < steps.drafted.sum()
    assert (steps.accepted == steps.drafted)[steps.drafted > 0].any()  # no model has read the last draft token yet
    assert worst(pair, drafts) < EXACT


@pytest.mark.parametrize("how", [("llama", 2, "pad"), ("qwen2", 1, "split"), ("gpt2", 1, "eager")], ids=str)
def test_drafts_are_right_on_every_path(how, drafts):
    pair = pair_of(*how[:2])
    decode(pair, attention=how[2])
    assert worst(pair, drafts) < EXACT


@pytest.mark.parametrize("compile", [pytest.param("off", marks=pytest.mark.ci), "graphs"])
def test_drafts_are_right_for_rows_that_wait_and_move(compile, drafts, monkeypatch):
    use_on_cpu(monkeypatch)
    pair = pair_of()
    decode(pair, num_return_sequences=3, max_batch_size=2, prompts=ragged_prompts(6, 2), compile=compile)
    with bass.Session(pair, max_batch_size=3, temperature=TEMPERATURE, draft_length=3, eos_token_id=()) as session:
        rows = [session.submit(prompt, max_new_tokens=9) for prompt in ragged_prompts(4, 7, 5, 9, 3)]
        session.step()
        session.step()
        session.cancel(rows[0])
        run_to_the_end(session)
    assert worst(pair, drafts) < EXACT


def test_rows_draft_independently():
    pair = pair_of()
    prompts = ragged_prompts(5, 11, 4)
    together = decode(pair, prompts=prompts, max_batch_size=2)
    with bass.Session(pair, temperature=TEMPERATURE, draft_length=3, eos_token_id=(), seed=1) as session:
        for number, prompt in enumerate(prompts):
            row = session.submit(prompt, max_new_tokens=18, row=number)
            run_to_the_end(session)
            assert session.result(row).sequence.tolist() == together[number].sequence.tolist()


@pytest.mark.parametrize("outer", ["head", "model"])
def test_interleaved_sessions_keep_their_own_states(outer, drafts):
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


def test_other_drafters_keep_no_hidden_states():
    target = tiny_model(dtype="float64")
    for draft in (target, bass.NgramDrafter()):
        with bass.Session(bass.ModelPair(target, draft), eos_token_id=()) as session:
            session.submit(ragged_prompts(5)[0], max_new_tokens=3)
            session.step()
            assert session.target.hidden(range(1)) is None


def test_misused_heads_are_refused():
    target = tiny_model(dtype="float64")
    head, wider = feature_head(target), tiny_model(hidden_size=64)
    with pytest.raises(ValueError, match="a feature head of hidden size 32 cannot draft for LlamaForCausalLM"):
        bass.Session(bass.ModelPair(wider, bass.FeatureDrafter(head)))
    with pytest.raises(ValueError, match=r"draft is a feature head, .*: FeatureDrafter\(head\)"):
        bass.ModelPair(target, head)
    with pytest.raises(TypeError, match="head must be a FeatureHead, got str; load_pair"):
        bass.FeatureDrafter("folder")


def test_head_follows_the_targets_dtype_and_stays_unchanged():
    head, target = feature_head(tiny_model(dtype="float64")), tiny_model(dtype="float32")
    out = decode(bass.ModelPair(target, bass.FeatureDrafter(head)))
    assert out.trace.steps.accepted.sum() > 0
    assert head.dtype == torch.float64 and not head.borrowed and head.predicted is None
