"""Sources of draft tokens, one method per file. `protocol` has the common interface."""

from bass_core.drafters.draft_model import ModelDrafter
from bass_core.drafters.feature import FeatureDrafter, FeatureHead, FeatureHeadConfig
from bass_core.drafters.lookup import NgramDrafter, SuffixDrafter
from bass_core.drafters.protocol import Context, Draft, Drafter, Setting

NAMES = '"ngram" or "suffix"'


def named(name: object) -> Drafter | None:
    """Return the drafter for one of `NAMES`, or None."""
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
