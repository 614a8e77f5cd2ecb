"""The laboratory around `bass_core`: measure, check, simulate, draw, teach.

A name is imported when it is first asked for: torch takes seconds, which `bass --help` need not wait for, and in which
the command line could not answer to Ctrl-C.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "SVIP": "study.published_policies",
    "AcceptanceTrace": "study.recorded_acceptance",
    "AdaEDL": "study.published_policies",
    "HuggingFaceHeuristic": "study.published_policies",
    "Profile": "measure.profiling",
    "check_parameters": "sweep.parameters",
    "load_records": "measure.records",
    "named_pair": "named_pairs",
    "profile": "measure.profiling",
    "record": "study.recording",
    "settle_threads": "threads",
    "show_source": "show.source",
    "simulate": "study.simulator",
    "verify": "checks.exactness",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
