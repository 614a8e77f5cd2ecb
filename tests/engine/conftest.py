import pytest
import torch
from torch._dynamo.utils import counters

from bass_core.gpu import compiled_layers


@pytest.fixture
def traced_only(monkeypatch):
    """Trace and guard compiled layers, but run the traced graph without generating C++."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(compiled_layers, "_compiled", {})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
