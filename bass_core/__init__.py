"""BASS, hands on: exact batched speculative decoding for ordinary transformers models (arXiv 2404.15778)."""

from bass_core.acceptance import AcceptanceTrace, record
from bass_core.checks import verify
from bass_core.costs import CostModel, costs_for
from bass_core.draft_length import BassHeuristic, DraftLengthPolicy, FixedLength, HuggingFaceHeuristic
from bass_core.draft_signals import SVIP, AdaEDL, MarginalValue
from bass_core.drafters import ModelDrafter, NgramDrafter
from bass_core.engine import Session, StepEvent
from bass_core.generation import Generation, generate
from bass_core.goodput import Goodput
from bass_core.hf import bass_generate
from bass_core.learned import Learned
from bass_core.models import ModelPair, load_pair
from bass_core.objective import Objective
from bass_core.parameters import check_parameters
from bass_core.profiling import Profile, profile
from bass_core.ragged_budget import RaggedBudget
from bass_core.records import load_records
from bass_core.sampling import SamplingParams
from bass_core.simulator import simulate
from bass_core.trace import Trace

__all__ = [
    "SVIP",
    "AcceptanceTrace",
    "AdaEDL",
    "BassHeuristic",
    "CostModel",
    "DraftLengthPolicy",
    "FixedLength",
    "Generation",
    "Goodput",
    "HuggingFaceHeuristic",
    "Learned",
    "MarginalValue",
    "ModelDrafter",
    "ModelPair",
    "NgramDrafter",
    "Objective",
    "Profile",
    "RaggedBudget",
    "SamplingParams",
    "Session",
    "StepEvent",
    "Trace",
    "bass_generate",
    "check_parameters",
    "costs_for",
    "generate",
    "load_pair",
    "load_records",
    "profile",
    "record",
    "simulate",
    "verify",
]
