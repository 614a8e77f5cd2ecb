"""Every kind of encoder-decoder model that transformers registers is decoded exactly or refused: docs/MODELS.md."""

import models_page
import pytest
import reading_kinds
from kinds import Finding
from test_kinds import quiet, without_numbers  # noqa: F401

REGISTERED = list(reading_kinds.kinds())
TABLE = {
    row[0]: Finding(**dict(zip(reading_kinds.COLUMNS, row, strict=True))) for row in models_page.rows("reading kinds")
}
FEW = ("t5", "marian", "m2m_100", "led")  # a bias by distance, a table of positions, computed ones, one that is refused


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in REGISTERED]
)
def test_kind_is_what_the_table_says(kind):
    found, said = reading_kinds.find(kind), TABLE[kind]
    assert (found.outcome, found.path) == (said.outcome, said.path)
    assert without_numbers(found.reason) == without_numbers(said.reason)


def test_the_table_has_every_registered_kind():
    assert list(TABLE) == REGISTERED
    assert reading_kinds.summary(list(TABLE.values())) in models_page.section("reading kinds")


def test_none_is_wrong_or_crashes_and_most_work():
    outcomes = [finding.outcome for finding in TABLE.values()]
    assert not {"wrong", "crashes"} & set(outcomes)
    assert outcomes.count("works") > len(outcomes) / 2
