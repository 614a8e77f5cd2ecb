import copy
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest
from recording import PROMPTS, session, submitted, texts, use_on_cpu
from tiny import BYTES, tiny_model, with_adapter

import bass_core as bass

PLAIN = tiny_model(vocab_size=BYTES)


@contextmanager
def scaled(model):
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(-3.0)
    yield


@contextmanager
def with_first_adapter(model):
    with TemporaryDirectory() as folder:
        with_adapter().save_pretrained(folder)
        model.load_adapter(folder)
    yield


CHANGES = {
    "target switched": (with_adapter, lambda model: model.disable_adapter(), "target"),
    "draft switched": (with_adapter, lambda model: model.disable_adapter(), "draft"),
    "scaled": (lambda: with_adapter().get_base_model(), scaled, "target"),
    "first adapter": (lambda: copy.deepcopy(PLAIN), with_first_adapter, "target"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_adapter_applies_from_the_next_step(monkeypatch, change):
    use_on_cpu(monkeypatch)
    make, changed, role = CHANGES[change]
    found = {}
    for compile in ("off", "graphs"):
        model = make()
        models = bass.ModelPair(model, PLAIN) if role == "target" else bass.ModelPair(PLAIN, model)
        with session(compile, models) as running:
            handles = submitted(running, PROMPTS[:2], 24)
            for _ in range(4):
                running.step()
            with changed(model):
                for _ in range(4):
                    running.step()
            steps = texts(running, handles), running.trace.steps[["step", "row", "drafted", "accepted"]]
            found[compile] = steps[0], steps[1].to_numpy().tolist()
    assert found["graphs"] == found["off"]
