"""Linear layers by oneDNN: the same numbers, only while a runner is at work, and nothing that is not plain."""

import pytest
import torch
from tiny import ragged_prompts, tiny_model
from torch import nn

import bass_core as bass
from bass_core import onednn
from bass_core.quantization import quantized
from bass_core.runner import Runner


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """As on a processor where it is faster, for products of all sizes."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "FEW", 0)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_same_up_to_rounding(bias):
    layer, x = nn.Linear(96, 40, bias=bias), torch.randn(3, 17, 96)
    by_onednn = onednn._forward(layer)
    for each in (x, x[0], x[:, ::2], x.transpose(0, 1), x[:0]):
        torch.testing.assert_close(by_onednn(each), layer(each))


def test_a_layer_goes_by_the_weights_that_it_has_now():
    layer, x = nn.Linear(8, 4), torch.randn(5, 8)
    by_onednn = onednn._forward(layer)
    layer.weight = nn.Parameter(torch.randn(4, 8))
    with torch.inference_mode():
        torch.testing.assert_close(by_onednn(x), layer(x))


def test_greedy_text_is_that_of_the_model(monkeypatch):
    pair, prompts = bass.ModelPair(tiny_model(), tiny_model(noise=0.1)), ragged_prompts(3, 9, 5)
    options = {"max_new_tokens": 20, "draft_length": 4, "eos_token_id": ()}
    found = bass.generate(pair, prompts, **options).sequences
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    expected = bass.generate(pair, prompts, **options).sequences
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_layers_are_changed_inside_alone():
    model = tiny_model()
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    with Runner(model, "pad", max_rows=1, capacity=8) as runner:
        with runner.prepared():
            assert all("forward" in vars(each) for each in layers)
        assert not any("forward" in vars(each) for each in layers)


def test_other_layers_are_left_alone(monkeypatch):
    model = tiny_model()  # others have it, too
    monkeypatch.setitem(vars(model.lm_head), "forward", lambda x: x)
    changed = {id(table) for table, _, _ in onednn.products(model)}
    assert changed and id(vars(model.lm_head)) not in changed
    assert id(vars(quantized(tiny_model(), "int8").lm_head)) not in changed
    assert onednn.products(tiny_model(dtype="float64")) == []
    assert all(type(each) is not nn.Linear for each in quantized(tiny_model(), "int8").model.layers.modules())
