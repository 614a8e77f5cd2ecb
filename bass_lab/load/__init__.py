"""Load tests. A `Workload` is a table of requests, served by a `Session` (`in_process`), by a server (`over_http`) or
in virtual time by a cost table (`simulate`); each gives a `LoadRun`. `highest_load` finds the highest rate within a
`Target`."""

from bass_lab.load.accuracy import front
from bass_lab.load.capacity import HighestLoad, highest_load, over_rates
from bass_lab.load.in_process import in_process
from bass_lab.load.over_http import over_http
from bass_lab.load.result import LoadRun, Target
from bass_lab.load.simulation import prefill_seconds, simulate
from bass_lab.load.workload import Poisson, Workload

__all__ = [
    "HighestLoad",
    "LoadRun",
    "Poisson",
    "Target",
    "Workload",
    "front",
    "highest_load",
    "in_process",
    "over_http",
    "over_rates",
    "prefill_seconds",
    "simulate",
]
