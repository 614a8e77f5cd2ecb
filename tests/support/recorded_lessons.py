"""Lessons as on a GPU: a startup file of IPython (in its profile's folder `startup`) that has kernels record steps.

Not where an oracle gives the random numbers: the small models of an enumeration stay on the CPU there, too.
"""

import os
from pathlib import Path

MARK = "recorded"  # a file that is there once a kernel has had a session that records
STARTUP = f"""\
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import recorded_lessons

recorded_lessons.begin()
"""


def put(folder: Path) -> dict[str, str]:
    """The startup file; what the environment of kernels has to say for it."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "record.py").write_text(STARTUP)
    return {"IPYTHONDIR": str(folder)}


def begin() -> None:
    import pytest
    from recording import use_on_cpu

    from bass_core import session
    from bass_core.exactness import randomness

    asked, accept = session.execution, randomness.accept
    use_on_cpu(pytest.MonkeyPatch())
    as_on_a_gpu = session.execution

    def execution(*given):
        way = (as_on_a_gpu if randomness.accept is accept else asked)(*given)
        if way.recorded:
            Path(os.environ["IPYTHONDIR"], MARK).touch()
        return way

    session.execution = execution
