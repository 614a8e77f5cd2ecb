"""Every encoder-decoder kind of transformers is decoded exactly or refused, as the table in docs/MODELS.md says."""

import kinds
import models_page
import pytest
import reading_kinds
from test_kinds import quiet, without_numbers  # noqa: F401

TABLE = {
    row[0]: kinds.Finding(**dict(zip(reading_kinds.COLUMNS, row, strict=True)))
    for row in models_page.rows("reading kinds")
}
FEW = ("led",)  # refused; tests/exactness/test_encoder_decoder.py decodes those that work


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in TABLE]
)
def test_kind_is_as_in_the_table(kind):
    found, said = reading_kinds.find(kind), TABLE[kind]
    assert (found.outcome, found.path) == (said.outcome, said.path)
    assert without_numbers(found.reason) == without_numbers(said.reason)


def test_table_is_complete_and_has_no_wrong_kind():
    assert list(TABLE) == list(reading_kinds.kinds())
    assert kinds.counts(list(TABLE.values())) in models_page.section("reading kinds")
    assert not {"wrong", "crashes"} & {finding.outcome for finding in TABLE.values()}
