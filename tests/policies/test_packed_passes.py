from contextlib import contextmanager

import pytest
import torch
from tiny import ragged_prompts, tiny_model
from trial_policies import PerRow

import bass_core as bass
from bass_core.model import probe
from bass_core.model.forward_pass import Pass
from bass_core.model.runner import Runner, packs


@pytest.mark.parametrize(
    ("architecture", "path"),
    [("llama", "pad"), ("gemma3", "split"), ("mistral", "pad"), ("gpt2", "split"), ("deepseek_v3", "pad")],
)
def test_packed_pass_equals_the_rectangular_one(architecture, path):
    model = tiny_model(architecture, dtype="float64")
    lengths, submitted = [7, 12, 5, 9], [3, 1, 4, 0]
    ids = torch.stack(
        [torch.arange(20) % 7 + 1, torch.arange(20) % 5 + 2, torch.arange(20) % 3 + 1, torch.ones(20).long()]
    )
    logits = []
    for packed in (False, True):
        with torch.inference_mode(), Runner(model, path, max_rows=4, capacity=20) as runner:
            runner.feed_last(ids, lengths, 12)
            starts = torch.tensor(lengths)
            following = ids.gather(1, starts[:, None] + torch.arange(4))
            runner.feed(following, starts, submitted, starts_host=lengths, packed=packed)
            # again, over the keys of the first pass
            starts = starts + torch.tensor(submitted)
            found = runner.feed(following, starts, [1, 2, 0, 4], starts_host=starts.tolist(), packed=packed)
            logits.append([found[row, :n] for row, n in enumerate([1, 2, 0, 4])])
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@contextmanager
def input_shapes(model):
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        yield shapes


def test_model_sees_submitted_tokens_only():
    model = tiny_model()
    options = {"max_new_tokens": 16, "draft_length": PerRow(5), "eos_token_id": ()}
    with input_shapes(model) as shapes:
        out = bass.generate(bass.ModelPair(model, tiny_model(noise=0.1)), ragged_prompts(3, 4, 5, 6), **options)
    steps = out.trace.steps[out.trace.steps.kind == "decode"].groupby("step").drafted
    for shape, (_, drafted) in zip(shapes[-len(steps) :], steps, strict=True):
        packed = packs(drafted.to_numpy() + 1, drafted.max() + 1)
        assert shape == ((1, (drafted + 1).sum()) if packed else (len(drafted), drafted.max() + 1))
    assert any(shape[0] == 1 and shape[1] > 1 for shape in shapes)


def test_passes_are_packed_for_a_large_saving():
    assert packs([1, 1, 1, 6], 6) and not packs([1, 6, 6, 6], 6) and not packs([6, 6], 6)
    assert not packs([0, 0], 1)  # an empty pass


def test_padding_of_a_packed_pass_changes_nothing():
    """The padding tokens belong to no row, and the padding keys go to the scratch slot."""
    model, lengths, ids = tiny_model(dtype="float64"), [4, 6], torch.arange(20).view(2, 10) % 9 + 1
    found = []
    for bucket in (1, 8):
        with torch.inference_mode(), Runner(model, "pad", max_rows=2, capacity=10) as runner:
            runner.bucket = bucket
            runner.feed_last(ids, lengths, 6)
            for _ in range(2):
                logits = runner.feed(ids[:, :3], torch.tensor(lengths), [3, 1], starts_host=lengths, packed=True)
        found.append(logits)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1, :1], found[1][1, :1])


def test_stopped_rows_are_fed_up_to_the_capacity(monkeypatch):
    pair, beyond, original = bass.ModelPair(tiny_model(), tiny_model(noise=0.1)), [], Runner.run

    def run(self, ids, current):
        if self.model is pair.draft and current.whole is not None:
            beyond.append(int((current.kv_slots == self.cache.scratch_kv_slot).sum()))
            assert current.kv_slots.max() <= self.cache.scratch_kv_slot and current.positions.max() < self.capacity
        return original(self, ids, current)

    def texts(more=0):
        beyond.clear()
        with bass.Session(pair, max_batch_size=2, draft_length=5, eos_token_id=(), compile="off") as session:
            rows = [session.submit(each, max_new_tokens=22 - len(each)) for each in ragged_prompts(14, 3)]
            session.reserve(22 + more)
            while not session.idle:
                session.step()
            return [session.result(row).sequence.tolist() for row in rows]

    monkeypatch.setattr(Runner, "run", run)
    with_room = texts(more=8)
    assert beyond and sum(beyond) == 0
    assert texts() == with_room and sum(beyond) > 0


def test_path_eager_is_never_packed():
    model = tiny_model()
    probe.resolve(model, "eager")
    options = {"max_new_tokens": 12, "draft_length": PerRow(5), "eos_token_id": (), "attention": "eager"}
    with input_shapes(model) as shapes:
        bass.generate(bass.ModelPair(model, tiny_model(noise=0.1)), ragged_prompts(3, 4, 5), **options)
    live = [shape[0] for shape in shapes]
    assert live[:4] == [3] * 4 and live == sorted(live, reverse=True)  # until rows end


def test_probe_takes_packed_passes(monkeypatch):
    """A model with a wrong packed pass gets another path."""
    model = tiny_model(seed=77)
    original = Pass.unpack
    monkeypatch.setattr(
        Pass, "unpack", lambda self, x: original(self, x) if self.packed is None else 0 * original(self, x)
    )
    assert "off by" in probe.probe(model, "pad")
    assert probe.resolve(model) == "eager"
