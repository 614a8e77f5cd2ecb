"""Lesson 14: states of claims, the paper's PAD and SPLIT attention, replays and tables."""

import re
from types import SimpleNamespace

import lesson_runs
import nbformat
import pandas as pd
import pytest
import torch

import bass_core as bass
from bass_core.model import attention
from bass_lab.lessons import l14_demonstrations as demonstrations
from bass_lab.lessons import l14_figures as figures
from bass_lab.measure.roofline import TARGET_8B
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.texts.prompt_sets import prompt_set

LESSON = nbformat.read(lesson_runs.NOTEBOOKS / "14_the_paper.ipynb", 4)
SETTLES = re.compile(r'paper\.settle\(\s*(\d+),\s*"([\w ]+)"')


@pytest.fixture(scope="module")
def made_up():
    return AcceptanceTrace.synthetic(alpha=0.8, length=48, sequences=32).past_eos()


def test_every_claim_is_settled_once_after_an_assertion():
    settled = {}
    for cell in LESSON.cells:
        for number, state in SETTLES.findall(cell.source) if cell.cell_type == "code" else ():
            assert int(number) not in settled
            settled[int(number)] = state
            before = cell.source[: cell.source.index("paper.settle")]
            assert state not in ("measured", "recorded", "modelled") or "assert " in before, cell.id
    assert sorted(settled) == list(range(1, len(demonstrations.CLAIMS) + 1)) and len(settled) == 18
    assert set(settled.values()) == set(demonstrations.STATES)


def test_unsettled_claims_are_open(capsys):
    paper = demonstrations.Paper()
    paper.settle(2, "measured", "two times")
    assert capsys.readouterr().out.endswith("measured: two times\n")
    assert paper.open == [1, *range(3, 19)]
    table = paper.table()
    assert table.state[2] == "measured" and table.here[2] == "two times" and table.state[1] == demonstrations.NOT_YET
    assert paper.styled().to_html().count(demonstrations.STATES["measured"]) == 1


def test_unknown_state_and_claim_are_refused():
    paper = demonstrations.Paper()
    with pytest.raises(ValueError, match="state must be"):
        paper.settle(1, "proved", "")
    with pytest.raises(ValueError, match="numbers 1 to 18"):
        paper.settle(19, "measured", "")


@pytest.mark.parametrize("path", ["pad", "split"])
def test_unfused_products_write_the_same_text(pair, path):
    prompts = prompt_set("mini", 2)
    options = {"draft_length": 3, "max_new_tokens": 8, "attention": path}
    fused, engines = bass.generate(pair, prompts, **options).sequences, attention._attend
    with demonstrations.unfused():
        assert attention._attend is not engines
        apart = bass.generate(pair, prompts, **options).sequences
    assert attention._attend is engines
    assert all(map(torch.equal, fused, apart))


def test_bytes_of_attention_are_counted():
    lengths, queries = [100, 300], 8
    moved = demonstrations.attention_bytes(lengths, queries, TARGET_8B)
    key = 2 * TARGET_8B.kv_heads * TARGET_8B.head_dim * 2  # bytes per token in one layer
    keys = moved["keys and values"] * 1e6 / key
    assert keys.to_dict() == pytest.approx(dict(zip(moved.index, (600, 600, 400, 400, 400), strict=True)))
    scores = 4 * 32 * 8 * 2 / 1e6
    assert moved.scores.tolist() == pytest.approx([600 * scores, 0, 400 * scores, 0, 0])
    assert moved.products.tolist() == [2, 1, 4, 2, 1]
    assert len(figures.bytes_figure(moved).layout.annotations) == 5


def test_regular_rows_finish_together(made_up):
    cost = demonstrations.costs_on(demonstrations.A100)
    regular, speculative = (demonstrations.replayed_speed(made_up, k, cost, 4, repeats=2) for k in (0, 5))
    assert regular.first == pytest.approx(regular.last) == pytest.approx(regular.every)
    assert regular.tokens_per_s == pytest.approx(4e3 / regular.every)
    assert speculative.first < speculative.every < speculative.last < regular.first


def test_first_and_last_are_the_lowest_and_highest_latency():
    """The row that ends first may have few tokens, and so more milliseconds per token."""
    samples = {"problem": [0, 0], "finish_seconds": [1.0, 2.0], "tokens": [10, 100], "passed": [True, False]}
    (line,) = demonstrations.table_lines({"batched": SimpleNamespace(samples=pd.DataFrame(samples))})
    assert (line["first"], line["all"], line["last"]) == (20, 60, 100)


def test_claims_of_others_have_a_source_and_a_year():
    cells = {cell.id: cell.source for cell in LESSON.cells if cell.id.startswith("after-")}
    quote = re.compile(r"^> [^\n]+(?:\n> [^\n]+)*", re.MULTILINE)
    claims = [claim for source in cells.values() for claim in quote.findall(source)]
    assert len(claims) == 6
    for claim in claims:
        assert re.search(r"\([^()]*\b20\d\d\b[^()]*\)$", claim), claim


@pytest.mark.slow
def test_run_with_other_settings_settles_every_claim(tmp_path):
    executed = lesson_runs.execute("14_the_paper", tmp_path, **lesson_runs.QUICKER["14_the_paper"])
    table = next(cell for cell in executed.cells if cell.id == "table").outputs[0].data["text/html"]
    assert demonstrations.NOT_YET not in re.sub("<style.*?</style>", "", table, flags=re.DOTALL)
