"""Every kind of decoder that transformers registers is decoded exactly or refused: docs/MODELS.md says which.

One kind of each distinct attention is decoded by `make test`; the others by `make test-slow`.
"""

import re

import faults
import kinds
import models_page
import pytest
import torch
import transformers

from bass_core import probe

REGISTERED = list(kinds.kinds())
TABLE = {row[0]: kinds.Finding(**dict(zip(kinds.COLUMNS, row, strict=True))) for row in models_page.rows("kinds")}


@pytest.fixture(autouse=True)
def quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        few = kinds.one_per_implementation()
        others = [pytest.param(kind, marks=pytest.mark.slow) for kind in REGISTERED if kind not in few]
        metafunc.parametrize("kind", [*few, *others])


def without_numbers(reason: str) -> str:
    """Errors of logits differ between machines."""
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", reason)


def test_kind_is_what_the_table_says(kind):
    found, said = kinds.find(kind), TABLE[kind]
    assert (found.outcome, found.path, found.longrope) == (said.outcome, said.path, said.longrope)
    assert without_numbers(found.reason) == without_numbers(said.reason)


def test_the_table_has_every_registered_kind():
    assert list(TABLE) == REGISTERED
    assert kinds.summary(list(TABLE.values())) in models_page.section("kinds")


def test_no_kind_is_wrong_or_crashes():
    outcomes = {finding.kind: f"{finding.outcome} {finding.longrope}" for finding in TABLE.values()}
    assert not {kind: outcome for kind, outcome in outcomes.items() if "wrong" in outcome or "crashes" in outcome}


def test_what_is_said_of_kinds_without_a_tiny_model_is_of_just_these():
    assert {kind for kind, finding in TABLE.items() if finding.outcome == "not tiny"} == set(kinds.NOT_TINY)


def test_most_kinds_work_and_drafts_are_both_accepted_and_rejected():
    """Else the comparisons would say little."""
    assert sum(finding.outcome == "works" for finding in TABLE.values()) > 100
    for kind in ("llama", "gptj", "opt"):
        assert 0.1 < kinds.alpha(kind) < 0.95


@pytest.mark.parametrize(
    ("fault", "probed", "outcome"),
    [
        ("batch mean", True, "refused"),
        ("batch mean", False, "wrong"),
        ("error for more than four queries", False, "crashes"),
    ],
)
def test_a_faulty_model_is_not_said_to_work(monkeypatch, fault, probed, outcome):
    monkeypatch.setattr(kinds, "tiny", lambda kind, noise=0.0, **changes: faults.FAULTS[fault]())
    if not probed:
        monkeypatch.setattr(probe, "probe", lambda model, path: None)
    assert kinds.find("llama").outcome == outcome


def test_a_rope_that_switches_changes_texts():
    rope = kinds.switching_rope(kinds.tiny("llama"))
    plain, switching = kinds.tiny("llama"), kinds.tiny("llama", rope_parameters=rope)
    before, beyond = torch.arange(3, 12)[None], torch.arange(3, 30)[None]
    assert torch.equal(plain(before).logits, switching(before).logits)
    assert not torch.equal(plain(beyond).logits, switching(beyond).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_a_tiny_model_is_tiny(name):
    config = kinds.tiny_config(name)
    assert (config.vocab_size, config.max_position_embeddings) == (kinds.VOCABULARY, kinds.CONTEXT)
    assert sum(parameter.numel() for parameter in kinds.tiny(name).parameters()) < 300_000


def test_a_tiny_model_has_one_layer_of_each_type_and_short_windows():
    config = kinds.tiny_config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == kinds.WINDOW
    assert kinds.tiny_config("gpt_neo").window_size == kinds.WINDOW
    assert kinds.tiny_config("llama4_text").floor_scale == kinds.SWITCH
