"""`verify` passes the healthy engine and fails planted bugs of three kinds, on the embedded pair itself."""

import inspect
import json

import pytest
import torch
from tiny import tiny_model
from typer.testing import CliRunner

import bass_core as bass
import bass_lab as lab
from bass_core import randomness, verification
from bass_core.drafters import ModelDrafter
from bass_core.eager_step import EagerStep
from bass_lab.checks import exactness, four_checks, plain_decoding
from bass_lab.cli import main
from bass_lab.texts.prompt_sets import prompt_set

NAMES = ["greedy identity", "sampled law", "coupled identity", "bfloat16 divergences"]
FOUR = prompt_set("mini", 4)  # of the eight that `verify` takes by default; what is planted shows in them too


@pytest.fixture(scope="module")
def embedded():
    return bass.load_pair(dtype="float32")


def verdicts(pair, prompts=None, **options):
    report = lab.verify(pair, prompts, **({"max_new_tokens": 16, "samples": 1000} | options))
    return {check.name: check.passed for check in report.checks}


# --- planted bugs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_healthy_engine_passes(embedded):
    report = lab.verify(embedded, max_new_tokens=16, samples=1000)
    assert report.passed, report.table().to_string()
    assert [check.name for check in report.checks] == NAMES
    sampled = report.checks[1].details["tests"]
    assert list(sampled) == ["token", "block", "temperature alone"]
    for rule in sampled:
        assert min(sampled[rule][kind] for kind in ("accepted", "recovered", "bonus")) > 100
    document = json.loads(report.to_json())
    assert document["verdict"] == "PASS"
    assert list(report.table().columns) == ["check", "passed", "tested", "seconds"]


@pytest.mark.slow
def test_a_rejected_token_redrawn_from_p_is_caught(embedded, monkeypatch):
    """The residual max(0, p - q) forgotten: greedy and coupled text do not change, sampled text does."""

    def from_p(q, p, accepted, lengths, weight, keys):
        return randomness.draw(p[torch.arange(len(p)), accepted], keys.target())

    monkeypatch.setattr(verification, "_residual_draw", from_p)
    assert verdicts(embedded, FOUR, samples=4096) == dict.fromkeys(NAMES, True) | {"sampled law": False}


@pytest.mark.slow
def test_what_is_wrong_by_temperature_alone_is_caught(embedded, monkeypatch):
    """As where a GPU's kernels draw and decide, which they do for nothing else."""
    decide = verification.token

    def colder(drafted, lengths, q, p, keys):
        if not (p == 0).any():  # top_k leaves zeros
            p = p**1.2 / (p**1.2).sum(-1, keepdim=True)
        return decide(drafted, lengths, q, p, keys)

    monkeypatch.setitem(verification.RULES, "token", colder)
    report = lab.verify(embedded, FOUR, max_new_tokens=16, samples=1000)
    assert report.checks[1].details["rejected"] == ["temperature alone"]


@pytest.mark.slow
def test_a_raw_q_is_caught(embedded, monkeypatch):
    """Acceptance divides by the draft's raw law, while its tokens come from the processed one."""
    original = ModelDrafter._next_token

    def raw(self, logits, *args):
        token, q, peak = original(self, logits, *args)
        return token, None if q is None else logits.softmax(-1), peak

    monkeypatch.setattr(ModelDrafter, "_next_token", raw)
    assert verdicts(embedded, FOUR) == dict.fromkeys(NAMES, True) | {"sampled law": False}


@pytest.mark.slow
def test_a_lost_cache_entry_is_caught(embedded, monkeypatch):
    """The last drafted token's keys are not kept, so that a fully accepted draft leaves a stale slot behind."""
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
    assert verdicts(embedded, FOUR) == dict.fromkeys(NAMES, False)


@pytest.mark.slow
def test_a_block_rule_without_its_weights_is_caught(embedded, monkeypatch):
    """Block verification with h_i = p_i for every i: nearly token verification, and not exact."""

    source = inspect.getsource(verification.block)
    mutated = source.replace(
        "torch.where(is_last, weight[:, 1:], torch.nn.functional.pad(inner, (0, 1)))", "weight[:, 1:]"
    )
    assert mutated != source
    scope = dict(vars(verification))
    exec(mutated, scope)
    monkeypatch.setitem(verification.RULES, "block", scope["block"])
    assert verdicts(embedded, FOUR, samples=2000) == dict.fromkeys(NAMES, True) | {"sampled law": False}


# --- other models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, bass.NgramDrafter(longest=2), "model", "target itself"])
def test_any_kind_of_draft_can_be_checked(draft):
    target = tiny_model("llama")
    pair = bass.ModelPair(target, {"model": tiny_model("gpt2", seed=3), "target itself": target}.get(draft, draft))
    report = lab.verify(pair, max_new_tokens=12, samples=1000)
    assert report.passed, report.table().to_string()
    if draft != "model":  # that one hardly ever agrees with the target
        assert report.checks[1].details["tests"]["token"]["accepted"] > 0


