"""Every model type of transformers is decoded exactly or refused, as in the tables of docs/MODELS.md.

`make test` decodes one type for each outcome and path. The other types are slow tests.
"""

import re

import faults
import kinds
import models_page
import pytest
import reading_kinds
import torch
import transformers

from bass_core.model import probe


@pytest.fixture(autouse=True)
def quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def without_numbers(reason: str) -> str:
    """Remove logit differences, which vary between machines."""
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", reason)


def table_of(section: str, columns) -> dict[str, kinds.Finding]:
    rows = models_page.rows(section)
    return {row[0]: kinds.Finding(**dict(zip(columns, row, strict=True))) for row in rows}


TABLE = table_of("kinds", kinds.COLUMNS)
READING = table_of("reading kinds", reading_kinds.COLUMNS)
# One exact type on the path "eager", and types refused for a state, an error, and differing logits.
FEW = ("big_bird", "rwkv", "bloom", "camembert", "led")
CASES = [(module, kind) for module, table in ((kinds, TABLE), (reading_kinds, READING)) for kind in table]


@pytest.mark.parametrize(
    ("module", "kind"),
    [pytest.param(*each, id=each[1], marks=[pytest.mark.slow] * (each[1] not in FEW)) for each in CASES],
)
def test_kind_is_as_in_the_table(module, kind):
    found, said = module.find(kind), (TABLE if module is kinds else READING)[kind]
    assert (found.outcome, found.path, found.longrope) == (said.outcome, said.path, said.longrope)
    assert without_numbers(found.reason) == without_numbers(said.reason)


def test_tables_are_complete_and_have_no_wrong_kind():
    assert (list(TABLE), list(READING)) == (list(kinds.kinds()), list(reading_kinds.kinds()))
    assert kinds.summary(list(TABLE.values())) in models_page.section("kinds")
    assert kinds.counts(list(READING.values())) in models_page.section("reading kinds")
    findings = [*TABLE.values(), *READING.values()]
    outcomes = {finding.kind: f"{finding.outcome} {finding.longrope}" for finding in findings}
    assert not {kind: outcome for kind, outcome in outcomes.items() if "wrong" in outcome or "crashes" in outcome}
    assert {kind for kind, finding in TABLE.items() if finding.outcome == "not tiny"} == set(kinds.NOT_TINY)


@pytest.mark.parametrize(
    ("fault", "probed", "outcome"),
    [
        ("batch mean", True, "refused"),
        ("batch mean", False, "wrong"),
        ("error for more than four queries", False, "crashes"),
    ],
)
def test_faulty_model_does_not_work(monkeypatch, fault, probed, outcome):
    monkeypatch.setattr(kinds, "tiny", lambda kind, noise=0.0, **changes: faults.FAULTS[fault]())
    if not probed:
        monkeypatch.setattr(probe, "probe", lambda model, path: None)
    assert kinds.find("llama").outcome == outcome


def test_rope_that_switches_changes_texts():
    rope = kinds.switching_rope(kinds.tiny("llama"))
    plain, switching = kinds.tiny("llama"), kinds.tiny("llama", rope_parameters=rope)
    before, beyond = torch.arange(3, 12)[None], torch.arange(3, 30)[None]
    assert torch.equal(plain(before).logits, switching(before).logits)
    assert not torch.equal(plain(beyond).logits, switching(beyond).logits)


def test_tiny_models_are_tiny_and_have_a_layer_of_each_type():
    config = kinds.tiny_config("gemma3_text")
    assert (config.vocab_size, config.max_position_embeddings) == (kinds.VOCABULARY, kinds.CONTEXT)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == kinds.tiny_config("gpt_neo").window_size == kinds.WINDOW
    assert kinds.tiny_config("llama4_text").floor_scale == kinds.SWITCH
    assert sum(parameter.numel() for parameter in kinds.tiny("gemma3_text").parameters()) < 300_000
