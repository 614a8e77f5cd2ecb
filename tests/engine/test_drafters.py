import numpy as np
import pytest
import torch
from recording import texts, use_on_cpu
from tiny import feature_head, forward_passes, greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.drafters import Context
from bass_core.drafters import lookup as lookup_module
from bass_core.exactness.randomness import StepKeys
from bass_lab.drafters import LayerSkipDrafter


def lookup(rows, k, longest=3, shortest=1):
    lengths = np.array([len(row) for row in rows])
    tokens = torch.full((len(rows), lengths.max() + 4), 7)  # 7s beyond a row's end must not be found
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    keys, params = StepKeys(nothing, nothing, k), bass.SamplingParams()
    known = tokens, tokens.numpy(), torch.from_numpy(lengths), lengths
    context = Context(range(len(rows)), *known, keys, params, prompts=nothing)
    draft = bass.NgramDrafter(longest, shortest).draft(context, np.full(len(rows), k), bass.FixedLength(k))
    return [t[:n].tolist() for t, n in zip(draft.tokens, draft.lengths_host, strict=True)]


def test_ngram_drafter_proposes_the_last_continuation():
    for row, k, expected in (
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),  # the tokens after 1 2 3
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),
        ([5, 3, 8, 3, 9, 3], 1, [9]),  # the most recent occurrence
        ([1, 2, 9, 3, 2, 8, 1, 2], 1, [9]),  # a longer match wins over a more recent, shorter match
        ([1, 2, 3, 4], 3, []),  # no repetition
        ([6, 6, 6], 2, [6]),
        ([4], 3, []),
        ([7, 1], 3, []),
    ):
        assert lookup([row, [2, 2]], k)[0] == expected
    assert lookup([[5, 3, 8, 3]], 2, longest=3, shortest=2) == [[]]
    with pytest.raises(ValueError, match="shortest"):
        bass.NgramDrafter(longest=1, shortest=2)


def test_regular_decoding_leaves_the_draft_model_alone():
    models = bass.ModelPair(tiny_model(), tiny_model.__wrapped__(noise=0.1))
    bass.Session(models, draft_length=0).close()  # the first session probes the models
    with forward_passes(models.draft) as passes:
        out = bass.generate(models, ragged_prompts(5, 9), draft_length=0, max_new_tokens=8, eos_token_id=())
    assert [len(sequence) for sequence in out.sequences] == [8, 8] and passes == []


def suffix_session(**options) -> bass.Session:
    return bass.Session(bass.ModelPair(tiny_model(), bass.SuffixDrafter()), eos_token_id=(), **options)


def drafted_by(session, *prompts, new=12) -> list:
    handles = [session.submit(torch.tensor(prompt), max_new_tokens=new) for prompt in prompts]
    return texts(session, handles)


def test_text_of_another_row_is_drafted():
    prompt = ragged_prompts(9)[0].tolist()
    with suffix_session(max_batch_size=1, draft_length=4) as session:
        first, second = drafted_by(session, prompt, prompt)
        steps = session.trace.steps.query("kind == 'decode'").groupby("row")
    assert first == second
    assert steps.accepted.sum()[1] > steps.accepted.sum()[0]
    assert len(steps.get_group(1)) <= 4  # 11 tokens after the prefill, at most five per step


def test_drafts_end_where_texts_disagree():
    drafter = bass.SuffixDrafter(longest=2, least=0.6)
    mine = drafter.begin(bass.Setting(tiny_model(), ["pad"], 4, 97))
    for place, text in enumerate(([1, 2, 3, 4], [1, 2, 3, 5], [7, 1, 2, 3, 5])):
        mine.ended(place, np.array(text))
    assert mine._continuation(np.array([9, 1]), 5) == [2, 3, 5]  # 2, 3 always followed; 5 two of three times
    assert mine._continuation(np.array([9, 8]), 5) == []


