"""Lesson 08: phases of a step, the roofline, figures, and the record of a run."""

import pytest

from bass_lab.lessons import l08_demonstrations
from bass_lab.measure import records
from bass_lab.measure.roofline import Device, Roofline, StepWork
from bass_lab.texts.prompt_sets import prompt_set

RECORD = records.SHIPPED / "embedded_cpu.jsonl"
DEVICE = Device("made up", bandwidth=1e9, flops=4e9)


@pytest.fixture(scope="module")
def phases(pair):
    options = {"repeats": 2, "max_new_tokens": 16, "temperature": 0.2}
    return l08_demonstrations.step_phases(pair, prompt_set("mini", 3), [1, 3], [0, 4], **options)


@pytest.fixture(scope="module")
def record():
    return records.frame(records.read(RECORD))


def test_phases_cover_full_steps(phases):
    assert list(zip(phases.batch, phases.k, strict=True)) == [(1, 0), (1, 4), (3, 0), (3, 4)]
    assert (phases[["draft", "verify", "other"]].sum(axis=1) == phases.step).all()
    regular, speculative = phases.query("k == 0"), phases.query("k == 4")
    assert (regular.tokens == 1).all() and speculative.tokens.between(1, 5).all()
    assert (regular.draft.to_numpy() < speculative.draft.to_numpy()).all()


def test_bounds_follow_the_roofline(pair, phases):
    roofline = Roofline(StepWork.of(pair.target), DEVICE)
    bound = l08_demonstrations.bounds(phases, roofline)
    for line, phase in zip(bound.itertuples(), phases.itertuples(), strict=True):
        shape = line.batch, line.k + 1, phase.kv + line.k + 1
        assert line.roof == pytest.approx(1e3 * roofline.seconds(*shape))
        assert line.share == pytest.approx(line.roof / phase.verify)
        assert line.limit == ("arithmetic" if roofline.intensity(*shape) > DEVICE.ridge else "memory")
        for used, tokens in ((line.verified, line.k + 1), (line.emitted, phase.tokens)):
            operations = roofline.work.flops(line.batch, tokens, phase.kv + (tokens - 1) / 2)
            assert used == pytest.approx(operations / DEVICE.flops / phase.step * 1e3)
    assert set(bound.limit) == {"memory", "arithmetic"}  # regular decoding of one row; all other points
    assert (bound.emitted <= bound.verified).all()
    regular = bound.query("k == 0")
    assert regular.emitted.to_numpy() == pytest.approx(regular.verified.to_numpy())
