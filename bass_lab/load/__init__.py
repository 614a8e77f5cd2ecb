"""Requests that come when they come: how long they wait, how many a second are served, what draft lengths change.

A `Workload` is a table of requests. It is served by a `Session` of this process (`in_process`), by a server
(`over_http`) or in virtual time by a cost table (`simulate`); each gives a `LoadRun`. `highest_load` asks for the most
that one can serve while a `Target` is kept.
"""

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
