"""`bass head`: a feature head for any target, with the target's settings and a reduced draft vocabulary."""

import json

import pytest
import torch
from commands import invoke
from cpu_models import model
from tiny import BYTES, CONTEXT, byte_tokenizer, greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.drafters import FeatureHead
from bass_lab.pair import feature_head, head

SETTINGS = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-5}


def new_head(target, ids=None, seed=1):
    torch.manual_seed(seed)
    return feature_head.new_head(target, head._sizes(target) | {"initializer_range": 0.3}, ids)


def test_settings_are_the_targets():
    found = new_head(model("llama", **SETTINGS)).config
    assert found.rope_parameters["rope_theta"] == 5e5 and found.rms_norm_eps == 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_reduced_vocabulary_is_drafted_alone_and_text_stays_exact(tmp_path, temperature):
    target, ids = tiny_model(dtype="float64"), torch.arange(1, 97, 3)
    feature_head.save_head(new_head(target, ids), tmp_path)
    loaded = FeatureHead.from_pretrained(tmp_path, dtype=torch.float64)
    pair = bass.ModelPair(target, bass.FeatureDrafter(loaded))
    prompts, options = ragged_prompts(4, 9), {"max_new_tokens": 16, "temperature": temperature, "eos_token_id": ()}
    out = bass.generate(pair, prompts, draft_length=4, trace="tokens", verification="coupled", **options)
    drafted = out.trace.tokens.query("kind in ('accepted', 'rejected')").token
    assert len(drafted) > 8 and set(drafted) <= set(ids.tolist())
    regular = bass.generate(bass.ModelPair(pair.target), prompts, draft_length=0, verification="coupled", **options)
    assert [row.tolist() for row in out.sequences] == [row.tolist() for row in regular.sequences]
    if temperature == 0:
        assert out.sequences[0].tolist() == greedy_alone(pair.target, prompts[0], 16).tolist()


def test_most_frequent_ids_are_kept():
    written = torch.tensor([[5, 5, 2, 9], [9, 5, 2, 7]])
    assert head.frequent(written, 3, 12).tolist() == [2, 5, 9]
    assert head.frequent(written, 12, 12).tolist() == [2, 5, 7, 9]  # absent ids are left out
    assert head.frequent(torch.arange(12), 12, 12) is None


@pytest.mark.ci
def test_command_writes_a_head_for_load_pair(tmp_path):
    folder = tmp_path / "head"
    done = invoke("head", "--minutes", "0.1", "--vocabulary", "300", "--output", str(folder), "--json")
    found = json.loads(done.stdout)
    assert found["draft_ids"] == 300 and len(found["acceptance"]) == head.POSITIONS
    assert found["tokens_per_step"] == pytest.approx(head.expected(found["acceptance"])) and found["memory_gb"] > 0
    pair = bass.load_pair(draft=folder)
    prompt, options = ["def add(a, b):\n"], {"max_new_tokens": 24, "eos_token_id": ()}
    drafted, regular = (bass.generate(pair, prompt, draft_length=k, **options) for k in (3, 0))
    assert drafted.trace.summary()["k"] == 3 and torch.equal(drafted.sequences[0], regular.sequences[0])


def test_unfit_targets_and_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        head.train_head(bass.ModelPair(tiny_model()), tmp_path, minutes=0.1)
    with pytest.raises(ValueError, match="but the target has torch"):
        head.train_head(bass.ModelPair(tiny_model(dtype="float64")), tmp_path, minutes=0.1)
    with pytest.raises(ValueError, match="the texts are empty"):
        head.beginnings(byte_tokenizer(), [], 9)
    with pytest.raises(ValueError, match="drafts id 96 does not fit 50 ids"):
        new_head(tiny_model(), torch.arange(90, 97)).attached(tiny_model(vocab_size=50))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_head_of_any_architecture_is_trained(tmp_path, architecture):
    """Also with a short context, a long beginning and a template that refuses the message."""
    tokenizer, said = byte_tokenizer(), []
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    target = tiny_model(architecture, vocab_size=BYTES, dtype="float32")
    for texts in (None, ["x" * 300]):
        found = head.train_head(
            bass.ModelPair(target, tokenizer=tokenizer), tmp_path, minutes=0.02, texts=texts, say=said.append
        )
        assert found["written_tokens"] % CONTEXT == 0 and found["tokens_per_step"] > 1
    pair = bass.ModelPair(target, bass.FeatureDrafter(FeatureHead.from_pretrained(tmp_path, dtype=torch.float32)))
    out = bass.generate(pair, ragged_prompts(4), max_new_tokens=8, draft_length=3, eos_token_id=())
    assert out.sequences[0].tolist() == greedy_alone(target, ragged_prompts(4)[0], 8).tolist()


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("<u>{{ messages[0]['content'] }}", "<u>"),
        ("{{ messages[0]['content'] }}", ""),
        ("{{ raise_exception('no') }}", ""),
    ],
)
def test_texts_begin_like_the_chat_template(template, opening):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    (ids,) = head.beginnings(tokenizer, None, 9)
    assert tokenizer.decode(ids) == (opening or "<s>")
