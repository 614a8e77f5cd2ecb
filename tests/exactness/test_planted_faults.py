"""The probe and `bass verify` find models with interacting rows, as in the table of docs/MODELS.md."""

import faults
import models_page
import pytest

import bass_core as bass
import bass_lab as lab
from bass_core.model import probe
from bass_lab.checks import four_checks

TABLE = {row[0]: tuple(row) for row in models_page.rows("faults")}


def test_table_has_every_fault():
    assert list(TABLE) == list(faults.FAULTS)


@pytest.mark.slow
def test_healthy_model_passes():
    assert probe.resolve(faults.healthy()) == "pad"
    report = faults.verified_without_the_probe(faults.healthy())
    assert report.passed, report.table().to_string()


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_verify_finds_the_fault_without_the_probe(fault):
    (_, by_probe, checks), (_, listed_probe, listed) = faults.found(fault), TABLE[fault]
    exact, listed = ({check for check in each.split(", ") if "bfloat16" not in check} for each in (checks, listed))
    assert checks != "none"
    assert (by_probe, exact) == (listed_probe, listed)  # rounding differs between machines


@pytest.fixture
def greedy_check(monkeypatch):
    for other in ("sampled", "coupled", "half"):
        monkeypatch.setattr(four_checks, other, lambda subject: (True, "", {}))
    return lambda model: lab.verify(bass.ModelPair(model), max_new_tokens=8).checks[0]


def test_fault_beyond_a_named_switch_is_found(greedy_check):
    """The fault begins at 250 tokens, beyond all other prompts of the checks."""
    assert greedy_check(faults.log_scaling(beyond=250)).passed
    model = faults.log_scaling(beyond=250)
    model.config.floor_scale = 250
    check = greedy_check(model)
    assert not check.passed
    assert "prompts on both sides of floor_scale 250" in check.tested


def test_window_too_long_for_a_quick_check_is_named_in_the_report(greedy_check):
    model = faults.healthy()
    model.config.max_position_embeddings = 2**20
    model.config.sliding_window_size, model.config.floor_scale = 4096, 64
    check = greedy_check(model)
    assert check.passed, check.tested
    assert "prompts on both sides of floor_scale 64" in check.tested
    assert "not reached, too long for this check: sliding_window_size 4096" in check.tested
