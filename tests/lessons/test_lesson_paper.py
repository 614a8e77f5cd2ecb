"""Lesson 14: every claim gets a state behind its cell's assertions; PAD and SPLIT as in the paper; what is counted."""

import re

import lesson_runs
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

import bass_core as bass
from bass_core import attention
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


# --- the table ---


def test_every_claim_is_settled_once_and_what_is_measured_or_modelled_behind_an_assertion():
    settled = {}
    for cell in LESSON.cells:
        for number, state in SETTLES.findall(cell.source) if cell.cell_type == "code" else ():
            assert int(number) not in settled
            settled[int(number)] = state
            before = cell.source[: cell.source.index("paper.settle")]
            assert state not in ("measured", "modelled") or "assert " in before, cell.id
    assert sorted(settled) == list(range(1, len(demonstrations.CLAIMS) + 1)) and len(settled) == 18
    assert set(settled.values()) == set(demonstrations.STATES)


def test_what_is_said_of_a_claim_fits_a_slide(capsys):
    demonstrations.Paper().settle(3, "modelled", "forty times, " * 20)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= demonstrations.WIDTH


def test_a_claim_without_a_state_is_open_and_the_table_says_so(capsys):
    paper = demonstrations.Paper()
    paper.settle(2, "measured", "two times")
    assert capsys.readouterr().out.endswith("measured: two times\n")
    assert paper.open == [1, *range(3, 19)]
    table = paper.table()
    assert table.state[2] == "measured" and table.here[2] == "two times" and table.state[1] == demonstrations.NOT_YET
    assert paper.styled().to_html().count(demonstrations.STATES["measured"]) == 1


def test_states_and_claims_that_there_are_not_are_refused():
    paper = demonstrations.Paper()
    with pytest.raises(ValueError, match="state must be"):
        paper.settle(1, "proved", "")
    with pytest.raises(ValueError, match="numbers 1 to 18"):
        paper.settle(19, "measured", "")
    assert len(paper.open) == 18


def test_a_table_that_is_shown_changes_with_its_claims(monkeypatch):
    updated = []
    monkeypatch.setattr(demonstrations.DisplayHandle, "update", lambda self, shown: updated.append(shown))
    monkeypatch.setattr(demonstrations.DisplayHandle, "display", lambda self, shown: None)
    paper = demonstrations.Paper()
    paper.settle(1, "modelled", "")
    assert not updated
    paper.show()
    paper.settle(3, "modelled", "as promised")
    assert "as promised" in updated[-1].to_html()


# --- PAD and SPLIT as in the paper ---


@pytest.mark.parametrize("path", ["pad", "split"])
def test_two_products_in_the_engine_write_the_same_text(pair, path):
    prompts = prompt_set("mini", 3)
    options = {"draft_length": 3, "max_new_tokens": 12, "attention": path}
    fused, before = bass.generate(pair, prompts, **options).sequences, attention._attend
    with demonstrations.unfused():
        assert attention._attend is not before
        apart = bass.generate(pair, prompts, **options).sequences
    assert attention._attend is before
    assert all(map(torch.equal, fused, apart))


@pytest.mark.parametrize("group", [1, 2])
def test_the_products_stand_in_for_the_engines_attention(group):
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = torch.zeros(2, 1, group * 3, 5)
    bias[..., 4] = -torch.inf
    arguments = query, key, value, bias, group, {"scaling": 0.3}
    torch.testing.assert_close(demonstrations._unfused(*arguments), attention._attend(*arguments))


def test_bytes_of_attention_are_counted():
    lengths, queries = [100, 300], 8
    moved = demonstrations.attention_bytes(lengths, queries, TARGET_8B)
    key = 2 * TARGET_8B.kv_heads * TARGET_8B.head_dim * 2  # of one token in one layer, in bytes
    keys = moved["keys and values"] * 1e6 / key
    assert keys.to_dict() == pytest.approx(dict(zip(moved.index, (600, 600, 400, 400, 400), strict=True)))
    scores = 4 * 32 * 8 * 2 / 1e6
    assert moved.scores.tolist() == pytest.approx([600 * scores, 0, 400 * scores, 0, 0])
    assert moved.products.tolist() == [2, 1, 4, 2, 1]
    assert len(figures.bytes_figure(moved).layout.annotations) == 5


