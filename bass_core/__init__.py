"""BASS, hands on: exact batched speculative decoding for ordinary transformers models (arXiv 2404.15778).

Read `exactness/verification.py` first, then `loop/step.py`, then `Session._decode`.

    session.py, generation.py, hf.py    the public API; options.py and prompts.py check arguments
    async_session.py                    the engine for coroutines
    exactness/                          verification rules, sampling, random numbers
    loop/                               rows, batches, decode steps, traces
    model/                              one forward pass over the ragged KV cache
    drafters/, policies/                sources of draft tokens, draft lengths
    loading/                            checkpoints and model pairs
    gpu/                                CUDA graphs, overlapped steps, compiled layers
"""

from bass_core.async_session import AsyncSession
from bass_core.detokenizer import FinalText
from bass_core.drafters import (
    Context,
    Draft,
    Drafter,
    FeatureDrafter,
    ModelDrafter,
    NgramDrafter,
    Setting,
    SuffixDrafter,
)
from bass_core.exactness.processors import Bias, MinTokens, Penalties, Processor
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import Generation, Interrupted, astream, generate, stream
from bass_core.hf import bass_generate
from bass_core.loading.measured_costs import costs_for
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.loading.quantization import quantized
from bass_core.loop.rows import Request
from bass_core.loop.trace import StepEvent, Trace
from bass_core.policies.costs import CostModel
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy, FixedLength, RowsView
from bass_core.session import Result, Session

__version__ = "0.2.0"

__all__ = [
    "AsyncSession",
    "BassHeuristic",
    "Bias",
    "Context",
    "CostModel",
    "Draft",
    "DraftLengthPolicy",
    "Drafter",
    "FeatureDrafter",
    "FinalText",
    "FixedLength",
    "Generation",
    "Goodput",
    "Interrupted",
    "MinTokens",
    "ModelDrafter",
    "ModelPair",
    "NgramDrafter",
    "Penalties",
    "Processor",
    "Request",
    "Result",
    "RowsView",
    "SamplingParams",
    "Session",
    "Setting",
    "StepEvent",
    "SuffixDrafter",
    "Trace",
    "__version__",
    "astream",
    "bass_generate",
    "costs_for",
    "generate",
    "load_pair",
    "quantized",
    "stream",
]