def test_prompt_counts_once_for_all_of_its_samples():
    prompt = ragged_prompts(9)[0].tolist()
    for places in (1, 4):
        with suffix_session(max_batch_size=places, draft_length=2) as session:
            drafted_by(session, *[prompt] * 4, new=1)
            assert session.drafter.followed[tuple(prompt[:3])] == {prompt[3]: 1}


def test_oldest_counts_are_forgotten(monkeypatch):
    monkeypatch.setattr(lookup_module, "KNOWN", 60)
    rng = np.random.default_rng(0)
    mine = bass.SuffixDrafter(longest=2).begin(bass.Setting(tiny_model(), ["pad"], 1, 97))
    for _ in range(200):
        mine.prefill(torch.tensor([text := rng.integers(97, size=20).tolist()]), [20], range(1))
        assert len(mine.followed) + len(mine.followed_before) <= 2 * (60 + 2 * 20)
        assert mine._after(text[-3:-1])[text[-1]] >= 1
    mine.release()
    assert mine._after(text[-3:-1]) is None


@pytest.mark.parametrize(
    ("drafter", "architecture", "compile"),
    [
        ("suffix", "llama", "graphs"),
        ("suffix", "opt", "off"),
        ("features", "qwen2", "graphs"),
        ("features", "phi3", "off"),
        ("layers", "llama", "off"),
        ("layers", "gpt2", "off"),
    ],
)
def test_greedy_text_is_the_targets_own(drafter, architecture, compile, monkeypatch):
    use_on_cpu(monkeypatch)
    target = tiny_model(architecture, dtype="float64")
    prompts = [*ragged_prompts(5, 11, 3, 5), *ragged_prompts(5)]
    drafts = {"suffix": bass.SuffixDrafter(), "layers": LayerSkipDrafter(1)}
    draft = bass.FeatureDrafter(feature_head(target)) if drafter == "features" else drafts[drafter]
    options = {"draft_length": 3, "eos_token_id": (), "compile": compile, "max_batch_size": 3}
    out = bass.generate(bass.ModelPair(target, draft), prompts, max_new_tokens=12, **options)
    assert [row.sequence.tolist() for row in out] == [greedy_alone(target, p, 12).tolist() for p in prompts]
    assert out.trace.steps.drafted.sum() > 0


class Returns(bass.Drafter):
    def __init__(self, function):
        self.function = function

    def draft(self, context, lengths, policy):
        return self.function(context, lengths)


def repeated(context, lengths) -> torch.Tensor:
    return context.last_tokens().expand(-1, int(lengths.max()))


class Empty(list, bass.Drafter):
    """An unhashable, empty (falsy) drafter."""

    def draft(self, context, lengths, policy):
        return bass.Draft.of(repeated(context, lengths), lengths)


def changed(**changes) -> bass.Drafter:

    def function(context, lengths):
        draft = bass.Draft.of(repeated(context, lengths), lengths)
        return draft._replace(**{name: change(getattr(draft, name)) for name, change in changes.items()})

    return Returns(function)


def longer(context, lengths) -> bass.Draft:
    lengths += 4
    return bass.Draft.of(repeated(context, lengths), lengths)


