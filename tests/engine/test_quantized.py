"""Models quantized by torchao: `make test-quantized` (conftest.py explains the separate run)."""

import pytest
import torch
from decoded import by_transformers, greedy
from test_loading import draft, save, target  # noqa: F401, pytest finds fixtures by name
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

import bass_core as bass
from bass_core.loading.model_pair import fingerprint
from bass_lab.checks import exactness

WEIGHTS = TorchAoConfig(Int8WeightOnlyConfig())


def test_torchao_weights_decode_like_transformers(target, draft):  # noqa: F811
    pair = bass.load_pair(target, draft, quantization_config=WEIGHTS)
    assert type(pair.target.lm_head.weight) is type(pair.draft.lm_head.weight)  # neither head nor draft is quantized
    assert type(pair.target.model.layers[0].mlp.up_proj.weight) is not type(pair.target.lm_head.weight)
    assert greedy(pair) == by_transformers(pair.target) != by_transformers(bass.load_pair(target).target)


def test_quantized_checkpoint_decodes_as_transformers_does(target, draft, tmp_path):  # noqa: F811
    quantized = bass.load_pair(target, quantization_config=WEIGHTS).target
    pair = bass.load_pair(save(tmp_path / "quantized", quantized), draft)
    assert greedy(pair) == by_transformers(quantized)
    assert fingerprint(pair.target) == fingerprint(quantized) != fingerprint(bass.load_pair(target).target)


def test_quantized_weights_in_half_precision_are_decoded(target):  # noqa: F811
    pair = bass.load_pair(target, quantization_config=WEIGHTS, dtype="bfloat16")
    assert pair.target.dtype == torch.bfloat16 and [len(row) for row in greedy(pair)] == [16, 16, 16]


def test_quantized_activations_are_refused_in_float32(target):  # noqa: F811
    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ValueError, match=r"cannot be decoded.*Quantize only the weights; quantized activations"):
        greedy(bass.load_pair(target, quantization_config=config))


def test_quantized_models_are_verified_in_float32(target):  # noqa: F811
    pair = bass.load_pair(target, quantization_config=WEIGHTS)
    report = exactness.verify(pair, samples=1000, max_new_tokens=6, compile="off")
    assert report.passed and [check.name for check in report.checks][1:] == ["sampled law", "coupled identity"]


def test_quantized_models_are_never_cast(target):  # noqa: F811
    pair = bass.load_pair(target, quantization_config=WEIGHTS, dtype="bfloat16")
    words = r"this needs float32, and quantized models cannot be cast: load .*dtype='float"
    with pytest.raises(ValueError, match=words):
        exactness.verify(pair)
