"""The laboratory around `bass_core`: measure, check, simulate, draw, teach."""

from bass_lab.checks.exactness import verify
from bass_lab.measure.profiling import Profile, profile
from bass_lab.measure.records import load_records
from bass_lab.named_pairs import named_pair
from bass_lab.show.source import show_source
from bass_lab.study.published_policies import SVIP, AdaEDL, HuggingFaceHeuristic
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.recording import record
from bass_lab.study.simulator import simulate
from bass_lab.sweep.parameters import check_parameters
from bass_lab.threads import settle_threads

__all__ = [
    "SVIP",
    "AcceptanceTrace",
    "AdaEDL",
    "HuggingFaceHeuristic",
    "Profile",
    "check_parameters",
    "load_records",
    "named_pair",
    "profile",
    "record",
    "settle_threads",
    "show_source",
    "simulate",
    "verify",
]