WRONG = [
    (changed(tokens=lambda t: t[:1]), r"Returns.draft returned tokens \[1, 3\] of torch.int64.* \[2, K\]"),
    (changed(tokens=lambda t: t[:, 0]), r"tokens \[2\] of torch.int64.* \[2, K\]"),
    (changed(tokens=lambda t: t.int()), r"tokens \[2, 3\] of torch.int32; expected ids \(torch.int64\)"),
    (changed(tokens=lambda t: t * 0 + 97), "ids from 97 to 97 .* has 97 ids"),
    (changed(tokens=lambda t: t * 0 - 1), "ids from -1 to -1"),
    (changed(tokens=lambda t: t[:, :1]), r"lengths \[3, 3\] of 1 tokens"),
    (changed(tokens=lambda t: t.to("meta")), "returned tokens on meta, but the rows are on cpu"),
    (changed(lengths_host=lambda n: n + 1), r"lengths \[4, 4\] of 3 tokens, but at most \[3, 3\] were requested"),
    (changed(lengths_host=lambda n: n - 9), r"lengths \[-6, -6\]"),
    (changed(lengths_host=lambda n: None), "lengths None; expected an array of 2 integers"),
    (changed(lengths_host=lambda n: n.tolist()), r"lengths \[3, 3\]; expected an array"),
    (changed(lengths_host=lambda n: n / 2), r"lengths \[1.5 1.5\]; expected an array of 2 integers"),
    (changed(lengths=lambda n: n - 1), r"lengths \[2, 2\] and lengths_host \[3, 3\]"),
    (
        changed(probs=lambda q: torch.ones(2, 3, 5) / 5),
        r"probs \[2, 3, 5\]; expected one probability per token of the target",
    ),
    (
        changed(probs=lambda q: torch.ones(2, 3, 97).half() / 97),
        "probs of torch.float16, which rounds the probabilities",
    ),
    (Returns(lambda *_: None), "Returns.draft returned NoneType; expected a Draft"),
    (Returns(repeated), "Returns.draft returned Tensor; expected a Draft"),
    (Returns(longer), r"lengths \[7, 7\] of 7 tokens, but at most \[3, 3\]"),
]


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_wrong_drafts_are_refused(compile, monkeypatch):
    use_on_cpu(monkeypatch)
    for careless, message in WRONG:
        with pytest.raises(TypeError if "expected a Draft" in message else ValueError, match=message):
            pair = bass.ModelPair(tiny_model(dtype="float64"), careless)
            bass.generate(pair, ragged_prompts(5, 7), draft_length=3, max_new_tokens=5, compile=compile)


def test_any_object_and_any_integers_will_do():
    target, (prompt,) = tiny_model(dtype="float64"), ragged_prompts(5)
    for drafter in (
        Empty(),
        Returns(lambda context, lengths: bass.Draft.of(repeated(context, lengths), lengths.tolist())),
        Returns(lambda context, lengths: bass.Draft.of(repeated(context, lengths), torch.tensor(lengths))),
    ):
        pair = bass.ModelPair(target, drafter)
        assert pair.drafter is pair.draft
        out = bass.generate(pair, prompt, max_new_tokens=9, eos_token_id=())  # looks up the pair's costs
        assert out[0].sequence.tolist() == greedy_alone(target, prompt, 9).tolist()


def test_ids_outside_the_vocabulary_are_clamped_and_marked():
    """Captured steps cannot check ids on the host."""
    draft = bass.Draft.of(torch.tensor([[3, -1], [96, 97], [-1, 5], [0, 400]]), [1, 2, 1, 1]).within(97)
    assert draft.tokens.tolist() == [[3, 0], [96, 96], [0, 5], [0, 96]]
    assert draft.finite.tolist() == [True, False, False, True]  # ids beyond lengths do not count


@pytest.mark.parametrize(("verification", "compile"), [("token", "graphs"), ("block", "off")])
def test_nan_probabilities_are_a_row_error(verification, compile, monkeypatch):
    """The second row drafts nothing: values beyond lengths do not count."""
    use_on_cpu(monkeypatch)

    def draft(context, lengths):
        lengths[1:] = 0
        tokens = repeated(context, lengths)
        return bass.Draft.of(tokens, lengths, torch.full((*tokens.shape, 97), torch.nan, dtype=torch.float64))

    pair = bass.ModelPair(tiny_model(dtype="float64"), Returns(draft))
    options = {"temperature": 1.0, "eos_token_id": (), "draft_length": 3, "max_new_tokens": 12, "compile": compile}
    with pytest.raises(FloatingPointError, match="draft model Returns gave NaN"):
        bass.generate(pair, ragged_prompts(5, 7), verification=verification, **options)
    out = bass.generate(pair, ragged_prompts(5, 7), verification=verification, on_row_error="finish", **options)
    assert out.finish_reasons == ["error", "error"]  # the second row has moved to slot 0
    assert [len(sequence) for sequence in out.sequences] == [1, 2]
