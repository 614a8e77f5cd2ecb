import json

import pytest
import torch
from commands import invoke
from tiny import ragged_prompts, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_core.exactness import randomness, verification
from bass_core.loop.step import EagerStep
from bass_lab.checks import exactness, four_checks, plain_decoding

NAMES = ["greedy identity", "sampled law", "coupled identity", "bfloat16 divergences"]


ONE = {"num_hidden_layers": 1}
FEW = {"max_new_tokens": 8, "samples": 1000}


def verdicts(pair, prompts=None):
    report = lab.verify(pair, prompts, **FEW)
    return {check.name: check.passed for check in report.checks}


@pytest.mark.ci
def test_healthy_engine_passes():
    report = lab.verify(bass.load_pair(dtype="float32"), max_new_tokens=16, samples=1000)
    assert report.passed, report.table().to_string()
    assert [check.name for check in report.checks] == NAMES
    sampled = report.checks[1].details["tests"]
    assert list(sampled) == ["token", "block", "temperature alone"]
    for rule in sampled:
        assert min(sampled[rule][kind] for kind in ("accepted", "recovered", "bonus")) > 100
    document = json.loads(report.to_json())
    assert document["verdict"] == "PASS"
    assert list(report.table().columns) == ["check", "passed", "tested", "seconds"]


def test_rejected_token_redrawn_from_p_is_caught(tiny_pair, monkeypatch):
    """The residual max(0, p - q) is ignored. Only sampled text changes."""
    decide = verification.token

    def from_p(drafted, lengths, q, p, keys):
        accepted = decide(drafted, lengths, q, p, keys).accepted
        return verification.Outcome(accepted, randomness.draw(p[torch.arange(len(p)), accepted], keys.target()))

    monkeypatch.setitem(verification.RULES, "token", from_p)
    assert verdicts(tiny_pair, ragged_prompts(4, 7)) == dict.fromkeys(NAMES, True) | {"sampled law": False}


@pytest.mark.slow
def test_bug_of_temperature_alone_is_caught(tiny_pair, monkeypatch):
    decide = verification.token

    def colder(drafted, lengths, q, p, keys):
        if not (p == 0).any():  # top_k leaves zeros
            p = p**1.2 / (p**1.2).sum(-1, keepdim=True)
        return decide(drafted, lengths, q, p, keys)

    monkeypatch.setitem(verification.RULES, "token", colder)
    report = lab.verify(tiny_pair, **FEW)
    assert report.checks[1].details["rejected"] == ["temperature alone"]


def test_lost_cache_entry_is_caught(tiny_pair, monkeypatch):
    """Losing the last draft token's keys leaves a stale position after a fully accepted draft."""
    original = EagerStep.target_pass

    def lossy(self, context, draft):
        buffers = self.target.cache.buffers()
        before = [buffer.clone() for buffer in buffers]
        logits = original(self, context, draft)
        rows = draft.lengths.nonzero()[:, 0]
        slots = (context.lengths - 1 + draft.lengths)[rows]
        for buffer, old in zip(buffers, before, strict=True):
            buffer[rows, :, slots] = old[rows, :, slots]
        return logits

    monkeypatch.setattr(EagerStep, "target_pass", lossy)
    assert verdicts(tiny_pair) == dict.fromkeys(NAMES, False)


@pytest.mark.ci
def test_any_kind_of_draft_can_be_checked():
    pair = bass.ModelPair(tiny_model(**ONE), bass.NgramDrafter(longest=2))
    report = lab.verify(pair, ragged_prompts(4, 7, 5, 9), **FEW)
    assert report.passed, report.table().to_string()
    assert report.checks[1].details["tests"]["token"]["accepted"] > 0


@pytest.mark.ci
def test_a_tiny_context_is_respected():
    small = {"n_positions": 8, "n_layer": 1}
    pair = bass.ModelPair(tiny_model("gpt2", **small), tiny_model("gpt2", noise=0.1, **small))
    assert all(verdicts(pair).values())


def test_too_short_a_context_is_refused():
    with pytest.raises(ValueError, match="context of 6"):
        lab.verify(bass.ModelPair(tiny_model("gpt2", n_positions=6)))


def test_models_are_unchanged():
    target, draft = (tiny_model(seed=seed, dtype="bfloat16", **ONE) for seed in (5, 6))
    weights = [tensor.clone() for tensor in target.state_dict().values()]
    target.train()
    before = target.config.to_dict(), target.generation_config.to_dict(), target.config._attn_implementation
    report = lab.verify(bass.ModelPair(target, draft), ragged_prompts(4, 7), max_new_tokens=4, samples=1000)
    assert report.passed, report.table().to_string()
    assert "float32 copies (the target is bfloat16)" in report.checks[0].tested
    assert target.training and target.dtype == torch.bfloat16
    assert before == (target.config.to_dict(), target.generation_config.to_dict(), target.config._attn_implementation)
    assert all(map(torch.equal, target.state_dict().values(), weights))


@pytest.mark.parametrize("error", [FloatingPointError("logits are NaN"), ValueError("refused"), RuntimeError("memory")])
def test_an_error_of_the_engine_is_a_failed_check(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(four_checks, "generate", fail)
    report = lab.verify(bass.ModelPair(tiny_model()), ragged_prompts(4, 7), max_new_tokens=4, samples=1000)
    assert [check.passed for check in report.checks] == [False] * 4
    assert report.checks[0].tested == f"{type(error).__name__}: {error}"
    assert json.loads(report.to_json())["verdict"] == "FAIL"


@pytest.mark.slow
def test_command_checks_a_target(tmp_path):
    tokenizer = bass.load_pair().tokenizer
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    document = json.loads(invoke("verify", "--target", tmp_path, "--samples", 1000, "--json").stdout)
    assert document["verdict"] == "PASS" and len(document["checks"]) == 4


@pytest.mark.parametrize(("passed", "word"), [(True, "PASS"), (False, "FAIL")])
def test_command_prints_the_verdicts(monkeypatch, passed, word):
    check, given = exactness.Check("greedy identity", passed, "7 of 8 rows", 0.1, {}), []

    def verify(pair, prompts, **options):
        given.append((prompts, options["samples"]))
        return exactness.Report("a pair", [check])

    monkeypatch.setattr(exactness, "verify", verify)
    result = invoke("verify", "--prompt", "a prompt", "--samples", 2000)
    assert result.exit_code == (not passed) and given == [(["a prompt"], 2000)]
    assert f"{word}  greedy identity" in result.stdout and result.stdout.endswith(f"\n{word}\n")


def test_likely_texts_keep_their_exact_probabilities():
    target = tiny_model(vocab_size=5, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    prompt = torch.tensor([1, 2])
    law = plain_decoding.likely_law(target, prompt, 0.8, 3, most=2)
    whole = plain_decoding.exact_law(target, prompt, bass.SamplingParams(0.8), 3)
    assert len(whole) == 5**3 and len(law) == 2**3 + 1 + 2 + 4
    found = dict.fromkeys(law, 0.0)
    for text, outcome in zip(whole, plain_decoding.as_likely(list(whole), law), strict=True):
        found[outcome] += whole[text]
    assert found == pytest.approx(law, abs=1e-6)
