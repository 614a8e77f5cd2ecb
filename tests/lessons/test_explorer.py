"""Lesson 03: the explorer without a browser, its views of a trace, and its record."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import record_lines

import bass_core as bass
from bass_lab.lessons import l03_explorer as explorer_module
from bass_lab.lessons.l03_explorer import POLICIES, AcceptanceExplorer
from bass_lab.pairs import drafters_for, models_named
from bass_lab.show import plots, token_views
from bass_lab.texts.prompt_sets import prompt_set

SIZE = {"batch_size": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module", autouse=True)
def drafters_are_loaded_once(pair):
    found = drafters_for(pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer_module, "drafters_for", lambda given: found if given is pair else drafters_for(given))
        yield


def shown(raster):
    drafted, regular = (np.array(drawn.z, dtype=float) for drawn in raster.data)
    return np.where(np.isnan(drafted), regular, drafted)


def drawn(figure):
    picture = json.loads(figure.to_json())
    return picture | {"data": [{key: value for key, value in one.items() if key != "uid"} for one in picture["data"]]}


def click(figure, row, nth):
    points = {"trace_indexes": [0], "point_indexes": [[row, nth - 1]], "xs": [nth], "ys": [row], "zs": [0]}
    figure._js2py_pointsCallback = {"event_type": "plotly_click", "points": points}


@pytest.mark.parametrize(
    "name, value",
    [("draft_length", 0), ("drafter", "suffix"), ("verification", "block"), ("prompt_set", "library"), ("seed", 7)],
)
def test_setting_decodes_and_redraws(pair, name, value):
    explorer = AcceptanceExplorer(pair, temperature=0.8, **SIZE)
    before = shown(explorer.raster)
    explorer.controls[name].value = value
    now = {key: explorer.controls[key].value for key in ("batch_size", "draft_length", "policy", "prompt_set")}
    out = bass.generate(
        replace(pair, draft=explorer.drafters[explorer.controls["drafter"].value]),
        prompt_set(now["prompt_set"], now["batch_size"]),
        draft_length=POLICIES[now["policy"]](now["draft_length"]),
        max_new_tokens=SIZE["max_new_tokens"],
        **{key: explorer.controls[key].value for key in ("temperature", "verification", "seed")},
    )
    np.testing.assert_array_equal(shown(explorer.raster), plots.raster_matrix(out.trace).to_numpy(dtype=float))
    assert explorer.out.texts == out.texts
    assert shown(explorer.raster).shape != before.shape or not np.array_equal(shown(explorer.raster), before)


def test_known_settings_are_not_decoded_again(pair, monkeypatch):
    explorer = AcceptanceExplorer(pair, **SIZE)
    first = explorer.out
    explorer.controls["draft_length"].value = 2
    monkeypatch.setattr(explorer_module, "generate", None)
    explorer.controls["draft_length"].value = 5
    assert explorer.out is first and explorer.message.value == "" and explorer.same_text is True


def test_policy_disables_the_draft_length(pair):
    explorer = AcceptanceExplorer(pair, **SIZE)
    assert not explorer.controls["draft_length"].disabled
    explorer.controls["policy"].value = "Algorithm 1"
    assert explorer.controls["draft_length"].disabled
    assert explorer.out.trace.steps.query("kind == 'decode'").k.iloc[0] == 7


def test_reloaded_page_gets_the_current_figure(pair):
    explorer = AcceptanceExplorer(pair, **SIZE)
    explorer.controls["draft_length"].value = 2
    state = explorer.raster.get_state()
    assert state["_widget_layout"]["title"]["text"] == explorer.raster.layout.title.text
    assert state["_widget_data"][0]["zmax"] == 2


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"drafter": "best"}, "drafter must be one of its own draft, n-gram, suffix, first layers, middle draft"),
        ({"policy": "best"}, "policy must be one of fixed, default, Algorithm 1, transformers; got 'best'"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"temperature": -0.5}, "temperature must be >= 0"),
    ],
)
def test_invalid_setting_is_refused(pair, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AcceptanceExplorer(pair, **settings)


def test_error_is_shown_and_the_controls_recover(pair):
    explorer = AcceptanceExplorer(pair, prompts={"mine": ["def f(x):\n", "class A:\n"]}, prompt_set="mine",
                                  batch_size=2, max_new_tokens=8)  # fmt: skip
    before = shown(explorer.raster)
    explorer.controls["batch_size"].value = 3
    assert "the prompt set &#x27;mine&#x27; has 2 prompts; batch size is 3 (ValueError)" in explorer.message.value
    np.testing.assert_array_equal(shown(explorer.raster), before)
    explorer.controls["batch_size"].value = 1
    assert explorer.message.value == "" and len(shown(explorer.raster)) == 1


def test_large_pair_waits_for_the_button(pair):
    explorer = AcceptanceExplorer(pair, live=False, **SIZE)
    assert explorer.out is None and "Run" in explorer.message.value
    explorer.controls["run"].click()
    first = explorer.out
    assert first is not None and explorer.message.value == ""
    explorer.controls["draft_length"].value = 2
    assert explorer.out is first and "Run" in explorer.message.value
    explorer.controls["run"].click()
    assert explorer.raster.data[0].zmax == 2
    explorer.run(draft_length=3, seed=4)
    assert explorer.raster.data[0].zmax == 3 and explorer.controls["seed"].value == 4


def test_drafts_without_a_model_are_shown(pair):
    explorer = AcceptanceExplorer(bass.ModelPair(pair.target, tokenizer=pair.tokenizer), temperature=0.8, **SIZE)
    assert explorer.message.value == "" and explorer.out.trace.tokens.q.isna().all()
    explorer.view.choose(*token_views.surest_rejection(explorer.out.trace))
    json.loads(explorer.view.bars.to_json())


def test_coupled_text_equals_regular_decoding(pair):
    explorer = AcceptanceExplorer(pair, temperature=0.9, verification="coupled", **SIZE)
    texts, passes = explorer.out.texts, {explorer.out.trace.summary()["steps"]}
    for name, value in (("draft_length", 1), ("policy", "Algorithm 1")):
        explorer.controls[name].value = value
        assert explorer.same_text is True and "3 of 3 rows are equal" in explorer.badge.value
        assert explorer.out.texts == texts
        passes.add(explorer.out.trace.summary()["steps"])
    assert len(passes) > 1


def test_block_verification_promises_no_equal_text(pair):
    explorer = AcceptanceExplorer(pair, temperature=0.9, verification="block", **SIZE)
    assert explorer.same_text is None and "block verification" in explorer.badge.value


def test_different_text_is_reported(pair, monkeypatch):
    generate = explorer_module.generate

    def with_an_error(pair, prompts, **options):
        out = generate(pair, prompts, **options)
        if options.get("draft_length") == bass.FixedLength(0):
            out.sequences[1][3] += 1
        return out

    monkeypatch.setattr(explorer_module, "generate", with_an_error)
    explorer = AcceptanceExplorer(pair, temperature=0.9, verification="coupled", **SIZE)
    assert explorer.same_text is False and "2 of 3 rows are equal" in explorer.badge.value


def test_click_equals_the_controls(pair):
    clicked, set_by_hand = (AcceptanceExplorer(pair, temperature=0.8, **SIZE) for _ in range(2))
    click(clicked.raster, row=1, nth=2)
    set_by_hand.controls["row"].value = 1
    set_by_hand.controls["step"].value = 2
    assert (clicked.controls["row"].value, clicked.controls["step"].value) == (1, 2)
    assert drawn(clicked.view.bars) == drawn(set_by_hand.view.bars)
    assert clicked.view.text.value == set_by_hand.view.text.value
    assert clicked.view.reason.value == set_by_hand.view.reason.value
    (frame,) = clicked.raster.layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (1.5, 2.5, 0.5, 1.5)


def test_step_and_row_stay_within_the_run(pair):
    explorer = AcceptanceExplorer(pair, prompt_set="library", **SIZE)
    explorer.view.choose(2, 100)
    steps = explorer.out.trace.steps.query("kind == 'decode'").groupby("row").size()
    assert (explorer.controls["row"].value, explorer.controls["step"].value) == (2, steps[2])
    explorer.controls["batch_size"].value = 1
    steps = explorer.out.trace.steps.query("kind == 'decode'").groupby("row").size()
    assert explorer.controls["row"].value == 0 and explorer.controls["step"].value <= steps[0]


def test_replay_equals_the_live_explorer(pair, tmp_path):
    live = AcceptanceExplorer(pair, temperature=0.8, prompt_set="library", **SIZE)
    live.out.trace.save(tmp_path / "run.json.gz")
    replayed = AcceptanceExplorer.replay(tmp_path / "run.json.gz", pair.tokenizer, prompt_set("library", 3))
    for row, nth in ((0, 1), (2, 3)):
        live.view.choose(row, nth)
        click(replayed.raster, row, nth)
        np.testing.assert_array_equal(shown(replayed.raster), shown(live.raster))
        assert drawn(replayed.bars) == drawn(live.view.bars)
        for name in ("headline", "reason", "text"):
            assert getattr(replayed, name).value == getattr(live.view, name).value
    assert set(replayed.controls) == {"row", "step", "play"}


def test_replay_needs_a_trace_of_tokens(pair):
    steps_only = bass.generate(pair, "def f(x):\n", max_new_tokens=4).trace
    with pytest.raises(ValueError, match="trace='tokens'"):
        AcceptanceExplorer.replay(steps_only, pair.tokenizer)


def test_record_holds_settings_and_acceptance(pair):
    explorer = AcceptanceExplorer(pair, draft_length=3, **SIZE)
    record, summary = explorer.record(), explorer.out.trace.summary()
    assert record_lines.kind_of(record) == "acceptance"
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["k"] == 3 and record["method"] == "batched" and record["same_text"] is True
    assert (record["alpha"], record["tokens_per_step"]) == (summary["alpha"], summary["tokens_per_step"])
    assert record["models"] == models_named(pair)
    explorer.controls["draft_length"].value = 0
    assert explorer.record()["method"] == "regular" and explorer.record()["alpha"] is None
