"""Load tests. A `Workload` is a table of requests. `in_process` serves a workload with a `Session`, `over_http` with a
server, and `simulate` in virtual time with a cost table. Each returns a `LoadRun`. `highest_load` finds the highest
request rate that meets a `Target`."""

from bass_lab.load.accuracy import front as front
from bass_lab.load.capacity import HighestLoad as HighestLoad
from bass_lab.load.capacity import highest_load as highest_load
from bass_lab.load.capacity import over_rates as over_rates
from bass_lab.load.in_process import in_process as in_process
from bass_lab.load.over_http import over_http as over_http
from bass_lab.load.result import LoadRun as LoadRun
from bass_lab.load.result import Target as Target
from bass_lab.load.simulation import prefill_seconds as prefill_seconds
from bass_lab.load.simulation import simulate as simulate
from bass_lab.load.workload import Poisson as Poisson
from bass_lab.load.workload import Workload as Workload
