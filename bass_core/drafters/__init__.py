"""Where draft tokens come from, a way per file; what they have in common is in `protocol`."""

from bass_core.drafters.feature import FeatureDrafter, FeatureHead
from bass_core.drafters.layer_skip import LayerSkipDrafter
from bass_core.drafters.model import ModelDrafter
from bass_core.drafters.ngram import NgramDrafter
from bass_core.drafters.protocol import Context, Draft, Drafter, Setting
from bass_core.drafters.suffix import SuffixDrafter

__all__ = [
    "Context",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "FeatureHead",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Setting",
    "SuffixDrafter",
]
