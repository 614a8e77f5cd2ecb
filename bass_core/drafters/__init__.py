"""Where draft tokens come from, a way per file; what they have in common is in `protocol`."""

from bass_core.drafters.draft_model import ModelDrafter
from bass_core.drafters.feature import FeatureDrafter, FeatureHead, FeatureHeadConfig
from bass_core.drafters.lookup import NgramDrafter, SuffixDrafter
from bass_core.drafters.protocol import Context, Draft, Drafter, Setting

NAMES = '"ngram" or "suffix"'


def named(name: object) -> Drafter | None:
    """The drafter that one of `NAMES` stands for; None for anything else."""
    if name == "ngram":
        return NgramDrafter()
    if name == "suffix":
        return SuffixDrafter()
    return None


__all__ = [
    "Context",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "FeatureHead",
    "FeatureHeadConfig",
    "ModelDrafter",
    "NgramDrafter",
    "Setting",
    "SuffixDrafter",
    "named",
]