# --- replays ---


def test_speeds_of_a_batch_are_ordered_and_regular_rows_finish_together(made_up):
    cost = demonstrations.costs_on(demonstrations.A100)
    regular, speculative = (demonstrations.replayed_speed(made_up, k, cost, 4, repeats=2) for k in (0, 5))
    assert regular.first == pytest.approx(regular.last) == pytest.approx(regular.every)
    assert regular.tokens_per_s == pytest.approx(4e3 / regular.every)
    assert speculative.first < speculative.every < speculative.last < regular.first


def test_utilisation_of_regular_decoding_does_not_depend_on_what_is_counted(made_up):
    used = demonstrations.utilisations(made_up, 5, [1, 4]).set_index(["method", "batch"])
    regular = used.loc["regular"]
    np.testing.assert_allclose(regular.verified, regular.emitted)
    assert used.verified["batched", 1] == used.verified["single", 1] == used.verified["single", 4]
    assert used.verified["batched", 4] > used.emitted["batched", 4] > used.emitted["single", 4]
    assert len(figures.utilisation_figure(used.reset_index()).data) == 6


def test_policies_are_held_against_the_best_fixed_length(made_up):
    cost = demonstrations.costs_on(demonstrations.A100)
    found = demonstrations.behind_the_best_fixed(
        made_up, {"Algorithm 1": bass.BassHeuristic}, (1, 6), [2], cost, repeats=2
    )
    by = found.set_index("policy")
    assert by.over_best[["fixed 1", "fixed 6"]].max() == 1 and by.over_regular["regular"] == 1
    assert by.k["regular"] == 0 and by.k["Algorithm 1"] > 1
    figure = figures.lengths_figure(found, ["Algorithm 1"], "")
    assert [trace.name for trace in figure.data] == ["Algorithm 1", "Algorithm 1", "best fixed"]


def test_lines_of_models_that_are_not_here(made_up):
    works = demonstrations.modelled_pair("opt-13b")
    assert works[0].weights == pytest.approx(13e9, rel=0.03) and works[1].weights == pytest.approx(125e6, rel=0.03)
    found = pd.DataFrame(demonstrations.modelled_lines(works, made_up, (1, 4), 5, repeats=1))
    assert found.precision.tolist() == ["16 bits"] * 2 + ["8 bits"] * 2
    assert (found["first"] <= found["all"]).all() and (found["all"] <= found["last"]).all()
    assert found["all"][2] < found["all"][0]


def test_lines_of_graded_samples():
    from bass_lab.evaluation import Evaluation

    samples = pd.DataFrame(
        {
            "problem": [0, 0, 1, 1],
            "finish_seconds": [1.0, 0.5, 2.0, 1.0],
            "tokens": [10, 10, 10, 20],
            "passed": [True, False, False, False],
        }
    )
    [line] = demonstrations.table_lines({"regular": Evaluation(samples, {}, {})}, batch=2)
    assert line == pytest.approx(
        {"batch": 2, "method": "regular", "first": 50, "last": 150, "all": 100, "Pass@All": 0.5, "passed": 0.25}
    )


# --- slides ---


def test_every_cell_knows_its_slide_and_prose_is_shown():
    kinds = {cell.id: cell.metadata.slideshow.slide_type for cell in LESSON.cells}
    assert set(kinds.values()) == {"slide", "subslide", "fragment", "skip"}
    headings = [cell.id for cell in LESSON.cells if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    assert all(kinds[each] == "slide" for each in headings if each != "settings")


# --- other settings ---


@pytest.mark.slow
def test_a_run_with_other_settings_settles_every_claim_and_fills_the_table_at_the_top(tmp_path):
    executed = lesson_runs.execute("14_the_paper", tmp_path, **lesson_runs.QUICKER["14_the_paper"])
    table = next(cell for cell in executed.cells if cell.id == "table").outputs[0].data["text/html"]
    assert demonstrations.NOT_YET not in re.sub("<style.*?</style>", "", table, flags=re.DOTALL)