@pytest.mark.parametrize("architecture", ["gemma3", "opt", "gptj"])
def test_other_architectures_can_be_checked(architecture):
    assert all(verdicts(bass.ModelPair(tiny_model(architecture), tiny_model(architecture, noise=0.1))).values())


@pytest.mark.parametrize("context", [8, 16])
@pytest.mark.parametrize("has_draft", [True, False])
def test_a_tiny_context_is_respected(context, has_draft):
    draft = tiny_model("gpt2", noise=0.1, n_positions=context) if has_draft else None
    assert all(verdicts(bass.ModelPair(tiny_model("gpt2", n_positions=context), draft)).values())


def test_one_prompt_makes_a_ragged_batch():
    prompts, new = exactness._prompts(bass.ModelPair(tiny_model()), [torch.arange(3, 20)], 20)
    assert [len(prompt) for prompt in prompts] == [17, 15, 13, 11]
    assert new == 20


def test_a_context_too_short_to_check_is_refused():
    with pytest.raises(ValueError, match="context of 6"):
        lab.verify(bass.ModelPair(tiny_model("gpt2", n_positions=6)))


def test_models_are_left_as_they_were():
    target, draft = tiny_model("llama", seed=5, dtype="bfloat16"), tiny_model("llama", seed=6, dtype="bfloat16")
    weights = [tensor.clone() for tensor in target.state_dict().values()]
    target.train()
    before = target.config.to_dict(), target.generation_config.to_dict(), target.config._attn_implementation
    report = lab.verify(bass.ModelPair(target, draft), max_new_tokens=8, samples=1000)
    assert report.passed, report.table().to_string()
    assert "float32 copies (the target is bfloat16)" in report.checks[0].tested
    assert target.training and target.dtype == torch.bfloat16
    assert before == (target.config.to_dict(), target.generation_config.to_dict(), target.config._attn_implementation)
    assert all(map(torch.equal, target.state_dict().values(), weights))


@pytest.mark.parametrize("error", [FloatingPointError("logits are NaN"), ValueError("refused"), RuntimeError("memory")])
def test_what_the_engine_raises_is_a_failed_check(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(four_checks, "generate", fail)
    report = lab.verify(bass.ModelPair(tiny_model()), max_new_tokens=4, samples=1000)
    assert [check.passed for check in report.checks] == [False] * 4
    assert report.checks[0].tested == f"{type(error).__name__}: {error}"
    assert json.loads(report.to_json())["verdict"] == "FAIL"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_verdicts_or_one_document(embedded, tmp_path):
    tiny_model("llama", vocab_size=len(embedded.tokenizer)).save_pretrained(tmp_path)
    embedded.tokenizer.save_pretrained(tmp_path)
    arguments = ["verify", "--target", str(tmp_path), "--samples", "1000"]
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 0, result.output
    assert "PASS  sampled law" in result.stdout and result.stdout.endswith("\nPASS\n")
    assert result.stderr.count("\n") <= 5  # what is checked, and perhaps how many threads do it
    document = json.loads(CliRunner().invoke(main.app, [*arguments, "--json"]).stdout)
    assert document["verdict"] == "PASS" and len(document["checks"]) == 4


def test_the_command_fails_where_a_check_does(monkeypatch):
    check = exactness.Check("greedy identity", False, "7 of 8 rows", 0.1, {})
    monkeypatch.setattr(exactness, "verify", lambda *args, **kwargs: exactness.Report("a pair", [check]))
    result = CliRunner().invoke(main.app, ["verify"])
    assert result.exit_code == 1
    assert "FAIL  greedy identity" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--target", "/no/such/folder"], ["--draft", "/no/such/folder"], ["--prompt", ""], ["--dtype", "float7"]],
)
def test_what_cannot_be_loaded_is_one_plain_error(arguments):
    result = CliRunner().invoke(main.app, ["verify", *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_the_law_of_likely_texts_is_that_of_all_texts_by_other_names():
    target, prompt = (
        tiny_model(vocab_size=5, pad_token_id=None, bos_token_id=None, eos_token_id=None),
        torch.tensor([1, 2]),
    )
    law = plain_decoding.likely_law(target, prompt, 0.8, 3, most=2)
    whole = plain_decoding.exact_law(target, prompt, bass.SamplingParams(0.8), 3)
    assert len(whole) == 5**3 and len(law) == 2**3 + 1 + 2 + 4
    found = dict.fromkeys(law, 0.0)
    for text, outcome in zip(whole, plain_decoding.as_likely(list(whole), law), strict=True):
        found[outcome] += whole[text]
    assert found == pytest.approx(law, abs=1e-6)


def test_the_exact_law_sums_to_one():
    law = plain_decoding.exact_law(tiny_model(), torch.tensor([5, 6, 7]), bass.SamplingParams(1.5, top_k=3), 4)
    assert len(law) == 81
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
