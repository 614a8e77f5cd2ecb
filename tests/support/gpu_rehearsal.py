"""GPU tests rehearsed on a CPU: `BASS_REHEARSE=1 pytest -m gpu tests/engine`.

GPU time is dear, and a test that asks for what its own prompts and policy never bring about fails there as it would
here. In a rehearsal models are on the CPU, and a recorder stands in for CUDA graphs; layers are not compiled.
"""

import os

import pytest
import torch

HERE = torch.cuda.is_available()
REHEARSED = not HERE and os.environ.get("BASS_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSED else "cuda"

there_or_rehearsed = pytest.mark.skipif(not (HERE or REHEARSED), reason="needs a CUDA GPU")
only_there = pytest.mark.skipif(not HERE, reason="looks at what a CUDA GPU alone has")
compiled = pytest.mark.skipif(not HERE, reason="layers are compiled in tests of their own")
