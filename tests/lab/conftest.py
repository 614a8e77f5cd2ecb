import functools

import pytest
import sweeps
from tiny import tiny_model

import bass_core as bass
from bass_core.loading import model_pair
from bass_lab import named_pairs

load_pair = bass.load_pair
embedded_pair = functools.cache(load_pair)


def read_once(target=None, draft=None, *, dtype=None, **options):
    """Load a pair. The embedded pairs without options are loaded only once for all tests."""
    others = {name: value for name, value in options.items() if value and (name, value) != ("device", "cpu")}
    if target not in (None, model_pair.READER) or draft is not None or others:
        return load_pair(target, draft, dtype=dtype, **options)
    return embedded_pair(target, dtype=dtype or "float32")


@pytest.fixture(scope="module", autouse=True)
def pairs_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        for module in (bass, named_pairs):
            patch.setattr(module, "load_pair", read_once)
        yield


@pytest.fixture(scope="session")
def tiny_pair():
    return bass.ModelPair(tiny_model(num_hidden_layers=1), tiny_model(num_hidden_layers=1, noise=0.1))


@pytest.fixture
def notebook(tmp_path):
    return sweeps.stub(tmp_path)
