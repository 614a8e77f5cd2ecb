"""Where draft tokens come from, a way per file; what they have in common is in `protocol`."""

from bass_core.drafters.draft_model import ModelDrafter, runners_of
from bass_core.drafters.feature import FeatureDrafter, FeatureHead, FeatureHeadConfig
from bass_core.drafters.layer_skip import LayerSkipDrafter
from bass_core.drafters.ngram import NgramDrafter
from bass_core.drafters.protocol import Context, Draft, Drafter, Setting
from bass_core.drafters.suffix import SuffixDrafter

NAMES = '"ngram", "suffix" or "layers:N" (the target\'s first N)'


def named(name: object) -> Drafter | None:
    """The drafter that one of `NAMES` stands for; None for anything else."""
    if name == "ngram":
        return NgramDrafter()
    if name == "suffix":
        return SuffixDrafter()
    count = name.removeprefix("layers:") if isinstance(name, str) and name.startswith("layers:") else ""
    return LayerSkipDrafter(int(count)) if count.isdecimal() else None


__all__ = [
    "Context",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "FeatureHead",
    "FeatureHeadConfig",
    "LayerSkipDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Setting",
    "SuffixDrafter",
    "named",
    "runners_of",
]
