"""What tests of compiled layers share."""

import pytest
import torch
from torch._dynamo.utils import counters

from bass_core.gpu import compiled_layers


@pytest.fixture
def traced_only(monkeypatch):
    """Layers are traced and guarded as ever, and run as they were traced: no C++ is written."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(compiled_layers, "_compiled", {})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
